"""Listening sockets, and who is let in: connections in bounded number, of which the silent ones make room.

asyncio's own servers answer a lack of descriptors with a traceback for each entry of their backlog, over and over.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from h11 import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_voicechat.errors import VoiceChatError

from .limits import CONNECTIONS, LATE_SECONDS, REQUEST_SECONDS

RECEIVE_BYTES = 2**17  # in the kernel: three seconds of audio that are not read yet
SEND_BYTES = 2**16  # in the kernel: one second of speech
BACKLOG = 128  # connections that the kernel keeps for us
LOCALHOST = ("127.0.0.1", "::1")
DRAWS = 20  # of a free port that all families have
SPARE_DESCRIPTORS = 32  # for files, pipes and programs while all connections are open
SHORT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
WAIT_SECONDS = 0.05  # between two looks for room
LINE_SECONDS = 5.0  # between two lines in the log that say the same

log = logging.getLogger(__name__)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening TCP sockets, one for each address of `host`; port 0 for any free one. Raises VoiceChatError."""
    for last in reversed(range(DRAWS)):
        try:
            return _bound(_addresses(host, port))
        except (OSError, OverflowError, UnicodeError) as fault:
            if port == 0 and last and getattr(fault, "errno", None) == errno.EADDRINUSE:
                continue  # the port that one family drew is another's
            reason = getattr(fault, "strerror", None) or str(fault)
            raise VoiceChatError(
                f"Cannot listen on {host} port {port}: {reason}.", "Choose others with --host and --port."
            ) from None
    raise AssertionError


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Every address to listen at, once; `localhost` is both loopbacks, whatever the hosts file says of it."""
    names = LOCALHOST if host.lower() == "localhost" else (host,)
    found = [
        (family, address)
        for name in names
        for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    ]
    return list(dict.fromkeys(found))


def _bound(addresses: Sequence[tuple[socket.AddressFamily, Any]]) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, address in addresses:
            port = listeners[0].getsockname()[1] if listeners else address[1]
            try:
                listeners.append(_listener(family, (address[0], port, *address[2:]), len(addresses) > 1))
            except OSError as fault:
                if len(addresses) == 1 or fault.errno not in NO_SUCH_FAMILY:
                    raise
                absent = fault
        if absent is not None and not listeners:
            raise absent
        return listeners
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def _listener(family: socket.AddressFamily, address: Any, one_of_several: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and one_of_several:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Accepted sockets inherit them: what the kernel buffers, no queue of ours can bound.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except BaseException:
        listener.close()
        raise


def most_connections(sessions: int) -> int:
    """How many connections may be open at once, by the process's limit of descriptors, raised where that is too low."""
    wanted = max(CONNECTIONS, 2 * sessions)
    used = len(os.listdir("/dev/fd")) + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + used
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - used))


class Requests(H11Protocol):
    """HTTP of a client that has REQUEST_SECONDS for each request and to take its answer; then it is cut off."""

    since = 0.0  # of the event loop's clock: when the wait for a request began
    _limit: asyncio.TimerHandle | None = None

    @property
    def silent(self) -> bool:
        """Whether there is no request that is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begin()

    def handle_websocket_upgrade(self, event: Request) -> None:
        self._stop()
        super().handle_websocket_upgrade(event)

    def _begin(self) -> None:
        self._stop()
        self.since = self.loop.time()
        self._limit = self.loop.call_later(REQUEST_SECONDS, self._end)

    def _stop(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def _end(self) -> None:
        if self.loop.time() > self.since + REQUEST_SECONDS + LATE_SECONDS:
            self._begin()  # this process stood still: what was sent meanwhile is not read yet
        else:
            self.transport.abort()


class Door:
    """Accepts connections of some listeners while there is room for them, on the event loop.

    `connections` are uvicorn's protocols of those that are open. Where they are `most`, or the machine has no
    descriptor, the silent one that has waited longest is cut off; where none is silent, new ones wait in the kernel.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: set[Any],
        most: int,
        context: ssl.SSLContext | None,
    ) -> None:
        self._make_protocol = make_protocol
        self._connections = connections
        self._most = most
        self._context = context
        self._handshakes: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._tasks: list[asyncio.Task[None]] = []
        self._said_at = float("-inf")

    def open(self, listeners: Sequence[socket.socket]) -> None:
        """Begin to accept."""
        self._tasks += [asyncio.create_task(self._accept(listener)) for listener in listeners]

    async def shut(self) -> None:
        """Accept no more."""
        tasks = [*self._tasks, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._connections) + len(self._handshakes) >= self._most:
                self._say("All %d connections are in use: silent ones are closed, new ones wait.", self._most)
                await self._make_room()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as fault:
                if fault.errno in SHORT_OF_DESCRIPTORS:
                    self._say(
                        "No room for another connection (%s): silent ones are closed, new ones wait.",
                        os.strerror(fault.errno),
                    )
                    await self._make_room()
                    await asyncio.sleep(WAIT_SECONDS)
                elif fault.errno != errno.ECONNABORTED:
                    self._say("A connection could not be accepted: %s.", fault.strerror or fault)
                    await asyncio.sleep(WAIT_SECONDS)
                continue
            task = asyncio.create_task(self._let_in(connection))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _let_in(self, connection: socket.socket) -> None:
        """Give a connection its protocol; with TLS this waits for the handshake."""
        seconds = None if self._context is None else REQUEST_SECONDS
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except OSError:  # among them what TLS raises, and a client that is gone
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _make_room(self) -> None:
        silent = [one for one in self._connections if isinstance(one, Requests) and one.silent]
        if silent:
            min(silent, key=lambda one: one.since).transport.abort()
        elif self._context is not None and self._handshakes:
            next(iter(self._handshakes)).cancel()
        else:
            await asyncio.sleep(WAIT_SECONDS)
        await asyncio.sleep(0)  # what was cut off leaves the set then

    def _say(self, message: str, *facts: object) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._said_at + LINE_SECONDS:
            self._said_at = now
            log.warning(message, *facts)
