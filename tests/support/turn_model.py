"""A model whose sessions take turns and call tools by simple rules, for the server's dialects.

Loud audio is speech: each loud frame is one word of the transcript. The agent answers three quiet frames after it, a
word a frame, two frames of silence after its EOS. With tools in the prompt and `calls` it first calls the first tool.
One that is not `willing` never begins by itself; with `settles` False a turn's transcript never comes to rest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_voicechat.errors import InputError, LimitError
from mlx_voicechat.events import (
    AudioFrame,
    Cancelled,
    CloseReason,
    Event,
    FailureReason,
    FunctionApplied,
    FunctionCall,
    FunctionFailed,
    LimitReached,
    SettleTimeout,
    TextDelta,
    TranscriptDelta,
    TurnClosed,
    TurnOpened,
)
from tests.support.fake_model import CONFIG, step_each

ANSWER = ("One", " two", " three", " four", " five", " six.")
QUIET_FRAMES = 3
TAIL_FRAMES = 2


class TurnSession:
    """One conversation with a TurnModel."""

    def __init__(self, model: TurnModel, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.owner, self.tools = options["turns"], options["tools"]
        self.turn, self.frames, self.speaking, self.in_cycle = "user", 0, False, False
        self.calls: list[FunctionCall] = []
        self.results: dict[str, str] = {}
        self.limited = False
        self._audio = np.zeros(0, np.float32)
        self._received = 0
        self._words = 0
        self._quiet = 0
        self._unanswered = self._said = ""
        self._left: list[str] = []
        self._tail = 0
        self._ending: CloseReason | None = None
        self._settled = self._before_settling = 0
        self._force_bos = False
        self._called = False
        self._answer_behind_call = False

    # -- stepping

    def add(self, samples: np.ndarray, rate_hz: int = 16000) -> None:
        assert rate_hz == 16000
        if self.limited:
            raise LimitError("The session's limit is reached.")
        self._received += len(samples)
        self.limited = self._received > self.options["max_seconds"] * 16000
        self._audio = np.concatenate([self._audio, samples])

    @property
    def runnable(self) -> bool:
        whole = len(self._audio) >= 1280
        return whole or self.turn in ("settling", "closing") or bool(self.results) or self._force_bos

    def step(self) -> list[Event]:
        if self.results and len(self.results) == len(self.calls):
            return self._apply()
        heard = self.turn == "settling" and self._before_settling > 0
        if not heard and (self.turn in ("settling", "closing") or self._force_bos):
            return self._frame(np.zeros(1280, np.float32))
        if len(self._audio) >= 1280:
            piece, self._audio = self._audio[:1280], self._audio[1280:]
            self._before_settling = max(0, self._before_settling - 1280)
            events = self._frame(piece)
            return [*events, LimitReached(self.frames, self.options["max_seconds"])] if self.limited else events
        return []

    def _frame(self, samples: np.ndarray) -> list[Event]:
        index, self.frames = self.frames, self.frames + 1
        self.model.before(index)
        events: list[Event] = []
        if np.abs(samples).mean() > 0.01:
            self._words += 1
            self._quiet = 0
            word = f" w{self._words}"
            self._unanswered += word
            events.append(TranscriptDelta(index, word, self._unanswered))
        else:
            self._quiet += 1
        events += self._open(index)
        said, closed = self._speak(index)
        events += said
        level = 0.1 if any(isinstance(event, TextDelta) for event in said) else 0.0
        cancelled = self.turn == "closing"
        events.append(AudioFrame(index, np.full(1764, level, np.float32), (0,) * 31, cancelled))
        if closed is not None:
            self.turn = "user"
            events.append(TurnClosed(index, closed))
        return events

    def _open(self, index: int) -> list[Event]:
        """The agent's turn, or its call, where it is due."""
        if self.turn == "settling" and not self._before_settling:
            self._settled += 1
        unasked = self.owner == "model" and self.turn == "user" and self.model.willing
        own = unasked and bool(self._unanswered) and self._quiet >= QUIET_FRAMES
        settled = self.turn == "settling" and self._settled > QUIET_FRAMES
        if settled and not self.model.settles and not self._force_bos:
            self.turn = "user"
            return [SettleTimeout(index)]
        due = own or self._force_bos or settled
        if self._answer_behind_call and not self.in_cycle:
            self._answer_behind_call = False
            opened = [] if self.turn == "agent" else [TurnOpened(index, "")]
            self._begin()
            return [*opened]
        if not due or self.in_cycle or self.turn == "agent":
            return []
        self._force_bos = False
        transcript, self._unanswered = self._unanswered.strip(), ""
        events: list[Event] = []
        if self.tools and self.model.calls and not self._called:
            self._called = self.in_cycle = True
            if self.owner == "application" or not own:
                self.turn = "agent"
                events.append(TurnOpened(index, transcript))
            else:
                self.turn = "user"
            call = FunctionCall(index, f"call_{index:024d}", self.tools[0].name, {"city": "Paris"}, "[...]")
            self.calls = [call]
            return [*events, call]
        self._begin()
        return [*events, TurnOpened(index, transcript)]

    def _begin(self) -> None:
        self.turn, self.speaking, self._called = "agent", True, False
        self._left, self._tail, self._ending = list(self.model.answer), 0, None

    def _speak(self, index: int) -> tuple[list[Event], CloseReason | None]:
        if self.turn not in ("agent", "closing") or self.in_cycle:
            return [], None
        if self._left and self._ending is None:
            word = self._left.pop(0)
            self._said += word
            return [TextDelta(index, 7, word, self._said)], None
        self.speaking = False
        self._tail += 1
        if self._tail <= TAIL_FRAMES:
            return [], None
        return [], self._ending or CloseReason.MODEL

    def _apply(self) -> list[Event]:
        ids = tuple(call.call_id for call in self.calls)
        applied = FunctionApplied(self.frames, ids, tuple(self.results.values()))
        self.calls, self.results, self.in_cycle, self._answer_behind_call = [], {}, False, True
        return [applied]

    # -- what is noted

    def begin_turn(self) -> None:
        self._drop_cycle()
        if self.turn == "agent":
            self.turn, self._ending = "closing", CloseReason.CANCELLED
        elif self.turn == "settling":
            self.turn = "user"

    def end_turn(self, patience_frames: int = 0) -> None:
        if self.turn != "user":
            raise InputError(f"The turn is {self.turn}.")
        self.turn, self._settled = "settling", 0
        self._audio = np.pad(self._audio, (0, -len(self._audio) % 1280))
        self._before_settling = len(self._audio)

    def open_turn(self) -> None:
        self._force_bos = True

    def interrupt(self) -> None:
        self._drop_cycle()
        if self.turn == "agent":
            self._ending = CloseReason.INTERRUPTED

    def _drop_cycle(self) -> None:
        self.calls, self.results, self.in_cycle = [], {}, False
        self._answer_behind_call = self._called = False

    def give(self, call_id: str, result: str) -> None:
        if call_id not in {call.call_id for call in self.calls} or call_id in self.results:
            raise InputError(f"There is no open call {call_id}.")
        if len(result) > 512:
            raise InputError("The result is longer than 128 tokens.")
        self.results[call_id] = result

    def refuse(self, call_id: str, why: str) -> None:
        self.give(call_id, why)

    def cancel(self) -> list[Event]:
        failed = [FunctionFailed(self.frames, c.call_id, FailureReason.CANCELLED, c.raw) for c in self.calls]
        return [*failed, Cancelled(self.frames)]


class TurnModel:
    """Opens such sessions and remembers what it was asked for."""

    def __init__(self, answer: tuple[str, ...] = ANSWER, calls: bool = True) -> None:
        self.answer, self.calls = answer, calls
        self.willing = self.settles = True
        self.name = "fake"
        self.call_tokens = (20, 21, 22)
        self.config = SimpleNamespace(**{**vars(CONFIG), "default_system_prompt": "Default."})
        self.tokenizer = SimpleNamespace(encode=lambda text: text.split())
        self.before: Callable[[int], Any] = lambda index: None
        self.opened: list[dict[str, Any]] = []
        self.sessions: list[TurnSession] = []

    def opening(self, **options: Any) -> Generator[None, None, TurnSession]:
        self.opened.append(options)
        self.sessions.append(TurnSession(self, options))
        return self.sessions[-1]
        yield

    def warm(self, voice: str | None = None, sessions: int = 1) -> None:
        pass

    def step(self, sessions: Sequence[Any]) -> Iterator[tuple[Any, list[Event] | Exception]]:
        return step_each(sessions)
