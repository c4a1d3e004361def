"""GPTQ (Frantar et al. 2022, arXiv 2210.17323) onto MLX's affine grid: rounding that knows what a layer is given.

A weight's columns are rounded in order; what each rounding loses is made up for by the columns that follow, by the
inverse of the inputs' second moments. The grid (scale and bias of each group) is that of `mx.quantize` for what the
group's columns have become, in the type it is stored in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from scipy.linalg import lapack

from mlx_voicechat.errors import InputError, VoiceChatError

DAMPING = 0.01  # of the mean diagonal, added to it (the paper, section 3.3)
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # parts of a group's range that its grid is tried with
PACKED_ROWS = 256  # rows packed at once: each of their bits is a byte meanwhile


class Inverse(NamedTuple):
    """The order (in,) in which columns are rounded, groups whole, and the `inverse_factor` of moments in that order."""

    order: np.ndarray
    factor: np.ndarray


class Rounded(NamedTuple):
    """A quantised matrix as MLX stores it: packed codes (out, in * bits / 32), scales and biases (out, in / group)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array

    def dequantised(self, bits: int, group_size: int) -> np.ndarray:
        """The matrix (out, in) float32 that it stands for."""
        scales, biases = (a.astype(mx.float32) for a in (self.scales, self.biases))
        return np.array(mx.dequantize(self.weight, scales, biases, group_size=group_size, bits=bits))


def quantise(
    weight: np.ndarray,
    moment: np.ndarray,
    bits: int,
    group_size: int,
    dtype: mx.Dtype = mx.bfloat16,
    inverse: Inverse | None = None,
    shrinks: Sequence[float] = SHRINKS,
) -> tuple[Rounded, float]:
    """Of each row, `compensated` or, where that loses more for these inputs, `nearest`; and what all of them lose.

    `inverse` is `by_energy(moment, group_size)` for who has it. Raises as `compensated`.
    """
    ours = compensated(weight, moment, bits, group_size, dtype, inverse, shrinks)
    candidates = ours, nearest(weight, bits, group_size, dtype)
    lost = [losses(weight - rounded.dequantised(bits, group_size), moment) for rounded in candidates]
    first = mx.array(lost[0] <= lost[1])[:, None]
    best = Rounded(*(mx.where(first, one, other) for one, other in zip(*candidates, strict=True)))
    mx.eval(best)
    return best, float(np.minimum(*lost).sum())


def compensated(
    weight: np.ndarray,
    moment: np.ndarray,
    bits: int,
    group_size: int,
    dtype: mx.Dtype,
    inverse: Inverse | None = None,
    shrinks: Sequence[float] = SHRINKS,
) -> Rounded:
    """Round `weight` (out, in) for inputs with the second moments `moment` (in, in), the sum of x x^T, both float32.

    `dtype` is that of scales and biases. A group's grid spans the part of its range, of `shrinks`, at which its columns
    lose least, each by its own diagonal (the paper's equation 2); (1.0,) is MLX's own grid. Memory peaks at about twice
    the moments' and seven times the weight's. Raises
    InputError for shapes that do not fit, VoiceChatError when the moments are no such sum.
    """
    rows, columns = weight.shape
    if moment.shape != (columns, columns):
        raise InputError(f"The moments have shape {moment.shape}, expected {(columns, columns)} for this weight.")
    if columns % group_size:
        raise InputError(f"Groups of {group_size} do not divide the weight's {columns:,} inputs.")
    order, factor = by_energy(moment, group_size) if inverse is None else inverse
    rest, codes = weight.astype(np.float32)[:, order], np.empty((rows, columns), np.uint8)
    scales, biases = (np.empty((rows, columns // group_size), np.float32) for _ in range(2))
    for start in range(0, columns, group_size):
        block, group = slice(start, start + group_size), order[start] // group_size
        costs = 1 / np.square(np.einsum("ii->i", factor[block, block]))
        grid = _best_grid(rest[:, block], costs, bits, dtype, shrinks)
        scales[:, group], biases[:, group] = grid
        codes[:, order[block]], lost = _round_group(rest[:, block], factor[block, block], bits, *grid)
        rest[:, block.stop :] -= lost @ factor[block, block.stop :]
    return Rounded(packed(codes, bits), *(mx.array(a).astype(dtype) for a in (scales, biases)))


def towards(weight: np.ndarray, wanted: np.ndarray, inverse: Inverse) -> np.ndarray:
    """The weight (out, in) whose outputs are nearest, by least squares and damped, to its own and something more.

    `wanted` (out, in) is the sum of what is more (out,) times the inputs, over positions.
    """
    order, factor = inverse
    change = np.empty_like(weight)
    change[:, order] = wanted[:, order] @ factor.T @ factor
    return weight + change


def nearest(weight: np.ndarray, bits: int, group_size: int, dtype: mx.Dtype = mx.bfloat16) -> Rounded:
    """Plain rounding, as `mx.quantize` does it, with scales and biases in `dtype`."""
    return Rounded(*mx.quantize(mx.array(weight).astype(dtype), group_size=group_size, bits=bits))


def losses(error: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """What each output (out,) is off by, squared and summed over positions; `error` (out, in), `moment` (in, in)."""
    return np.einsum("oi,oi->o", error @ moment, error, dtype=np.float64)


def loss(error: np.ndarray, moment: np.ndarray) -> float:
    """The sum of `losses`."""
    return float(losses(error, moment).sum())


def by_energy(moment: np.ndarray, group_size: int) -> Inverse:
    """Columns of much energy first, groups and inside each: what they lose, all others can still make up for."""
    energy = np.einsum("ii->i", moment)
    groups = np.argsort(-energy.reshape(-1, group_size).sum(axis=1), kind="stable")
    within = np.argsort(-energy.reshape(-1, group_size), axis=1, kind="stable")
    order = (groups[:, None] * group_size + within[groups]).reshape(-1)
    return Inverse(order, inverse_factor(moment, order))


def in_order(moment: np.ndarray) -> Inverse:
    """Columns as they stand."""
    return Inverse(np.arange(len(moment)), inverse_factor(moment))


def inverse_factor(moment: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """Upper Cholesky factor (in, in) of the inverse of the damped moments, their inputs in `order`.

    An input that never came has only the damping, and then nothing is made up for elsewhere.
    """
    order = np.arange(len(moment)) if order is None else order
    damped = np.asarray(moment, np.float32)[np.ix_(order, order)].T  # symmetric, and now in Fortran's order
    diagonal = np.einsum("ii->i", damped)
    diagonal += np.float32(DAMPING) * diagonal.mean() or np.float32(1)
    upper, faults = damped, []
    upper, fault = lapack.spotrf(upper, lower=0, overwrite_a=1)
    faults.append(fault)
    upper, fault = lapack.spotri(upper, lower=0, overwrite_c=1)
    faults.append(fault)
    upper, fault = lapack.spotrf(upper, lower=0, overwrite_a=1, clean=1)
    if any([*faults, fault]) or not np.isfinite(np.einsum("ii->i", upper)).all():
        raise VoiceChatError(
            "The moments of this layer's inputs are no sum of squares.", "Remove them and calibrate again."
        )
    return upper


def _best_grid(
    columns: np.ndarray, costs: np.ndarray, bits: int, dtype: mx.Dtype, shrinks: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias (out,) of one group's columns (out, group), each row's of the `shrinks` that costs it least."""
    grids = [_grid(columns, bits, dtype, shrink) for shrink in shrinks]
    if len(grids) == 1:
        return grids[0]
    lost = [np.square(columns - _on_grid(columns, *grid, bits)[1]) @ costs for grid in grids]
    best = np.argmin(lost, axis=0)[None]
    scale, bias = (np.take_along_axis(np.stack(parts), best, axis=0)[0] for parts in zip(*grids, strict=True))
    return scale, bias


def _grid(columns: np.ndarray, bits: int, dtype: mx.Dtype, shrink: float) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias (out,) for a part of the columns' range, rounded to `dtype`."""
    low, high = (shrink * end(columns, axis=1, keepdims=True) for end in (np.min, np.max))
    clipped = np.clip(columns, np.minimum(low, high), high) if shrink < 1 else columns
    _, scales, biases = mx.quantize(mx.array(clipped), group_size=columns.shape[1], bits=bits)
    stored = (a.astype(dtype).astype(mx.float32) for a in (scales, biases))
    scale, bias = (np.array(a)[:, 0] for a in stored)
    return scale, bias


def _on_grid(columns: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The nearest codes of columns (out, n), and the values that they stand for."""
    divisor = np.where(scale == 0, np.float32(1), scale)
    codes = np.clip(np.rint((columns - bias[:, None]) / divisor[:, None]), 0, 2**bits - 1)
    return codes, codes * scale[:, None] + bias[:, None]


def _round_group(
    columns: np.ndarray, factor: np.ndarray, bits: int, scale: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Round columns (out, group) in order -> codes (out, group), and what each lost by its own diagonal."""
    rest, codes, lost = columns.copy(), np.empty(columns.shape, np.uint8), np.empty_like(columns)
    for column in range(columns.shape[1]):
        value = rest[:, column, None]
        code, found = _on_grid(value, scale, bias, bits)
        codes[:, column] = code[:, 0]
        lost[:, column] = (value - found)[:, 0] / factor[column, column]
        rest[:, column + 1 :] -= np.outer(lost[:, column], factor[column, column + 1 :])
    return codes, lost


def packed(codes: np.ndarray, bits: int) -> mx.array:
    """Codes (out, in) uint8 -> (out, in * bits / 32) uint32: MLX's layout, one little-endian stream of bits a row."""
    parts = []
    for start in range(0, len(codes), PACKED_ROWS):
        rows = codes[start : start + PACKED_ROWS]
        stream = np.unpackbits(rows[..., None], axis=-1, count=bits, bitorder="little").reshape(len(rows), -1)
        parts.append(np.packbits(stream, axis=-1, bitorder="little").view("<u4"))
    return mx.array(np.concatenate(parts))
