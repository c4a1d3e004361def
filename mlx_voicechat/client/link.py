"""A session's connection, over as many sockets as it takes: in order, each event once, nothing lost on the way.

Messages are numbered (`client_event_seq`), and a server of this project says at a resume which of them it has.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from websockets.exceptions import ConnectionClosed

from mlx_voicechat.client.connecting import refusal
from mlx_voicechat.client.duplex_events import (
    CONNECTION_RESUMED,
    DuplexEvent,
    ErrorEvent,
    SessionClosed,
    SessionExpired,
    typed,
)
from mlx_voicechat.client.errors import (
    DuplexClientError,
    DuplexConnectionError,
    DuplexProtocolError,
    DuplexSessionClosedError,
)
from mlx_voicechat.client.feed import Feed, Subscription
from mlx_voicechat.client.outbox import ASK_BYTES, Outbox
from mlx_voicechat.client.responses import Responses
from mlx_voicechat.client.session_config import AudioFormat, ReconnectPolicy
from mlx_voicechat.errors import ServerError

CLOSE_SECONDS = 20.0
ACKNOWLEDGE_SECONDS = 0.2  # event_acks are gathered for so long
SILENT_HEARTBEATS = 3  # so many without any message: the connection is gone
LOST = (ConnectionClosed, DuplexConnectionError, OSError, EOFError)
ENDS = ("session.replaced", "session.resync_required")  # besides closed and expired


class Transport(Protocol):
    """A connection that carries JSON texts; when lost it raises DuplexConnectionError, or websockets' own."""

    async def send(self, text: str, /) -> None: ...
    async def recv(self) -> str | bytes: ...
    async def close(self) -> None: ...


Connect = Callable[[], Awaitable[Transport]]


class Link:
    """One session's connection: `open`, `send`, `close`; what comes goes to `feed` and `responses`."""

    def __init__(
        self,
        connect: Connect,
        output: AudioFormat,
        reconnect: ReconnectPolicy | None,
        heartbeat_s: float | None,
        handshake_s: float,
    ) -> None:
        self.session_id: str | None = None
        self.session_info: dict[str, Any] = {}
        self.resume_token: str | None = None
        self.last_server_event_seq = 0
        self.feed: Feed[DuplexEvent] = Feed()
        self.responses = Responses(output)
        self._connect = connect
        self._reconnect = reconnect
        self._heartbeat_s = heartbeat_s
        self._handshake_s = handshake_s
        self._transport: Transport | None = None
        self._outbox = Outbox()
        self._asked_at_bytes = 0
        self._sending = asyncio.Lock()
        self._attached, self._unacknowledged = asyncio.Event(), asyncio.Event()
        self._opened = self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._catching_up: asyncio.Task[None] | None = None

    async def open(self, session: dict[str, Any]) -> None:
        """Connect, configure, take the greeting. Raises DuplexClientError."""
        try:
            await asyncio.wait_for(self._shake_hands(session), self._handshake_s)
        except asyncio.TimeoutError:
            await self._hang_up()
            raise DuplexConnectionError(f"No session within {self._handshake_s:g} s.") from None
        except BaseException:
            await self._hang_up()
            raise
        self._opened = True
        self._attached.set()
        work: list[Coroutine[Any, Any, None]] = [self._read(), self._acknowledge()]
        if self._heartbeat_s is not None:
            work.append(self._heartbeat(self._heartbeat_s))
        self._tasks = [asyncio.create_task(one) for one in work]

    async def close(self) -> None:
        """End the session, wait for the server's word that it has, and hang up."""
        if not self._closing:
            self._closing = True
            with suppress(*LOST, asyncio.TimeoutError, ServerError):
                if self._attached.is_set() and not self.feed.ended:
                    last = self.feed.subscribe()
                    await self._write({"type": "session.close", "event_id": event_id()})
                    await asyncio.wait_for(_drain(last), CLOSE_SECONDS)
        self._finish(None)
        tasks = [*self._tasks, *([self._catching_up] if self._catching_up else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._hang_up()

    def abort(self) -> None:
        """The session is over for this side; `close` then hangs up without a farewell."""
        self._closing = True
        self._finish(None)

    async def send(self, event: dict[str, Any]) -> None:
        """Send an event; waits while the connection is made again. Raises what ended the session."""
        self._check_open()
        await self._attached.wait()
        self._check_open()
        async with self._sending:
            number = self._outbox.number()
            text = json.dumps({**event, "client_event_seq": number})
            if self._resumable:
                self._outbox.put(number, text)
            if self._attached.is_set():
                try:
                    await self._put(self._transport, number, text)
                except LOST as fault:
                    if not self._resumable:
                        raise _connection_error(fault) from None
                    self._attached.clear()  # it goes with the next connection
        if self._outbox.size_bytes - self._asked_at_bytes > ASK_BYTES:
            self._asked_at_bytes = self._outbox.size_bytes
            await self._mention({"type": "session.heartbeat"})

    async def _shake_hands(self, session: dict[str, Any]) -> None:
        try:
            self._transport = await self._connect()
            await self._write({"type": "session.update", "event_id": event_id(), "session": session})
            while self.session_id is None:
                event = await self._event(self._transport)
                if isinstance(event, ErrorEvent):
                    raise protocol_error(event)
                self._take(event)
        except LOST as fault:
            raise _connection_error(fault) from None
        except DuplexClientError:
            raise
        except ServerError as fault:
            raise DuplexConnectionError(fault.message, fault.remedy, fault.code) from None

    async def _hang_up(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(*LOST):
                await transport.close()

    # -- what comes --------------------------------------------------------------------------------------------------

    @property
    def _resumable(self) -> bool:
        capabilities = self.session_info.get("capabilities")
        able = isinstance(capabilities, dict) and capabilities.get("supports_session_resume") is True
        return able and self._reconnect is not None and self.resume_token is not None

    async def _read(self) -> None:
        """Take events to the end of the session, over as many connections as it takes."""
        fault: ServerError | None = None
        while not self.feed.ended:
            try:
                if self._transport is None:
                    raise DuplexConnectionError("There is no connection.")
                self._take(await self._event(self._transport))
            except (*LOST, asyncio.TimeoutError) as lost:
                if self._closing or self.feed.ended:
                    break
                try:
                    await self._resume(_connection_error(lost))
                except DuplexClientError as final:
                    fault = final
                    break
            except DuplexClientError as wrong:
                fault = wrong
                break
        self._finish(fault)

    async def _event(self, transport: Transport) -> DuplexEvent:
        patience = None if self._heartbeat_s is None or not self._opened else SILENT_HEARTBEATS * self._heartbeat_s
        text = await asyncio.wait_for(transport.recv(), patience)
        try:
            raw = json.loads(text)
        except ValueError:
            raw = None
        if not isinstance(raw, dict):
            raise DuplexProtocolError("The server sent what is no JSON object.", "invalid_server_event")
        return typed(raw)

    def _take(self, event: DuplexEvent) -> None:
        """An event in order: once, whatever is replayed. The answer to a resume stands before the replay."""
        number = event.server_event_seq
        if number is not None and event.type != "session.resumed":
            if number <= self.last_server_event_seq:
                return
            self.last_server_event_seq = number
            self._unacknowledged.set()
        self._learn(event)
        self.responses.take(event)
        self.feed.publish(event)
        if isinstance(event, SessionClosed | SessionExpired) or event.type in ENDS:
            reason = str(event.raw.get("reason") or event.type.partition(".")[2])
            asked = self._closing and isinstance(event, SessionClosed)
            self._finish(None if asked else DuplexSessionClosedError(f"The session has ended: {reason}.", reason))

    def _learn(self, event: DuplexEvent) -> None:
        raw = event.raw
        if event.type in ("session.created", "session.updated", "session.resumed"):
            session = raw.get("session")
            self.session_info = {**self.session_info, **(session if isinstance(session, dict) else {})}
            self.session_id = event.session_id or self.session_id or ""
            if isinstance(raw.get("resume_token"), str):
                self.resume_token = raw["resume_token"]
        arrived = raw.get("last_client_event_seq")
        if isinstance(arrived, int) and event.type in ("session.heartbeat_ack", "session.resumed"):
            self._outbox.arrived(arrived)
            self._asked_at_bytes = self._outbox.size_bytes

    # -- coming back -------------------------------------------------------------------------------------------------

    async def _resume(self, lost: DuplexConnectionError) -> None:
        """Attach the session to a new connection. Raises DuplexSessionClosedError when it cannot be."""
        self._attached.clear()
        await self._hang_up()
        if not self._resumable or self._reconnect is None:
            raise DuplexSessionClosedError(lost.message, "transport_error")
        for attempt in range(self._reconnect.attempts):
            await asyncio.sleep(self._reconnect.delay(attempt))
            try:
                await asyncio.wait_for(self._attach(), self._handshake_s)
                return
            except (DuplexSessionClosedError, DuplexProtocolError):
                raise
            except (*LOST, asyncio.TimeoutError, ServerError):  # it is tried again
                await self._hang_up()
        raise DuplexSessionClosedError(f"{lost.message} It was not made again.", "transport_error")

    async def _attach(self) -> None:
        self._transport = await self._connect()
        await self._write(
            {
                "type": "session.resume",
                "event_id": event_id(),
                "session_id": self.session_id,
                "resume_token": self.resume_token,
                "last_received_server_event_seq": self.last_server_event_seq,
            }
        )
        while (event := await self._event(self._transport)).type != "session.resumed":
            if isinstance(event, ErrorEvent | SessionClosed | SessionExpired) or event.type in ENDS:
                code = event.code if isinstance(event, ErrorEvent) else str(event.raw.get("reason") or event.type)
                raise DuplexSessionClosedError(f"The session could not be resumed: {code}.", code)
        await self._sending.acquire()
        arrived = event.raw.get("last_client_event_seq")
        again = self._outbox.after(arrived if isinstance(arrived, int) else None)
        self._catching_up = asyncio.create_task(self._catch_up(self._transport, again or []))
        if again is None:
            why = "More was said without a connection than could be kept."
            raise DuplexSessionClosedError(why, "outbox_overflow")
        self._take(event)
        generation = event.raw.get("attachment_generation")
        resumed = {"type": CONNECTION_RESUMED, "session_id": self.session_id, "attachment_generation": generation}
        self._take(typed(resumed))

    async def _catch_up(self, transport: Transport, again: list[tuple[int, str]]) -> None:
        """Send again what has not arrived, while events are taken, then let others send."""
        try:
            for number, text in again:
                await self._put(transport, number, text)
            if transport is self._transport:
                self._attached.set()
        except LOST:
            pass  # the reader knows
        finally:
            self._sending.release()

    # -- what goes ---------------------------------------------------------------------------------------------------

    async def _put(self, transport: Transport | None, number: int, text: str) -> None:
        if transport is None:
            raise DuplexConnectionError("There is no connection.")
        await transport.send(text)
        self._outbox.written = max(self._outbox.written, number)

    async def _write(self, message: dict[str, Any]) -> None:
        """Send a message that is of this connection alone."""
        if self._transport is None:
            raise DuplexConnectionError("There is no connection.")
        await self._transport.send(json.dumps(message))

    async def _mention(self, message: dict[str, Any]) -> None:
        """Send what does no harm when it is lost."""
        with suppress(*LOST):
            if self._attached.is_set():
                await self._write(message)

    async def _heartbeat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._mention({"type": "session.heartbeat"})

    async def _acknowledge(self) -> None:
        while True:
            await self._unacknowledged.wait()
            await asyncio.sleep(ACKNOWLEDGE_SECONDS)
            self._unacknowledged.clear()
            await self._mention({"type": "session.event_ack", "server_event_seq": self.last_server_event_seq})

    def _finish(self, fault: ServerError | None) -> None:
        self.feed.end(fault)
        self.responses.end(fault)
        self._attached.set()

    def _check_open(self) -> None:
        if self.feed.ended or not self._opened:
            raise self.feed.fault or DuplexSessionClosedError("The session is not open.")


async def _drain(events: Subscription[DuplexEvent]) -> None:
    async for _ in events:
        pass


def event_id() -> str:
    """A new id for a client's event."""
    return f"evt_{secrets.token_hex(12)}"


def protocol_error(event: ErrorEvent) -> DuplexProtocolError:
    """An error event as an exception."""
    busy = event.code in ("server_busy", "resource_exhausted")
    message = refusal(event.code, event.message).message if busy else event.message or "The server sent an error."
    return DuplexProtocolError(message, event.code, event.related_event_id)


def _connection_error(fault: BaseException) -> DuplexConnectionError:
    if isinstance(fault, DuplexConnectionError):
        return fault
    if isinstance(fault, asyncio.TimeoutError):
        return DuplexConnectionError("The server has sent nothing for too long.")
    code = fault.rcvd.code if isinstance(fault, ConnectionClosed) and fault.rcvd else None
    shown = f" (closing code {code})" if code else ""
    return DuplexConnectionError(f"The connection to the server was lost{shown}.")
