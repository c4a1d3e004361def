"""The synthesiser for typed text: this machine's own, a command, and what a command can do wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mlx_voicechat.errors import InputError
from mlx_voicechat.server import typed_voice
from mlx_voicechat.server.typed_voice import ESPEAK, SAY, TypedVoice, TypedVoiceError, find_voice, spoken

HEADER = "import sys, wave, time, os; text = sys.stdin.buffer.read()\n"
# Speaks a sample for every byte of the text, whose value is the byte.
ECHO = HEADER + (
    "out = wave.open(sys.stdout.buffer, 'wb'); out.setnchannels(1); out.setsampwidth(2); out.setframerate(16000)\n"
    "out.writeframesraw(bytes(b for byte in text for b in (byte, 0))); out._patchheader = lambda: None; out.close()\n"
)


def _voice(tmp_path: Path, program: str, seconds: float = 20, output_bytes: int = 1 << 20) -> TypedVoice:
    script = tmp_path / "synthesiser.py"
    script.write_text(program)
    return TypedVoice([sys.executable, str(script)], seconds, output_bytes)


def _speak(voice: TypedVoice, text: str = "Hello.") -> np.ndarray:
    return asyncio.run(voice.speak(text))


def test_a_command_is_found_and_split_as_a_shell_would_without_one(tmp_path: Path) -> None:
    folder = tmp_path / "a folder; touch pwned"
    folder.mkdir()
    script = folder / "synth"
    script.write_text(f"#!{sys.executable}\n{ECHO}")
    script.chmod(0o755)
    voice = find_voice(f"{shlex.quote(str(script))} --slow")
    assert voice == TypedVoice([str(script), "--slow"])
    assert len(_speak(voice, "Hello.")) == 6
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("command", ["", "no-such-synthesiser --fast", "'unclosed"])
def test_a_command_that_is_not_there_is_refused(command: str) -> None:
    with pytest.raises(InputError, match="--typed-voice"):
        find_voice(command)


def test_the_text_comes_on_standard_input_alone(tmp_path: Path) -> None:
    text = "Grüße; $(touch x) --help\nnext"
    samples = _speak(_voice(tmp_path, ECHO), text)
    np.testing.assert_array_equal(np.rint(samples * 32768).astype(int), list(text.encode()))


def test_commands_to_a_synthesiser_are_words() -> None:
    assert "[[" not in spoken("[[slnc 99999]] a [[[[x")
    assert spoken(" a\tb\x00c\nd ") == "a b c\nd"


@pytest.mark.parametrize("text", ["", " \n", "\x00", "a" * 4001])
def test_nothing_and_too_much_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TypedVoiceError, match=r"no text|at most 4,000"):
        _speak(_voice(tmp_path, ECHO), text)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print('no wave')", "no usable WAV"),
        ("", "no usable WAV"),
        ("import sys; print('a\\nno voice\\n', file=sys.stderr); sys.exit(3)", r"exit code 3\): no voice"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("import sys\nwhile True: sys.stdout.buffer.write(bytes(65536))", "more than 1,048,576 bytes"),
    ],
)
def test_a_program_that_fails_is_named(tmp_path: Path, program: str, why: str) -> None:
    with pytest.raises(TypedVoiceError, match=why):
        _speak(_voice(tmp_path, program))


def test_a_program_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypedVoiceError, match="does not start"):
        _speak(TypedVoice([str(tmp_path / "gone")]))


FOREVER = HEADER + (
    "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "open({path!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)\n"
)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _pids(path: Path) -> list[int]:
    deadline = time.monotonic() + 10
    while not path.exists() or " " not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


def test_a_program_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    voice = _voice(tmp_path, FOREVER.format(path=str(pids)), seconds=1.5)
    with pytest.raises(TypedVoiceError, match=r"within 1\.5 s"):
        _speak(voice)
    _wait_for_the_end(_pids(pids))


def _wait_for_the_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while not all(map(_gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_call_that_is_cancelled_ends_its_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    voice = _voice(tmp_path, FOREVER.format(path=str(pids)))

    async def run() -> None:
        task = asyncio.create_task(voice.speak("Hello."))
        await asyncio.to_thread(_pids, pids)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    _wait_for_the_end(_pids(pids))


def test_none_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING, "mlx_voicechat.server"):
        assert find_voice() is None
    assert [record.getMessage() for record in caplog.records] == [typed_voice.NONE_FOUND]


# A stand-in for macOS's say: -f text -o wav, 22,050 Hz.
SAY_PROGRAM = (
    "import sys, wave; words = sys.argv\n"
    "assert words[5:] == ['--file-format=WAVE', '--data-format=LEI16@22050'] and not sys.stdin.read(0), words\n"
    "text = open(words[words.index('-f') + 1], 'rb').read()\n"
    "with wave.open(words[words.index('-o') + 1], 'wb') as out:\n"
    "    out.setparams((1, 2, 22050, 0, 'NONE', '')); out.writeframes(bytes(2 * 2205 * len(text) * {times}))\n"
)


@pytest.mark.parametrize("times", [1, 4000])
def test_a_mac_speaks_by_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    program = tmp_path / "say"
    program.write_text(f"#!{sys.executable}\n{SAY_PROGRAM.format(times=times)}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))
    voice = find_voice()
    assert voice == TypedVoice(SAY)
    if times == 1:
        assert len(_speak(voice, "Hello")) == 5 * 1600
    else:
        with pytest.raises(TypedVoiceError, match="more than"):
            _speak(voice, "Hello")


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="no espeak-ng here")
def test_espeak_speaks() -> None:
    voice = TypedVoice(ESPEAK)
    samples = _speak(voice, "What is the capital of France?")
    assert samples.dtype == np.float32
    assert 1.0 < len(samples) / 16_000 < 4.0
    assert 0.05 < np.abs(samples).max() <= 1
    assert len(_speak(voice, "-w x.wav")) > 1600
