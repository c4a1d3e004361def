"""The speech detector: onsets and ends of recordings, noise, settings, pieces of any size, the thread it runs on."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.server.detector import RATE_HZ, STEP_SAMPLES, Activity, SpeechDetector, detect

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = ["goodbye", "hello", "question", "tell_me_a_joke", "what_time_is_it", "what_is_two_plus_two"]


def _noise(seconds: float, level: float = 1e-4) -> np.ndarray:
    return np.random.default_rng(0).normal(0, level, int(seconds * RATE_HZ)).astype(np.float32)


def _question(name: str, gain: float = 1.0) -> tuple[np.ndarray, int, int]:
    """A recording between a second of faint noise and two, and where its speech begins and ends, in ms."""
    speech, rate = sf.read(EXAMPLES / f"{name}.wav", dtype="float32")
    assert rate == RATE_HZ
    audio = np.concatenate([_noise(1), speech * gain, _noise(2)])
    blocks = audio[: len(audio) // 160 * 160].reshape(-1, 160)
    loud = np.nonzero(np.sqrt(np.mean(blocks**2, axis=1)) > 0.01 * gain)[0]
    return audio, int(loud[0]) * 10, int(loud[-1] + 1) * 10


def _told(detector: SpeechDetector, audio: np.ndarray, piece: int = 320) -> list[tuple[float, Activity]]:
    """Every activity, with the length of what had been given when it was told."""
    told = []
    for at in range(0, len(audio), piece):
        told += [(detector.heard_ms, activity) for activity in detector.push(audio[at : at + piece])]
    return told


@pytest.mark.parametrize("gain", [1.0, 0.2])
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_begins_within_200_ms_and_ends_after_the_silence(name: str, gain: float) -> None:
    audio, onset, end = _question(name, gain)
    told = _told(SpeechDetector(), audio)
    assert [activity.kind for _, activity in told] == ["started", "stopped"]
    (started_at, started), (stopped_at, stopped) = told
    assert 64 <= started_at - onset <= 200
    assert abs(started.speech_ms - onset) <= 100
    assert started.at_ms == started.speech_ms - 300
    assert abs(stopped.speech_ms - end) <= 250
    assert 500 <= stopped.at_ms - stopped.speech_ms < 500 + 32
    assert stopped.at_ms <= stopped_at <= stopped.at_ms + 20


@pytest.mark.parametrize(
    "audio", [np.zeros(5 * RATE_HZ, np.float32), _noise(5, 0.05), np.eye(1, 5 * RATE_HZ, 40_000, dtype=np.float32)[0]]
)
def test_silence_noise_and_a_click_are_no_speech(audio: np.ndarray) -> None:
    assert SpeechDetector().push(audio) == []


def test_settings_and_the_start_of_the_stream() -> None:
    audio, _, _ = _question("question")
    speech = audio[int(1.4 * RATE_HZ) :]
    quick = SpeechDetector(prefix_padding_ms=1000, silence_duration_ms=200)
    (_, started), (_, stopped) = _told(quick, speech)
    assert started.at_ms == 0
    assert 200 <= stopped.at_ms - stopped.speech_ms < 232


def _scripted(*probabilities: float) -> SpeechDetector:
    left = iter(probabilities)
    return SpeechDetector(probability=lambda _: next(left))


def _steps(count: int) -> np.ndarray:
    return np.zeros(count * STEP_SAMPLES, np.float32)


def test_the_rule_step_by_step() -> None:
    detector = _scripted(0.4, 0.9, 0.9, 0.1, 0.9, 0.36, 0.36, *[0.34] * 15, 0.36, *[0.34] * 16)
    assert detector.push(_steps(6)) == []
    assert detector.push(_steps(1)) == [Activity("started", 0, 4 * 32)]
    assert detector.push(_steps(16)) == []
    assert detector.push(_steps(15)) == []
    assert detector.push(_steps(1)) == [Activity("stopped", 39 * 32, 23 * 32)]
    assert not detector.speaking


def test_an_utterance_that_the_application_ends() -> None:
    detector = _scripted(*[0.9] * 3, 0.1, *[0.9] * 3)
    assert detector.end() is None
    detector.push(_steps(4))
    assert detector.speaking
    assert detector.end() == Activity("stopped", 128, 96)
    assert detector.end() is None
    assert detector.push(_steps(3)) == [Activity("started", 0, 128)]


def test_other_settings_in_the_middle() -> None:
    detector = _scripted(*[0.5] * 3, *[0.3] * 6)
    detector.push(_steps(3))
    detector.configure(0.5, 300, 100)
    assert detector.push(_steps(6)) == [Activity("stopped", 7 * 32, 3 * 32)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=12))
def test_pieces_of_any_size_give_what_one_gives(sizes: list[int]) -> None:
    audio, _, _ = _question("hello")
    edges = np.cumsum([0, *sizes])
    pieces = SpeechDetector()
    told = [activity for a, b in pairwise(edges) for activity in pieces.push(audio[a:b])]
    assert told + pieces.push(audio[edges[-1] :]) == SpeechDetector().push(audio)


def test_it_runs_on_one_thread_of_its_own_in_order() -> None:
    seen: list[tuple[int, str]] = []

    def probability_of(name: str) -> SpeechDetector:
        return SpeechDetector(probability=lambda _: seen.append((threading.get_ident(), name)) or 0.0)

    async def run() -> None:
        a, b = probability_of("a"), probability_of("b")
        await asyncio.gather(detect(a, _steps(2)), detect(b, _steps(1)), detect(a, _steps(1)))

    asyncio.run(run())
    assert [name for _, name in seen] == ["a", "a", "b", "a"]
    assert len({ident for ident, _ in seen} | {threading.get_ident()}) == 2
