"""Presses of the space bar and of Enter at the terminal, as they happen and without being shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from mlx_voicechat.errors import InputError

PRESSES = b" \r\n"


def check_terminal(option: str) -> None:
    """Raise InputError where standard input is no terminal."""
    if not sys.stdin.isatty():
        raise InputError(f"{option} needs a terminal, and standard input is none.", "Run it in a terminal window.")


@contextlib.contextmanager
def presses(press: Callable[[], object]) -> Iterator[None]:
    """Call `press` on the event loop for each press during the block; Ctrl-C stays a signal."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        data = os.read(descriptor, 1024)
        for byte in data:
            if byte in PRESSES:
                press()
        if not data:  # the terminal is gone
            loop.remove_reader(descriptor)

    tty.setcbreak(descriptor, termios.TCSADRAIN)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
