"""A linear layer for the frame: its transposed weight is a constant, so that no call makes the view again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Product: TypeAlias = Callable[[nn.Module, mx.array], mx.array]  # layer (in -> out), x (..., in) -> (..., out)


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


def product(layer: nn.Module, x: mx.array) -> mx.array:
    """What the layer itself gives."""
    return layer(x)


def add_product(
    addend: mx.array, layer: nn.Module, x: mx.array, scale: float = 1.0, multiply: Product = product
) -> mx.array:
    """`addend + scale * layer(x)`; one kernel for a float32 layer without bias (narrower ones would round)."""
    plain = isinstance(layer, Linear) and "_matrix" in layer and "bias" not in layer and x.dtype == mx.float32
    if plain and (multiply is product or layer.weight.dtype != mx.float32):
        return mx.addmm(addend, x, layer["_matrix"], alpha=scale)
    out = multiply(layer, x)
    return addend + (out if scale == 1.0 else scale * out)


def prepare_linears(module: nn.Module) -> None:
    """Prepare all linear layers in `module`; call it once after its weights are loaded and quantised."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.prepare()


def numpy_is_faster() -> bool:
    """Whether large arrays are: on Linux on a CPU, where MLX has the reference BLAS and scalar exponentials."""
    return sys.platform != "darwin" and mx.default_device().type == mx.cpu


def numpy_product(layer: nn.Module, x: mx.array) -> mx.array:
    """A Product by numpy where the layer is a float32 one; evaluates what it is given. For many rows."""
    if not isinstance(layer, nn.Linear) or layer.weight.dtype != mx.float32:
        return layer(x)
    out = np.asarray(x).reshape(-1, x.shape[-1]) @ np.asarray(layer.weight).T
    if "bias" in layer:
        out += np.asarray(layer.bias)
    return mx.array(out.reshape(*x.shape[:-1], -1))


def product_of_many_rows() -> Product:
    """The faster Product where there are many rows."""
    return numpy_product if numpy_is_faster() else product
