"""strict-v3: the open function cycle, seen from its client: one call at a time, its time limit, what comes after it."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from .strict_v3_codes import RECOVERY_FRAMES, Refused


@dataclass
class PendingCall:
    """One call. `ours` is answered by a tool of the server, and the client does not hear of it."""

    call_id: str
    name: str
    arguments: str
    ours: bool
    given: bool = False
    failed: bool = False
    deadline: float = 0.0
    failure: str = ""  # of one that is not sent
    event_id: str | None = None  # of the client's result


class Calls:
    """The calls of one cycle: the open one, and those of the same list that wait behind it."""

    def __init__(self) -> None:
        self.open: PendingCall | None = None
        self.waiting: deque[PendingCall] = deque()
        self.frame_index = -1
        self.ticks = 0

    @property
    def deadline(self) -> float | None:
        """When the open call has run out of time."""
        call = self.open
        return None if call is None or call.given or call.failed or call.ours else call.deadline

    def require(self, call_id: str) -> PendingCall:
        """The open call that this is a result of. Raises Refused."""
        call = self.open
        if call is None or call.ours or call.call_id != call_id:
            raise Refused("invalid_function_call_output", f"No call {call_id[:80]!r} waits for a result.")
        if call.failed:
            raise Refused("invalid_function_call_output", "The result came too late: the call has failed.")
        if call.given:
            raise Refused("invalid_function_call_output", "The call has its result already.")
        return call

    def tick(self) -> None:
        """One frame after the last result was accepted. Raises Refused."""
        call = self.open
        if call is None or not (call.given or call.failed):
            return
        self.ticks += 1
        if self.ticks >= RECOVERY_FRAMES:
            wrong = f"The result of {call.call_id} was not taken within {RECOVERY_FRAMES} frames."
            raise Refused("function_output_apply_timeout", wrong)

    def clear(self) -> None:
        self.open = None
        self.waiting.clear()
        self.ticks = 0


def arguments_text(arguments: Any) -> str:
    """Arguments as the wire has them: compact, keys sorted."""
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))
