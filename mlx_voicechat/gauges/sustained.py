"""How long frames take when there is no pause between them, minute by minute: a machine without a fan slows down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ..voicechat import VoiceChat

SESSION_FRAMES = 750  # a minute of conversation; then another one begins, so that none grows
PARTS = 12  # of the time, at most, that the curve is drawn of
SHORTEST_SECONDS = 5.0  # of a part


class Part(NamedTuple):
    """A part of the time: when it began, in seconds; frames, and their times in ms."""

    second: float
    frames: int
    p50_ms: float
    p95_ms: float


def sustained(
    model: VoiceChat,
    seconds: float,
    noise: Iterator[np.ndarray],
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Part]:
    """Run frames one after the other for so long; openings are not timed. `stop` ends it early."""
    length = max(seconds / PARTS, SHORTEST_SECONDS)
    parts: list[list[float]] = [[]]
    session = None
    started = clock()
    while (now := clock()) - started < seconds and not stop():
        if session is None or session.frames >= SESSION_FRAMES:
            session = model.session()
            now = clock()
        while now - started >= length * len(parts):
            parts.append([])
        session.push(next(noise), model.config.input_rate_hz)
        parts[-1].append((clock() - now) * 1000)
    return [
        Part(index * length, len(times), *(float(np.percentile(times, q)) for q in (50, 95)))
        for index, times in enumerate(parts)
        if times
    ]
