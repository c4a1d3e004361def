"""What a session has heard of: samples that wait for their frame, perception that runs ahead, the limit in seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .frame import Heard
from .sound.samples import checked_samples, dbfs
from .turns import QUIET_DBFS


class Piece(NamedTuple):
    """One frame's input: whether it was `loud`, and whether it is a `zero` frame that no audio brought."""

    heard: Heard
    loud: bool
    zero: bool


class Hearing:
    """The input of one session, in frames of `frame_samples` at `rate_hz`."""

    def __init__(self, frame_samples: int, rate_hz: int, max_seconds: float | None) -> None:
        self.limited = False
        self.limit_due = False  # it is to be announced
        self._frame_samples, self._rate_hz = frame_samples, rate_hz
        self._most = math.inf if max_seconds is None else round(max_seconds * rate_hz)
        self._received = 0
        self._waiting = np.zeros(0, np.float32)
        self._in_turn = 0  # how many of those were there when the user's turn ended
        self._pieces: deque[Piece] = deque()

    @property
    def waits(self) -> bool:
        """Whether a whole frame waits."""
        return bool(self._pieces) or len(self._waiting) >= self._frame_samples

    @property
    def waits_in_turn(self) -> bool:
        """Whether a frame waits that came before the end of the user's turn."""
        return bool(self._pieces) or self._in_turn >= self._frame_samples

    def add(self, samples: Any, rate_hz: Any) -> None:
        """Add samples (S,) up to the limit. Raises InputError and takes none."""
        chunk = checked_samples(samples, rate_hz, self._rate_hz)
        self._received += len(chunk)
        excess = self._received - self._most
        if excess > 0:
            self.limited = self.limit_due = True
            chunk = chunk[: len(chunk) - int(excess)]
        self._waiting = np.concatenate([self._waiting, chunk])

    def end(self, pad_partial: bool) -> None:
        """No more will come: fill a partial frame with zeros, or drop it."""
        whole = len(self._waiting) // self._frame_samples * self._frame_samples
        if not pad_partial:
            self._waiting = self._waiting[:whole]
        elif len(self._waiting) > whole:
            padding = np.zeros(whole + self._frame_samples - len(self._waiting), np.float32)
            self._waiting = np.concatenate([self._waiting, padding])

    def end_turn(self) -> None:
        """The user's turn ends with what waits, a partial frame included."""
        self.end(not self.limited)
        self._in_turn = len(self._waiting)

    def clear(self) -> None:
        """Drop everything that waits."""
        self._waiting = self._waiting[:0]
        self._pieces.clear()
        self._in_turn = 0

    def next_piece(self, zero: bool, ahead: int, hear: Callable[[np.ndarray], list[Heard]]) -> Piece:
        """The next frame's input; it stays the next until `done`.

        `hear` runs perception over whole frames, at most `ahead` at once; `zero` asks for a frame of zeros.
        """
        if not self._pieces and zero:
            (heard,) = hear(np.zeros(self._frame_samples, np.float32))
            self._pieces.append(Piece(heard, False, True))
        elif not self._pieces:
            count = min(ahead, len(self._waiting) // self._frame_samples)
            taken = self._waiting[: count * self._frame_samples]
            heard_frames = hear(taken)
            self._waiting = self._waiting[len(taken) :]
            self._in_turn = max(0, self._in_turn - len(taken))
            for heard, samples in zip(heard_frames, taken.reshape(count, -1), strict=True):
                self._pieces.append(Piece(heard, dbfs(samples) > QUIET_DBFS, False))
        return self._pieces[0]

    def done(self) -> Piece:
        """The next frame's input was used."""
        return self._pieces.popleft()
