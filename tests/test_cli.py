"""The command as a whole: help, version, usage errors, and how an error becomes a line and an exit code."""

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
    assert "--help" in err


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
