"""A model that answers at once from a script, for what surrounds the model: commands, files and the server."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_voicechat import AudioFrame, Cancelled, Done, Event, FunctionDelta, LimitReached, TextDelta, TranscriptDelta
from mlx_voicechat.errors import LimitError

CONFIG = SimpleNamespace(
    input_rate_hz=16000,
    output_rate_hz=22050,
    frame_seconds=0.08,
    frame_samples_in=1280,
    frame_samples_out=1764,
    eos_id=2,
    demonstration="",
    speaker="Aria",
    default_system_prompt="",
)
SCRIPT = {2: ("user", "Hello"), 3: ("user", " there."), 6: ("assistant", "Good"), 7: ("assistant", " day.")}
KINDS: dict[str, Callable[[int, str, str], Event]] = {
    "user": TranscriptDelta,
    "assistant": lambda index, delta, text: TextDelta(index, 7, delta, text),
    "function": lambda index, delta, text: FunctionDelta(index, 8, delta, text),
}


class FakeSession:
    """Frame i: what `script` has for it, then samples that are all i / 1000. `before(i)` runs ahead of the frame."""

    def __init__(self, model: FakeModel, seed: int, max_seconds: float | None, profile: bool) -> None:
        self.model, self.seed, self.max_seconds = model, seed, max_seconds
        self.profile = SimpleNamespace(summary=lambda: {"frames": self.frames}) if profile else None
        self.said = dict.fromkeys(KINDS, "")
        self.frames = 0
        self.limited = self._limit_due = False
        self.speaking = model.speaking
        self.blocks: list[int] = []
        self.forced: list[tuple[int, int | None]] = []  # frame and text id
        self._waiting = np.zeros(0, np.float32)
        self._received = 0

    transcript = property(lambda self: self.said["user"])
    text = property(lambda self: self.said["assistant"])
    function = property(lambda self: self.said["function"])

    def feed(self, samples: np.ndarray, rate_hz: int = 16000, block_frames: int = 1) -> Iterator[Event]:
        self._take(samples, rate_hz)
        while self.runnable:
            yield from self._step()

    def push(self, samples: np.ndarray, rate_hz: int = 16000) -> list[Event]:
        self.add(samples, rate_hz)
        events: list[Event] = []
        while self.runnable:
            events += self.step()
        return events

    def add(self, samples: np.ndarray, rate_hz: int = 16000) -> None:
        if self.limited:
            raise LimitError(f"The session's limit of {self.max_seconds:g} s is reached.")
        self._take(samples, rate_hz)

    @property
    def runnable(self) -> bool:
        return self._limit_due or len(self._waiting) >= CONFIG.frame_samples_in

    def step(self) -> list[Event]:
        return list(self._step())

    def _take(self, samples: np.ndarray, rate_hz: int) -> None:
        assert rate_hz == CONFIG.input_rate_hz
        assert samples.dtype == np.float32
        self.blocks.append(len(samples))
        self._received += len(samples)
        if self.max_seconds is not None and self._received > self.max_seconds * rate_hz:
            samples = samples[: len(samples) - self._received + round(self.max_seconds * rate_hz)]
            self.limited = self._limit_due = True
        self._waiting = np.concatenate([self._waiting, samples])

    def _step(self) -> Iterator[Event]:
        if len(self._waiting) >= CONFIG.frame_samples_in:
            self._waiting = self._waiting[CONFIG.frame_samples_in :]
            yield from self._frame()
        elif self._limit_due:
            self._limit_due = False
            yield LimitReached(self.frames, float(self.max_seconds or 0))

    def force(self, text: int | None = None) -> None:
        self.forced.append((self.frames, text))

    def _frame(self) -> Iterator[Event]:
        index, self.frames = self.frames, self.frames + 1
        self.model.before(index)
        if index in self.model.script:
            kind, delta = self.model.script[index]
            self.said[kind] += delta
            yield KINDS[kind](index, delta, self.said[kind])
        yield AudioFrame(index, np.full(CONFIG.frame_samples_out, index / 1000, np.float32), (index,) * 31)

    def finish(self, pad_partial: bool = True) -> list[Event]:
        partial = len(self._waiting) > 0 and pad_partial and not self.limited
        return [*(self._frame() if partial else []), Done(self.frames)]

    def cancel(self) -> list[Event]:
        return [Cancelled(self.frames)]


class FakeModel:
    """Opens fake sessions and remembers what it was asked for."""

    def __init__(self, script: dict[int, tuple[str, str]] = SCRIPT, demonstration: str = "") -> None:
        self.script = script
        self.name = "fake"
        self.call_tokens = (20, 21, 22)
        self.config = SimpleNamespace(**{**vars(CONFIG), "demonstration": demonstration})
        self.before: Callable[[int], Any] = lambda index: None
        self.opening_steps = 0
        self.before_opening: Callable[[int], Any] = lambda step: None
        self.rounds: list[int] = []  # how many sessions stepped together
        self.warmed: list[str | None] = []
        self.speaking = False
        self.loaded: list[str] = []
        self.load_options: list[dict[str, Any]] = []
        self.opened: list[dict[str, Any]] = []
        self.sessions: list[FakeSession] = []

    def load(self, name: str, say: Callable[[str], None], **options: Any) -> FakeModel:
        self.loaded.append(name)
        self.load_options.append(options)
        return self

    def session(self, **options: Any) -> FakeSession:
        self.opened.append(options)
        profile = options.get("profile", False)
        self.sessions.append(FakeSession(self, options["seed"], options["max_seconds"], profile))
        return self.sessions[-1]

    def opening(self, **options: Any) -> Generator[None, None, FakeSession]:
        for step in range(self.opening_steps + 1):
            self.before_opening(step)
            if step < self.opening_steps:
                yield
        return self.session(**options)

    def warm(self, voice: str | None = None, sessions: int = 1) -> None:
        self.warmed.append(voice)

    def step(self, sessions: Sequence[Any]) -> Iterator[tuple[Any, list[Event] | Exception]]:
        self.rounds.append(len(sessions))
        return step_each(sessions)


def step_each(sessions: Sequence[Any]) -> Iterator[tuple[Any, list[Event] | Exception]]:
    """`VoiceChat.step` of sessions that answer at once."""
    for session in sessions:
        try:
            outcome = session.step()
        except Exception as fault:
            outcome = fault
        yield session, outcome
