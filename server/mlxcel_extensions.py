"""What a client of the dialect `mlxcel` gets that asks for `extensions`: events of tools, and turns of its own.

There is still one frame of speech for each frame that was heard: those with which a session settles between turns, or
drives the assistant's to its end, are left out, and frames are numbered without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_voicechat.events import (
    FunctionApplied,
    FunctionCall,
    FunctionFailed,
    OnHold,
    SettleTimeout,
    TurnClosed,
    TurnOpened,
)

from . import messages
from .json_messages import named

SILENT_PEAK = 1e-3  # -60 dBFS


@dataclass(frozen=True)
class TurnBegun:
    """The user's turn has begun, and the assistant's has ended if it was open."""


@dataclass(frozen=True)
class TurnEnds:
    """The user's turn ends: the session settles."""


# Of sessions with tools or turns; a client is told of the first three, if it asked.
OF_TOOLS = (FunctionCall, FunctionFailed, FunctionApplied)
EXTENSIONS = (*OF_TOOLS, OnHold, TurnEnds, TurnOpened, TurnClosed, SettleTimeout, messages.Answering)


def turns_asked(session: Mapping[str, Any]) -> messages.Owner:
    """Who owns the turns, as a session.update has it. Raises ValueError, which says what was expected."""
    extensions, turns = session.get("extensions"), session.get("turns")
    if not (extensions is None or isinstance(extensions, bool)):
        raise ValueError(f"session.extensions must be true or false, not {named(extensions)}.")
    if turns not in (None, "model", "application"):
        raise ValueError(f"session.turns must be model or application, not {named(turns)}.")
    if turns is not None and not extensions:
        raise ValueError("session.turns works only with session.extensions true.")
    return "application" if turns == "application" else "model"


class Timeline:
    """The frames as the client counts them."""

    def __init__(self) -> None:
        self.left_out = 0
        self._settling = self._opening = False

    def take(self, event: Any) -> bool:
        """Whether an event is for the client; a frame that is not is counted."""
        if isinstance(event, TurnBegun | TurnEnds | TurnOpened | SettleTimeout):
            self._settling = isinstance(event, TurnEnds)
            self._opening = isinstance(event, TurnOpened)
        if not isinstance(event, messages.Speech):
            return True
        silent = self._opening and np.abs(np.frombuffer(event.samples, np.float32)).max() < SILENT_PEAK
        self._opening = False
        hidden = self._settling or event.cancelled or bool(silent)
        self.left_out += hidden
        return not hidden

    def numbered(self, event: Any) -> Any:
        """The event with the client's number of its frame."""
        if not self.left_out or not hasattr(event, "frame_index"):
            return event
        return dataclasses.replace(event, frame_index=max(0, event.frame_index - self.left_out))


def extension_events(event: Any) -> list[Any]:
    """What a client is told of an event of tools: of results each."""
    if not isinstance(event, FunctionApplied):
        return [event] if isinstance(event, OF_TOOLS) else []
    pairs = zip(event.call_ids, event.results, strict=True)
    return [FunctionApplied(event.frame_index, (call_id,), (result,)) for call_id, result in pairs]


def _call(_: object, event: FunctionCall) -> dict[str, Any]:
    called = {"call_id": event.call_id, "name": event.name, "arguments": dict(event.arguments)}
    return {"frame_index": event.frame_index, **called}


def _result(_: object, event: FunctionApplied) -> dict[str, Any]:
    return {"frame_index": event.frame_index, "call_id": event.call_ids[0], "result": event.results[0]}


def _failed(_: object, event: FunctionFailed) -> dict[str, Any]:
    failed = {"call_id": event.call_id, "reason": event.reason.value, "raw": event.raw}
    return {"frame_index": event.frame_index, **failed}


WRITTEN: dict[type, tuple[str, Callable[[Any, Any], dict[str, Any]]]] = {
    FunctionCall: ("tool.call", _call),
    FunctionApplied: ("tool.result", _result),
    FunctionFailed: ("tool.failed", _failed),
}
