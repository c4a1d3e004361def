"""A program that a command starts: its whole group ends with it, and what it says on stderr is kept by its end."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress

from mlx_voicechat.errors import InputError

TAIL_BYTES = 2000  # of stderr that are kept
TOLD_CHARACTERS = 200  # of it in an error
POLL_SECONDS = 0.01
GRACE_SECONDS = 1.0  # between being asked to end and being made to
SHORTEST_SECRET = 4  # characters; "1" and "on" are no secrets


def words_of(command: str, option: str) -> list[str]:
    """A command line -> program and arguments. Raises InputError if there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as fault:
        raise InputError(f"{option} is no command line: {fault}.", "Check its quotes.") from None
    if not words:
        raise InputError(f"{option} is empty.", "Name a program.")
    check_program(words[0], option)
    return words


def check_program(program: str, option: str) -> None:
    """Raise InputError if there is no such program."""
    if shutil.which(program) is None:
        remedy = "Write its whole path, or install it."
        if os.path.isfile(program):
            remedy = f"Make it one with chmod +x {shlex.quote(program)}, or name its interpreter before it."
        raise InputError(f"{option}: {program} is no program that can be run.", remedy)


class Tail:
    """The end of what a program says on stderr, without the values in `secrets`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted((text for text in secrets if len(text) >= SHORTEST_SECRET), key=len, reverse=True)
        self._kept = b""

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Read to the end."""
        while piece := await stream.read(2**16):
            self._kept = (self._kept + piece)[-TAIL_BYTES:]

    def hide(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def __str__(self) -> str:
        """`: ...`, the last line that says something, or nothing."""
        lines = [" ".join(line.split()) for line in self._kept.decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        printable = "".join(letter if letter.isprintable() else "?" for letter in self.hide(last))
        return f": {printable[-TOLD_CHARACTERS:].rstrip('.')}" if printable else ""


async def start(
    words: list[str], *, env: dict[str, str] | None = None, cwd: str | None = None, line_bytes: int = 2**16
) -> asyncio.subprocess.Process:
    """Start a program in a group of its own, all three streams piped. Raises OSError."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=cwd, start_new_session=True, limit=line_bytes
    )


async def exited(process: asyncio.subprocess.Process, seconds: float) -> bool:
    """Whether it ends in time. `process.wait()` would also wait for children of its own that hold its pipes."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while process.returncode is None and loop.time() < end:
        await asyncio.sleep(POLL_SECONDS)
    return process.returncode is not None


async def stop(process: asyncio.subprocess.Process, grace_seconds: float = GRACE_SECONDS) -> None:
    """Close its stdin, ask its group to end after a while, make it after another, and let go of its pipes."""
    if process.stdin is not None:
        process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not await exited(process, grace_seconds):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
    await exited(process, GRACE_SECONDS)
    process._transport.close()  # type: ignore[attr-defined]  # a child that holds a pipe would keep it open
    await asyncio.sleep(0)
