"""Tools that are Python functions: each call runs on a thread of its own, with a time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..events import FunctionCall
from .tool import Tool


class Outcome(NamedTuple):
    """How a call ended: with a `result`, or with what it `raised`; neither when its time is up."""

    call_id: str
    result: Any = None
    raised: str = ""
    timed_out: bool = False


class Runner:
    """The running calls of one session.

    `ready` is called on the tool's thread when a call has ended. A function that does not end in time keeps its thread,
    which does not keep the process; what it gives then is dropped.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.ready: Callable[[], None] = lambda: None
        self._timeout = timeout_seconds
        self._deadlines: dict[str, float] = {}
        self._ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    @property
    def pending(self) -> bool:
        """Whether a call runs whose end was not taken."""
        return bool(self._deadlines)

    @property
    def due(self) -> bool:
        """Whether `ended` may have something to tell."""
        overdue = time.monotonic() >= min(self._deadlines.values(), default=float("inf"))
        return overdue or (self.pending and not self._ended.empty())

    def runs(self, call_id: str) -> bool:
        """Whether that call runs here, or has ended and was not taken."""
        return call_id in self._deadlines

    def start(self, call: FunctionCall, tool: Tool) -> None:
        """Begin to run a call."""
        self._deadlines[call.call_id] = time.monotonic() + self._timeout
        threading.Thread(target=self._run, args=(call, tool), name=f"tool-{tool.name}", daemon=True).start()

    def forget(self) -> None:
        """Drop what runs: nobody waits for it any more."""
        self._deadlines.clear()

    def ended(self) -> list[Outcome]:
        """The calls that have ended since the last time, or have run out of time."""
        outcomes = []
        while True:
            try:
                outcome = self._ended.get_nowait()
            except queue.Empty:
                break
            if self._deadlines.pop(outcome.call_id, None) is not None:
                outcomes.append(outcome)
        now = time.monotonic()
        for call_id in [each for each, deadline in self._deadlines.items() if now >= deadline]:
            del self._deadlines[call_id]
            outcomes.append(Outcome(call_id, timed_out=True))
        return outcomes

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until every call has ended or run out of time; False when `seconds` are over before."""
        until = max(self._deadlines.values(), default=0.0)
        if seconds is not None:
            until = min(until, time.monotonic() + seconds)
        running, ended = set(self._deadlines), []
        while running and time.monotonic() < until:
            try:
                ended.append(self._ended.get(timeout=max(until - time.monotonic(), 0.0)))
            except queue.Empty:
                break
            running.discard(ended[-1].call_id)
        for outcome in ended:
            self._ended.put(outcome)
        now = time.monotonic()
        return all(now >= self._deadlines[call_id] for call_id in running)

    def _run(self, call: FunctionCall, tool: Tool) -> None:
        assert tool.callable is not None
        try:
            result = tool.callable(call) if tool.wants_call else tool.callable(**call.arguments)
        except Exception as error:  # the tool is not ours: whatever it raises is its result
            self._ended.put(Outcome(call.call_id, raised=f"{type(error).__name__}: {error}"))
        else:
            self._ended.put(Outcome(call.call_id, result))
        self.ready()
