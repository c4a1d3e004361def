"""`talk` with an interface of several inputs, and with devices that are pulled out and plugged in again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from mlx_voicechat.cli import live
from tests.support.scripted_server import Peer, standing_in
from tests.support.sound import device, install
from tests.test_microphone import LOUD, NOISE, Command, command, hear, sent, trouble, whole

__all__ = ["command"]  # a fixture

INTERFACE = [device(0, "Interface", inputs=4), device(1, "Built-in Output", outputs=2)]
CAPTURED = 3277  # of NOISE, as the server gets it


def spoken_to(peer: Peer) -> None:
    peer.greet()
    hear(peer, 3, LOUD)
    peer.text("Hello.")
    hear(peer, speech=LOUD)
    peer.finish()


def test_the_input_with_sound_is_found_and_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = install(monkeypatch, devices=INTERFACE, hears=NOISE, inputs=[2])
    with standing_in(whole) as server:
        code, _, err = command("--url", server.url, "--duration", 1)
    assert code == 0
    assert sound.streams[1].channels == 4
    assert err.count("Interface: input 3 of 4 is heard; --input-channel takes another.") == 1
    assert np.abs(sent(server.peer)[200:-200] - CAPTURED).max() < 40


@pytest.mark.parametrize(("number", "level"), [(3, CAPTURED), (2, 0)])
def test_an_input_is_asked_for(command: Command, monkeypatch: pytest.MonkeyPatch, number: int, level: int) -> None:
    install(monkeypatch, devices=INTERFACE, hears=NOISE, inputs=[2])
    with standing_in(whole) as server:
        code, _, err = command("--url", server.url, "--duration", 1, "--input-channel", number)
    assert code == 0
    assert "--input-channel" not in err
    assert np.abs(sent(server.peer)[200:-200] - level).max() < 40


def test_an_input_that_there_is_not(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, devices=INTERFACE)
    line = trouble(command("--input-channel", 5, "-m", "/nowhere"), 2)
    assert line == "error: Interface has no input 5: --input-channel is at most 4."
    assert "--input-channel is for the microphone" in trouble(command("--input-channel", 1, "--file", "x.wav"), 2)


def test_one_input_where_not_all_can_be_opened(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = install(monkeypatch, devices=INTERFACE, hears=NOISE, takes=lambda rate_hz, channels: channels < 3)
    with standing_in(whole) as server:
        assert command("--url", server.url, "--duration", 1)[0] == 0
    assert sound.streams[1].channels == 1


@pytest.mark.parametrize(
    ("gone", "which"),
    [("unplugged_after", "microphone Built-in Microphone"), ("loudspeaker_gone_after", "loudspeaker Built-in Output")],
)
def test_a_device_that_comes_back_is_taken_again(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str, which: str
) -> None:
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.05)
    sound = install(monkeypatch, hears=NOISE, speed=2, back_after=0.5, **{gone: 1.0})
    out = tmp_path / "out.wav"
    with standing_in(spoken_to) as server:
        code, printed, err = command("--url", server.url, "--duration", 3, "--output-audio", out)
    assert (code, printed) == (0, "Hello.\n[user]\n"), err
    assert err.count(f"The {which} has stopped. It is waited for; Ctrl-C ends.") == 1
    assert err.count("Built-in Microphone listens again, Built-in Output speaks.") == 1
    assert len(sound.streams) == 4
    assert len(sent(server.peer)) == 3 * 16000
    assert soundfile.info(out).duration > 2.5
    assert np.abs(sound.heard[-30]).max() > 0.1  # heard to the end


def test_a_device_that_comes_back_elsewhere_is_known_by_its_name(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.05)
    sound = install(monkeypatch, hears=NOISE, speed=2, back_after=0.3, unplugged_after=0.5)
    before, stopped = list(sound.devices), sound.stopped

    def listed() -> list[dict[str, object]]:
        if not stopped:
            return before
        moved = [device(0, "Other", inputs=1), device(1, "Built-in Output", outputs=2)]
        return moved if sound._is_gone("input") else [*moved, device(2, "Built-in Microphone", inputs=1)]

    monkeypatch.setattr(sound, "query_devices", listed)
    sound.devices = [*before, device(2, "Built-in Microphone", inputs=1)]
    with standing_in(whole) as server:
        code, _, err = command("--url", server.url, "--duration", 1)
    assert code == 0, err
    assert sound.streams[-1].device == 2
