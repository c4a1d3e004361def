"""Keys and values of one attention layer: appended in place, grown by blocks, a ring once a window is full.

Conversations that step together have a cache each (`CacheRows`): their lengths differ, so attention runs one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx

_Row = TypeVar("_Row")

BLOCK = 256  # positions added at a growth; the copy is one layer's, see `phase`


Attend: TypeAlias = Callable[[Any, "KvCache"], mx.array]  # queries, keys and values (rows, heads, T, head_dim)


class KvCache:
    """Keys and values (B, heads, positions, head_dim) of everything seen, or of the last `window` positions.

    Rotary positions must already be in the keys: in a full ring the order of slots is not the order of time.
    `phase` staggers the growth of a stack's layers, so that no frame copies more than one layer's cache. `joint`
    (B, 2 heads, room, head_dim), None at first, holds the keys' heads before the values': one write a position.
    """

    def __init__(self, window: int | None = None, phase: int = 0) -> None:
        self.window = window
        self.phase = phase % BLOCK
        self.offset = 0
        self.joint: mx.array | None = None

    def copy(self) -> KvCache:
        """A cache that goes on independently; the memory is shared until one of the two writes."""
        twin = KvCache(self.window, self.phase)
        twin.offset = self.offset
        # A slice assignment changes the array object it is made on, so the twin needs an object of its own.
        twin.joint = None if self.joint is None else self.joint[...]
        return twin

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self.joint is None else [self.joint]

    @property
    def positions(self) -> mx.array:
        """The position (1,) of the next step."""
        return mx.array([self.offset])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def room(self, positions: int) -> int:
        """Positions that are allocated once it holds `positions`: whole blocks, no more than the window."""
        if positions == 0:
            return 0
        room = -(-(positions + self.phase) // BLOCK) * BLOCK - self.phase
        return room if self.window is None else min(room, self.window)

    def attend(self, attend: Attend, projected: Sequence[mx.array]) -> mx.array:
        """What `attend` gives for queries, keys and values and this cache."""
        return attend(projected, self)

    def reserve(self, rows: int, heads: int, head_dim: int, positions: int, dtype: mx.Dtype) -> None:
        """Room for `positions` in a fresh cache of B = `rows`; lazy, so that its size can be told without taking it."""
        self.joint = mx.zeros((rows, 2 * heads, self.room(positions), head_dim), dtype)

    def update(self, *parts: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
        """Add T positions; returns keys, values and mask (T, positions) to attend with (None: attend to all).

        `parts`: keys and values, each (B, heads, T, head_dim), or one array with the heads of both.
        """
        steps = parts[0].shape[2]
        start, end = self.offset, self.offset + steps
        self.offset = end
        if self.window is not None and end > self.window:
            if steps > 1:
                return self._wrap_many(mx.concatenate(list(parts), axis=1), start)
            keys, values = _halves(self._write(parts, start % self.window, self.window))
            return keys, values, None
        keys, values = _halves(self._write(parts, start, end)[:, :, :end])
        mask = None
        if steps > 1:
            mask = mx.arange(end)[None] <= mx.arange(start, end)[:, None]
        return keys, values, mask

    def _write(self, parts: Sequence[mx.array], at: int, needed: int) -> mx.array:
        """Put T positions at slot `at` of an allocation of at least `needed`; returns the whole allocation."""
        joint, head = self._reserved(parts, needed), 0
        for part in parts:
            joint[:, head : head + part.shape[1], at : at + part.shape[2]] = part
            head += part.shape[1]
        return joint

    def _reserved(self, parts: Sequence[mx.array], needed: int) -> mx.array:
        have = 0 if self.joint is None else self.joint.shape[2]
        if self.joint is not None and have >= needed:
            return self.joint
        batch, _, _, width = parts[0].shape
        heads = sum(part.shape[1] for part in parts)
        blank = mx.zeros((batch, heads, self.room(needed) - have, width), parts[0].dtype)
        self.joint = blank if self.joint is None else mx.concatenate([self.joint, blank], axis=2)
        return self.joint

    def _wrap_many(self, new: mx.array, start: int) -> tuple[mx.array, mx.array, mx.array]:
        """Several positions at once across the end of the ring: attend over time-ordered keys, then refill it."""
        window, end = self.window, start + new.shape[2]
        assert window is not None
        kept = min(start, window - 1)
        ordered = new
        if kept and self.joint is not None:
            slots = mx.arange(start - kept, start) % window
            ordered = mx.concatenate([mx.take(self.joint, slots, axis=2), new], axis=2)
        positions = mx.arange(start - kept, end)[None]
        queries = mx.arange(start, end)[:, None]
        mask = (positions <= queries) & (positions > queries - window)
        newest = mx.arange(end - window, end) - (start - kept)
        order = mx.argsort(mx.arange(end - window, end) % window)
        self.joint = mx.take(ordered, newest[order], axis=2)
        return *_halves(ordered), mask


def _halves(joint: mx.array) -> tuple[mx.array, mx.array]:
    """Views of keys and values."""
    keys, values = mx.split(joint, 2, axis=1)
    return keys, values


class CacheRows(KvCache):
    """One layer's caches of B conversations that step together, a position at a time: one each, in the order of rows.

    Queries, keys and values have G rows for each: (G B, heads, 1, head_dim), the first of all B before the second. A
    cache that holds one row stands for both. Where there is none, and past the last, a row takes no part: it gets what
    the first that does gets.
    """

    def __init__(self, caches: Sequence[KvCache | None], batch: int) -> None:
        super().__init__()
        self._caches, self._batch = tuple(caches), batch

    def only(self, rows: Sequence[bool]) -> CacheRows:
        """The same caches, those that stand still left out."""
        return CacheRows([cache if row else None for cache, row in zip(self._caches, rows, strict=False)], self._batch)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for cache in self._caches if cache is not None for array in cache.arrays]

    @property
    def positions(self) -> mx.array:
        """The position (B, 1) of each conversation's next step."""
        offsets = [0 if cache is None else cache.offset for cache in self._caches]
        return mx.array([[offset] for offset in filled(offsets, self._batch)])

    def attend(self, attend: Attend, projected: Sequence[mx.array]) -> mx.array:
        batch, groups = self._batch, projected[0].shape[0] // self._batch
        parts = [mx.split(a.reshape(groups, batch, *a.shape[1:]), batch, axis=1) for a in projected]
        attended: dict[int, mx.array] = {}
        for index, (cache, *rows) in enumerate(zip(self._caches, *parts, strict=False)):
            if cache is not None:
                count = groups if cache.joint is None else cache.joint.shape[0]
                out = attend([row[:count].squeeze(1) for row in rows], cache)
                attended[index] = mx.broadcast_to(out, (groups, *out.shape[1:]))
        first = next(iter(attended.values()))
        joint = mx.stack([attended.get(index, first) for index in range(batch)], axis=1)
        return joint.reshape(groups * batch, *first.shape[1:])


def filled(rows: Sequence[_Row], count: int) -> list[_Row]:
    """`count` rows: the first again for those that are missing, so that what fills a slab up asks for nothing new."""
    return [*rows, *[rows[0]] * (count - len(rows))]
