"""A Model Context Protocol server as a process: messages as lines on its stdin and stdout, and a bound on both.

The transport of the `mcp` package, whose own keeps an endless line in memory and does not say why a server ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from .child import Tail, exited, start, stop

MAX_LINE_BYTES = 2**22  # of one message
MOST_LINES = 1000  # in a second,
LINES_AN_ANSWER = 10  # and for each message it was told, with what it logs of it
LAST_SECONDS = 0.5  # for a process that closed its stdout to end


@dataclass(frozen=True)
class Program:
    """What to run; `env` is added to the few variables every server gets, and its values are never shown."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None


class Process:
    """One run of a server. Once it is over by itself, `over` is set and `fault` says why."""

    def __init__(self, program: Program) -> None:
        self.fault = ""
        self.over = asyncio.Event()
        self.tail = Tail(program.env.values())
        self._program = program
        self._process: Any = None
        self._lines = 0  # of this second

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """What it says and what it is told, as the `mcp` package has it; it ends with the block. Raises OSError."""
        import anyio
        from mcp.client.stdio import get_default_environment
        from mcp.shared.message import SessionMessage

        program = self._program
        env = get_default_environment() | program.env
        self._process = await start(program.words, env=env, cwd=program.cwd, line_bytes=MAX_LINE_BYTES)
        said, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        tell, told = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.create_task(self.tail.follow(self._process.stderr)),
            asyncio.create_task(self._read(said)),
            asyncio.create_task(self._write(told)),
        ]
        try:
            yield heard, tell
        finally:
            await asyncio.shield(asyncio.ensure_future(stop(self._process)))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (said, heard, tell, told):
                stream.close()

    async def _read(self, said: Any) -> None:
        with said:
            self.fault = await self._pass_on(said)
        self.over.set()

    async def _pass_on(self, said: Any) -> str:
        """Hand on its messages until it is over, and return why; a line that is no message is dropped."""
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        loop, since = asyncio.get_running_loop(), 0.0
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                return f"sent a message of more than {MAX_LINE_BYTES:,} bytes"
            if not line:
                return await self._why_it_ended()
            if loop.time() - since > 1.0:
                self._lines, since = 0, loop.time()
            self._lines += 1
            if self._lines > MOST_LINES:
                return f"sent more than {MOST_LINES:,} messages in a second"
            with suppress(ValueError):
                await said.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))

    async def _write(self, told: Any) -> None:
        async for message in told:
            self._lines -= LINES_AN_ANSWER
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
            with suppress(ConnectionError):  # it has ended, which the reader finds out
                self._process.stdin.write(line.encode())
                await self._process.stdin.drain()

    async def _why_it_ended(self) -> str:
        if not await exited(self._process, LAST_SECONDS):
            return f"closed its output{self.tail}"
        await asyncio.sleep(0.05)  # for the last of its stderr
        return f"ended with exit code {self._process.returncode}{self.tail}"
