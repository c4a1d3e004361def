"""Connections with Model Context Protocol servers, on one asyncio thread; calls may come from any thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import asynccontextmanager
from typing import Any

from mlx_voicechat.errors import InputError, ToolError

from .child import Tail
from .mcp_config import Address, ServerEntry
from .mcp_process import Process

START_SECONDS = 60.0  # a server may have to be downloaded first (uvx, npx)
CALL_SECONDS = 25.0  # less than a session waits for a result: its own words would say less
END_SECONDS = 5.0
MOST_PAGES, MOST_LISTED = 20, 1000
PROTOCOL_LOGGERS = ("mcp", "httpx2", "httpcore2")  # they show addresses, and a traceback for each broken message


class McpServers:
    """Servers that are connected when the block begins and let go when it ends.

    A server that cannot be used is told of once through `say` (a line, from any thread) and is then without tools.
    Raises InputError where the package `mcp` is missing.
    """

    def __init__(
        self, entries: list[ServerEntry], say: Callable[[str], object], start_seconds: float = START_SECONDS
    ) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            remedy = "Install it with: pip install 'mlx-voicechat[tools]'"
            raise InputError("MCP servers need the package mcp.", remedy) from None
        for name in PROTOCOL_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._servers = {entry.name: _Server(entry, say, start_seconds) for entry in entries}
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._hold()), name="mcp", daemon=True)
        self._over = False

    def __enter__(self) -> McpServers:
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(2 * END_SECONDS)

    @property
    def all_usable(self) -> bool:
        """Whether every server has listed its tools and is still there."""
        return all(server.usable for server in self._servers.values())

    def listed(self) -> list[tuple[str, Any]]:
        """(server, tool) of every tool, in the order of the servers and of their lists."""
        return [(server.name, tool) for server in self._servers.values() for tool in server.tools]

    def call(self, server: str, name: str, arguments: dict[str, Any], seconds: float = CALL_SECONDS) -> Any:
        """Call a tool and wait on the calling thread for its `CallToolResult`. Raises ToolError."""
        let_go = ToolError(f"The MCP server {server} was let go.")
        if self._over:
            raise let_go
        answer = asyncio.run_coroutine_threadsafe(self._servers[server].call(name, arguments, seconds), self._loop)
        try:
            return answer.result(seconds + END_SECONDS)
        except (CancelledError, TimeoutError, FutureTimeout):
            raise let_go from None

    async def _hold(self) -> None:
        """The thread's work, to the end of the block."""
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        servers = self._servers.values()
        starting = asyncio.gather(*(server.start() for server in servers))
        ending = asyncio.create_task(self._ending.wait())
        waits: set[asyncio.Future[Any]] = {starting, ending}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self._started.set()
        await ending
        starting.cancel()
        await asyncio.gather(*(server.end() for server in servers))


class _Server:
    """One connection. A task of its own opens it, holds it and closes it, as the package wants it."""

    def __init__(self, entry: ServerEntry, say: Callable[[str], object], start_seconds: float) -> None:
        self.name = entry.name
        self.tools: list[Any] = []
        self._where, self._say, self._start_seconds = entry.where, say, start_seconds
        self._client: Any = None
        self._process: Process | None = None
        self._fault = ""  # why it cannot be used any more
        self._hide: Callable[[str], str] = str
        self._leaving = asyncio.Event()
        self._listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return self._listed.is_set() and not self._fault

    async def start(self) -> None:
        """Connect and list the tools; afterwards it is usable, or was told of."""
        self._task = asyncio.create_task(self._hold())
        listed = asyncio.create_task(self._listed.wait())
        waits: set[asyncio.Task[Any]] = {self._task, listed}
        await asyncio.wait(waits, timeout=self._start_seconds, return_when=asyncio.FIRST_COMPLETED)
        listed.cancel()
        if not self._listed.is_set() and not self._task.done():
            self._lose(f"did not list its tools within {self._start_seconds:g} s")
            self._task.cancel()

    async def end(self) -> None:
        """Close it; a server that is not closed in time is left to itself."""
        self._fault = self._fault or "was let go"
        self._leaving.set()
        if self._task is None:
            return
        _, late = await asyncio.wait({self._task}, timeout=END_SECONDS)
        for task in late:
            task.cancel()

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Call a tool. Raises ToolError."""
        if self._fault:
            raise ToolError(f"The MCP server {self.name} {self._fault}.")
        try:
            return await asyncio.wait_for(self._client.call_tool(name, arguments), seconds)
        except asyncio.TimeoutError:
            why = f"did not answer within {seconds:g} s"
        except Exception as fault:  # whatever a server of others' making causes is the end of this call alone
            await asyncio.sleep(0)  # for the reader, which may know better
            why = self._described(fault)
        raise ToolError(f"The MCP server {self.name} {self._fault or why}.")

    async def _hold(self) -> None:
        try:
            async with self._connected() as client:
                self.tools = await _tools_of(client)
                self._client = client
                self._listed.set()
                await self._over()
        except asyncio.CancelledError:
            pass
        except Exception as fault:  # as in `call`: of this server alone
            self._lose(self._described(fault))

    async def _over(self) -> None:
        """Until the block ends, or the server does."""
        leaving = asyncio.create_task(self._leaving.wait())
        waits = {leaving}
        if self._process is not None:
            waits.add(asyncio.create_task(self._process.over.wait()))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if not self._leaving.is_set() and self._process is not None:
            self._lose(self._process.fault)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        from mcp import Client

        where = self._where
        if not isinstance(where, Address):
            self._process = Process(where)
            self._hide = self._process.tail.hide
            async with Client(self._process.streams(), cache=None) as client:
                yield client
            return
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        self._hide = Tail([where.url, *where.headers.values()]).hide
        timeout = httpx2.Timeout(CALL_SECONDS)
        async with (
            httpx2.AsyncClient(headers=where.headers, timeout=timeout) as http,
            Client(streamable_http_client(where.url, http_client=http), cache=None) as client,
        ):
            yield client

    def _lose(self, why: str) -> None:
        if not self._fault:
            self._fault = why
            self._say(f"the MCP server {self.name} {why}: its tools cannot be called.")

    def _described(self, fault: BaseException) -> str:
        """What happened, as the end of a sentence that begins with the server."""
        from mcp import MCPError

        if self._process is not None and self._process.fault:
            return self._process.fault
        while inner := list(getattr(fault, "exceptions", ())):  # of a group, the first
            fault = inner[0]
        if isinstance(fault, MCPError):
            return f"answered: {' '.join(self._hide(fault.message).split()).rstrip('.')[:200]}"
        if isinstance(fault, OSError) and fault.strerror:
            return f"could not be started: {fault.strerror}"
        if isinstance(self._where, Address):
            return f"could not be reached ({type(fault).__name__})"  # more would show its address
        return f"failed: {' '.join(self._hide(str(fault)).split()).rstrip('.')[:200] or type(fault).__name__}"


async def _tools_of(client: Any) -> list[Any]:
    """The tools of all pages, or of the first ones of a server that never ends its list."""
    tools: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) >= MOST_LISTED:
            break
    return tools[:MOST_LISTED]
