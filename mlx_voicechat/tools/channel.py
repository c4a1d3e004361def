"""The function channel of one session: its tool cycle, the functions that run for it, and which clock it is on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InputError
from ..events import Event, FailureReason, FunctionCall
from ..frame import Frame
from .cycle import Cycle, CycleState, ToolTokens
from .running import Runner
from .tool import by_name

if TYPE_CHECKING:
    from ..model import Model
    from ..options import SessionOptions

RUN_POSITIONS = 32  # of a result at once: between two runs other sessions have their frames
RECOMMENDED_TOOLS = 5  # NVIDIA's model card

log = logging.getLogger(__name__)


class Channel:
    """The tools of a session. `held`: the positions of a cycle run between two audio frames, not one a frame."""

    def __init__(self, model: Model, options: SessionOptions, tokens: ToolTokens) -> None:
        frame_seconds = model.config.frame_seconds
        tools = by_name(options.tools)
        self.held = options.tool_clock == "held"
        self.pad_id = tokens.pad
        self.runner = Runner(options.tool_timeout)
        self.cycle = Cycle(
            tools,
            model.tokenizer,
            tokens,
            self.runner.start,
            round(options.tool_timeout / frame_seconds),
            frame_seconds,
        )

    @classmethod
    def of(cls, model: Model, options: SessionOptions) -> Channel | None:
        """The channel of a session with tools, None without. InputError for tools that the checkpoint cannot call."""
        if not by_name(options.tools):
            return None
        if model.call_tokens is None:
            raise InputError(
                f"The checkpoint {model.name} has no tools: its tokenizer lacks <SPECIAL_20> to <SPECIAL_22>.",
                "Leave tools out.",
            )
        _warn(options)
        config = model.config
        return cls(model, options, ToolTokens(*model.call_tokens, config.pad_id, config.bos_id, config.eos_id))

    @property
    def between_frames(self) -> bool:
        """Whether the next step is one of the LLM alone."""
        return self.held and self.cycle.state in (CycleState.CALLING, CycleState.INJECTING, CycleState.CLOSING)

    @property
    def stands_still(self) -> bool:
        """Whether the LLM takes no part in the next audio frame."""
        return self.held and self.cycle.waiting

    @property
    def run_ids(self) -> tuple[int, ...]:
        """The known function ids of the next run of positions."""
        return self.cycle.known[:RUN_POSITIONS]

    @property
    def forced_id(self) -> int | None:
        """The function id of the next frame of an open cycle; None for the model's own."""
        if self.cycle.waiting:
            return self.pad_id
        return self.cycle.known[0] if self.cycle.known else None

    @property
    def asked(self) -> tuple[FunctionCall, ...]:
        """The open calls that no function of ours answers."""
        return tuple(call for call in self.cycle.open_calls if not self.runner.runs(call.call_id))

    def passed(self, frame: Frame, index: int, still: bool) -> list[Event]:
        """An audio frame passed; `still`: the LLM took no part in it."""
        waited = self.cycle.waiting
        events = [] if still else self.cycle.took(frame.function_id, index)
        if waited:
            events += self.cycle.waited(index)
        if frame.refused:
            events += self.cycle.refused(index)
        return events

    def wait(self) -> None:
        """Wait for the functions that run for an open cycle."""
        if self.cycle.waiting:
            self.runner.wait()

    def collect(self, index: int) -> list[Event]:
        """Take the results of functions that have ended."""
        events: list[Event] = []
        for outcome in self.runner.ended():
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
        return self.cycle.drop(index)


def _warn(options: SessionOptions) -> None:
    tools: Sequence = options.tools
    if len(tools) > RECOMMENDED_TOOLS:
        log.warning("%d tools were given; the model was made for at most %d.", len(tools), RECOMMENDED_TOOLS)
    told = [options.system_prompt or "", *(f"{tool.name} {tool.description} {tool.parameters}" for tool in tools)]
    if not all(text.isascii() for text in told):
        log.warning("The system prompt or a tool is not plain ASCII, which the model was not trained on.")
