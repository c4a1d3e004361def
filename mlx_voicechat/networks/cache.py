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
    `phase` staggers the growth of a stack's layers, so that no frame copies more than one layer's cache. `dtype` is
    what is stored and handed out; None stores what comes.
    """

    def __init__(self, window: int | None = None, phase: int = 0, dtype: mx.Dtype | None = None) -> None:
        self.window = window
        self.phase = phase % BLOCK
        self.dtype = dtype
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def copy(self) -> KvCache:
        """A cache that goes on independently; the memory is shared until one of the two writes."""
        twin = KvCache(self.window, self.phase, self.dtype)
        twin.offset = self.offset
        # A slice assignment changes the array object it is made on, so the twin needs objects of its own.
        twin.keys, twin.values = (None if a is None else a[...] for a in (self.keys, self.values))
        return twin

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.keys, self.values) if a is not None]

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
        shape, dtype = (rows, heads, self.room(positions), head_dim), self.dtype or dtype
        self.keys, self.values = mx.zeros(shape, dtype), mx.zeros(shape, dtype)

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
        """Add T positions; returns keys, values and mask (T, positions) to attend with (None: attend to all).

        `keys`, `values`: (B, heads, T, head_dim).
        """
        if self.dtype is not None:
            keys, values = keys.astype(self.dtype), values.astype(self.dtype)
        steps = keys.shape[2]
        start, end = self.offset, self.offset + steps
        self.offset = end
        if self.window is not None and end > self.window:
            if steps > 1:
                return self._wrap_many(keys, values, start)
            return *self._write(keys, values, start % self.window, self.window), None
        all_keys, all_values = self._write(keys, values, start, end)
        mask = None
        if steps > 1:
            mask = mx.arange(end)[None] <= mx.arange(start, end)[:, None]
        return all_keys[:, :, :end], all_values[:, :, :end], mask

    def _write(self, keys: mx.array, values: mx.array, at: int, needed: int) -> tuple[mx.array, mx.array]:
        """Put T positions at slot `at` of an allocation of at least `needed`; returns the whole allocation."""
        all_keys, all_values = self._reserved(keys, values, needed)
        all_keys[:, :, at : at + keys.shape[2]] = keys
        all_values[:, :, at : at + keys.shape[2]] = values
        return all_keys, all_values

    def _reserved(self, keys: mx.array, values: mx.array, needed: int) -> tuple[mx.array, mx.array]:
        have = 0 if self.keys is None else self.keys.shape[2]
        if self.keys is not None and self.values is not None and have >= needed:
            return self.keys, self.values
        extra = self.room(needed) - have
        self.keys, self.values = _extended(self.keys, keys, extra), _extended(self.values, values, extra)
        return self.keys, self.values

    def _wrap_many(self, keys: mx.array, values: mx.array, start: int) -> tuple[mx.array, mx.array, mx.array]:
        """Several positions at once across the end of the ring: attend over time-ordered keys, then refill it."""
        window, end = self.window, start + keys.shape[2]
        assert window is not None
        kept = min(start, window - 1)
        ordered = [keys, values]
        if kept and self.keys is not None and self.values is not None:
            slots = mx.arange(start - kept, start) % window
            ordered = [
                mx.concatenate([mx.take(old, slots, axis=2), new], axis=2)
                for old, new in ((self.keys, keys), (self.values, values))
            ]
        positions = mx.arange(start - kept, end)[None]
        queries = mx.arange(start, end)[:, None]
        mask = (positions <= queries) & (positions > queries - window)
        newest = mx.arange(end - window, end) - (start - kept)
        order = mx.argsort(mx.arange(end - window, end) % window)
        self.keys, self.values = (mx.take(a, newest[order], axis=2) for a in ordered)
        return ordered[0], ordered[1], mask


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
                held = groups if cache.keys is None else cache.keys.shape[0]
                out = attend([row[:held].squeeze(1) for row in rows], cache)
                attended[index] = mx.broadcast_to(out, (groups, *out.shape[1:]))
        first = next(iter(attended.values()))
        joint = mx.stack([attended.get(index, first) for index in range(batch)], axis=1)
        return joint.reshape(groups * batch, *first.shape[1:])


def filled(rows: Sequence[_Row], count: int) -> list[_Row]:
    """`count` rows: the first again for those that are missing, so that what fills a slab up asks for nothing new."""
    return [*rows, *[rows[0]] * (count - len(rows))]


def _extended(old: mx.array | None, like: mx.array, extra: int) -> mx.array:
    batch, heads, _, width = like.shape
    blank = mx.zeros((batch, heads, extra, width), like.dtype)
    return blank if old is None else mx.concatenate([old, blank], axis=2)
