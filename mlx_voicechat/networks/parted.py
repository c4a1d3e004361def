"""A layer held in parts: those that a checkpoint quantises unlike each other cannot be one matrix."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn


class Parted(nn.Module):
    """Linear layers of one input, (..., in) -> (..., sum of outs): outputs beside each other."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([self[name](x) for name in self._names], axis=-1)
