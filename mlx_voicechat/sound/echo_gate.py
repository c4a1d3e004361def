"""Whether there is an echo at all, and which blocks after an echo canceller are worth passing on. Numpy alone."""

from __future__ import annotations

from collections import deque

import numpy as np

from .pcm import Samples

BLOCK_MS = 10
WINDOW_BLOCKS = 8  # of a level: over less, peaks of the remains would pass

HANG_MS = 240  # after the far side, in which the room still sounds
SOUNDING_DBFS = -50.0  # a far side below it is not heard in the room
START_DBFS, LEAST_DBFS, MOST_DBFS = -40.0, -46.0, -30.0  # of the threshold
MARGIN_DB = 6.0  # of the threshold over the remains
TAKEN_DB = 12.0  # that the canceller takes where little but the echo is heard
RISE_DB, FALL_DB = 0.04, 0.01  # of the threshold in a block: it settles over the loudest fifth of the remains
BEGINNING_BLOCKS, PAUSE_BLOCKS = 100, 10  # of a far side that begins, after a pause: cancellers leave bursts of it
STEADY_BLOCKS, STEADY_DB = 6, 3.0  # of the 80 ms then, and how far under the threshold: no burst, somebody speaks

STEADY_DBFS = -35.0  # a far side above it goes on
SETTLE_MS = 120  # for which it must have: a room's path and its first reflections
SILENT_DBFS = -95.0  # a near side below it is switched off, and tells nothing
ABSENT_DB = 40.0  # that the near side is below the far side where there is no echo
ABSENT_BLOCKS = 100  # of a far side that goes on


class EchoPath:
    """Tells whether the microphone hears the loudspeaker at all. With headphones it does not, and must not be touched:
    a canceller that finds no echo takes the near speaker for one.

    No echo is what a near side shows that stays 40 dB below a far side that goes on; it counts for a second of such.
    """

    def __init__(self, delay_ms: int = 0) -> None:
        count = WINDOW_BLOCKS + (SETTLE_MS + delay_ms) // BLOCK_MS
        self._far: deque[float] = deque([0.0] * count, count)
        self._near = _Window()
        self._absent_blocks = 0

    def audible(self, far: Samples, near: Samples) -> bool:
        """far and near (S,), the same 10 ms of each -> whether an echo has to be expected."""
        self._far.append(_energy(far))
        near_dbfs = self._near.level_dbfs(near)
        far_dbfs = _dbfs(min(self._far))
        if far_dbfs > STEADY_DBFS:
            absent = SILENT_DBFS < near_dbfs < far_dbfs - ABSENT_DB
            self._absent_blocks = ABSENT_BLOCKS if absent else max(self._absent_blocks - 1, 0)
        return not self._absent_blocks


class EchoGate:
    """Tells which blocks of the cancelled near side are passed on: not those that hold an echo's remains alone.

    While the far side sounds, and 240 ms and the delay longer, a block passes when the level over the last 80 ms is at
    least `threshold_dbfs`. That follows the remains, seen where the canceller has taken most of the near side. In the
    first second of a far side that begins, most of those 80 ms must be loud too.
    """

    def __init__(self, delay_ms: int = 0) -> None:
        self._hang_blocks = (HANG_MS + delay_ms) // BLOCK_MS
        self._since_far = self._hang_blocks
        self._far_blocks = 0  # since it began
        self._near, self._left = _Window(), _Window()
        self.threshold_dbfs = START_DBFS

    def passes(self, far: Samples, near: Samples, left: Samples) -> bool:
        """far, near and cancelled near (S,), the same 10 ms of each -> whether the last is passed on."""
        self._since_far = 0 if _dbfs(_energy(far)) > SOUNDING_DBFS else self._since_far + 1
        self._far_blocks = 0 if self._since_far > PAUSE_BLOCKS else self._far_blocks + 1
        heard, level = self._near.level_dbfs(near), self._left.level_dbfs(left)
        if self._since_far > self._hang_blocks:
            return True
        if not self._since_far and heard - level >= TAKEN_DB:
            step = RISE_DB if level + MARGIN_DB > self.threshold_dbfs else -FALL_DB
            self.threshold_dbfs = min(max(self.threshold_dbfs + step, LEAST_DBFS), MOST_DBFS)
        steady = self._left.blocks_above(self.threshold_dbfs - STEADY_DB) >= STEADY_BLOCKS
        return level >= self.threshold_dbfs and (steady or self._far_blocks > BEGINNING_BLOCKS)


class _Window:
    """The level over the last 80 ms."""

    def __init__(self) -> None:
        self._energies: deque[float] = deque([0.0] * WINDOW_BLOCKS, WINDOW_BLOCKS)

    def level_dbfs(self, block: Samples) -> float:
        """With this block (S,) the last."""
        self._energies.append(_energy(block))
        return _dbfs(sum(self._energies) / WINDOW_BLOCKS)

    def blocks_above(self, level_dbfs: float) -> int:
        """How many of its blocks are louder."""
        return sum(_dbfs(energy) > level_dbfs for energy in self._energies)


def _energy(samples: Samples) -> float:
    return float(np.mean(np.square(samples)))


def _dbfs(energy: float) -> float:
    return 10 * float(np.log10(energy + 1e-12))
