"""What stands between the audio callbacks and the event loop: rings, the resamplers' length and purity, the jitter."""

from types import SimpleNamespace

import numpy as np
import pytest

from mlx_voicechat.cli.buffers import CALM_SECONDS, CAPTURE_SECONDS, LEAST_FRAMES, MOST_FRAMES, Capture, Playback, Ring

FINE = SimpleNamespace(input_overflow=False, output_underflow=False)
LATE = SimpleNamespace(input_overflow=True, output_underflow=True)
RATE = 22050
FRAME = 1764
SECONDS = 20


def tone(samples: int, rate_hz: int, start: int = 0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 / rate_hz * np.arange(start, start + samples))).astype(np.float32)


def error_db(found: np.ndarray, rate_hz: int) -> float:
    """Of a 440 Hz tone that begins at the first sample; its ends ring."""
    wanted = tone(len(found), rate_hz)
    inner = slice(rate_hz // 10, -rate_hz // 10)
    error = found[inner] - wanted[inner]
    return 20 * np.log10(np.abs(error).max() / 0.5)


def pull(playback: Playback, frames: int, status: SimpleNamespace = FINE) -> np.ndarray:
    block = np.full((frames, 2), np.nan, np.float32)
    playback.fill(block, frames, None, status)
    np.testing.assert_array_equal(block[:, 0], block[:, 1])
    return block[:, 0]


@pytest.mark.parametrize("device_hz", [44100, 48000])
@pytest.mark.parametrize("block", [128, 441, 1024])
def test_the_microphone_keeps_length_and_tone(device_hz: int, block: int) -> None:
    capture, found = Capture(device_hz, 16000), []
    total = SECONDS * device_hz
    for start in range(0, total, block):
        samples = tone(min(block, total - start), device_hz, start)
        capture.hear(np.stack([samples, samples], axis=1), len(samples), None, FINE)
        if start // block % 3 == 0:
            found.append(capture.take())
    found += [capture.take(), capture.finish()]
    heard = np.concatenate(found)
    assert abs(len(heard) - SECONDS * 16000) <= 1
    assert error_db(heard, 16000) < -60
    assert (capture.lost_seconds, capture.overflows, capture.waiting_seconds) == (0, 0, 0)
    assert capture.seconds == SECONDS


@pytest.mark.parametrize("device_hz", [44100, 48000])
@pytest.mark.parametrize("block", [128, 441, 1024])
def test_the_loudspeaker_keeps_length_and_tone(device_hz: int, block: int) -> None:
    playback, found = Playback(RATE, device_hz, 0.08), []
    frames = round(SECONDS / 0.08)
    for index in range(frames):
        playback.push(tone(FRAME, RATE, index * FRAME))
        while playback.waiting_seconds > 0.24:
            found.append(pull(playback, block))
    playback.finish()
    while playback.waiting_seconds:
        found.append(pull(playback, block))
    played = np.concatenate(found)
    assert 0 <= len(played) - SECONDS * device_hz <= block
    assert not played[SECONDS * device_hz + 1 :].any()
    assert error_db(played[: SECONDS * device_hz], device_hz) < -60
    assert (playback.starved, playback.lost) == (0, 0)


def test_a_ring_goes_round() -> None:
    ring, rng = Ring(100), np.random.default_rng(0)
    written, read = [np.zeros(0, np.float32)], []
    for _ in range(500):
        piece = rng.normal(size=rng.integers(0, 70)).astype(np.float32)
        written.append(piece[: ring.write(piece)])
        out = np.zeros(rng.integers(0, 70), np.float32)
        read.append(out[: ring.read_into(out)])
    given, taken = np.concatenate(written), np.concatenate(read)
    assert ring.waiting == len(given) - len(taken)
    assert len(taken) > 5000
    np.testing.assert_array_equal(taken, given[: len(taken)])
    assert ring.write(np.ones(1000, np.float32)) == 100 - (len(given) - len(taken))
    ring.skip()
    assert ring.waiting == ring.read_into(np.zeros(9, np.float32)) == 0
    assert ring.write(np.ones(1000, np.float32)) == 100


def test_a_microphone_without_room() -> None:
    capture = Capture(16000, 16000)
    for _ in range(round(CAPTURE_SECONDS) + 2):
        capture.hear(np.full((16000, 1), 0.25, np.float32), 16000, None, LATE)
    assert capture.lost_seconds == 2
    assert capture.overflows == CAPTURE_SECONDS + 2
    assert len(capture.take()) == CAPTURE_SECONDS * 16000
    assert capture.peak == 0.25
    capture.hear(np.ones((5, 1), np.float32), 5, None, FINE)
    assert capture.take().tolist() == [1] * 5


def inputs(*levels: float, frames: int = 160) -> np.ndarray:
    """A block with a tone of these levels on its inputs."""
    return np.outer(np.sin(np.arange(frames)), levels).astype(np.float32)


def test_the_input_with_sound_is_heard() -> None:
    capture = Capture(16000, 16000)
    for _ in range(50):
        capture.hear(inputs(1e-4, 1e-4, 0, 1e-4), 160, None, FINE)
    assert not capture.inputs.settled
    assert np.abs(capture.take()).max() < 2e-4
    for _ in range(20):
        capture.hear(inputs(1e-4, 1e-4, 0.3, 1e-4), 160, None, FINE)
    assert (capture.inputs.number, capture.inputs.settled) == (3, True)
    heard = capture.take()
    np.testing.assert_array_equal(heard, np.tile(inputs(0.3)[:, 0], 20))  # from the first block on
    for _ in range(100):
        capture.hear(inputs(0.9, 0, 0.1, 0), 160, None, FINE)
    np.testing.assert_array_equal(capture.take(), np.tile(inputs(0.1)[:, 0], 100))  # and it stays


def test_an_input_that_was_asked_for_is_heard() -> None:
    capture = Capture(16000, 16000, number=2)
    assert capture.inputs.settled
    capture.hear(inputs(0.9, 0.2), 160, None, FINE)
    np.testing.assert_array_equal(capture.take(), inputs(0.2)[:, 0])


def test_an_input_of_no_numbers_is_not_the_one_with_sound() -> None:
    capture = Capture(16000, 16000)
    capture.hear(inputs(np.nan, 0.2), 160, None, FINE)
    np.testing.assert_array_equal(capture.take(), inputs(0.2)[:, 0])


@pytest.fixture
def playback() -> Playback:
    """At the model's own rate."""
    return Playback(RATE, RATE, 0.08)


def test_it_waits_for_two_frames(playback: Playback) -> None:
    playback.push(tone(FRAME, RATE))
    assert not pull(playback, 441).any()
    playback.push(tone(FRAME, RATE, FRAME))
    np.testing.assert_array_equal(pull(playback, 2 * FRAME), tone(2 * FRAME, RATE))
    assert playback.starved == 0


def test_a_large_block_is_waited_for(playback: Playback) -> None:
    for _ in range(4):
        playback.push(tone(FRAME, RATE))
        assert not pull(playback, 5 * FRAME).any()
    playback.push(tone(FRAME, RATE))
    assert pull(playback, 5 * FRAME).any()
    assert playback.starved == 0


def test_starved_it_grows_and_calm_it_shrinks(playback: Playback) -> None:
    grown = []
    for _ in range(4):
        for _ in range(playback.target):
            playback.push(np.full(FRAME, 0.5, np.float32))
        dry = np.concatenate([pull(playback, 1000) for _ in range(9)])
        assert not dry[-1000:].any()
        assert np.abs(np.diff(dry)[10:]).max() < 0.01  # it dies away
        grown.append(playback.target)
    assert grown == [3, 4, MOST_FRAMES, MOST_FRAMES]
    assert playback.starved == 4
    targets = []
    for _ in range(round(3 * CALM_SECONDS / 0.08)):
        playback.push(np.full(FRAME, 0.5, np.float32))
        pull(playback, FRAME)
        targets.append(playback.target)
    assert sorted(set(targets)) == [2, 3, 4]
    assert targets == sorted(targets, reverse=True)
    assert targets[-1] == LEAST_FRAMES
    assert playback.starved == 4


def test_what_it_holds_too_much_goes_in_a_pause(playback: Playback) -> None:
    for _ in range(10):
        playback.push(np.full(FRAME, 0.5, np.float32))
    assert playback.waiting_seconds == pytest.approx(0.8)
    for _ in range(30):
        playback.push(np.full(FRAME, 0.001, np.float32))
        pull(playback, FRAME)
    assert playback.waiting_seconds == pytest.approx(0.08 * (LEAST_FRAMES + 1), abs=0.081)
    assert playback.starved == 0


def test_an_interruption_empties_it(playback: Playback) -> None:
    for _ in range(5):
        playback.push(np.full(FRAME, 0.5, np.float32))
    assert pull(playback, 441).all()
    assert playback.speaking
    playback.clear()
    assert not playback.speaking
    assert not pull(playback, 441).any()
    assert (playback.starved, playback.waiting_seconds) == (0, 0)
    for _ in range(LEAST_FRAMES):
        assert not pull(playback, 441).any()
        playback.push(np.full(FRAME, 0.25, np.float32))
    assert (pull(playback, 441) == 0.25).all()


def test_it_speaks_until_a_moment_after_the_last_loud_sample(playback: Playback) -> None:
    silence = np.zeros(FRAME, np.float32)
    assert not playback.speaking
    for frame in (silence, silence, np.full(FRAME, 0.5, np.float32)):
        playback.push(frame)
    spoke = []
    for _ in range(10):
        playback.push(silence)
        pull(playback, FRAME)
        spoke.append(playback.speaking)
    assert spoke == [True] * 6 + [False] * 4  # the third frame, and 0.3 s


def test_the_end_is_played_however_short(playback: Playback) -> None:
    playback.push(tone(FRAME, RATE))
    assert not pull(playback, 441).any()
    playback.finish()
    np.testing.assert_array_equal(pull(playback, FRAME + 5), [*tone(FRAME, RATE), *[0] * 5])
    pull(playback, FRAME, LATE)
    assert (playback.starved, playback.underflows) == (0, 1)
