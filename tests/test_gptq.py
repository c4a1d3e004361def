"""GPTQ against its formula in float64, against mlx-lm's, and against plain rounding."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_voicechat.convert.gptq import (
    DAMPING,
    SHRINKS,
    by_energy,
    compensated,
    in_order,
    inverse_factor,
    loss,
    nearest,
    packed,
    quantise,
    towards,
)
from mlx_voicechat.errors import InputError, VoiceChatError

BITS = (2, 3, 4, 5, 6, 8)


def layer(outputs: int, inputs: int, positions: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weight (out, in), inputs (positions, in) that depend on each other, and their second moments; float32."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(inputs, inputs)) * rng.lognormal(size=inputs)
    x = (rng.normal(size=(positions, inputs)) @ mixing / np.sqrt(inputs)).astype(np.float32)
    return rng.normal(size=(outputs, inputs)).astype(np.float32), x, x.T @ x


def reference(
    weight: np.ndarray,
    moment: np.ndarray,
    bits: int,
    group_size: int,
    order: np.ndarray,
    shrinks: Sequence[float],
) -> np.ndarray:
    """The paper's rule as it stands (equations 2 and 3), float64: one column after the other, the inverse reduced.

    -> the dequantised matrix. Columns are taken in `order`. The grid of a group is fixed when its first column comes:
    that of the part of its range at which equation 2 gives the least for its columns as they are.
    """
    rest, size = weight.astype(np.float64)[:, order], weight.shape[1]
    moment = moment.astype(np.float64)[order][:, order]
    inverse = np.linalg.inv(moment + DAMPING * np.diag(moment).mean() * np.eye(size))
    diagonal = np.square(np.diag(np.linalg.cholesky(inverse)))  # of the inverse when a column's turn has come
    found = np.empty_like(rest)
    for column in range(size):
        if column % group_size == 0:
            group = slice(column, column + group_size)
            scale, bias = reference_grid(rest[:, group], diagonal[group], bits, shrinks)
        code = np.clip(np.rint((rest[:, column] - bias) / scale), 0, 2**bits - 1)
        found[:, column] = code * scale + bias
        error = (rest[:, column] - found[:, column]) / inverse[column, column]
        rest[:, column:] -= np.outer(error, inverse[column, column:])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return found[:, np.argsort(order)]


def reference_grid(
    columns: np.ndarray, diagonal: np.ndarray, bits: int, shrinks: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias (out,) of a group, row by row."""
    grids = []
    for row in columns:
        tried = []
        for shrink in shrinks:
            low, high = (shrink * end for end in (row.min(), row.max()))
            clipped = mx.array(np.clip(row, min(low, high), high).astype(np.float32)[None])
            _, scales, biases = mx.quantize(
                clipped if shrink < 1 else mx.array(row.astype(np.float32)[None]), len(row), bits
            )
            scale, bias = float(scales.item()), float(biases.item())
            values = np.clip(np.rint((row - bias) / scale), 0, 2**bits - 1) * scale + bias
            tried.append((float((np.square(row - values) / diagonal).sum()), len(tried), scale, bias))
        grids.append(min(tried)[2:])
    scale, bias = np.array(grids).T
    return scale, bias


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("plain", [True, False])
def test_equals_the_formula_in_float64(bits: int, group_size: int, plain: bool) -> None:
    """As the columns stand on MLX's grid, and in order of their energy on the best one."""
    weight, _, moment = layer(24, 128)
    inverse = in_order(moment) if plain else by_energy(moment, group_size)
    shrinks = (1.0,) if plain else SHRINKS
    rounded = compensated(weight, moment, bits, group_size, mx.float32, inverse, shrinks)
    expected = reference(weight, moment, bits, group_size, inverse.order, shrinks)
    actual = rounded.dequantised(bits, group_size)
    differing = np.abs(actual - expected) > 1e-4
    assert differing.mean() <= 0.002  # a value in the middle of two codes goes either way, and its row with it
    assert loss(weight - actual, moment) == pytest.approx(loss(weight - expected, moment), rel=1e-3)


def test_equals_mlx_lm_at_four_bits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, which mlx-lm imports
        from mlx_lm.quant.gptq import gptq_quantize
    weight, x, moment = layer(32, 128)
    peer = nn.Sequential(nn.Linear(128, 32, bias=False))
    peer.layers[0].weight = mx.array(weight)
    peer, _ = gptq_quantize(peer, mx.array(x), 4, 64, 4, 64, batch_size=len(x))
    theirs, ours = peer.layers[0], compensated(weight, moment, 4, 64, mx.float32, in_order(moment), (1.0,))
    expected = np.array(mx.dequantize(theirs.weight, theirs.scales, theirs.biases, 64, 4))
    actual = ours.dequantised(4, 64)
    assert (np.abs(actual - expected) > 1e-4).mean() <= 0.01
    assert loss(weight - actual, moment) == pytest.approx(loss(weight - expected, moment), rel=0.01)
    _, lost = quantise(weight, moment, 4, 64, mx.float32)  # by energy, on the best grid
    assert lost < 0.95 * loss(weight - expected, moment)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_order_and_grid_are_worth_it(bits: int) -> None:
    weight, _, moment = layer(40, 256, positions=2000)
    found = [
        quantise(weight, moment, bits, 64, inverse=inverse, shrinks=shrinks)[1]
        for inverse, shrinks in ((in_order(moment), (1.0,)), (by_energy(moment, 64), (1.0,)), (None, SHRINKS))
    ]
    assert found[1] < found[0]
    assert found[2] < found[1]


def test_columns_of_much_energy_come_first() -> None:
    _, _, moment = layer(4, 128)
    order, factor = by_energy(moment, 32)
    assert sorted(order) == list(range(128))
    assert all(len({column // 32 for column in order[start : start + 32]}) == 1 for start in range(0, 128, 32))
    energy = np.diag(moment)[order].reshape(4, 32)
    assert (np.diff(energy, axis=1) <= 0).all()
    assert (np.diff(energy.sum(axis=1)) <= 0).all()
    np.testing.assert_array_equal(factor, inverse_factor(moment[order][:, order]))


@pytest.mark.parametrize(("bits", "part"), [(2, 1.0), (3, 0.8), (4, 0.7), (5, 0.7), (6, 0.7), (8, 0.7)])
def test_loses_no_more_than_rounding(bits: int, part: float) -> None:
    weight, x, moment = layer(40, 256, positions=2000)
    rounded, lost = quantise(weight, moment, bits, 64)
    error = weight - rounded.dequantised(bits, 64)
    assert lost == pytest.approx(float(np.square(x.astype(np.float64) @ error.T).sum()), rel=1e-3)
    plain = loss(weight - nearest(weight, bits, 64).dequantised(bits, 64), moment)
    assert lost <= part * plain


def test_without_correlation_it_is_plain_rounding() -> None:
    weight, _, _ = layer(16, 64)
    rounded = compensated(weight, np.eye(64, dtype=np.float32), 4, 32, mx.float32, shrinks=(1.0,))
    np.testing.assert_array_equal(np.array(rounded.weight), np.array(nearest(weight, 4, 32, mx.float32).weight))


def test_inputs_that_never_came_are_rounded_as_they_are() -> None:
    weight, x, _ = layer(16, 64)
    x[:, 10:20] = 0
    rounded = compensated(weight, x.T @ x, 4, 32, mx.float32, shrinks=(1.0,))
    found = rounded.dequantised(4, 32)
    assert np.isfinite(found).all()
    step = np.array(rounded.scales).repeat(32, axis=1)
    assert (np.abs(weight - found)[:, 10:20] <= np.abs(step)[:, 10:20] * 0.5001).mean() > 0.95  # ends of a grid clip


@given(st.sampled_from(BITS), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_packs_as_mlx_does(bits: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=(rows, 64), dtype=np.uint8)
    scales, biases = mx.ones((rows, 2)), mx.zeros((rows, 2))
    found = mx.dequantize(packed(codes, bits), scales, biases, group_size=32, bits=bits)
    np.testing.assert_array_equal(np.array(found), codes.astype(np.float32))


def test_the_factor_is_that_of_the_damped_inverse() -> None:
    _, _, moment = layer(4, 48)
    factor = inverse_factor(moment).astype(np.float64)
    damped = moment + DAMPING * np.diag(moment).mean() * np.eye(48)
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(48), atol=1e-3)
    assert not np.tril(factor, -1).any()


@pytest.mark.parametrize("fault", ["shape", "groups", "no sum of squares", "NaN"])
def test_faults_are_named(fault: str) -> None:
    weight, _, moment = layer(4, 64)
    kind: type[Exception] = InputError
    if fault == "shape":
        moment = moment[:32, :32]
    elif fault == "groups":
        weight, moment = weight[:, :48], moment[:48, :48]
    elif fault == "NaN":
        kind, moment[3, 3] = VoiceChatError, np.nan
    else:
        kind, moment = VoiceChatError, -moment
    with pytest.raises(kind, match=r"moments|Groups"):
        quantise(weight, moment, 4, 32)


def test_a_weight_moves_to_what_is_wanted_of_it() -> None:
    weight, x, _ = layer(24, 64)
    rng = np.random.default_rng(1)
    given = (x + 0.1 * rng.normal(size=x.shape)).astype(np.float32)
    more = rng.normal(size=(len(x), 24)).astype(np.float32)
    moment = given.T @ given
    drift, stream = (x - given).T @ given, more.T @ given
    moved = towards(weight, weight @ drift + stream, by_energy(moment, 32))
    damping = np.sqrt(DAMPING * np.diag(moment).mean()) * np.eye(64)
    target = np.concatenate([x @ weight.T + more, damping @ weight.T]).astype(np.float64)  # damped to where it was
    expected, *_ = np.linalg.lstsq(np.concatenate([given, damping]).astype(np.float64), target, rcond=None)
    np.testing.assert_allclose(moved, expected.T, atol=1e-4 * np.abs(expected).max())
    assert np.square(x @ weight.T + more - given @ moved.T).sum() < np.square((x - given) @ weight.T + more).sum()
