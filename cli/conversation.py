"""A conversation with a server, from the first block sent to the last event, whether a recording's or a person's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import typer

from mlx_voicechat.errors import AudioError, ServerError

from .offline import INTERRUPTED
from .render import note

if TYPE_CHECKING:
    from pathlib import Path

    from mlx_voicechat import AudioFrame, Event

    from .client import Notice, Wire


ANSWER_SECONDS = 5.0  # for the server's answer to the cancellation of a damaged recording


def _patience(sender: asyncio.Task[None]) -> float | None:
    """Seconds to listen on behind a sender that has ended: None to the end, 0 after a fault that nobody tells of."""
    fault = None if sender.cancelled() else sender.exception()
    if isinstance(fault, AudioError):
        return ANSWER_SECONDS
    return None if fault is None or isinstance(fault, ServerError) else 0.0


class Conversation:
    """One conversation: a task sends, another takes what comes.

    What ends it early does not raise, so that what was spoken can be kept: `fail_if_cut_short` says it afterwards.
    """

    audible = False  # whether somebody hears it, with nothing printed or written

    def __init__(self) -> None:
        self._interrupted = False
        self._lost: ServerError | None = None
        self._broken: Exception | None = None  # on the way to the server
        self.seconds = 0.0  # how much of the conversation took place
        self.behind_seconds = 0.0  # the most that the server was behind real time

    def opened(self, wire: Wire) -> AbstractContextManager[None]:
        """What it needs for the time of the conversation."""
        raise NotImplementedError

    def faults(self) -> list[str]:
        """What did not go well, a line each."""
        raise NotImplementedError

    async def run(self, wire: Wire, take: Callable[[Event], bool]) -> None:
        """Converse to the end, or until `take`, which gets every event of the session, wants no more.

        What fails on the sending side ends it at once, as what the server does: `fail_if_cut_short` raises it.
        """
        sender = asyncio.create_task(self._send(wire))
        listener = asyncio.create_task(self._listen(wire, take))
        try:
            with self._interruptible(wire, sender, listener):
                await asyncio.wait({listener, sender}, return_when=asyncio.FIRST_COMPLETED)
                if not listener.done():
                    await asyncio.wait({listener}, timeout=_patience(sender))
        finally:
            sender.cancel()
            listener.cancel()
            heard, said = await asyncio.gather(listener, sender, return_exceptions=True)
        if isinstance(heard, Exception):
            raise heard
        if isinstance(said, AudioError):  # what was to be said is no recording, so that nothing is to be kept
            raise said
        if isinstance(said, Exception) and not isinstance(said, ServerError):  # of that one the listener knows
            self._broken = said

    def fail_if_cut_short(self, kept: Path | None = None) -> None:
        """Leave with Ctrl-C's exit code or an error when the conversation ended before its time."""
        if self._broken:
            raise self._broken
        if self._interrupted:
            note(f"interrupted after {self.seconds:.2f} s of the conversation.")
            raise typer.Exit(INTERRUPTED)
        if self._lost and self.seconds:
            raise ServerError(self._lost.message + self._ended(kept), self._lost.remedy, self._lost.code)
        if self._lost:
            raise self._lost

    def _ended(self, kept: Path | None) -> str:
        rest = f"; what was spoken until then is in {kept}" if kept else ""
        return f" The conversation ended after {self.seconds:.2f} s{rest}."

    async def _send(self, wire: Wire) -> None:
        """Say what is to be said, and commit."""
        raise NotImplementedError

    def _press(self, wire: Wire, sender: asyncio.Task[None], listener: asyncio.Task[None]) -> bool:
        """Ctrl-C; True if another one is to do at once what it did before the conversation."""
        raise NotImplementedError

    def _notice(self, notice: Notice) -> None:
        """What the server tells of itself."""

    def _count(self, frame: AudioFrame) -> None:
        """A frame was answered."""

    async def _listen(self, wire: Wire, take: Callable[[Event], bool]) -> None:
        from mlx_voicechat import AudioFrame

        from .client import Interrupted, Lagging, Refusal

        try:
            async for event in wire.events():
                if isinstance(event, Refusal):  # all that was spoken has come before it
                    why = f"The server says: {event.message.rstrip('.')} ({event.code})."
                    raise ServerError(why, code=event.code)
                if isinstance(event, Lagging | Interrupted):
                    self._notice(event)
                    continue
                if isinstance(event, AudioFrame):
                    self.seconds = (event.frame_index + 1) * wire.frame_seconds
                    self._count(event)
                if not take(event):
                    break
        except ServerError as fault:
            self._lost = fault

    @contextlib.contextmanager
    def _interruptible(self, wire: Wire, sender: asyncio.Task[None], listener: asyncio.Task[None]) -> Iterator[None]:
        loop, previous = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

        def restore() -> None:
            if loop.remove_signal_handler(signal.SIGINT):
                signal.signal(signal.SIGINT, previous)

        def press() -> None:
            self._interrupted = True
            if self._press(wire, sender, listener):
                restore()

        if previous is not signal.SIG_IGN:  # a shell's background job is not to be interrupted
            loop.add_signal_handler(signal.SIGINT, press)
        try:
            yield
        finally:
            restore()
