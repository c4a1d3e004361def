"""The cycle of a tool call on the function channel: idle, calling, waiting, injecting, closing. No MLX here.

Who runs the positions tells the cycle each id that the channel took (`took`) and each frame that passed while it waits
(`waited`), and asks what the next position must carry. The rules are those of spec/turns-and-tools.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from ..errors import InputError
from ..events import Event, FailureReason, FunctionApplied, FunctionCall, FunctionFailed, OnHold
from . import results
from .calls import OPENING, WrittenCall, new_call_id, parse_calls
from .tool import Tool

MAX_CALL_IDS = 512
MAX_CALL_POSITIONS = 125
MAX_CLOSING_POSITIONS = 8
MAX_CYCLES = 8  # in one turn of the user
MAX_OPENINGS = 4  # of one call: a model that repeats itself
HOLD_GRACE_SECONDS = 0.8  # most tools are faster
HOLD_TAIL = 17  # PAD frames after a sentence on hold: the rest of its speech

log = logging.getLogger(__name__)


class CycleState(str, Enum):
    """Where a cycle is."""

    IDLE = "idle"
    CALLING = "calling"
    WAITING = "waiting"
    INJECTING = "injecting"
    CLOSING = "closing"


class ToolTokens(NamedTuple):
    """Ids of the function channel: a call's start and end, the end of a response; and the text channel's own."""

    start: int
    end: int
    response_end: int
    pad: int
    bos: int
    eos: int


class Text(results.Encoder, Protocol):
    """The part of a tokenizer that the cycle needs."""

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


@dataclass
class OpenCall:
    """A call of the cycle, and its result once it has one."""

    event: FunctionCall
    tool: Tool | None
    result: str | None = None


class Cycle:
    """The function channel of one session.

    `run(call, tool)` starts a tool that has a callable; its end comes back by `give` or `fail`. `timeout_frames` is how
    long a call without one may wait. All times are in audio frames; `frame_index` is of the last frame.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        text: Text,
        tokens: ToolTokens,
        run: Callable[[FunctionCall, Tool], None],
        timeout_frames: int,
        frame_seconds: float,
    ) -> None:
        self.state = CycleState.IDLE
        self.cycles = 0  # in this turn of the user
        self._tools, self._text, self._tokens, self._run = tools, text, tokens, run
        self._timeout_frames = timeout_frames
        self._grace_frames = round(HOLD_GRACE_SECONDS / frame_seconds)
        self._calls: list[OpenCall] = []
        self._ids: list[int] = []
        self._raw = ""
        self._positions = self._waited = 0
        self._injected: deque[int] = deque()
        self._leftover: deque[int] = deque()  # what closes a call that was dropped
        self._ends_turn = False
        self._hold: deque[int] = deque()
        self._held = False  # whether a sentence on hold was begun in this cycle
        self._refused = False

    # -- what the next position carries --------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether a cycle is open: the text channel is PAD."""
        return self.state != CycleState.IDLE

    @property
    def waiting(self) -> bool:
        """Whether it waits for results, or for the end of a sentence on hold."""
        return self.state == CycleState.WAITING

    @property
    def exhausted(self) -> bool:
        """Whether this turn of the user has had all its cycles: the next call is to be refused."""
        return self.cycles >= MAX_CYCLES

    @property
    def repeats(self) -> bool:
        """Whether the call that is being written has begun too often."""
        return self.state == CycleState.CALLING and self._text.decode(self._ids).count(OPENING) > MAX_OPENINGS

    @property
    def known(self) -> tuple[int, ...]:
        """The ids that the next positions must carry, while results are injected or a dropped call is closed."""
        return tuple(self._leftover or self._injected)

    @property
    def dropped(self) -> bool:
        """Whether a dropped call is still to be closed for the model, which else waits for its result for ever."""
        return bool(self._leftover)

    @property
    def spoken(self) -> int:
        """The id that the speech generator gets in the next waiting frame: of a sentence on hold, or PAD."""
        return self._hold[0] if self._hold else self._tokens.pad

    @property
    def open_calls(self) -> tuple[FunctionCall, ...]:
        """The calls without a result."""
        return tuple(call.event for call in self._calls if call.result is None and self.waiting)

    def opens(self, count: int) -> bool:
        """Whether the last of the next `count` known positions takes BOS: a dropped call ends as an empty answer."""
        return self._ends_turn and len(self._leftover) == count

    def is_open(self, call_id: str) -> bool:
        """Whether that call waits for its result."""
        return any(call.call_id == call_id for call in self.open_calls)

    # -- what happened -------------------------------------------------------------------------------------------

    def new_turn(self) -> None:
        """The user has begun to speak: count the cycles anew."""
        if not self.active:
            self.cycles, self._refused = 0, False

    def took(self, function_id: int, frame_index: int) -> list[Event]:
        """An LLM position took this function id."""
        if self._leftover:
            self._leftover.popleft()
            return []
        if self.state == CycleState.IDLE:
            if function_id == self._tokens.start:
                self._begin()
            return []
        if self.state == CycleState.CALLING:
            return self._call_id(function_id, frame_index)
        if self.state == CycleState.INJECTING:
            self._injected.popleft()
            if not self._injected:
                self._enter(CycleState.CLOSING)
        elif self.state == CycleState.CLOSING:
            return self._closing_id(function_id, frame_index)
        return []

    def waited(self, frame_index: int) -> list[Event]:
        """An audio frame passed while calls wait, and `spoken` was said in it."""
        self._waited += 1
        if self._hold:
            self._hold.popleft()
        events: list[Event] = []
        for call in self._calls:
            own = call.tool is not None and call.tool.callable is not None
            if call.result is None and not own and self._waited >= self._timeout_frames:
                events += self.fail(call.event.call_id, FailureReason.TIMED_OUT, "timed out", frame_index)
        sentence = next((c.tool.on_hold for c in self._calls if c.result is None and c.tool and c.tool.on_hold), None)
        if sentence and not self._held and self._waited >= self._grace_frames:
            self._held = True
            tail = [self._tokens.pad] * HOLD_TAIL
            self._hold.extend([self._tokens.bos, *self._text.encode(sentence), *tail, self._tokens.eos])
            events.append(OnHold(frame_index + 1, sentence))
        self._proceed()
        return events

    def refused(self, frame_index: int) -> list[Event]:
        """A call was asked for after the last cycle of the turn; told once."""
        if self._refused:
            return []
        self._refused = True
        return [FunctionFailed(frame_index, new_call_id(), FailureReason.TOO_MANY, "")]

    def give(self, call_id: str, result: object) -> None:
        """The result of an open call; InputError when there is none of that id, or the result is too long."""
        call = self._open(call_id)
        call.result = results.rendered(result, self._text)
        self._proceed()

    def fail(self, call_id: str, reason: FailureReason, why: str, frame_index: int) -> list[Event]:
        """An open call has failed: the model gets `{"error": why}`."""
        call = self._open(call_id)
        call.result = results.error_result(why)
        log.warning("The call %s of %s failed: %s", call_id, call.event.name, why)
        self._proceed()
        return [FunctionFailed(frame_index, call_id, reason, call.event.raw)]

    def refuse(self, call_id: str, why: str) -> None:
        """An open call is refused by who runs the tools: the model gets `{"error": why}`."""
        self._open(call_id).result = results.error_result(why)
        self._proceed()

    def drop(self, frame_index: int) -> list[Event]:
        """End the cycle where it is: calls without a result have failed, and no result is told.

        The positions in `known` close it for the model, with an error in the place of results, and with a BOS: the
        EOS that is to follow ends an empty answer, and the model does not begin one about the error.
        """
        pending = [call for call in self._calls if call.result is None]
        ids = [call.event.call_id for call in pending]
        raw = self._raw
        if self.state == CycleState.CALLING:
            ids, raw = [new_call_id()], self._text.decode(self._ids)
        if self.active:
            self._shut("cancelled")
            self._leftover.extend([self._tokens.pad] * 2)  # as trained: PAD, then BOS, which EOS follows
            self._ends_turn = True
        return [FunctionFailed(frame_index, call_id, FailureReason.CANCELLED, raw) for call_id in ids]

    # -- states --------------------------------------------------------------------------------------------------

    def _enter(self, state: CycleState) -> None:
        self.state, self._positions = state, 0
        if state == CycleState.IDLE:
            self._calls, self._ids, self._raw = [], [], ""
            self._injected.clear()
            self._hold.clear()

    def _begin(self) -> None:
        self._enter(CycleState.IDLE)
        self._enter(CycleState.CALLING)
        self.cycles += 1
        self._waited, self._held = 0, False

    def _call_id(self, function_id: int, frame_index: int) -> list[Event]:
        self._positions += 1
        if function_id == self._tokens.end:
            return self._called(frame_index)
        if function_id != self._tokens.pad:
            self._ids.append(function_id)
        if len(self._ids) > MAX_CALL_IDS or self._positions >= MAX_CALL_POSITIONS:
            raw = self._text.decode(self._ids)
            self._shut("the call did not end")
            return [FunctionFailed(frame_index, new_call_id(), FailureReason.TOO_LONG, raw)]
        return []

    def _shut(self, why: str) -> None:
        """Leave the cycle; what is missing of it for the model is left over."""
        self._ends_turn = False
        if self.state in (CycleState.CALLING, CycleState.WAITING):
            response = results.response_ids([results.error_result(why)], self._text)
            end = [self._tokens.end] if self.state == CycleState.CALLING else []
            self._leftover.extend([*end, *response])
        self._leftover.extend(self._injected)
        self._leftover.append(self._tokens.response_end)
        self._enter(CycleState.IDLE)

    def _called(self, frame_index: int) -> list[Event]:
        self._raw = self._text.decode(self._ids)
        try:
            text = b"".join(self._text.token_bytes(token) for token in self._ids).decode()
            calls = parse_calls(text, self._tools)
        except UnicodeDecodeError:
            calls = [WrittenCall(new_call_id(), "", {}, FailureReason.MALFORMED, "The call is no UTF-8.")]
        self._enter(CycleState.WAITING)
        events: list[Event] = []
        for call in calls:
            event = FunctionCall(frame_index, call.call_id, call.name, call.arguments, self._raw)
            tool = None if call.failure else self._tools.get(call.name)
            self._calls.append(OpenCall(event, tool))
            if call.failure is None:
                events.append(event)
        for call in calls:
            if call.failure is not None:
                events += self.fail(call.call_id, call.failure, call.why, frame_index)
        for opened in list(self._calls):
            if opened.tool is not None and opened.tool.callable is not None:
                self._run(opened.event, opened.tool)
        return events

    def _proceed(self) -> None:
        """Inject, once every call has its result and nothing is being said."""
        if not self.waiting or self._hold or any(call.result is None for call in self._calls):
            return
        given = [call.result or "" for call in self._calls]
        self._enter(CycleState.INJECTING)
        self._injected.extend(results.response_ids(given, self._text))

    def _closing_id(self, function_id: int, frame_index: int) -> list[Event]:
        self._positions += 1
        again = function_id == self._tokens.start and not self.exhausted
        closed = again or function_id == self._tokens.response_end
        if not closed and self._positions < MAX_CLOSING_POSITIONS:
            return []
        events: list[Event] = []
        if not closed:
            events.append(FunctionFailed(frame_index, "", FailureReason.UNCLOSED, self._raw))
        ids, given = zip(*((call.event.call_id, call.result or "") for call in self._calls), strict=True)
        events.append(FunctionApplied(frame_index, ids, given))
        self._enter(CycleState.IDLE)
        if again:
            self._begin()
        return events

    def _open(self, call_id: str) -> OpenCall:
        for call in self._calls:
            if call.event.call_id == call_id and call.result is None and self.waiting:
                return call
        waiting = ", ".join(call.call_id for call in self.open_calls) or "none"
        raise InputError(f"No open call has the id {str(call_id)[:60]!r}.", f"Open calls: {waiting}.")
