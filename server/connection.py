"""One WebSocket, whatever its dialect: reading that waits for room, one queue of what is to be sent, and its times."""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from . import messages
from .access import chosen_protocol
from .limits import LATE_SECONDS, OUTGOING_EVENTS, SLOW_SECONDS
from .settings import ServerSettings
from .sockets import SCOPE_KEY, Socket

if TYPE_CHECKING:
    from .engine import Engine, Slot

LOOK_SECONDS = 1.0  # between two looks at how long a client is silent
LISTEN_SECONDS = 0.25  # between two looks at a client that is not read from
NORMAL, POLICY, FAILED, TRY_LATER = 1000, 1008, 1011, 1013  # closing codes


@dataclass(frozen=True)
class Error:
    """An error event; `event_id` is that of the client's message that caused it."""

    code: str
    message: str
    event_id: str | None = None


@dataclass(frozen=True)
class Close:
    """The last entry of a queue: close with `code`."""

    code: int


@dataclass(frozen=True)
class Patience:
    """How long may pass since a moment of the event loop's clock without a message, and the event that is sent then."""

    since: float
    seconds: float
    event: Any


class Connection(ABC):
    """From acceptance to closing. A dialect says what messages and events mean: the abstract methods.

    What it reads goes to `slot`, where a slot is taken; what it sends (`send`, `close`) waits in one queue.
    """

    needs_slot = True  # whether it is refused where there is no free one
    slow_seconds = SLOW_SECONDS  # that an event may wait to be sent

    def __init__(self, websocket: WebSocket, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.id = f"sess_{secrets.token_hex(8)}"
        self.slot: Slot | None = None
        self.heard_at = self.loop.time()
        self._websocket = websocket
        self._socket: Socket = websocket.scope[SCOPE_KEY]
        self._closing = False
        self._outgoing: deque[tuple[float, Any]] = deque()
        self._filled, self._moved = asyncio.Event(), asyncio.Event()
        self._watch: asyncio.TimerHandle | None = None
        self._looked_at = self._awake_since = self.heard_at

    @abstractmethod
    def greet(self) -> None:
        """The client was accepted, and there is a free slot."""

    @abstractmethod
    def take(self, frame: Mapping[str, Any]) -> None:
        """A message came: `text` or `bytes`."""

    @abstractmethod
    def written(self, event: Any) -> tuple[str, dict[str, Any]]:
        """An entry of the queue as it is sent: its name and its fields. Raises KeyError for one without a name."""

    @abstractmethod
    def patience(self) -> Patience:
        """How long the client may be silent."""

    @abstractmethod
    def busy(self, event_id: str | None) -> Any:
        """The event that says that there is no free slot."""

    @abstractmethod
    def slow(self) -> Any:
        """The event that says that the client reads slower than real time."""

    async def run(self) -> None:
        """Serve the client until one side closes."""
        await self._websocket.accept(chosen_protocol(self._websocket.scope))
        self.engine.metrics.connections.inc()
        if self.needs_slot and not await self.engine.room():
            self.refuse_busy(None)
        else:
            self.greet()
            self.watch_silence()
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closing = True
            if self._watch is not None:
                self._watch.cancel()
            self.gone()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def send(self, event: Any) -> None:
        """Put an event at the end of the queue."""
        if self._closing:
            return
        self._outgoing.append((self.loop.time(), event))
        self._filled.set()
        self._moved.set()

    def close(self, code: int) -> None:
        """Close after what waits was sent; what comes from now on is not answered."""
        self.send(Close(code))
        self._closing = True

    def refuse_busy(self, event_id: str | None) -> None:
        """Close: there is no free slot."""
        self.send(self.busy(event_id))
        self.close(TRY_LATER)

    def allow_messages(self, size_bytes: int) -> None:
        """Let messages be as large as this."""
        self._socket.allow_messages(size_bytes)

    def gone(self) -> None:
        """The client is gone, or nobody listens to it any more."""
        if self.slot is not None:
            self.slot.release()
            self.slot = None

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be read from the client."""
        return self.slot is not None and self.slot.full

    def left(self, event: Any) -> None:
        """An entry of the queue was sent."""
        if isinstance(event, messages.Speech) and self.slot is not None:
            self.slot.sent()

    # -- reading -------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while await self._room():
            frame = await self._websocket.receive()
            if frame["type"] == "websocket.disconnect":
                return
            if not self._closing:
                self.heard_at = self.loop.time()
                self.take(frame)

    async def _room(self) -> bool:
        """Wait until another message may be read; False when the client has hung up meanwhile."""
        while not self._closing and (self.full or len(self._outgoing) >= OUTGOING_EVENTS):
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), LISTEN_SECONDS)
            except asyncio.TimeoutError:
                if self._socket.hung_up():
                    return False
        return True

    def watch_silence(self) -> None:
        """Close when `patience` is at its end; to be called when it has become another."""
        if self._watch is not None:
            self._watch.cancel()
        if self._closing:
            return
        patience = self.patience()
        end = max(patience.since, self._awake()) + patience.seconds
        if self.loop.time() < end:
            self._watch = self.loop.call_at(min(end, self.loop.time() + LOOK_SECONDS), self.watch_silence)
            return
        self.out_of_patience(patience.event)
        self.gone()

    def out_of_patience(self, event: Any) -> None:
        """The client was silent for too long."""
        self.send(event)
        self.close(POLICY)

    def _awake(self) -> float:
        """Since when this process runs: what a client did while it stood still, or its machine slept, is not read yet.

        It is asked every LOOK_SECONDS at least, or it stood still.
        """
        now = self.loop.time()
        if now > self._looked_at + LOOK_SECONDS + LATE_SECONDS:
            self._awake_since = now
        self._looked_at = now
        return self._awake_since

    # -- writing -------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Send what waits, in order, to the closing."""
        while True:
            while not self._outgoing:
                self._filled.clear()
                await self._filled.wait()
            since, event = self._outgoing.popleft()
            if not await self._unblocked(since):
                await self._give_up()
                return
            try:
                if isinstance(event, Close):
                    await self._websocket.close(event.code)
                    return
                await self._say(event)
            except WebSocketDisconnect:
                return
            self.left(event)
            self._moved.set()

    async def _unblocked(self, since: float) -> bool:
        """Whether the client reads, `slow_seconds` after an entry came into the queue at the latest."""
        while self._socket.blocked:
            seconds = max(since, self._awake()) + self.slow_seconds - self.loop.time()
            if seconds <= 0:
                return False
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._socket.drained(), seconds)
        return True

    async def _say(self, event: Any) -> None:
        code = getattr(event, "code", None)
        if code is not None:
            self.engine.metrics.error(code)
        kind, fields = self.written(event)
        await self._websocket.send_text(
            json.dumps({"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **fields})
        )

    async def _give_up(self) -> None:
        """The client reads slower than real time: its last words jump the queue."""
        self._closing = True
        self.gone()
        self._outgoing.clear()
        self._socket.unblock()
        with suppress(WebSocketDisconnect):
            await self._say(self.slow())
            await self._websocket.close(POLICY)


def sessions_in_use(count: int) -> str:
    """All the sessions of a server in a sentence."""
    return "its one session" if count == 1 else f"all {count} sessions"
