"""A linear layer for the frame: its transposed weight is a constant, so that no call makes the view again."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class Linear(nn.Linear):
    """(..., in) -> (..., out); two axes are the cheapest, since more are flattened and restored in every call."""

    def prepare(self) -> None:
        """Build the transposed weight, once the weight is in place."""
        weight = self.weight
        if weight.dtype == mx.float32 and mx.default_device().type == mx.cpu:
            # MLX's reference BLAS on Linux takes half the time for a matrix whose outputs are adjacent.
            weight = mx.contiguous(weight.T).T
            mx.eval(weight)
            self.weight = weight  # a view of it: the tensor is in memory once
        self._matrix = weight.T
        mx.eval(self._matrix)

    def __call__(self, x: mx.array) -> mx.array:
        matrix = self._matrix if "_matrix" in self else self.weight.T
        return mx.addmm(self.bias, x, matrix) if "bias" in self else x @ matrix


def add_product(addend: mx.array, layer: nn.Module, x: mx.array, scale: float = 1.0) -> mx.array:
    """`addend + scale * layer(x)`; one kernel for a float32 layer without bias (narrower ones would round)."""
    if isinstance(layer, Linear) and "_matrix" in layer and "bias" not in layer and x.dtype == mx.float32:
        return mx.addmm(addend, x, layer["_matrix"], alpha=scale)
    product = layer(x)
    return addend + (product if scale == 1.0 else scale * product)


def prepare_linears(module: nn.Module) -> None:
    """Prepare all linear layers in `module`; call it once after its weights are loaded and quantised."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.prepare()
