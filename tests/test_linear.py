"""The frame's linear layer: the product of `mlx.nn`'s before and after `prepare`, kept in memory once, quantisable."""

import gc

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_voicechat.networks.linear import Linear, add_product, prepare_linears

INPUTS, OUTPUTS = 96, 40


def drawn(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def layer(bias: bool, dtype: mx.Dtype = mx.float32) -> Linear:
    made = Linear(INPUTS, OUTPUTS, bias=bias)
    made.load_weights([(name, drawn(*a.shape).astype(dtype)) for name, a in made.parameters().items()])
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(INPUTS,), (1, INPUTS), (3, INPUTS), (2, 3, INPUTS)])
def test_the_product_is_that_of_the_library(shape: tuple[int, ...], bias: bool) -> None:
    own, x = layer(bias), drawn(*shape, seed=1)
    weight = np.array(own.weight)
    expected = np.array(x, np.float64) @ weight.T.astype(np.float64) + (np.array(own.bias) if bias else 0)
    for _ in range(2):  # not prepared, then prepared
        np.testing.assert_allclose(np.array(own(x)), expected, atol=1e-4, rtol=0)
        prepare_linears(nn.Sequential(own))
    np.testing.assert_array_equal(np.array(own.weight), weight)
    assert set(own.parameters()) == ({"weight", "bias"} if bias else {"weight"})


def test_a_prepared_weight_is_in_memory_once() -> None:
    gc.collect()
    mx.eval(before := mx.zeros((1,)))
    free = mx.get_active_memory()
    own = Linear(1024, 512, bias=False)
    mx.eval(own.parameters())
    own.prepare()
    assert mx.get_active_memory() - free < 1.1 * own.weight.nbytes
    del before


def test_a_compiled_row_is_one_primitive(tmp_path_factory: pytest.TempPathFactory) -> None:
    own, x = layer(bias=False), drawn(1, INPUTS)
    own.prepare()
    path = tmp_path_factory.mktemp("graph") / "product.dot"
    mx.export_to_dot(str(path), own(x))
    assert path.read_text(encoding="utf-8").count("shape=rectangle") == 1


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["float32", "bias", "bfloat16", "quantised", "not prepared"])
def test_a_product_is_added_as_if_apart(kind: str, scale: float) -> None:
    dtype = mx.bfloat16 if kind == "bfloat16" else mx.float32
    own: nn.Module = layer(kind == "bias", dtype)
    if kind == "quantised":
        own = own.to_quantized(32, 8)
    if kind != "not prepared":
        prepare_linears(own)
    x, addend = drawn(2, INPUTS, seed=1).astype(dtype), drawn(2, OUTPUTS, seed=2).astype(dtype)
    added = add_product(addend, own, x, scale)
    apart = addend + scale * own(x)
    assert added.dtype == dtype
    np.testing.assert_allclose(
        np.array(added.astype(mx.float32)),
        np.array(apart.astype(mx.float32)),
        atol=0 if dtype == mx.bfloat16 else 1e-5,  # rounded like the plain sum, or golden ids would change
    )


def test_quantising_replaces_the_layer() -> None:
    tree = nn.Sequential(layer(bias=False))
    nn.quantize(tree, group_size=32, bits=8)
    prepare_linears(tree)
    assert type(tree.layers[0]) is nn.QuantizedLinear
