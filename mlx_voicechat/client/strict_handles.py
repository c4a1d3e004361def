"""What StrictV3Client gives out: turns, responses, calls and typed jobs, each with exactly one end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from mlx_voicechat.errors import ServerError

SAMPLE_RATE_HZ = 22_050
SAMPLE_BYTES = 2


@dataclass(frozen=True)
class Deadlines:
    """How long is waited for the server, in seconds; the protocol's own numbers."""

    created_s: float = 15.0
    updated_s: float = 45.0
    acknowledged_s: float = 15.0  # from the first writing
    retry_s: float = 5.0  # then the same message is sent again
    response_s: float = 15.0  # from the commit's acknowledgement
    applied_s: float = 30.0
    silent_s: float = 45.0  # once audio was sent
    closed_s: float = 8.0


@dataclass(frozen=True)
class Call:
    """A function call that waits for its result: `StrictV3Client.give`."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    response_id: str
    turn_id: str


@dataclass(frozen=True)
class Turn:
    """A committed turn of the user."""

    client_turn_id: int
    turn_id: str


@dataclass(eq=False)
class StrictResponse:
    """One response: its text so far, its audio as it comes, how it ended."""

    response_id: str
    turn_id: str
    text: str = ""
    status: str | None = None
    reason: str | None = None
    _chunks: deque[bytes] = field(default_factory=deque, repr=False)
    _more: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    _fault: ServerError | None = field(default=None, repr=False)

    @property
    def finished(self) -> bool:
        return self.status is not None or self._fault is not None

    async def audio(self) -> AsyncIterator[bytes]:
        """PCM16 mono at 22,050 Hz, in order. Raises what ended the conversation before the response."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self.finished:
                break
            self._more.clear()
            await self._more.wait()
        if self._fault is not None:
            raise self._fault

    async def wait(self) -> StrictResponse:
        """To its end."""
        while not self.finished:
            self._more.clear()
            await self._more.wait()
        if self._fault is not None:
            raise self._fault
        return self

    def hear(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._more.set()

    def end(self, status: str, reason: str | None) -> None:
        self.status, self.reason = status, reason
        self._more.set()

    def fail(self, fault: ServerError) -> None:
        if not self.finished:
            self._fault = fault
            self._more.set()


@dataclass(eq=False)
class TypedJob:
    """A typed request: accepted, injected, finished; or rejected, with the server's reason."""

    job_id: str
    state: str = "sent"  # accepted, rejected, started, finished
    reason: str | None = None  # of a rejection
    disposition: str | None = None  # completed, cancelled, replaced or error
    _more: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    _fault: ServerError | None = field(default=None, repr=False)

    @property
    def over(self) -> bool:
        return self.state in ("rejected", "finished")

    async def wait(self) -> TypedJob:
        """To its end."""
        while not self.over:
            if self._fault is not None:
                raise self._fault
            self._more.clear()
            await self._more.wait()
        return self

    def become(self, state: str, reason: str | None = None, disposition: str | None = None) -> None:
        self.state, self.reason, self.disposition = state, reason, disposition
        self._more.set()

    def fail(self, fault: ServerError) -> None:
        self._fault = fault
        self._more.set()
