"""Frames of several conversations in one evaluation: how long they take, and how many run in real time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..frame import MOST_ROWS, ROWS, rows_for
from ..session import Session
from ..voicechat import VoiceChat
from .profile import COLD_FRAMES, spread

BLOCK = 4  # frames that a company steps before the next has its turn, so that a busy machine slows all of them
SHARE = 0.75  # of a frame's length that a round may take: the rest is the server's, and what a machine does besides


def frame_times(
    model: VoiceChat,
    counts: Iterable[int],
    frames: int,
    noise: Iterator[np.ndarray],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[float]]:
    """Milliseconds of `frames` frames of so many sessions together, for each of `counts`; in turns, warm.

    `clock` tells seconds: those of the processor, say, where other programs are at work.
    """
    companies = {count: [model.session(seed=seed) for seed in range(count)] for count in counts}
    times: dict[int, list[float]] = {count: [] for count in companies}
    for sessions in companies.values():
        for _ in range(COLD_FRAMES):
            _stepped(model, sessions, next(noise), clock)
    while any(len(found) < frames for found in times.values()):
        for count, sessions in companies.items():
            times[count] += [_stepped(model, sessions, next(noise), clock) for _ in range(min(BLOCK, frames))]
    return {count: found[:frames] for count, found in times.items()}


def company(model: VoiceChat, sessions: int, frames: int, noise: Iterator[np.ndarray]) -> dict[str, Any]:
    """Frame times by the rows of a slab, as many as `sessions` need, and how many of them run in real time."""
    counts = [rows for rows in ROWS if rows <= rows_for(min(sessions, MOST_ROWS))]
    together = {rows: spread(times) for rows, times in frame_times(model, counts, frames, noise).items()}
    slow = {rows: times["p95_ms"] or 0.0 for rows, times in together.items()}
    return {
        "sessions": sessions,
        "rows": {str(rows): times for rows, times in together.items()},
        "real_time_sessions": real_time_sessions(slow, sessions, model.config.budget_ms),
    }


def real_time_sessions(row_ms: dict[int, float], most: int, budget_ms: float) -> int:
    """The most sessions, up to `most`, whose round fits into its share of a frame; `row_ms` of a slab by its rows."""

    def round_ms(count: int) -> float:
        full, rest = divmod(count, MOST_ROWS)
        return (full * row_ms[MOST_ROWS] if full else 0.0) + (row_ms[rows_for(rest)] if rest else 0.0)

    fitting = [count for count in range(1, most + 1) if round_ms(count) <= SHARE * budget_ms]
    return max(fitting, default=0)


def _stepped(model: VoiceChat, sessions: Sequence[Session], samples: np.ndarray, clock: Callable[[], float]) -> float:
    for session in sessions:
        session.add(samples)
    started = clock()
    for _, outcome in model.step(sessions):
        if isinstance(outcome, Exception):
            raise outcome
    return (clock() - started) * 1000
