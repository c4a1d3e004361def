"""`talk` with echo cancellation, on a stand-in whose loudspeaker is heard by its microphone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from mlx_voicechat.cli.main import run
from tests.support.rooms import Room, nine
from tests.support.scripted_server import Peer, standing_in
from tests.support.server import RunningServer, running_server
from tests.support.sound import device, install
from tests.test_microphone import hear, sent

pytest.importorskip("livekit", reason="the package livekit is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
GOLDEN_ANSWERS = Path(__file__).parent / "golden" / "answers"
NINE = nine(seed=77)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`talk` -> exit code, stdout, stderr."""
    monkeypatch.delenv("MLX_VOICECHAT_API_KEY", raising=False)
    monkeypatch.delenv("MLX_VOICECHAT_MODEL", raising=False)

    def call(*options: object) -> tuple[int, str, str]:
        return run(["talk", *map(str, options)]), *capsys.readouterr()

    return call


def speaking(peer: Peer) -> None:
    """A server that hears half a second, speaks for two answers, and falls silent."""
    answer = np.concatenate([soundfile.read(GOLDEN_ANSWERS / f"{n}.flac", dtype="int16")[0] for n in (1, 5)])
    peer.greet()
    frames = [np.zeros(1764, "<i2")] * 6 + [answer[at : at + 1764] for at in range(0, len(answer) - 1763, 1764)]
    if not any(hear(peer, 1, frame) for frame in frames):
        hear(peer, speech=np.zeros(1764, "<i2"))
    peer.finish()


def loud(samples: np.ndarray) -> float:
    """The loudest 80 ms in dB of full scale."""
    energy = np.square(samples.astype(np.float64) / 32768)
    return float(10 * np.log10(np.convolve(energy, np.ones(1280) / 1280, "valid").max() + 1e-12))


def test_what_is_played_is_not_sent(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {}
    for option in ("--echo-cancellation", "--no-echo-cancellation"):
        noise = np.random.default_rng(0).normal(0, 3e-4, 48000 * 9).astype(np.float32)
        sound = install(monkeypatch, hears=noise, speed=2, room=Room(0.8, 10, 150, 3).echo(48000).hear)
        with standing_in(speaking) as server:
            code, _, err = command("--url", server.url, "--duration", 8, option)
        assert code == 0, err
        assert np.abs(sound.played).max() > 0.2
        assert len(sent(server.peer)) == 8 * 16000
        levels[option] = loud(sent(server.peer))
        assert ("use headphones" in err) == (option == "--no-echo-cancellation")
    assert levels["--no-echo-cancellation"] > -25
    assert levels["--echo-cancellation"] < -60


def test_the_delay_is_that_of_the_devices(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_voicechat.sound import echo

    made: list[tuple[object, ...]] = []

    class Canceller(echo.EchoCanceller):
        def __init__(self, *sides: int, **options: bool) -> None:
            made.append((*sides, *options.items()))
            super().__init__(*sides, **options)

    monkeypatch.setattr(echo, "EchoCanceller", Canceller)
    devices = [device(0, "Mic", inputs=1, rate_hz=44100), device(1, "Out", outputs=2, rate_hz=48000)]
    install(monkeypatch, devices=devices, hears=np.zeros(44100, np.float32), speed=4)
    with standing_in(speaking) as server:
        assert command("--url", server.url, "--duration", 1, "--auto-gain", "--noise-suppression")[0] == 0
    asked = ("noise_suppression", True), ("auto_gain", True)
    assert made[-1] == (16000, 48000, 20, *asked, ("continuous", True))


def test_without_the_package(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "livekit", None)
    install(monkeypatch, hears=np.full(48000, 0.1, np.float32), speed=4)
    with standing_in(speaking) as server:
        code, _, err = command("--url", server.url, "--duration", 1)
        assert code == 0
        assert err.splitlines()[0] == (
            "note: no echo cancellation without the package livekit (pip install livekit); "
            "use headphones: through loudspeakers the model hears itself."
        )
        code, _, err = command("--url", server.url, "--noise-suppression")
    assert (code, err) == (2, "error: Echo cancellation needs the package livekit. pip install livekit\n")


@pytest.mark.parametrize("option", ["--noise-suppression", "--auto-gain"])
def test_parts_of_it_do_not_go_without_it(command: Command, option: str) -> None:
    code, _, err = command("--no-echo-cancellation", option)
    assert code == 2
    assert f"{option} is a part of echo cancellation" in err


# With the model


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with running_server("tiny") as server:
        yield server


def said_at(name: str, silence_seconds: float) -> np.ndarray:
    """A recording as a microphone of 48 kHz brings it, with noise."""
    samples = soundfile.read(EXAMPLES / name, dtype="float32")[0]
    samples = np.concatenate(
        [np.zeros(8000, np.float32), samples, np.zeros(round(silence_seconds * 16000), np.float32)]
    )
    noise = np.random.default_rng(0).normal(0, 3e-4, len(samples)).astype(np.float32)
    return soxr.resample(samples + noise, 16000, 48000)


def in_time(err: str) -> None:
    """Skip where the machine is too slow for the stand-in's clock: the two sides are then not what they would be."""
    if "s behind" in err:
        pytest.skip("this machine is slower than the stand-in's clock")


def through(command: Command, monkeypatch: pytest.MonkeyPatch, served: RunningServer, room: Room, *options: str) -> str:
    """A question, its answer through the room, and what is printed of it."""
    hears = said_at("question.wav", 6)
    install(monkeypatch, hears=hears, speed=0.5, room=room.echo(48000).hear)
    code, printed, err = command("--url", served.ws_url, "--duration", len(hears) / 48000, *options)
    assert code == 0, err
    in_time(err)
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("room", NINE, ids=lambda r: f"{r.loudness:.0%}, {r.path_ms:.0f} ms, {r.reverberation_ms} ms")
def test_the_whole_of_talk_in_nine_rooms(
    command: Command, monkeypatch: pytest.MonkeyPatch, served: RunningServer, room: Room
) -> None:
    wanted = "[user] What is the capital of France?\nThe capital of France is Paris.\n"
    assert through(command, monkeypatch, served, room) == wanted


@pytest.mark.slow
def test_without_it_talk_answers_itself(
    command: Command, monkeypatch: pytest.MonkeyPatch, served: RunningServer
) -> None:
    printed = through(command, monkeypatch, served, NINE[4], "--no-echo-cancellation")
    assert printed.startswith("[user] What is the capital of France?\nThe capital of France is Paris.")
    assert len(printed) > len("[user] What is the capital of France?\nThe capital of France is Paris.\n")


@pytest.mark.slow
@pytest.mark.parametrize("room", NINE[1::2], ids=lambda r: f"{r.loudness:.0%}, {r.path_ms:.0f} ms")
def test_the_whole_of_talk_interrupted(
    command: Command, monkeypatch: pytest.MonkeyPatch, served: RunningServer, room: Room
) -> None:
    hears = said_at("barge_in.wav", 2)
    sound = install(monkeypatch, hears=hears, speed=0.5, room=room.echo(48000).hear)
    code, printed, err = command("--url", served.ws_url, "--duration", len(hears) / 48000)
    assert code == 0, err
    in_time(err)
    asked = "[user] Tell me a joke.\nWhy did the chicken cross the road? To get to the other side."
    assert printed.startswith(asked[:50])
    assert len(printed) > len(asked) + 1  # who interrupted is answered
    # The joke has no pause above 0.12 s and would go on until second 6: it has ended for who spoke from 3.9 on.
    loud = np.flatnonzero(np.abs(sound.played) > 0.02) / 48000
    pauses = loud[:-1][np.diff(loud) > 0.3]
    assert np.any((pauses > 3.9) & (pauses < 5.4)), pauses
