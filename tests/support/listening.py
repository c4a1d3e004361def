"""RNNT branch and duplex LLM for tests: those of the golden checkpoints, and random ones of any size."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from mlx_voicechat.config import LlmConfig, ModelConfig, RnntConfig
from mlx_voicechat.networks.duplex_lm import DuplexLm
from mlx_voicechat.networks.rnnt import Joint, PredictionNet
from mlx_voicechat.weights.config_file import read_config
from mlx_voicechat.weights.layout import assemble

from .checkpoints import GOLDEN, tensors_of

# No two sizes are equal; two attention blocks in a row, one at the end.
DISTINCT_LLM = LlmConfig(
    vocab_size=53,
    hidden_size=44,
    intermediate_size=60,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    mamba_num_heads=6,
    mamba_head_dim=7,
    ssm_state_size=9,
    conv_kernel=4,
    n_groups=3,
    norm_eps=1e-5,
    pattern="M-M**M-*",
    attention_bias=False,
    mamba_proj_bias=False,
    mlp_bias=False,
    use_bias=False,
    use_conv_bias=True,
    time_step_limit=None,
)
DISTINCT_RNNT = RnntConfig(
    encoder_hidden=29,
    pred_hidden=17,
    pred_layers=3,
    joint_hidden=23,
    blank_id=11,
    max_symbols=4,
    pieces=tuple("abcdefghijk"),
)


def close(actual: mx.array, expected: np.ndarray | mx.array) -> None:
    """Within the oracle's tolerance: 1e-5 times the largest absolute reference, at least 1e-5."""
    expected = np.array(expected)
    np.testing.assert_allclose(np.array(actual), expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


def golden_parameters(name: str, prefix: str, *parts: str) -> list[tuple[str, mx.array]]:
    """Parameters of a golden checkpoint below `prefix`, or only those that begin with one of `parts`."""
    found = assemble(tensors_of(GOLDEN / name), torch_layout=True)
    inside = [(path.removeprefix(prefix), array) for path, array in found.items() if path.startswith(prefix)]
    return [(path, array) for path, array in inside if path.startswith(parts or "")]


def duplex_lm(config: LlmConfig, boosts: dict[int, float] | None = None, user_weight: float = 1.0) -> DuplexLm:
    return DuplexLm(config, text_weight=1.0, user_weight=user_weight, function_weight=2.0, boosts=boosts)


def golden_llm(name: str = "tiny-f32") -> DuplexLm:
    config = read_config(GOLDEN / name)
    llm = duplex_lm(config.llm)
    quantised = {path.removeprefix("stt_model.") for path in config.quantization}
    if quantised:
        nn.quantize(llm, group_size=64, bits=4, class_predicate=lambda path, _: path in quantised)
    parts = ("embed_tokens.", "llm.", "lm_head.", "function_head.")
    llm.load_weights(golden_parameters(name, "stt_model.", *parts), strict=True)
    llm.prepare()
    return llm


@cache
def golden_config() -> ModelConfig:
    return read_config(GOLDEN / "tiny-f32")


@cache
def golden_rnnt() -> tuple[PredictionNet, Joint]:
    """Of tiny-f32; shared, so never altered."""
    config = golden_config().rnnt
    decoder, joint = PredictionNet(config), Joint(config)
    decoder.load_weights(golden_parameters("tiny-f32", "stt_model.rnnt_decoder."), strict=True)
    joint.load_weights(golden_parameters("tiny-f32", "stt_model.rnnt_joint."), strict=True)
    return decoder, joint


def random_weights(module: nn.Module, seed: int = 0) -> None:
    """Fill a module with seeded noise: matrices scaled by their inputs, norms around one, other vectors around zero."""
    rng = np.random.default_rng(seed)

    def draw(path: str, array: mx.array) -> mx.array:
        noise = rng.normal(size=array.shape)
        if array.ndim > 1:
            noise /= np.sqrt(array[0].size)
        elif "norm" in path:
            noise = 1 + 0.2 * noise
        return mx.array(noise.astype(np.float32))

    module.update(tree_map_with_path(draw, module.parameters()))


def random_llm(config: LlmConfig = DISTINCT_LLM, seed: int = 0) -> DuplexLm:
    llm = duplex_lm(config)
    random_weights(llm, seed)
    llm.prepare()
    return llm


def random_rnnt(config: RnntConfig = DISTINCT_RNNT, seed: int = 0) -> tuple[PredictionNet, Joint]:
    decoder, joint = PredictionNet(config), Joint(config)
    random_weights(decoder, seed)
    random_weights(joint, seed + 1)
    return decoder, joint
