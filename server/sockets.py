"""uvicorn as this server needs it: sockets with short buffers, closings that arrive, an end within seconds."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from asyncio import Transport
from asyncio.transports import BaseTransport
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from .limits import CLOSING_SECONDS, UNREAD_SECONDS
from .listening import Door, Requests, most_connections
from .settings import MESSAGE_BYTES, ServerSettings

if TYPE_CHECKING:
    from .engine import Engine

WRITE_BYTES = 2**14  # in the process: beyond it nothing is sent until the client has read
UNREAD_BYTES = 2**17  # in the process, of answers to pings: then the client is cut off
MOST_FRAGMENTS = 2**16  # of one message
DRAIN_SECONDS = 0.25  # without data after a message that was too big: the client has stopped sending
END_SECONDS = 0.5  # for a client to answer the closing when the server ends
GRACE_SECONDS = 1  # for connections when the server ends
SCOPE_KEY = "mlx_voicechat.socket"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Socket(WebSocketsSansIOProtocol):
    """A WebSocket whose handler finds it in its scope under SCOPE_KEY."""

    _cutting = False
    _cut_at = 0.0

    def connection_made(self, transport: BaseTransport) -> None:
        assert isinstance(transport, Transport)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BYTES)

    async def run_asgi(self) -> None:
        self.scope[SCOPE_KEY] = self  # type: ignore[literal-required]
        app: Any = self.app

        async def answered(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            if self.close_sent and not self.handshake_complete:
                raise ClientDisconnected  # refused in words, which uvicorn would log as a fault of the application

        self.app = answered
        await super().run_asgi()
        if not (self.disconnected or self._cutting):  # closing alone waits for ever for a peer that does not read
            self._cut_later(UNREAD_SECONDS if self.transport.get_write_buffer_size() else CLOSING_SECONDS)

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self._cutting or self.transport.is_closing():  # and the handler does not know yet
            raise ClientDisconnected
        await super().send(message)

    def allow_messages(self, size_bytes: int) -> None:
        """Take messages as large as this from now on."""
        name = "max_message_size" if hasattr(self.conn, "max_message_size") else "max_size"  # before websockets 16
        setattr(self.conn, name, size_bytes)

    @property
    def blocked(self) -> bool:
        """Whether the client has not read for a while: what is sent now would wait."""
        return not self.writable.is_set()

    async def drained(self) -> None:
        """Wait until it has."""
        await self.writable.wait()

    def unblock(self) -> None:
        """Let the last words be sent although the client does not read."""
        self.writable.set()

    def hung_up(self) -> bool:
        """Whether the client has closed its side, also behind data that was not read."""
        end = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
        poll = select.poll()
        try:
            poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN | end)
        except (OSError, ValueError):
            return True
        return any(found & (end | select.POLLNVAL) for _, found in poll.poll(0))

    def handle_ping(self) -> None:
        if self.blocked and self.transport.get_write_buffer_size() > UNREAD_BYTES:
            self.transport.abort()  # it asks for answers and does not read them
        super().handle_ping()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MOST_FRAGMENTS:
            self.transport.abort()  # of a message whose pieces are too small for its size to end it
        super().handle_cont(event)

    def handle_parser_exception(self) -> None:
        """A message over the limit, or none of WebSocket: say so, and read on, or the reset would overtake it."""
        assert self.conn.close_sent is not None
        if not self.close_sent:
            self._say_closing(self.conn.close_sent.code, self.conn.close_sent.reason)
            self._cut_at = self.loop.time() + CLOSING_SECONDS
        if self.loop.time() < self._cut_at:
            self._cut_later(DRAIN_SECONDS)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.fail(1007, "text that is not UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def shutdown(self) -> None:
        """The server ends."""
        self.stop_keepalive()
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
            self.transport.abort()
            return
        self.conn.send_close(1001, "the server ends")
        self._say_closing(1001, "the server ends")
        self._cut_later(END_SECONDS)

    def _say_closing(self, code: int, reason: str) -> None:
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _cut_later(self, seconds: float) -> None:
        self._cutting = True
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(seconds, self.transport.abort)


class Server(uvicorn.Server):
    """uvicorn on a socket of ours. A first signal ends it in order, a second at once; `ended_by` is the first.

    With `drain_seconds` SIGTERM drains `engine` first: the listeners stay, for who asks whether it is ready, and the
    end comes with that of the last conversation, when the time is over, or by another signal.
    """

    def __init__(self, app: Any, settings: ServerSettings, engine: Engine | None = None) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Requests,
            ws=Socket,
            ws_max_size=settings.max_message_bytes or MESSAGE_BYTES,
            ws_ping_timeout=None,  # a pong waits behind audio that is not read yet
            ws_per_message_deflate=False,  # base64 of speech hardly shrinks
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        super().__init__(config)
        self.ended_by: int | None = None
        self._most_connections = most_connections(settings.max_sessions)
        self._door: Door | None = None
        self._engine, self._drain_seconds = engine, settings.drain_seconds
        self._drained_by: float | None = None  # of time.monotonic

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of `sockets`, in place of uvicorn."""
        await super().startup(sockets=[])

        def protocol() -> Requests:
            return Requests(self.config, self.server_state, self.lifespan.state)

        self._door = Door(protocol, self.server_state.connections, self._most_connections, self.config.ssl)
        self._door.open(sockets or [])

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._drained_by is not None and (not self._in_use or time.monotonic() >= self._drained_by):
            self.should_exit = True
        return await super().on_tick(counter)

    @property
    def _in_use(self) -> bool:
        """Whether there is a conversation: a socket that is open, or a session that waits to be resumed."""
        sockets = any(isinstance(one, Socket) for one in self.server_state.connections)
        return sockets or (self._engine is not None and self._engine.active > 0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in order."""
        if self._door is not None:
            await self._door.shut()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: the command catches them (`catch_signals`), as it does before and after uvicorn runs."""
        yield

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Catch the signals that end the command meanwhile, those that are ignored excepted; main thread only."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.ended_by = self.ended_by or sig
        engine = self._engine
        loaded = engine is not None and engine.config is not None
        if sig == signal.SIGTERM and self._drain_seconds > 0 and loaded and self._drained_by is None:
            assert engine is not None
            engine.draining = True
            self._drained_by = time.monotonic() + self._drain_seconds
            return
        self.should_exit = True
