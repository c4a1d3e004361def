"""The canceller on simulated rooms, without a model: blocks, delay, remains; gate and echo path on plain levels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from mlx_voicechat.errors import InputError
from mlx_voicechat.sound.echo_gate import EchoGate, EchoPath
from tests.support.checkpoints import GOLDEN
from tests.support.rooms import Room, nine

livekit = pytest.importorskip("livekit", reason="the package livekit is not installed")

from mlx_voicechat.sound.echo import EchoCanceller  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"
FAR_HZ, NEAR_HZ = 22_050, 16_000
DELAY_SAMPLES = 128  # of the library
NOISE = np.random.default_rng(1).normal(0, 0.05, 4 * NEAR_HZ).astype(np.float32)


def speech(*answers: int, pause_seconds: float = 1.0) -> np.ndarray:
    """Golden answers with pauses around them, at 22.05 kHz."""
    pause = np.zeros(round(pause_seconds * FAR_HZ), np.float32)
    parts = [soundfile.read(GOLDEN / "answers" / f"{index}.flac", dtype="float32")[0] for index in answers]
    return np.concatenate([pause, *(part for answer in parts for part in (answer, pause))])


def heard_in(room: Room, far: np.ndarray, rate_hz: int = FAR_HZ) -> np.ndarray:
    """What the microphone hears of far sound, with its own noise."""
    echo = room.echo().hear(soxr.resample(far, rate_hz, NEAR_HZ))
    return echo + np.random.default_rng(0).normal(0, 3e-4, len(echo)).astype(np.float32)


def cancelled(canceller: EchoCanceller, far: np.ndarray, near: np.ndarray, block_ms: int = 80) -> np.ndarray:
    """Both sides in turns, as a loop does it; then the rest."""
    left = []
    far_samples, near_samples = FAR_HZ * block_ms // 1000, NEAR_HZ * block_ms // 1000
    for index in range(-(-len(near) // near_samples)):
        canceller.far(far[index * far_samples : (index + 1) * far_samples])
        left.append(canceller.near(near[index * near_samples : (index + 1) * near_samples]))
    return np.concatenate([*left, canceller.finish()])


def dbfs(samples: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(np.square(samples)) + 1e-12))


# -- the canceller


def test_any_blocks_give_the_same() -> None:
    far = speech(1)
    near = heard_in(Room(0.6, 20, 150, 3), far)
    near[NEAR_HZ * 2 :] += NOISE[: len(near) - NEAR_HZ * 2]
    whole = EchoCanceller()
    whole.far(far)
    first = whole.near(near)
    wanted = np.concatenate([first, whole.finish()])
    assert 0 <= len(near) - len(first) < 160 + 48
    for size in (1, 7, 160, 1000):
        canceller, parts, given = EchoCanceller(), [], 0
        for start in range(0, len(near), size):
            until = -(-(start + size) * FAR_HZ // NEAR_HZ)  # what is played while that is heard
            canceller.far(far[given:until])
            given = until
            parts.append(canceller.near(near[start : start + size]))
        np.testing.assert_array_equal(np.concatenate([*parts, canceller.finish()]), wanted)


@pytest.mark.parametrize("rate_hz", [16_000, 44_100, 48_000])
def test_as_much_comes_out_as_went_in(rate_hz: int) -> None:
    canceller = EchoCanceller(near_rate_hz=rate_hz, far_rate_hz=48_000)
    near = soxr.resample(NOISE, NEAR_HZ, rate_hz)[:-77]
    parts = [canceller.near(near[start : start + 1023]) for start in range(0, len(near), 1023)]
    left = np.concatenate([*parts, canceller.finish()])
    assert abs(len(left) - len(near)) <= 1
    assert left.dtype == np.float32


def test_without_far_sound_the_near_side_is_unchanged_but_for_the_high_pass() -> None:
    """From 400 Hz on it is the near side through one linear filter that is flat within 0.6 dB."""
    left = cancelled(EchoCanceller(), np.zeros(0, np.float32), NOISE)
    assert len(left) == len(NOISE)
    pieces = (NOISE[NEAR_HZ:-DELAY_SAMPLES], left[NEAR_HZ + DELAY_SAMPLES :])
    near, out = (np.fft.rfft(x[:46080].reshape(-1, 1024) * np.hanning(1024)) for x in pieces)
    cross, power = np.sum(near.conj() * out, 0), np.sum(np.abs(near) ** 2, 0)
    gain_db = 20 * np.log10(np.abs(cross / power))
    coherence = np.abs(cross) ** 2 / (power * np.sum(np.abs(out) ** 2, 0))
    at = np.fft.rfftfreq(1024, 1 / NEAR_HZ)
    assert np.abs(gain_db[at > 400]).max() < 0.6
    assert coherence[at > 400].min() > 0.998
    assert gain_db[at < 40].max() < -30


@pytest.mark.parametrize("room", nine(5), ids=lambda room: f"{room.loudness:.0%} {room.path_ms:.0f} ms")
def test_nothing_of_an_echo_is_left(room: Room) -> None:
    far = speech(1, 5, 9)
    near = heard_in(room, far)
    assert dbfs(near[NEAR_HZ : 2 * NEAR_HZ]) > -38
    left = cancelled(EchoCanceller(), far, near)
    # In pauses, 240 ms after the far side, the microphone's noise is there again: -70 dB.
    assert dbfs(left[-NEAR_HZ // 2 :]) == pytest.approx(dbfs(near[-NEAR_HZ // 2 :]), abs=2)
    assert np.sqrt(np.convolve(np.square(left), np.ones(1280) / 1280, "valid")).max() < 10 ** (-60 / 20)
    assert not left[round(1.1 * NEAR_HZ) : round(2.6 * NEAR_HZ)].any()


def test_who_speaks_over_it_is_heard() -> None:
    far = speech(1, 5, 5, pause_seconds=0.5)
    near = heard_in(Room(0.6, 15, 150, 9), far)
    question, _ = soundfile.read(EXAMPLES / "question.wav", dtype="float32")
    at = round(5.2 * NEAR_HZ)
    near[at : at + len(question)] += question
    left = cancelled(EchoCanceller(), far, near)[DELAY_SAMPLES:]
    assert dbfs(left[at : at + len(question)]) > dbfs(question) - 6
    assert not left[round(4.5 * NEAR_HZ) : at - 400].any()


def test_headphones_leave_the_near_side_alone() -> None:
    """Nothing is heard of the far side, so who speaks over it loses nothing."""
    far = speech(1, 5)
    question, _ = soundfile.read(EXAMPLES / "question.wav", dtype="float32")
    near = np.random.default_rng(0).normal(0, 3e-4, len(far) * NEAR_HZ // FAR_HZ).astype(np.float32)
    at = round(4.2 * NEAR_HZ)
    near[at : at + len(question)] += question
    said = slice(at, at + len(question))
    wanted = cancelled(EchoCanceller(), np.zeros(0, np.float32), near)[said]
    assert dbfs(cancelled(EchoCanceller(), far, near)[said] - wanted) < dbfs(wanted) - 40


def test_a_late_echo_needs_the_delay_to_be_known() -> None:
    """What comes after 240 ms is waited for when the devices say so."""
    far = speech(1)
    near = np.concatenate([np.zeros(NEAR_HZ * 4 // 10, np.float32), heard_in(Room(0.6, 10, 150, 2), far)])
    ends = {delay_ms: cancelled(EchoCanceller(delay_ms=delay_ms), far, near) for delay_ms in (0, 400)}
    at = round((1 + 1.84 + 0.24) * NEAR_HZ)
    late = slice(at, at + NEAR_HZ * 3 // 10)
    assert ends[0][late].any()
    assert not ends[400][late].any()


def test_far_sound_that_came_too_early_is_caught_up_with() -> None:
    """The far clock is the faster one: 200 ms wait. After two seconds they are gone, and the echo with them."""
    far = speech(*range(1, 12), pause_seconds=0.2)
    near = heard_in(Room(1.0, 10, 150, 4), far)
    canceller = EchoCanceller()
    canceller.far(np.zeros(FAR_HZ // 5, np.float32))
    left = cancelled(canceller, far, near)
    settled = left[5 * NEAR_HZ : 14 * NEAR_HZ]
    assert dbfs(settled) < -75
    assert len(canceller._far) == 0


def test_near_sound_waits_for_its_far_sound_where_that_has_no_gaps() -> None:
    far = speech(1)
    near = heard_in(Room(0.6, 20, 150, 3), far)
    in_time = cancelled(EchoCanceller(), far, near)
    left = {}
    for continuous in (True, False):
        canceller, parts = EchoCanceller(continuous=continuous), []
        for index in range(-(-len(near) // 1280)):  # 80 ms of either side, the near one first
            parts.append(canceller.near(near[index * 1280 : (index + 1) * 1280]))
            canceller.far(far[index * 1764 : (index + 1) * 1764])
        left[continuous] = np.concatenate([*parts, canceller.finish()])
    np.testing.assert_array_equal(left[True], in_time)
    assert dbfs(left[False]) > dbfs(in_time) + 10


def test_near_sound_does_not_wait_for_ever() -> None:
    canceller = EchoCanceller(continuous=True)
    given = [len(canceller.near(NOISE[start : start + 1600])) for start in range(0, len(NOISE), 1600)]
    assert len(NOISE) - sum(given) < 1600 + 160 + 48
    assert sum(given) + len(canceller.finish()) == len(NOISE)


def test_an_hour_of_far_sound_alone_does_not_grow() -> None:
    canceller = EchoCanceller()
    minute = np.zeros(60 * FAR_HZ, np.float32)
    for _ in range(12):
        canceller.far(minute)
    assert len(canceller._far) == 60_000


def test_the_options_do_what_they_say() -> None:
    quiet = 0.1 * NOISE
    plain = cancelled(EchoCanceller(), np.zeros(0, np.float32), quiet)[NEAR_HZ:]
    suppressed = cancelled(EchoCanceller(noise_suppression=True), np.zeros(0, np.float32), quiet)[NEAR_HZ:]
    assert dbfs(suppressed) < dbfs(plain) - 6
    question, _ = soundfile.read(EXAMPLES / "question.wav", dtype="float32")
    far, faint = np.zeros(0, np.float32), np.tile(0.1 * question, 4)
    raised = cancelled(EchoCanceller(auto_gain=True), far, faint)
    assert dbfs(raised) > dbfs(cancelled(EchoCanceller(), far, faint)) + 6


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="positive"):
        EchoCanceller(far_rate_hz=0)
    with pytest.raises(InputError, match="mono"):
        EchoCanceller().far(np.zeros((2, 160), np.float32))
    with pytest.raises(InputError, match="mono"):
        EchoCanceller().near(np.zeros((2, 160), np.float32))
    with pytest.raises(InputError, match="floats"):
        EchoCanceller().far(np.zeros(160, np.int16))
    monkeypatch.setitem(sys.modules, "livekit", None)
    with pytest.raises(InputError, match="livekit") as refused:
        EchoCanceller()
    assert refused.value.remedy == "pip install livekit"


# -- the gate, and whether there is an echo


def block(level_dbfs: float) -> np.ndarray:
    """10 ms of this level."""
    return np.full(160, 10 ** (level_dbfs / 20), np.float32)


def passing(gate: EchoGate, far: float, near: float, left: float, blocks: int) -> list[bool]:
    return [gate.passes(block(far), block(near), block(left)) for _ in range(blocks)]


@pytest.mark.parametrize("delay_ms", [0, 100])
def test_it_closes_while_the_far_side_sounds_and_240_ms_after(delay_ms: int) -> None:
    gate = EchoGate(delay_ms)
    assert all(passing(gate, -100, -60, -60, 50))
    assert not any(passing(gate, -20, -30, -60, 50))
    after = passing(gate, -100, -60, -60, 60)
    assert after == [False] * (24 + delay_ms // 10) + [True] * (36 - delay_ms // 10)


def test_it_opens_for_what_is_louder_over_80_ms() -> None:
    gate = EchoGate()
    assert not any(passing(gate, -20, -30, -60, 20))
    assert not any(passing(gate, -20, -30, -32, 1))  # a peak of 10 ms: -41 dB over 80 ms
    gate = EchoGate()
    assert not any(passing(gate, -20, -30, -60, 20))
    assert passing(gate, -20, -30, -38.5, 20) == [False] * 5 + [True] * 15
    assert passing(gate, -20, -30, -60, 10) == [True] * 2 + [False] * 8


def test_where_the_far_side_begins_a_burst_does_not_pass_and_a_speaker_does() -> None:
    """A canceller that has not converged leaves bursts of up to 50 ms, at the first word and after pauses."""
    gate = EchoGate()
    for _ in range(2):
        assert not any(
            passing(gate, -20, -20, -60, 20) + passing(gate, -20, -20, -25, 5) + passing(gate, -20, -20, -60, 8)
        )
        assert passing(gate, -20, -20, -25, 20) == [False] * 5 + [True] * 15
        passing(gate, -100, -60, -60, 30)
    passing(gate, -20, -20, -60, 101)
    assert all(passing(gate, -20, -20, -25, 5))


def test_its_threshold_follows_what_is_left() -> None:
    gate = EchoGate()
    assert gate.threshold_dbfs == -40
    passing(gate, -20, -20, -38, 100)
    assert -37 < gate.threshold_dbfs < -35  # 4 dB a second
    passing(gate, -20, -20, -38, 400)
    assert gate.threshold_dbfs == pytest.approx(-32, abs=0.1)
    assert not any(passing(gate, -20, -20, -38, 10))
    passing(gate, -20, -10, -25, 1000)
    assert gate.threshold_dbfs == -30
    assert all(passing(gate, -20, -20, -25, 10))
    passing(gate, -20, -20, -70, 5000)
    assert gate.threshold_dbfs == -46


def test_its_threshold_does_not_follow_a_speaker() -> None:
    gate = EchoGate()
    passing(gate, -20, -25, -26, 1000)
    assert gate.threshold_dbfs == -40
    passing(gate, -100, -25, -60, 1000)
    assert gate.threshold_dbfs == -40


def test_where_no_echo_comes_none_is_expected() -> None:
    path = EchoPath()
    assert all(path.audible(block(-20), block(-35)) for _ in range(200))
    assert not [path.audible(block(-20), block(-65)) for _ in range(30)][-1]
    # Who speaks over it for less than a second changes nothing; an echo that goes on does.
    assert not any(path.audible(block(-20), block(-25)) for _ in range(90))
    assert not any(path.audible(block(-20), block(-65)) for _ in range(20))
    said = [path.audible(block(-20), block(-35)) for _ in range(120)]
    assert said[-1]
    assert not said[90]


@pytest.mark.parametrize(("far", "near"), [(-40, -90), (-20, -58), (-20, -120)], ids=["faint", "near", "switched off"])
def test_what_does_not_show_that_there_is_no_echo(far: float, near: float) -> None:
    path = EchoPath()
    assert all(path.audible(block(far), block(near)) for _ in range(300))


def test_far_sound_must_go_on_before_its_echo_is_missed() -> None:
    path = EchoPath(delay_ms=100)
    for _ in range(50):
        assert path.audible(block(-20), block(-30))
        for _ in range(28):
            assert path.audible(block(-20), block(-65))
        assert path.audible(block(-100), block(-65))
