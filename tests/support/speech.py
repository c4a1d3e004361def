"""EAR-TTS for tests: the golden checkpoint's, random ones of any size, and the oracle's arrays."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlx_voicechat.config import CharacterEncoderConfig, ModelConfig, MogConfig, TtsConfig
from mlx_voicechat.networks.ear_tts import EarTts
from mlx_voicechat.weights.config_file import read_config
from mlx_voicechat.weights.layout import assemble

from .checkpoints import GOLDEN

ORACLE = dict(np.load(GOLDEN / "oracle" / "tts.npz"))
PREFIX = "tts_model.tts_model."
PAD, EOS = 12, 2
# No two sizes are equal, query heads share keys, layers reach past the global one.
DISTINCT = TtsConfig(
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=7,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=10,
    sliding_window=9,
    latent_size=20,
    num_quantizers=7,
    codebook_size=17,
    exponent=3.0,
    guidance_scale=0.2,
    top_p=0.95,
    noise_scale=0.001,
    prompt_frames=5,
    characters=CharacterEncoderConfig(
        hidden_size=44,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=14,
        char_vocab_size=23,
    ),
    mog=MogConfig(intermediate_size=36, low_rank=6, min_log_std=-4.0, num_layers=2, num_predictions=29),
)
VOCABULARY = 31


def close(actual: mx.array, expected: np.ndarray) -> None:
    """Within the oracle's tolerance: 1e-5 times the largest absolute reference, at least 1e-5."""
    np.testing.assert_allclose(np.array(actual), expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


@cache
def golden_config() -> ModelConfig:
    return read_config(GOLDEN / "tiny-f32")


@cache
def golden_weights() -> dict[str, mx.array]:
    raw: dict[str, mx.array] = {}
    for shard in sorted((GOLDEN / "tiny-f32").glob("*.safetensors")):
        loaded = mx.load(str(shard))
        assert isinstance(loaded, dict)
        raw |= loaded
    return assemble(raw, torch_layout=True)


def golden_characters() -> list[list[int]]:
    return [[int(c) for c in row if c >= 0] for row in ORACLE["subword_char_ids"]]


def golden_voice() -> mx.array:
    return golden_weights()["tts_model.audio_prompt_latents.Aria"]


@cache
def golden_tts() -> EarTts:
    """The golden checkpoint's TTS, prepared, not compiled; shared, so never altered."""
    config = golden_config()
    tts = EarTts(config.tts, config.llm.vocab_size)
    weights = golden_weights()
    tts.load_weights([(k.removeprefix(PREFIX), v) for k, v in weights.items() if k.startswith(PREFIX)], strict=True)
    tts.prepare(weights["tts_model.codec_silence_tokens"], config.pad_id, config.eos_id)
    tts.use_text_rows(tts.text_rows(golden_characters()))
    return tts


def random_weights(module: EarTts, seed: int = 0) -> None:
    """Fill a module with seeded noise: matrices scaled by their inputs, vectors (norms, biases) around one half."""
    rng = np.random.default_rng(seed)

    def draw(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = rng.normal(size=array.shape)
        scaled = 0.5 + 0.2 * noise if array.ndim < 2 else noise / np.sqrt(array.shape[-1])
        return mx.array(scaled.astype(np.float32))

    module.update(tree_map(draw, module.parameters()))


def prepare(tts: EarTts, config: TtsConfig) -> EarTts:
    """Prepare a random TTS with a made-up vocabulary, some tokens without characters."""
    size = config.characters.char_vocab_size
    characters = [[(token * 5 + i) % size for i in range(token % 4)] for token in range(VOCABULARY)]
    tts.prepare(mx.arange(config.num_quantizers) % config.codebook_size, PAD, EOS)
    tts.use_text_rows(tts.text_rows(characters))
    return tts


def random_tts(config: TtsConfig = DISTINCT, seed: int = 0) -> EarTts:
    tts = EarTts(config, VOCABULARY)
    random_weights(tts, seed)
    return prepare(tts, config)


def draws(config: TtsConfig, count: int, batch: int = 1, seed: int = 0) -> list[tuple[mx.array, mx.array]]:
    """Noise of `count` steps: uniform (B, passes, C), normal (B, passes, Z) each."""
    rng, passes = np.random.default_rng(seed), len(config.pass_counts)
    return [
        (
            mx.array(rng.random((batch, passes, config.mog.num_predictions), np.float32)),
            mx.array(rng.standard_normal((batch, passes, config.latent_size), np.float32)),
        )
        for _ in range(count)
    ]
