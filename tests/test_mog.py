"""MoG head and code generation: the oracle's numbers, the rule in plain numpy, quantised and grouped weights."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map_with_path
from support.speech import DISTINCT, ORACLE, close, draws, golden_config, golden_tts, random_tts

from mlx_voicechat.networks.mog import (
    Codebooks,
    CodeGenerator,
    MogHead,
    component_product,
    gumbel_noise,
    keep_ranked,
    sampling_controls,
)

CASES = {  # guidance scale, top-p, noise scale
    "g02": (0.2, 0.95, 0.001),
    "g05": (0.5, 0.8, 0.8),
    "p1": (0.2, 1.0, 0.5),
    "ptiny": (0.2, 1e-8, 0.0),
    "g0": (0.0, 0.95, 0.001),
}


def golden_generator() -> CodeGenerator:
    tts = golden_tts()
    books = Codebooks(tts.rvq_embs)
    return CodeGenerator(tts.mog_head, tts.embed_code, books, golden_config().tts.pass_counts)


def random_generator() -> CodeGenerator:
    tts = random_tts()
    return CodeGenerator(tts.mog_head, tts.embed_code, Codebooks(tts.rvq_embs), DISTINCT.pass_counts)


def test_pass_counts_are_the_oracles_schedule() -> None:
    assert golden_config().tts.pass_counts == tuple(n for n in ORACLE["schedule_counts"].tolist() if n)
    assert golden_config().tts.pass_counts == (1, 1, 3, 4, 22)


@pytest.mark.parametrize("place", range(len(ORACLE["topp_p"])))
def test_top_p_keeps_what_the_oracle_keeps(place: int) -> None:
    rows = mx.array(ORACLE["topp_rows"])
    controls = sampling_controls(0.0, float(str(ORACLE["topp_p"][place])), 0.0)
    order = mx.argsort(rows, axis=-1)
    kept = keep_ranked(mx.take_along_axis(rows, order, axis=-1), controls[:, 1:2])
    in_place = np.zeros(rows.shape, bool)
    np.put_along_axis(in_place, np.array(order).astype(int), np.array(kept), axis=-1)
    np.testing.assert_array_equal(in_place, ORACLE["topp_keep"][place].astype(bool))


def test_distribution_is_the_oracles() -> None:
    gumbel = gumbel_noise(mx.array(ORACLE["mog_uniform"])[0])
    mean, log_std = golden_tts().mog_head.distribution(
        mx.array(ORACLE["mog_x"])[:, 0], gumbel, sampling_controls(*CASES["g02"])
    )
    close(mean, ORACLE["mog_mu"][0])
    close(log_std, ORACLE["mog_logs"][0])


@pytest.mark.parametrize("case", CASES)
def test_codes_are_the_oracles(case: str) -> None:
    generator, guidance = golden_generator(), CASES[case][0]
    hidden = mx.array(ORACLE["gen_hidden"])[: 2 if guidance else 1]
    uniform, normal = (mx.array(ORACLE[f"gen_{case}_{name}"])[None] for name in ("uniform", "normal"))
    codes, latent = generator(hidden, uniform, normal, sampling_controls(*CASES[case]))
    np.testing.assert_array_equal(np.array(codes)[0], ORACLE[f"gen_{case}_codes"])
    close(latent, np.array(generator.books.embed(codes)))


def plain_head(head: MogHead, x: np.ndarray, uniform: np.ndarray, normal: np.ndarray, top_p: float) -> np.ndarray:
    """The head's rule in float64, for one guided row x (W,) after the layers."""
    logits = np.array(head.proj_logits.weight, np.float64) @ x
    order = np.lexsort((np.arange(len(logits)), logits))[::-1]
    mass = np.exp(logits[order]) / np.exp(logits).sum()
    kept = order[np.cumsum(mass) - mass < top_p]
    gumbel = -np.log(-np.log(uniform + 1e-8) + 1e-8)
    k = kept[np.argmax(logits[kept] + gumbel[kept])]
    width = len(x)
    mus = np.array(head.proj_mus.weight, np.float64).reshape(len(logits), -1, width)
    spread = np.exp(max(np.array(head.proj_logs.weight, np.float64)[0] @ x, -4.0))
    mu = np.array(head.low_mat, np.float64)[k] @ (mus[k] @ x)
    return mu * spread + np.array(head.proj_else.weight, np.float64) @ x + spread * 0.5 * normal


@pytest.mark.parametrize("top_p", [0.2, 0.7, 1.0])
def test_distinct_widths_follow_the_plain_rule(top_p: float) -> None:
    head = random_tts().mog_head
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x = mx.array(rng.normal(size=(2, DISTINCT.hidden_size)).astype(np.float32))
        uniform = rng.random(DISTINCT.mog.num_predictions).astype(np.float32)
        normal = rng.normal(size=DISTINCT.latent_size).astype(np.float32)
        z = head(x, gumbel_noise(mx.array(uniform)[None]), mx.array(normal)[None], sampling_controls(0.3, top_p, 0.5))
        for layer in head.mlp_stack:
            x = layer(x)
        rows = np.array(x, np.float64)
        close(z, plain_head(head, rows[0] + 0.3 * (rows[0] - rows[1]), uniform, normal, top_p)[None])


def test_equal_logits_rank_by_index() -> None:
    head = MogHead(DISTINCT)
    logits = mx.zeros((1, DISTINCT.mog.num_predictions))
    favours_low = -mx.arange(DISTINCT.mog.num_predictions, dtype=mx.float32)[None]
    drawn = head._draw(logits, favours_low, mx.array([[0.5]]))
    assert drawn.item() == DISTINCT.mog.num_predictions // 2


def test_guidance_of_zero_equals_no_second_row() -> None:
    generator = random_generator()
    hidden = mx.random.normal((2, 1, DISTINCT.hidden_size), key=mx.random.key(1))
    noise = draws(DISTINCT, 1)[0]
    controls = sampling_controls(0.0, 0.95, 0.001)
    both, one = generator(hidden, *noise, controls), generator(hidden[:1], *noise, controls)
    np.testing.assert_array_equal(np.array(both[0]), np.array(one[0]))


def test_two_conversations_at_once_equal_two_alone() -> None:
    generator = random_generator()
    hidden = mx.random.normal((4, 1, DISTINCT.hidden_size), key=mx.random.key(2))
    uniform, normal = draws(DISTINCT, 1, batch=2)[0]
    controls = mx.concatenate([sampling_controls(0.2, 0.95, 0.1), sampling_controls(0.7, 0.5, 0.3)])
    together, latent = generator(hidden, uniform, normal, controls)
    assert together.shape == (2, DISTINCT.num_quantizers)
    for i in range(2):
        rows = slice(i, i + 1)
        alone = generator(hidden[i::2], uniform[rows], normal[rows], controls[rows])
        np.testing.assert_array_equal(np.array(together)[rows], np.array(alone[0]))
        close(latent[rows], np.array(alone[1]))


def test_codes_past_the_codebook_add_nothing() -> None:
    books = random_generator().books
    codes = mx.array([[3, 17, 5, 17, 18, 0, 20]])
    expected = sum(np.array(books.books[q])[code] for q, code in ((0, 3), (2, 5), (5, 0)))
    close(books.embed(codes), np.array(expected)[None])


@pytest.mark.parametrize("mode", ["affine", "mxfp8"])
def test_the_gather_of_a_quantised_projection_equals_the_full_product(mode: str) -> None:
    head = MogHead(DISTINCT)
    inputs, rank, components = 96, DISTINCT.mog.low_rank, DISTINCT.mog.num_predictions
    dense = nn.Linear(inputs, rank * components, bias=False)
    head.proj_mus = dense.to_quantized(32, 8, mode)
    x = mx.random.normal((3, inputs), key=mx.random.key(3))
    picked = mx.array([5, 0, components - 1], mx.uint32)
    full = head.proj_mus(x).reshape(3, components, rank)
    close(head._low_rank(x[:, None], picked).squeeze(1), np.array(full)[np.arange(3), np.array(picked)])


def test_narrow_matrices_are_widened_row_by_row() -> None:
    matrices = mx.random.normal((4, 6, 9), key=mx.random.key(4))
    x = mx.random.normal((2, 1, 9), key=mx.random.key(5))
    picked = mx.array([3, 1], mx.uint32)
    narrow = matrices.astype(mx.bfloat16)
    product = component_product(x, narrow, picked)
    assert product.dtype == mx.float32
    close(product, np.array(component_product(x, narrow.astype(mx.float32), picked)))


def test_bfloat16_weights_give_float32_latents() -> None:
    head = random_tts().mog_head
    narrow = {"proj_mus.weight", "low_mat"}
    head.update(tree_map_with_path(lambda k, a: a.astype(mx.bfloat16) if k in narrow else a, head.parameters()))
    uniform, normal = draws(DISTINCT, 1)[0]
    x = mx.random.normal((2, DISTINCT.hidden_size), key=mx.random.key(6))
    z = head(x, gumbel_noise(uniform[:, 0]), normal[:, 0], sampling_controls(0.2, 0.95, 0.001))
    assert (z.shape, z.dtype) == ((1, DISTINCT.latent_size), mx.float32)
