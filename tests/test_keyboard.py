"""Presses of keys at a terminal, and no terminal at all."""

import asyncio
import os
import pty
import re
import sys
import termios
from pathlib import Path

import pytest

from mlx_voicechat.cli.keyboard import check_terminal, presses
from mlx_voicechat.errors import InputError


def test_space_and_enter_are_presses_and_the_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    person, terminal = pty.openpty()
    with os.fdopen(person, "wb", buffering=0) as keys, os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        check_terminal("--push-to-talk")
        before = termios.tcgetattr(stdin.fileno())
        count = 0

        def press() -> None:
            nonlocal count
            count += 1

        async def type_keys() -> None:
            with presses(press):
                assert not termios.tcgetattr(stdin.fileno())[3] & (termios.ECHO | termios.ICANON)
                assert termios.tcgetattr(stdin.fileno())[3] & termios.ISIG  # Ctrl-C stays a signal
                for typed, expected in ((b" ", 1), (b"\r", 2), (b"x y", 3)):
                    keys.write(typed)
                    for _ in range(200):
                        if count == expected:
                            break
                        await asyncio.sleep(0.01)
                    assert count == expected

        asyncio.run(type_keys())
        assert termios.tcgetattr(stdin.fileno()) == before


def test_no_terminal_is_bad_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.touch()
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(InputError, match=re.escape("--push-to-talk needs a terminal, and standard input is none.")):
            check_terminal("--push-to-talk")
