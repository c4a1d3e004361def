"""A recording through a session: its timeline in blocks, events as they come, Ctrl-C between frames."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from mlx_voicechat import Event, Session

INTERRUPTED = 130  # exit code of a program ended by Ctrl-C


class Interrupt:
    """Ctrl-C as a flag that is read between frames; pressed again it does at once what it did before."""

    def __init__(self) -> None:
        self.pressed = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not signal.SIG_IGN:  # a shell's background job is not to be interrupted
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _press(self, number: int, frame: Any) -> None:
        if self.pressed:
            if callable(self._previous):
                self._previous(number, frame)
            raise KeyboardInterrupt
        self.pressed = True


def silence(samples: int, piece_samples: int = 16000) -> Iterator[np.ndarray]:
    """`samples` zeros, in pieces."""
    import numpy as np

    for start in range(0, samples, piece_samples):
        yield np.zeros(min(piece_samples, samples - start), np.float32)


def cut(pieces: Iterable[np.ndarray], block_samples: int) -> Iterator[np.ndarray]:
    """Pieces (S,) of any length -> blocks (block_samples,); the last may be shorter."""
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
    """Feed `blocks` to the session, perception over `block_frames` at once, and yield its events.

    Ends with Done, after LimitReached when the session's limit cut it short, or with Cancelled after Ctrl-C.
    """
    from mlx_voicechat import AudioFrame

    rate_hz = session.model.config.input_rate_hz
    for block in blocks:
        for event in session.feed(block, rate_hz, block_frames=block_frames):
            yield event
            if interrupt.pressed and isinstance(event, AudioFrame):  # the last event of its frame
                yield from session.cancel()
                return
        if session.limited:
            break
    yield from session.finish(pad_partial=True)
