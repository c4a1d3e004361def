"""`talk` when its microphone, its loudspeaker, its disk or its server misbehaves: what was said is never lost."""

from __future__ import annotations

import errno
import os
import time
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mlx_voicechat.cli import live
from mlx_voicechat.cli.render import Output, complain, printable
from tests.support.scripted_server import Peer, standing_in
from tests.support.sound import Sound, install
from tests.test_microphone import LOUD, NOISE, Command, command, hear, noisy, sent, trouble

__all__ = ["command", "noisy"]  # fixtures


def spoken_to(peer: Peer) -> None:
    """A word, and speech for as long as something comes."""
    peer.greet()
    hear(peer, 3, LOUD)
    peer.text("Hello.")
    hear(peer, speech=LOUD)
    peer.finish()


def test_samples_that_are_no_numbers_are_silence(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    hears = NOISE[: 48000 * 2].copy()
    hears[48000:50000] = np.nan
    hears[60000:60100] = np.inf
    install(monkeypatch, hears=hears, speed=2)
    with standing_in(spoken_to) as server:
        code, printed, err = command("--url", server.url, "--duration", 2)
    assert (code, printed) == (0, "Hello.\n[user]\n")
    assert err.count("Built-in Microphone brings samples that are no numbers: they are heard as silence.") == 1
    heard = sent(server.peer)
    assert len(heard) == 32000
    assert np.abs(heard[16200:16500]).max() < 400
    assert np.abs(heard[21000:31000] - 3277).max() < 40


@pytest.mark.parametrize("microphone_alone", [True, False])
def test_a_fault_on_the_way_to_the_server_ends_at_once_with_everything_written(
    command: Command, noisy: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, microphone_alone: bool
) -> None:
    taken = live.Capture.take
    began = time.monotonic()

    def breaks(self: live.Capture) -> np.ndarray:
        if self.seconds > 1.5:
            raise ValueError("a driver's own fault")
        return taken(self)

    noisy.speed = 2
    monkeypatch.setattr(live.Capture, "take", breaks)
    out = tmp_path / "out.wav"
    with standing_in(spoken_to) as server:
        code, printed, err = command("--url", server.url, *([] if microphone_alone else ["--output-audio", out]))
    assert code == 1
    assert printed.startswith("Hello.\n")
    assert "a driver's own fault" in err.splitlines()[-1]
    assert time.monotonic() - began < 15
    if not microphone_alone:
        assert 0.5 < soundfile.info(out).duration < 3


def test_a_loudspeaker_that_vanishes(command: Command, noisy: Sound, tmp_path: Path) -> None:
    noisy.speed = 2
    noisy.loudspeaker_gone_after = 1.5
    out = tmp_path / "out.wav"
    with standing_in(spoken_to) as server:
        result = command("--url", server.url, "--output-audio", out)
    line = trouble(result, 1)
    assert line.startswith("error: The loudspeaker Built-in Output has stopped. The conversation ended after ")
    assert soundfile.info(out).duration > 1
    assert result[1].startswith("Hello.\n")


@pytest.mark.parametrize("when", ["while it is written", "when it is put in place"])
def test_speech_that_cannot_be_written_takes_no_words_with_it(
    command: Command, noisy: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    out = tmp_path / "out.wav"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if when == "while it is written":
        monkeypatch.setattr(wave.Wave_write, "writeframesraw", full)
    else:
        monkeypatch.setattr(os, "replace", full)
    noisy.speed = 4
    with standing_in(spoken_to) as server:
        result = command("--url", server.url, "--duration", 1, "--output-audio", out)
    assert f"Cannot write {out}: No space left on device" in trouble(result, 1)
    assert result[1] == "Hello.\n[user]\n"
    assert list(tmp_path.iterdir()) == []


CLEAR = "\x1b]0;owned\x07\x1b[2J"


def test_a_server_does_not_drive_the_terminal(command: Command, noisy: Sound) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        hear(peer, 3)
        peer.text(f"Hel{CLEAR}lo.\r\x9b31m\u202e")
        hear(peer, 2)
        peer.error("inference_error", f"It{CLEAR} broke.")
        peer.finish()

    with standing_in(script) as server:
        _, printed, err = command("--url", server.url, "--duration", 1)
    assert printed.startswith("Hel]0;owned[2Jlo.31m\n")
    shown = printed + err
    assert not [character for character in shown if ord(character) < 32 and character not in "\n\t"]
    assert "\x9b" not in shown
    assert "\u202e" not in shown


def test_what_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\tb\nc é 你 👍") == "a\tb\nc é 你 👍"
    assert printable("\x00\x07\x08\x1b[1m\x7f\x85\r\u2066x") == "[1mx"
    Output().write("a\x1bb\n")
    complain("c\x1bd")
    assert capsys.readouterr() == ("ab\n", "cd\n")
