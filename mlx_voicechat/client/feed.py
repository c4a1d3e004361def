"""Events to any number of readers, each from the moment it asked; no reader holds up another, or the connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar
from weakref import WeakSet

from mlx_voicechat.errors import ServerError

E = TypeVar("E")

MOST_EVENTS = 20_000  # of a reader that does not read: ten minutes of a conversation


class Subscription(AsyncIterator[E], Generic[E]):
    """What is published from now on; it ends, or raises what ended it, after the last event."""

    def __init__(self) -> None:
        self._events: deque[E] = deque()
        self._more = asyncio.Event()
        self._ended = False
        self._fault: ServerError | None = None

    def __aiter__(self) -> Subscription[E]:
        return self

    async def __anext__(self) -> E:
        while not self._events:
            if self._fault is not None:
                raise self._fault
            if self._ended:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        return self._events.popleft()

    def put(self, event: E) -> None:
        if self._ended:
            return
        if len(self._events) >= MOST_EVENTS:
            self._events.clear()
            self.end(ServerError(f"{MOST_EVENTS:,} events were not read.", "Read faster, or drop the iterator."))
            return
        self._events.append(event)
        self._more.set()

    def end(self, fault: ServerError | None) -> None:
        if not self._ended:
            self._ended, self._fault = True, fault
            self._more.set()


class Feed(Generic[E]):
    """The readers of one connection's events; one that nobody holds any more is forgotten."""

    def __init__(self) -> None:
        self._readers: WeakSet[Subscription[E]] = WeakSet()
        self._ended = False
        self._fault: ServerError | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def fault(self) -> ServerError | None:
        """What ended it, None where it ended as asked, or has not."""
        return self._fault

    def subscribe(self) -> Subscription[E]:
        reader: Subscription[E] = Subscription()
        self._readers.add(reader)
        if self._ended:
            reader.end(self._fault)
        return reader

    def publish(self, event: E) -> None:
        for reader in list(self._readers):
            reader.put(event)

    def end(self, fault: ServerError | None) -> None:
        """No more comes; only the first end counts."""
        if not self._ended:
            self._ended, self._fault = True, fault
            for reader in list(self._readers):
                reader.end(fault)
