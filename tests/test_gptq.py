"""GPTQ against its formula in float64, against mlx-lm's, and against plain rounding."""

from __future__ import annotations

import warnings

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_voicechat.convert.gptq import DAMPING, compensated, inverse_factor, loss, nearest, packed, quantise
from mlx_voicechat.errors import InputError, VoiceChatError

BITS = (2, 3, 4, 5, 6, 8)


def layer(outputs: int, inputs: int, positions: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weight (out, in), inputs (positions, in) that depend on each other, and their second moments; float32."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(inputs, inputs)) * rng.lognormal(size=inputs)
    x = (rng.normal(size=(positions, inputs)) @ mixing / np.sqrt(inputs)).astype(np.float32)
    return rng.normal(size=(outputs, inputs)).astype(np.float32), x, x.T @ x


def reference(weight: np.ndarray, moment: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """The paper's rule as it stands (equations 2 and 3), float64: one column after the other, the inverse reduced.

    -> the dequantised matrix. The grid of a group is fixed when its first column comes.
    """
    rest, size = weight.astype(np.float64), weight.shape[1]
    inverse = np.linalg.inv(moment.astype(np.float64) + DAMPING * np.diag(moment).mean() * np.eye(size))
    found = np.empty_like(rest)
    for column in range(size):
        if column % group_size == 0:
            group = mx.array(rest[:, column : column + group_size].astype(np.float32))
            _, scales, biases = mx.quantize(group, group_size=group_size, bits=bits)
            scale, bias = (np.array(a, np.float64)[:, 0] for a in (scales, biases))
        code = np.clip(np.rint((rest[:, column] - bias) / scale), 0, 2**bits - 1)
        found[:, column] = code * scale + bias
        error = (rest[:, column] - found[:, column]) / inverse[column, column]
        rest[:, column:] -= np.outer(error, inverse[column, column:])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64])
def test_equals_the_formula_in_float64(bits: int, group_size: int) -> None:
    weight, _, moment = layer(24, 128)
    rounded = compensated(weight, moment, bits, group_size, mx.float32)
    expected, actual = reference(weight, moment, bits, group_size), rounded.dequantised(bits, group_size)
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
    theirs, (ours, _) = peer.layers[0], quantise(weight, moment, 4, 64, mx.float32)
    expected = np.array(mx.dequantize(theirs.weight, theirs.scales, theirs.biases, 64, 4))
    actual = ours.dequantised(4, 64)
    assert (np.abs(actual - expected) > 1e-4).mean() <= 0.01
    assert loss(weight - actual, moment) == pytest.approx(loss(weight - expected, moment), rel=0.01)


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
    rounded, _ = quantise(weight, np.eye(64, dtype=np.float32), 4, 32, mx.float32)
    np.testing.assert_array_equal(np.array(rounded.weight), np.array(nearest(weight, 4, 32, mx.float32).weight))


def test_inputs_that_never_came_are_rounded_as_they_are() -> None:
    weight, x, _ = layer(16, 64)
    x[:, 10:20] = 0
    rounded, _ = quantise(weight, x.T @ x, 4, 32, mx.float32)
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
