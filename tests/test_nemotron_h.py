"""Our stack of blocks against mlx-lm's Nemotron-H, an implementation by other hands (mlx_lm.models.nemotron_h)."""

from __future__ import annotations

import math
import warnings

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import GOLDEN
from support.listening import DISTINCT_LLM, close, golden_llm, random_llm

from mlx_voicechat.config import LlmConfig
from mlx_voicechat.networks import mamba
from mlx_voicechat.networks.duplex_lm import DuplexLm
from mlx_voicechat.weights.config_file import read_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of transformers, which mlx-lm imports
    from mlx_lm.models import nemotron_h, ssm
    from mlx_lm.models.base import create_attention_mask
    from mlx_lm.models.cache import ArraysCache, KVCache

LENGTH = 70  # longer than one block of positions that attend at once


def peer_of(llm: DuplexLm, config: LlmConfig) -> nemotron_h.NemotronHModel:
    """mlx-lm's model with our weights; its embedding stays its own, and is not used."""
    arguments = nemotron_h.ModelArgs(
        model_type="nemotron_h",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=4096,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        attention_bias=config.attention_bias,
        mamba_num_heads=config.mamba_num_heads,
        mamba_head_dim=config.mamba_head_dim,
        mamba_proj_bias=config.mamba_proj_bias,
        ssm_state_size=config.ssm_state_size,
        conv_kernel=config.conv_kernel,
        n_groups=config.n_groups,
        mlp_bias=config.mlp_bias,
        layer_norm_epsilon=config.norm_eps,
        use_bias=config.use_bias,
        use_conv_bias=config.use_conv_bias,
        hybrid_override_pattern=list(config.pattern),
        head_dim=config.head_dim,
        time_step_limit=config.time_step_limit,
    )
    model = nemotron_h.NemotronHModel(arguments)
    embeddings = [("embeddings.weight", model.embeddings.weight)]
    parameters = tree_flatten(llm.llm.parameters())
    assert isinstance(parameters, list)
    model.load_weights(embeddings + parameters, strict=True)
    return model


def peer_step(model: nemotron_h.NemotronHModel, x: mx.array, caches: list[object]) -> mx.array:
    """x (B, T, H) -> hidden (B, T, H), advancing a cache for each block that keeps one."""
    attention = next((cache for cache in caches if isinstance(cache, KVCache)), None)
    mask = create_attention_mask(x, attention)
    for layer, cache in zip(model.layers, caches, strict=True):
        x = layer(x, mask=mask if layer.block_type == "*" else None, cache=cache)
    return model.norm_f(x)


def caches_for(config: LlmConfig) -> list[object]:
    made = {"M": lambda: ArraysCache(size=2), "*": KVCache, "-": lambda: None}
    return [made[kind]() for kind in config.pattern]


CASES = {"golden": lambda: (golden_llm(), read_config(GOLDEN / "tiny-f32").llm)}
CASES["distinct sizes"] = lambda: (random_llm(), DISTINCT_LLM)


@pytest.mark.parametrize("piece", [1, 7, LENGTH])
@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_those_of_mlx_lm(case: str, piece: int) -> None:
    llm, config = CASES[case]()
    peer, caches, state = peer_of(llm, config), caches_for(config), llm.init_state()
    x = 0.5 * mx.random.normal((1, LENGTH, config.hidden_size), key=mx.random.key(3))
    for start in range(0, LENGTH, piece):
        ours, state = llm.step(x[:, start : start + piece], state)
        theirs = peer_step(peer, x[:, start : start + piece], caches)
        mx.eval(ours, theirs, state.arrays)
        close(ours, theirs)
    kept = [cache for cache in caches if isinstance(cache, ArraysCache)]
    for mine, its in zip(state.mamba, kept, strict=True):
        close(mine.ssm, its[1])


@pytest.mark.parametrize("one_kernel", [True, False])
def test_state_update_of_one_position_equals_that_of_mlx_lm(one_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function whose Metal kernel can take a Mamba step on a GPU, in the form it has on a CPU."""
    monkeypatch.setattr(mamba, "ONE_KERNEL", one_kernel)
    llm = random_llm()
    config, mixer = DISTINCT_LLM, llm.llm.layers[0].mixer
    heads, width, size, groups = 6, 7, 9, 3
    keys = mx.random.split(mx.random.key(5), 5)
    state = mixer.init_state(1, mx.float32)._replace(ssm=mx.random.normal((1, heads, width, size), key=keys[0]))
    value = mx.random.normal((1, 1, heads * width), key=keys[1])
    key, query = (mx.random.normal((1, 1, groups * size), key=k) for k in keys[2:4])
    raw = mx.random.normal((1, 1, heads), key=keys[4])
    steps = mixer._one_time_step(raw.reshape(1, 1, -1))
    read, after = mamba._scan_one(value, key, query, *steps, state.ssm, groups)
    read = read + mixer._skip * value.reshape(read.shape)
    limit = config.time_step_limit or (0.0, math.inf)
    grouped = (a.reshape(1, 1, groups, size) for a in (key, query))
    theirs, its = ssm.ssm_update(
        value.reshape(1, 1, heads, width), mixer.A_log, *grouped, mixer.D, raw, mixer.dt_bias, state.ssm, limit
    )
    close(read.reshape(-1), theirs.reshape(-1))
    close(after, its)
