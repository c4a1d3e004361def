"""A recording through a session: its timeline in blocks, events as they come, Ctrl-C between frames."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from mlx_voicechat import Event, Session


class Interrupt:
    """Ctrl-C as a flag, read between frames; KeyboardInterrupt while input is awaited or when pressed again."""

    def __init__(self) -> None:
        self.pressed = False
        self.waiting = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not signal.SIG_IGN:  # a shell's background job is not to be interrupted
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, *_: object) -> None:
        again, self.pressed = self.pressed, True
        if again or self.waiting:
            raise KeyboardInterrupt

    def watch(self, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The same blocks, until Ctrl-C: also one pressed while a block is awaited, as from a live pipe, ends them."""
        source = iter(blocks)
        while not self.pressed:
            try:
                self.waiting = True
                block = next(source, None)
            except KeyboardInterrupt:
                return
            finally:
                self.waiting = False
            if block is None:
                return
            yield block


def timeline(
    recording: AudioReader, extra_seconds: float, config: ModelConfig, block_frames: int
) -> tuple[Iterator[np.ndarray], int | None]:
    """The recording and the silence after it in pieces of `block_frames` frames, and the frames in all if known."""
    silence_samples = round(extra_seconds * config.input_rate_hz)
    blocks = cut(chain(recording, silence(silence_samples)), block_frames * config.frame_samples_in)
    if recording.samples is None:
        return blocks, None
    return blocks, -(-(recording.samples + silence_samples) // config.frame_samples_in)


def silence(samples: int, piece_samples: int = 16000) -> Iterator[np.ndarray]:
    """`samples` zeros in small pieces."""
    import numpy as np

    for start in range(0, samples, piece_samples):
        yield np.zeros(min(piece_samples, samples - start), np.float32)


def cut(pieces: Iterable[np.ndarray], block_samples: int) -> Iterator[np.ndarray]:
    """Pieces of any length -> blocks (block_samples,); the last may be shorter."""
    import numpy as np

    waiting = np.zeros(0, np.float32)
    for piece in pieces:
        waiting = np.concatenate([waiting, piece])
        while len(waiting) >= block_samples:
            yield waiting[:block_samples]
            waiting = waiting[block_samples:]
    if len(waiting):
        yield waiting


def converse(
    session: Session, blocks: Iterable[np.ndarray], block_frames: int, interrupt: Interrupt
) -> Iterator[Event]:
    """Feed `blocks` to the session and yield its events.

    Ends with Done, after LimitReached if the session's limit cut it short, or with Cancelled after Ctrl-C.
    """
    from mlx_voicechat import AudioFrame

    rate_hz = session.model.config.input_rate_hz
    for block in interrupt.watch(blocks):
        for event in session.feed(block, rate_hz, block_frames=block_frames):
            yield event
            if interrupt.pressed and isinstance(event, AudioFrame):  # the last event of its frame
                break
        if session.limited:
            break
    yield from session.cancel() if interrupt.pressed else session.finish(pad_partial=True)
