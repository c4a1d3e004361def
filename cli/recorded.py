"""A recording said to a server as a person would say it. No MLX."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING

from mlx_voicechat.errors import AudioError, ServerError

from .conversation import Conversation
from .offline import cut, silence
from .render import Progress

if TYPE_CHECKING:
    from mlx_voicechat import AudioFrame
    from mlx_voicechat.sound.recordings import AudioReader

    from .client import Wire

AHEAD_FRAMES = 25  # sent and not yet answered with --fast: two seconds
BEHIND_SECONDS = 1.0  # a server that falls behind by less is not spoken of
FAREWELL_SECONDS = 5.0  # for the server's answer to Ctrl-C


class RecordedConversation(Conversation):
    """A recording said to a server, in real time or as fast as the server takes it.

    `extra_seconds` of silence follow it. Ctrl-C cancels the conversation.
    """

    def __init__(self, recording: AudioReader, extra_seconds: float, fast: bool) -> None:
        super().__init__()
        self._recording, self._extra_seconds, self._fast = recording, extra_seconds, fast
        self._room = asyncio.Semaphore(AHEAD_FRAMES)
        self._sent_seconds = 0.0
        self._leaving: asyncio.Task[None] | None = None

    @contextmanager
    def opened(self, wire: Wire) -> Iterator[None]:
        """A bar of progress."""
        seconds = self._recording.seconds + self._extra_seconds
        with Progress(seconds, wire.frame_seconds, live=True) as self._progress:
            yield

    def faults(self) -> list[str]:
        """A server slower than real time."""
        if self.behind_seconds < BEHIND_SECONDS:
            return []
        return [f"the server fell behind by {self.behind_seconds:.1f} s: it is slower than real time, or shared."]

    async def _send(self, wire: Wire) -> None:
        clock = asyncio.get_running_loop().time
        pieces = chain(self._recording, silence(round(self._extra_seconds * wire.input_rate_hz)))
        started = clock()
        try:
            for count, block in enumerate(cut(pieces, wire.frame_samples), 1):
                if self._fast:
                    await self._room.acquire()
                else:
                    await asyncio.sleep(max(0.0, started + count * wire.frame_seconds - clock()))
                await wire.append(block)
                self._sent_seconds += len(block) / wire.input_rate_hz
        except AudioError:  # the recording turned out to be damaged
            await wire.cancel()
            raise
        await wire.commit()

    def _press(self, wire: Wire, sender: asyncio.Task[None], listener: asyncio.Task[None]) -> bool:
        sender.cancel()
        self._leaving = asyncio.create_task(_leave(wire))
        listener.add_done_callback(lambda _: self._leaving and self._leaving.cancel())
        return True

    def _count(self, frame: AudioFrame) -> None:
        self._progress.take(frame)
        if not self._fast:
            self.behind_seconds = max(self.behind_seconds, self._sent_seconds - self.seconds)
        self._room.release()


async def _leave(wire: Wire) -> None:
    """Cancel the conversation, and hang up on a server that does not answer."""
    with suppress(ServerError, asyncio.TimeoutError):
        await asyncio.wait_for(wire.cancel(), FAREWELL_SECONDS)
        await asyncio.sleep(FAREWELL_SECONDS)
    await wire.close()
