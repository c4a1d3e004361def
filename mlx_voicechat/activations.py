"""Activations as plain functions, any shape.

Those of `mlx.nn` are compiled at their first call, which on Linux takes a C++ compiler and seconds. Here an eager run
compiles nothing, and `VoiceChat.compile` fuses them with what stands around them.
"""

from __future__ import annotations

import math

import mlx.core as mx


def silu(x: mx.array) -> mx.array:
    """`x sigmoid(x)`; on a CPU MLX's own sigmoid takes twice as long as its exponential."""
    return x / (1 + mx.exp(-x))


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def gelu(x: mx.array) -> mx.array:
    """The exact one, by the error function."""
    return x * (0.5 + 0.5 * mx.erf(x * math.sqrt(0.5)))


def gated_gelu(gate: mx.array, up: mx.array) -> mx.array:
    """`gelu(gate) * up` with the tanh approximation of the TTS."""
    inner = gate * (1 + 0.044715 * gate * gate)
    return gate * (0.5 + 0.5 * mx.tanh(math.sqrt(2 / math.pi) * inner)) * up
