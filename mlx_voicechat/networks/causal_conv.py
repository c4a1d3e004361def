"""A causal depthwise convolution of a stream: each output is made of its own input and of the kernel - 1 before it.

One vector a tap: compiled, the products, sums and bias are a single kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def taps_of(weight: mx.array) -> list[mx.array]:
    """weight (C, kernel, 1) -> the taps, each (C,) float32, the oldest input's first."""
    wide = weight.astype(mx.float32)
    return [mx.contiguous(wide[:, tap, 0]) for tap in range(wide.shape[1])]


def causal_conv(
    x: mx.array, past: Sequence[mx.array], taps: Sequence[mx.array], bias: mx.array | None = None
) -> tuple[mx.array, tuple[mx.array, ...]]:
    """x (B, T, C) and what came before it -> (B, T, C), and the past of the next call.

    `past` is kernel - 1 inputs, oldest first: one array (B, kernel - 1, C), or an array (B, 1, C) for each, so that a
    step of one moves none of them. It comes back in the form it was given in.
    """
    kept, length = len(taps) - 1, x.shape[1]
    apart = len(past) == kept
    if apart and length == 1:
        window = [*past, x]
        after = tuple(window[1:])
    else:
        joint = mx.concatenate([*past, x], axis=1)
        window = [joint[:, tap : tap + length] for tap in range(kept + 1)]
        after = _apart(joint, kept) if apart else (joint[:, length:],)
    first, *rest = (tap * rows for tap, rows in zip(taps, window, strict=True))
    y = first if bias is None else bias + first
    for term in rest:
        y = y + term
    return y, after


def _apart(joint: mx.array, kept: int) -> tuple[mx.array, ...]:
    """The last inputs as arrays of their own: slices would keep a whole prompt's inputs alive in the state."""
    length = joint.shape[1]
    return tuple(mx.split(mx.take(joint, mx.arange(length - kept, length), axis=1), kept, axis=1))
