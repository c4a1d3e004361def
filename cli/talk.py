"""`mlx-voicechat talk`: a recording through a server of /v1/realtime, as a person would say it. Needs no MLX."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mlx_voicechat.errors import AudioError, ServerError

from .conversation import cut, silence
from .generate import INTERRUPTED
from .options import extra_seconds, not_negative, positive_seconds
from .outputs import Outputs, Targets
from .render import LiveText, Output, Progress, note

if TYPE_CHECKING:
    import numpy as np

    from mlx_voicechat import AudioFrame, Event
    from mlx_voicechat.audio import AudioReader

    from .client import Wire

AHEAD_FRAMES = 25  # sent and not yet answered with --fast: two seconds
BEHIND_SECONDS = 1.0  # a server that falls behind by less is not spoken of
FAREWELL_SECONDS = 5.0  # for the server's answer to Ctrl-C


def talk(
    file: Annotated[str, Option(metavar="PATH", help="What to say: a recording; - is stdin.")],
    output_audio: Annotated[
        Path | None, Option(metavar="FILE", help="Write the assistant's speech: WAV, 22050 Hz, mono, 16 bits.")
    ] = None,
    url: Annotated[
        str, Option(metavar="URL", help="The server: ws, wss, http or https, with or without a path.")
    ] = "ws://127.0.0.1:8080/v1/realtime",
    system_prompt: Annotated[
        str | None, Option("-p", "--system-prompt", "--prompt", metavar="TEXT", help="The model's own if absent.")
    ] = None,
    seed: Annotated[
        int, Option(metavar="N", callback=not_negative, help="Of the speech's noise: same seed, same speech.")
    ] = 0,
    extra_decoding_seconds: Annotated[
        float,
        Option(metavar="SECONDS", callback=extra_seconds, help="Silence added, so that answers can end: 0 to 600."),
    ] = 3.0,
    max_seconds: Annotated[
        float, Option(metavar="SECONDS", callback=positive_seconds, help="Refuse a longer recording at once.")
    ] = 3600.0,
    api_key: Annotated[
        str, Option(metavar="KEY", envvar="MLX_VOICECHAT_API_KEY", show_default=False, help="The server's key, if any.")
    ] = "",
    fast: Annotated[bool, Option("--fast", help="As fast as the server takes it, not in real time.")] = False,
) -> None:
    """Talk to a server: print what is said as it comes, and write what the assistant speaks.

    The result is that of generate --stream for the same recording, prompt and seed.
    """
    targets = Targets(output_audio)
    targets.check(file, "--file")

    from mlx_voicechat.audio import AudioReader

    from .client import connect, realtime_url

    realtime_url(url)  # before a recording is decoded
    output = Output()
    text = LiveText(output.write)
    dialogue = Dialogue(fast)

    async def converse(files: contextlib.ExitStack, recording: AudioReader) -> None:
        async with connect(url, api_key, note) as wire:
            await wire.open(system_prompt, seed)
            outputs = Outputs(files, targets, wire)
            total_seconds = recording.seconds + extra_decoding_seconds
            progress = files.enter_context(Progress(total_seconds, wire.frame_seconds, live=True))

            def take(event: Event) -> bool:
                outputs.take(event)
                progress.take(event)
                text.take(event)
                return bool(targets) or not output.closed  # else nobody reads on, and nothing is to be written

            pieces = chain(recording, silence(round(extra_decoding_seconds * wire.input_rate_hz)))
            await dialogue.run(wire, cut(pieces, wire.frame_samples), take)

    with contextlib.ExitStack() as files:
        recording = files.enter_context(AudioReader(file, max_seconds=max_seconds))
        if recording.note:
            note(recording.note)
        files.callback(text.end_line)  # also before an error's line
        asyncio.run(converse(files, recording))
        if dialogue.seconds == 0:
            dialogue.fail_if_cut_short()  # and leave existing files as they are
    text.close()
    dialogue.fail_if_cut_short(output_audio)
    if dialogue.behind_seconds >= BEHIND_SECONDS:
        note(f"the server fell behind by {dialogue.behind_seconds:.1f} s: it is slower than real time, or shared.")


class Dialogue:
    """One recording through a server, in real time or as fast as the server takes it.

    What ends it early does not raise, so that what was spoken can be kept: `fail_if_cut_short` says it afterwards.
    """

    def __init__(self, fast: bool) -> None:
        self._fast = fast
        self._interrupted = False
        self._lost: ServerError | None = None
        self._room = asyncio.Semaphore(AHEAD_FRAMES)
        self._sent_seconds = 0.0
        self.seconds = 0.0  # how much of the conversation took place
        self.behind_seconds = 0.0  # the most that the server was behind real time

    async def run(self, wire: Wire, blocks: Iterable[np.ndarray], take: Callable[[Event], bool]) -> None:
        """Send blocks (S,) of one frame, the last may be shorter; hand over events until `take` wants no more."""
        from mlx_voicechat import AudioFrame

        from .client import Interrupted, Lagging, Refused

        sender = asyncio.create_task(self._send(wire, blocks))
        try:
            with self._interruptible(wire, sender):
                async for event in wire.events():
                    if isinstance(event, Refused):  # all that was spoken has come before it
                        why = f"The server says: {event.message.rstrip('.')} ({event.code})."
                        raise ServerError(why, code=event.code)
                    if isinstance(event, AudioFrame):
                        self._count(event, wire.frame_seconds)
                    if not isinstance(event, Lagging | Interrupted) and not take(event):
                        break
        except ServerError as fault:
            self._lost = fault
        finally:
            sender.cancel()
            (failure,) = await asyncio.gather(sender, return_exceptions=True)
        if isinstance(failure, Exception) and not isinstance(failure, ServerError):  # that one the events met, too
            raise failure

    def fail_if_cut_short(self, kept: Path | None = None) -> None:
        """Leave with Ctrl-C's exit code or ServerError when the conversation ended before the recording did."""
        if self._interrupted:
            note(f"interrupted after {self.seconds:.2f} s of the conversation.")
            raise typer.Exit(INTERRUPTED)
        if self._lost and self.seconds:
            rest = f"; what was spoken until then is in {kept}" if kept else ""
            message = f"{self._lost.message} The conversation ended after {self.seconds:.2f} s{rest}."
            raise ServerError(message, self._lost.remedy, self._lost.code)
        if self._lost:
            raise self._lost

    async def _send(self, wire: Wire, blocks: Iterable[np.ndarray]) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            for count, block in enumerate(blocks, 1):
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

    @contextlib.contextmanager
    def _interruptible(self, wire: Wire, sender: asyncio.Task[None]) -> Iterator[None]:
        """Ctrl-C asks the server to end the conversation; pressed again it does at once what it did before."""
        loop, previous = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
        leaving: list[asyncio.Task[None]] = []

        def restore() -> None:
            if loop.remove_signal_handler(signal.SIGINT):
                signal.signal(signal.SIGINT, previous)

        def press() -> None:
            restore()
            self._interrupted = True
            sender.cancel()
            leaving.append(loop.create_task(_leave(wire)))

        if previous is not signal.SIG_IGN:  # a shell's background job is not to be interrupted
            loop.add_signal_handler(signal.SIGINT, press)
        try:
            yield
        finally:
            restore()
            for task in leaving:
                task.cancel()

    def _count(self, frame: AudioFrame, frame_seconds: float) -> None:
        self.seconds = (frame.frame_index + 1) * frame_seconds
        if not self._fast:
            self.behind_seconds = max(self.behind_seconds, self._sent_seconds - self.seconds)
        self._room.release()


async def _leave(wire: Wire) -> None:
    """Cancel the conversation, and hang up on a server that does not answer."""
    with contextlib.suppress(ServerError, asyncio.TimeoutError):
        await asyncio.wait_for(wire.cancel(), FAREWELL_SECONDS)
        await asyncio.sleep(FAREWELL_SECONDS)
    await wire.close()
