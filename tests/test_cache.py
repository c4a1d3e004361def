"""The attention cache: what it hands to attention equals plain history, whatever the pieces."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.networks.cache import BLOCK, KvCache


def history(length: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    shape = (2, 3, length, 4)
    return tuple(mx.array(rng.normal(size=shape).astype(np.float32)) for _ in range(2))  # type: ignore[return-value]


def attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> np.ndarray:
    return np.array(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.5, mask=mask))


def plain(queries: mx.array, keys: mx.array, values: mx.array, window: int | None) -> np.ndarray:
    length = queries.shape[2]
    at = mx.arange(length)
    mask = at[None] <= at[:, None]
    if window is not None:
        mask = mask & (at[None] > at[:, None] - window)
    return attend(queries, keys, values, mask)


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([1, 1, 1, 2, 3, 7, 13]), min_size=1, max_size=30),
    window=st.sampled_from([None, 1, 2, 5, 16, 40]),
)
def test_pieces_equal_whole(pieces: list[int], window: int | None) -> None:
    keys, values = history(sum(pieces))
    queries, _ = history(sum(pieces), seed=1)
    cache = KvCache(window)
    got, start = [], 0
    for size in pieces:
        end = start + size
        seen = cache.update(keys[:, :, start:end], values[:, :, start:end])
        got.append(attend(queries[:, :, start:end], *seen))
        start = end
    np.testing.assert_allclose(np.concatenate(got, axis=2), plain(queries, keys, values, window), atol=1e-6)


def test_keys_and_values_may_come_as_one_array() -> None:
    keys, values = history(9)
    apart, joint = KvCache(window=5), KvCache(window=5)
    for start, end in ((0, 3), (3, 4), (4, 6), (6, 8), (8, 9)):
        piece = keys[:, :, start:end], values[:, :, start:end]
        seen = zip(apart.update(*piece), joint.update(mx.concatenate(piece, axis=1)), strict=True)
        for one, other in seen:
            assert (one is None) == (other is None)
            assert one is None or mx.array_equal(one, other)


def test_growth_is_by_blocks_and_bounded_by_the_window() -> None:
    keys, values = history(1)
    cache = KvCache(window=BLOCK + 10)
    for _ in range(BLOCK + 50):
        cache.update(keys, values)
        mx.eval(cache.arrays)
    assert cache.joint is not None
    assert cache.joint.shape[2] == BLOCK + 10
    assert cache.offset == BLOCK + 50


def test_phase_moves_the_growth_to_another_frame() -> None:
    keys, values = history(1)
    growths = []
    for phase in (0, 7):
        cache, sizes = KvCache(phase=phase), []
        for _ in range(2 * BLOCK):
            cache.update(keys, values)
            mx.eval(cache.arrays)
            assert cache.joint is not None
            sizes.append(cache.joint.shape[2])
        growths.append([i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]])
    assert growths[0] != growths[1]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("evaluated", [True, False])
def test_a_copy_goes_on_alone(window: int | None, evaluated: bool) -> None:
    keys, values = history(20)
    queries, _ = history(20, seed=1)
    first = KvCache(window)
    for i in range(9):
        first.update(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    if evaluated:
        mx.eval(first.arrays)
    second = first.copy()
    for i in range(12, 18):  # positions that the twin has never seen
        first.update(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        mx.eval(first.arrays)
    seen = second.update(keys[:, :, 9:10], values[:, :, 9:10])
    expected = plain(queries[:, :, :10], keys[:, :, :10], values[:, :, :10], window)[:, :, 9:10]
    np.testing.assert_allclose(attend(queries[:, :, 9:10], *seen), expected, atol=1e-6)


def test_a_narrow_cache_stores_and_hands_out_its_own_type() -> None:
    keys, values = (each.astype(mx.bfloat16) for each in history(8))
    cache = KvCache(window=6)
    cache.update(keys[:, :, :4], values[:, :, :4])
    seen = cache.copy().update(keys[:, :, 4:5], values[:, :, 4:5])
    assert seen[0].dtype == seen[1].dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(seen[0].astype(mx.float32)), np.array(keys[:, :, :5].astype(mx.float32)))
