"""The command as a whole: help, version, usage errors, and how an error becomes a line and an exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_voicechat
from mlx_voicechat.cli.main import run
from mlx_voicechat.errors import HubError, InputError

HEAVY = ("mlx.core", "mlx_lm", "numpy", "librosa", "soundfile", "soxr", "huggingface_hub", "tokenizers", "starlette")


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_help_lists_the_commands_and_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from mlx_voicechat.cli.main import run; code = run(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    for arguments, expected in (["--help"], ["generate", "synth"]), (["generate", "--help"], ["--output-audio"]):
        done = python("-c", program, *arguments, cwd=tmp_path)
        assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr
        assert all(word in done.stdout for word in expected)


def test_the_folder_of_the_repository_is_no_import_name(tmp_path: Path) -> None:
    assert python("-c", "import mlx_voicechat.cli", cwd=tmp_path).returncode == 0
    assert "No module named 'cli'" in python("-c", "import cli", cwd=tmp_path).stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mlx-voicechat 0.")


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate"], "--audio"),
        (["generate", "my question.wav", "-m", "tiny"], "--audio 'my question.wav'"),
        (["sing"], "sing"),
        (["generate", "--audio", "x.wav", "--loud"], "--loud"),
        (["generate", "--audio", "x.wav", "--seed", "one"], "--seed"),
        (["synth", "huge", "folder"], "huge"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err
    assert "--help" in err or "named with" in err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("A thing\nis wrong.", "Mend it."), 2, "error: A thing is wrong. Mend it."),
        (HubError("No network."), 1, "error: No network."),
        (OSError(28, "No space left on device", "/x/y.wav"), 1, "error: /x/y.wav: No space left on device."),
        (KeyError("odd"), 1, "error: Unexpected KeyError: 'odd'. Set MLX_VOICECHAT_DEBUG=1 to see where"),
    ],
)
def test_errors_of_a_command(
    error: Exception,
    code: int,
    line: str,
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(mlx_voicechat, "load", fail, raising=False)
    monkeypatch.delenv("MLX_VOICECHAT_DEBUG", raising=False)
    assert run(["generate", "--audio", str(recording)]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(line)
    monkeypatch.setenv("MLX_VOICECHAT_DEBUG", "1")
    assert run(["generate", "--audio", str(recording)]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.fixture
def recording() -> Path:
    return Path(__file__).parents[1] / "examples" / "hello.wav"


def test_synth_writes_a_checkpoint_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    assert run(["synth", "random", str(folder), "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "config.json").is_file()
    assert run(["synth", "random", str(folder)]) == 2
    assert str(folder) in capsys.readouterr().err


def test_help_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: mlx-voicechat generate [OPTIONS]\n")
    assert all(len(line) < 80 for line in out.splitlines())
    for shown in ("--system-prompt TEXT", "--extra-decoding-seconds SECONDS", "--stream  "):
        assert shown in out


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`line` in a shell, where $V is the command."""
    environment = os.environ | {"V": f"{sys.executable} -m mlx_voicechat.cli.main"}
    return subprocess.run(["sh", "-c", line], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


HEARD = f"$V generate -m tiny --extra-decoding-seconds 0 --audio {Path(__file__).parents[1] / 'examples' / 'hello.wav'}"


def test_closed_standard_streams(tmp_path: Path) -> None:
    done = shell(f"{HEARD} <&- 2>&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[user] ")
    assert "note:" not in done.stdout
    done = shell(f"{HEARD} --output-audio out.wav >&-", tmp_path)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["note:", "note:"]  # a demonstration; no answer
    assert (tmp_path / "out.wav").is_file()
    assert shell("$V sing 2>&-", tmp_path).stdout == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_full_standard_streams(tmp_path: Path) -> None:
    done = shell(f"{HEARD} 2>/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[user] ")
    for line in ("$V --version >/dev/full", f"{HEARD} --stream >/dev/full"):
        done = shell(line, tmp_path)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (
            1,
            "error: Cannot write standard output: No space left on device.",
        )


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "note: interrupted.\n"),
        (signal.SIGTERM, "note: ended by SIGTERM.\n"),
        (signal.SIGHUP, "note: ended by SIGHUP.\n"),
    ],
)
def test_a_signal_ends_it_in_order(number: signal.Signals, line: str, recording: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; import mlx_voicechat; from tests.support.fake_model import FakeModel;"
        "from mlx_voicechat.cli.main import main; model = FakeModel(); mlx_voicechat.load = model.load;"
        f"model.before = lambda index: os.kill(os.getpid(), {int(number)}) or (index > 3 and 1 / 0); main()"
    )
    if number == signal.SIGINT:  # in the conversation it has a meaning of its own
        program = program.replace("model.load;", "lambda *_, **__: model.before(9);")
    options = [
        "generate",
        "--audio",
        str(recording),
        "--output-audio",
        f"{tmp_path}/a.wav",
        "--events",
        f"{tmp_path}/e",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *options],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup's children ignore it
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", line)
    assert list(tmp_path.iterdir()) == []


def test_nothing_slow_is_imported_before_main(tmp_path: Path) -> None:
    done = python("-c", "import sys, mlx_voicechat.cli.main; print('typer' in sys.modules)", cwd=tmp_path)
    assert done.stdout == "False\n"
