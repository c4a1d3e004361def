"""The speech of a frame that comes with the frame after it, since another machine made it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..events import AudioFrame, Event
from ..frame import Frame, State


class Sounds:
    """The speech of a session's frames: with its frame, or, where it comes `late`, each with the frame after it.

    `last` waits for the last frame's. Where the application owns the `turns`, no frame may follow for long, and
    the sound is `due` at once.
    """

    def __init__(self, late: bool, turns: str, last: Callable[[State], tuple[np.ndarray, tuple[int, ...]]]) -> None:
        self._late, self._at_rest, self._last = late, turns == "application", last
        self._awaited: tuple[int, bool] | None = None  # index of a frame whose sound is to come, and `cancelled`

    @property
    def due(self) -> bool:
        """Whether the sound of the last frame is to be waited for when nothing else is to do."""
        return self._at_rest and self._awaited is not None

    def came(self, frame: Frame, index: int, cancelled: bool) -> list[Event]:
        """What came with frame `index`: its own sound, or that of the frame before."""
        if not self._late:
            return [AudioFrame(index, frame.samples, frame.codes, cancelled)]
        before, self._awaited = self._awaited, (index, cancelled)
        return [] if before is None else [AudioFrame(before[0], frame.samples, frame.codes, before[1])]

    def rest(self, state: State) -> list[Event]:
        """The sound of the last frame, if it is still to come."""
        if self._awaited is None:
            return []
        (index, cancelled), self._awaited = self._awaited, None
        return [AudioFrame(index, *self._last(state), cancelled)]
