"""A linear layer for the frame: its transposed weight is a constant, so that no call makes the view again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from threadpoolctl import threadpool_limits


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


def numpy_is_faster() -> bool:
    """Whether large arrays are: on Linux on a CPU, where MLX has the reference BLAS and scalar exponentials."""
    return sys.platform != "darwin" and mx.default_device().type == mx.cpu


@contextlib.contextmanager
def numpy_products(module: nn.Module, threads: int | None = None) -> Iterator[None]:
    """Meanwhile numpy multiplies for the float32 linear layers of `module`, for many rows, where `numpy_is_faster`.

    `threads` is the most that numpy takes, None as many as it likes.
    """
    if not numpy_is_faster():
        yield
        return
    named = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    layers = [(path, layer) for path, layer in named if layer.weight.dtype == mx.float32]
    module.update_modules(tree_unflatten([(path, _NumpyLinear(layer)) for path, layer in layers]))
    try:
        with threadpool_limits(threads):
            yield
    finally:
        module.update_modules(tree_unflatten(layers))


class _NumpyLinear(nn.Module):
    """A linear layer, (..., in) -> (..., out), float32; evaluates what it is given."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._weight = np.asarray(layer.weight).T
        self._bias = np.asarray(layer.bias) if "bias" in layer else None

    def __call__(self, x: mx.array) -> mx.array:
        out = np.asarray(x).reshape(-1, x.shape[-1]) @ self._weight
        if self._bias is not None:
            out += self._bias
        return mx.array(out.reshape(*x.shape[:-1], -1))
