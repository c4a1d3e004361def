"""The program of `--tool-command`: one run a call, JSON on its stdin, the result on its stdout, exit code 0."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mlx_voicechat.errors import ToolError

from .child import Tail, exited, start, stop, words_of

CALL_SECONDS = 25.0  # less than a session waits for a result: its own words would say less
MAX_OUTPUT_BYTES = 2**16  # four times what a result may be
LAST_SECONDS = 0.5  # for what a program wrote before it ended


class ToolCommand:
    """Calls by running `command`. Raises InputError if there is no such program."""

    def __init__(self, command: str, seconds: float = CALL_SECONDS) -> None:
        self._words = words_of(command, "--tool-command")
        self._seconds = seconds
        self._running: set[int] = set()
        self._closed = False

    def close(self) -> None:
        """End what runs: its call has failed."""
        self._closed = True
        for process in list(self._running):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)

    def call(self, name: str, arguments: Mapping[str, Any], call_id: str) -> str:
        """Run it, on the calling thread, and return what it prints. Raises ToolError."""
        request = json.dumps({"name": name, "arguments": dict(arguments), "call_id": call_id}) + "\n"
        return asyncio.run(self._run(request.encode()))

    async def _run(self, request: bytes) -> str:
        program = self._words[0]
        if self._closed:
            raise ToolError(f"{program} is not run any more.")
        try:
            process = await start(self._words)
        except OSError as fault:
            raise ToolError(f"{program} could not be started: {fault.strerror}.") from None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._running.add(process.pid)
        tail, output = Tail(), bytearray()
        tasks = [
            asyncio.create_task(tail.follow(process.stderr)),
            asyncio.create_task(_collect(process.stdout, output)),
        ]
        try:
            process.stdin.write(request)
            process.stdin.close()  # after what was written; it may also answer without having read
            in_time = await self._ended(process, output)
            await asyncio.wait(tasks, timeout=LAST_SECONDS if in_time else 0)
        finally:
            self._running.discard(process.pid)
            await stop(process, grace_seconds=0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if len(output) > MAX_OUTPUT_BYTES:
            raise ToolError(f"{program} printed more than {MAX_OUTPUT_BYTES:,} bytes.")
        if not in_time:
            raise ToolError(f"{program} did not answer within {self._seconds:g} s{tail}.")
        if process.returncode:
            raise ToolError(f"{program} failed with exit code {process.returncode}{tail}.")
        try:
            return output.decode().strip()
        except UnicodeDecodeError as fault:
            raise ToolError(f"{program} printed what is not UTF-8, at byte {fault.start}.") from None

    async def _ended(self, process: asyncio.subprocess.Process, output: bytearray) -> bool:
        """Whether it ends by itself, in time and before it prints too much."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        while len(output) <= MAX_OUTPUT_BYTES and asyncio.get_running_loop().time() < deadline:
            if await exited(process, 0.05):
                return True
        return False


async def _collect(stream: asyncio.StreamReader, output: bytearray) -> None:
    """Read to the end, or to one piece more than may be."""
    while len(output) <= MAX_OUTPUT_BYTES and (piece := await stream.read(2**14)):
        output += piece
