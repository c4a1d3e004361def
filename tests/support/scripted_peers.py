"""Servers on 127.0.0.1 that do what an asynchronous script says, one call of it for each connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response


@dataclass
class Peer:
    """One connection, seen from the server; `heard` is all that the client sent."""

    socket: ServerConnection
    number: int
    path: str
    heard: list[dict[str, Any]] = field(default_factory=list)
    sequence: int = 0

    async def send(self, kind: str, **fields: Any) -> None:
        """An event without a number of its own."""
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def say(self, kind: str, **fields: Any) -> None:
        """An event with the next server_event_seq."""
        self.sequence += 1
        await self.send(kind, server_event_seq=self.sequence, **fields)

    async def receive(self, *kinds: str, seconds: float = 10) -> dict[str, Any]:
        """The next message, or the next of these kinds."""
        while True:
            message: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), seconds))
            self.heard.append(message)
            if not kinds or message["type"] in kinds:
                return message

    async def cut(self) -> None:
        """Drop the connection without a word."""
        self.socket.transport.abort()


@dataclass
class Scripted:
    """A running server, and its connections so far."""

    url: str
    peers: list[Peer] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)


@asynccontextmanager
async def scripted(script: Callable[[Peer], Awaitable[object]], *refusals: tuple[int, str]) -> AsyncIterator[Scripted]:
    """Serve, after the HTTP `refusals` (status, body); a script that fails makes the block fail."""
    here = Scripted("", refusals=list(refusals))

    def refuse(connection: ServerConnection, request: Request) -> Response | None:
        if not here.refusals:
            return None
        status, body = here.refusals.pop(0)
        return connection.respond(HTTPStatus(status), body)

    async def handle(socket: ServerConnection) -> None:
        assert socket.request is not None
        peer = Peer(socket, len(here.peers), socket.request.path)
        here.peers.append(peer)
        try:
            with suppress(ConnectionClosed):
                await script(peer)
        except Exception as fault:
            here.faults.append(fault)

    async with serve(handle, "127.0.0.1", 0, process_request=refuse, compression=None, max_size=None) as server:
        here.url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/v1/realtime"
        yield here
    if here.faults:
        raise here.faults[0]
