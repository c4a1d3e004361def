"""Push-to-talk: a key begins and ends what is said to the model; typed lines are said for the person. No MLX."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_voicechat.errors import DeviceError, ServerError

from .client import MlxcelWire
from .keyboard import presses
from .live import LiveConversation
from .wires import StrictTimeline

if TYPE_CHECKING:
    from .client import Wire

KEYS = "push to talk: the space bar or Enter begins what you say, and ends it; else nothing is heard."
HOW = "press Enter to speak, and again when you have spoken."
TYPED = "type a line to have it said; an empty one begins and ends what you speak yourself."


class KeyedTurns(LiveConversation):
    """As LiveConversation, with turns of the person's own: the microphone is heard between two presses of a key."""

    def __init__(self, *devices: Any, **options: Any) -> None:
        super().__init__(*devices, **options)
        self._pressed = self._in_turn = False

    @contextmanager
    def opened(self, wire: Wire) -> Iterator[None]:
        """The devices, and the terminal's keys."""
        with super().opened(wire), presses(self._press_key):
            yield

    def _press_key(self) -> None:
        self._pressed = not self._pressed  # twice between two looks is none

    def _is_off(self) -> bool:
        return not self._in_turn or super()._is_off()

    async def _between(self, wire: Wire) -> None:
        if not self._pressed:
            return
        assert isinstance(wire, MlxcelWire)
        self._pressed, self._in_turn = False, not self._in_turn
        if not self._in_turn:
            await wire.end_turn()
            return
        self._playback.clear()
        await wire.begin_turn()
        self._say("you are heard; press again when you have finished.")


class PushToTalk(LiveConversation):
    """As LiveConversation, with the turns of strict-v3. `typed`: lines that are not empty are typed text."""

    def __init__(self, *devices: Any, typed: bool, **options: Any) -> None:
        super().__init__(*devices, **options)
        self._typed = typed
        self._keys = b""
        self._acts: set[asyncio.Task[None]] = set()

    async def _send(self, wire: Wire) -> None:
        assert isinstance(wire, StrictTimeline)
        self._say(TYPED if self._typed else HOW)
        loop = asyncio.get_running_loop()
        try:
            keyboard = sys.stdin.fileno()
            loop.add_reader(keyboard, self._read, wire, keyboard)
        except (OSError, ValueError, AttributeError):  # closed, or a file
            raise DeviceError("Standard input is no keyboard.", "Run it in a terminal, or use --file.") from None
        try:
            await super()._send(wire)
        finally:
            loop.remove_reader(keyboard)
            for act in self._acts:
                act.cancel()

    def _read(self, wire: StrictTimeline, keyboard: int) -> None:
        """Keys have come: do what each whole line asks for."""
        keys = os.read(keyboard, 4096)
        if not keys:  # the terminal is closed
            asyncio.get_running_loop().remove_reader(keyboard)
        *lines, self._keys = (self._keys + keys).split(b"\n")
        for line in lines:
            act = asyncio.create_task(self._act(wire, line.decode(errors="replace").strip()))
            self._acts.add(act)
            act.add_done_callback(self._acts.discard)

    async def _act(self, wire: StrictTimeline, text: str) -> None:
        try:
            if self._typed and text:
                await wire.type_text(text)
            else:
                self._say("listening; Enter ends." if await wire.toggle() else "heard.")
        except ServerError as fault:
            self._say(str(fault))
