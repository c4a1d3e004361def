"""The causal convolution: pieces of any size give what one call gives, in both forms of the past."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_voicechat.networks.causal_conv import causal_conv, taps_of

BATCH, LENGTH, WIDTH, KERNEL = 2, 11, 3, 4


def drawn(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


WEIGHT, BIAS = drawn(WIDTH, KERNEL, 1), drawn(WIDTH, seed=1)


def nothing(apart: bool) -> tuple[mx.array, ...]:
    return (mx.zeros((BATCH, 1, WIDTH)),) * (KERNEL - 1) if apart else (mx.zeros((BATCH, KERNEL - 1, WIDTH)),)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("size", [1, 3, 7, LENGTH])
def test_pieces_give_what_a_padded_convolution_gives(apart: bool, size: int) -> None:
    x = drawn(BATCH, LENGTH, WIDTH, seed=2)
    expected = mx.conv1d(mx.pad(x, [(0, 0), (KERNEL - 1, 0), (0, 0)]), WEIGHT, groups=WIDTH) + BIAS
    past, parts = nothing(apart), []
    for start in range(0, LENGTH, size):
        y, past = causal_conv(x[:, start : start + size], past, taps_of(WEIGHT), BIAS)
        parts.append(y)
    assert mx.allclose(mx.concatenate(parts, axis=1), expected, rtol=0, atol=1e-6)
    assert [a.shape for a in past] == [a.shape for a in nothing(apart)]
    assert mx.array_equal(mx.concatenate(list(past), axis=1), x[:, LENGTH - KERNEL + 1 :])


def test_narrow_weights_are_widened() -> None:
    assert [(tap.shape, tap.dtype) for tap in taps_of(WEIGHT.astype(mx.bfloat16))] == [((WIDTH,), mx.float32)] * KERNEL
