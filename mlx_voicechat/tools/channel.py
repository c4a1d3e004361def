"""The function channel of one session: its tool cycle, the functions that run for it, and which clock it is on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError
from ..events import Event, FailureReason, FunctionCall
from ..frame import Calls, Frame
from .cycle import Cycle, CycleState, ToolTokens
from .running import Runner
from .tool import by_name

if TYPE_CHECKING:
    from ..model import Model
    from ..options import SessionOptions

RUN_POSITIONS = 32  # of a result at once: between two runs other sessions have their frames
RECOMMENDED_TOOLS = 5  # NVIDIA's model card

log = logging.getLogger(__name__)


class Forced(NamedTuple):
    """What an open cycle wants of a frame: ids, or None for what others want, and what a call does to it."""

    text: int | None = None
    function: int | None = None
    spoken: int | None = None
    calls: Calls = Calls.FREE


class Channel:
    """The function channel of a session. Without tools it does nothing, and everything on it is the model's own.

    On the held clock the positions of a cycle run between two audio frames, on the running one each is a frame.
    """

    def __init__(self, model: Model, options: SessionOptions) -> None:
        self.runner = Runner(options.tool_timeout)
        self._drop_strays = options.drop_strays
        self._held = options.tool_clock == "held"
        self._cycle: Cycle | None = None
        tools = by_name(options.tools)
        if not tools:
            return
        if model.call_tokens is None:
            raise InputError(
                f"The checkpoint {model.name} has no tools: its tokenizer lacks <SPECIAL_20> to <SPECIAL_22>.",
                "Leave tools out.",
            )
        _warn(options)
        config = model.config
        self._tokens = ToolTokens(*model.call_tokens, config.pad_id, config.bos_id, config.eos_id)
        timeout_frames = round(options.tool_timeout / config.frame_seconds)
        self._cycle = Cycle(
            tools, model.tokenizer, self._tokens, self.runner.start, timeout_frames, config.frame_seconds
        )

    # -- what it is at -------------------------------------------------------------------------------------------

    @property
    def tools(self) -> bool:
        """Whether there are any."""
        return self._cycle is not None

    @property
    def cycle(self) -> Cycle:
        """The cycle; InputError without tools."""
        if self._cycle is None:
            raise InputError("The session has no tools.", "Open it with tools=[...].")
        return self._cycle

    @property
    def active(self) -> bool:
        """Whether a cycle is open."""
        return self._cycle is not None and self._cycle.active

    @property
    def between_frames(self) -> bool:
        """Whether the next step is one of the LLM alone."""
        working = (CycleState.CALLING, CycleState.INJECTING, CycleState.CLOSING)
        if self._cycle is None:
            return False
        return self._cycle.dropped or (self._held and self._cycle.state in working)

    @property
    def stands_still(self) -> bool:
        """Whether the LLM takes no part in the next audio frame."""
        return self._held and self._cycle is not None and self._cycle.waiting

    @property
    def run_ids(self) -> tuple[int, ...]:
        """The known function ids of the next run of positions."""
        return self.cycle.known[:RUN_POSITIONS]

    @property
    def repeats(self) -> bool:
        """Whether a call begins again and again."""
        return self._cycle is not None and self._cycle.repeats

    @property
    def asked(self) -> tuple[FunctionCall, ...]:
        """The open calls that no function of ours answers."""
        calls = () if self._cycle is None else self._cycle.open_calls
        return tuple(call for call in calls if not self.runner.runs(call.call_id))

    def forced(self, in_turn: bool) -> Forced:
        """What the next frame must carry; `in_turn`: the agent's turn is open."""
        cycle = self._cycle
        if cycle is None:
            return Forced()
        if not cycle.active:
            calls = Calls.ALONE if in_turn and self._drop_strays else Calls.SILENCE
            return Forced(calls=Calls.REFUSE if cycle.exhausted else calls)
        pad = self._tokens.pad
        if cycle.waiting:
            return Forced(pad, pad, cycle.spoken)
        return Forced(pad, cycle.known[0] if cycle.known else None)

    # -- what happened -------------------------------------------------------------------------------------------

    def passed(self, frame: Frame, index: int, still: bool) -> list[Event]:
        """An audio frame passed; `still`: the LLM took no part in it."""
        if self._cycle is None:
            return []
        waited = self._cycle.waiting
        events = [] if still else self._cycle.took(frame.function_id, index)
        if waited:
            events += self._cycle.waited(index)
        if frame.refused:
            events += self._cycle.refused(index)
        return events

    def new_turn(self) -> None:
        """The user has begun to speak."""
        if self._cycle is not None:
            self._cycle.new_turn()

    def wait(self) -> None:
        """Wait for the functions that run for an open cycle."""
        if self._cycle is not None and self._cycle.waiting:
            self.runner.wait()

    def collect(self, index: int) -> list[Event]:
        """Take the results of functions that have ended."""
        events: list[Event] = []
        for outcome in self.runner.ended() if self.runner.pending else []:
            call_id = outcome.call_id
            if not self.cycle.is_open(call_id):
                continue
            if outcome.timed_out:
                events += self.cycle.fail(call_id, FailureReason.TIMED_OUT, "timed out", index)
            elif outcome.raised:
                events += self.cycle.fail(call_id, FailureReason.RAISED, outcome.raised, index)
            else:
                try:
                    self.cycle.give(call_id, outcome.result)
                except InputError as error:
                    events += self.cycle.fail(call_id, FailureReason.RAISED, error.message, index)
        return events

    def drop(self, index: int) -> list[Event]:
        """End the cycle where it is, and forget what runs for it."""
        self.runner.forget()
        return [] if self._cycle is None else self._cycle.drop(index)


def _warn(options: SessionOptions) -> None:
    tools: Sequence = options.tools
    if len(tools) > RECOMMENDED_TOOLS:
        log.warning("%d tools were given; the model was made for at most %d.", len(tools), RECOMMENDED_TOOLS)
    prompt = [options.system_prompt or "", *(f"{tool.name} {tool.description} {tool.parameters}" for tool in tools)]
    if not all(text.isascii() for text in prompt):
        log.warning("The system prompt or a tool is not plain ASCII, which the model was not trained on.")
