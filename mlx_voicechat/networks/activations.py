"""Activations as plain functions, any shape.

Those of `mlx.nn` are compiled at their first call, which on Linux takes a C++ compiler and seconds. Here an eager run
compiles nothing, and `VoiceChat.compile` fuses them with what stands around them.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from .linear import numpy_is_faster


def silu(x: mx.array) -> mx.array:
    """`x sigmoid(x)`; on a CPU MLX's own sigmoid takes twice as long as its exponential."""
    return x / (1 + mx.exp(-x))


def silu_of_rows(x: mx.array) -> mx.array:
    """`silu` of many float32 rows, not for a compiled function: evaluated where numpy takes a fifth of the time."""
    if not numpy_is_faster():
        return silu(x)
    rows = np.asarray(x)
    with np.errstate(over="ignore"):  # 1 / infinity is the 0 that is meant
        return mx.array(rows / (1 + np.exp(-rows)))


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def gelu(x: mx.array) -> mx.array:
    """The exact one, by the error function."""
    return x * (0.5 + 0.5 * mx.erf(x * math.sqrt(0.5)))


def gated_gelu(gate: mx.array, up: mx.array) -> mx.array:
    """`gelu(gate) * up` with the tanh approximation of the TTS; (1 + tanh x) / 2 is written as sigmoid(2 x)."""
    scale = 2 * math.sqrt(2 / math.pi)
    return gate * mx.sigmoid(gate * (scale + 0.044715 * scale * mx.square(gate))) * up
