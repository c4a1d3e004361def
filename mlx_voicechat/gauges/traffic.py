"""The bytes that each stage of a frame must move, and so the time below which no engine on this memory can get.

A frame without a transcript symbol, late in a conversation: weights in the types they are held in, read once for each
time that the frame needs them all; of tables the rows in use; caches at their length, not their capacity. Activations,
norms' constants and what is written are left out, the Mamba states excepted: they are read and written whole.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from ..config import ModelConfig
from ..weights.checkpoint import llm_is_float32
from ..weights.precision import Plan
from ..weights.shards import Stored
from .memory import AS_STORED, FLOAT, guidance_rows, held, is_global, llm_width, machine

ONCE = {
    "perception": re.compile(r"^stt_model\.perception\.(?!.*\.linear_pos\.)"),  # positions are projected at load
    "rnnt": re.compile(r"^stt_model\.rnnt_joint\.(enc|joint_net)\."),
    "language": re.compile(r"^stt_model\.(llm|lm_head|function_head)\."),
    "tts": re.compile(
        r"^tts_model\.tts_model\.(backbone\.|rvq_embs|gated_fusion_audio_text\.(audio_proj|final_norm)\.)"
    ),
    "codec": re.compile(r"^tts_model\.audio_codec\.decoder\."),
}
EVERY_PASS = re.compile(
    r"^tts_model\.tts_model\.(embed_code\.|mog_head\.(mlp_stack|proj_logits|proj_logs|proj_else)\.)"
)
ONE_COMPONENT = re.compile(r"^tts_model\.tts_model\.mog_head\.(proj_mus\.|low_mat)")  # of C, in every pass
COPY_BYTES, COPIES = 2**28, 7  # of the measured copy: far larger than any processor's caches


def traffic(
    config: ModelConfig,
    stored: Mapping[str, Stored],
    positions: int,
    requantise: Plan = AS_STORED,
    tts_cache_bytes: int = FLOAT,
) -> dict[str, int]:
    """Bytes a frame by stage, after `positions` positions of the timeline; the options are `memory.announce`'s."""
    float32_llm = llm_is_float32(stored)
    sizes = {name: held(name, tensor, requantise, float32_llm) for name, tensor in stored.items()}

    def of(pattern: re.Pattern[str]) -> int:
        return sum(size for name, size in sizes.items() if pattern.search(name))

    moved = {stage: of(pattern) for stage, pattern in ONCE.items()}
    encoder, llm, tts, codec = config.encoder, config.llm, config.tts, config.codec
    moved["perception"] += FLOAT * encoder.n_layers * encoder.d_model * (3 * encoder.left_frames + 1)
    embedding = sum(size for name, size in sizes.items() if name.startswith("stt_model.embed_tokens."))
    moved["language"] += 2 * embedding // llm.vocab_size
    moved["language"] += llm.pattern.count("M") * 2 * FLOAT * llm.mamba_inner * llm.ssm_state_size
    keys_values = 2 * llm.num_key_value_heads * llm.head_dim * llm_width(stored)
    moved["language"] += llm.pattern.count("*") * positions * keys_values
    passes = len(tts.pass_counts)
    moved["tts"] += passes * (of(EVERY_PASS) + of(ONE_COMPONENT) // tts.mog.num_predictions)
    moved["tts"] += FLOAT * (tts.hidden_size + tts.num_quantizers * tts.latent_size)
    moved["tts"] += tts_cache_bytes * _tts_caches(config, tts.prompt_frames + positions)
    moved["codec"] += FLOAT * codec.num_quantizers * codec.latent_dim
    return moved


def _tts_caches(config: ModelConfig, positions: int) -> int:
    tts = config.tts
    layers = range(tts.num_hidden_layers)
    seen = sum(positions if is_global(layer) else min(positions, tts.sliding_window) for layer in layers)
    return seen * guidance_rows(config) * 2 * tts.num_key_value_heads * tts.head_dim


def milliseconds(moved: int, bandwidth_gbps: float) -> float:
    """How long moving so many bytes takes at so many GB (10^9 bytes) a second."""
    return moved / bandwidth_gbps / 1e6


def measured_bandwidth() -> float:
    """GB a second that the device reads and writes: the best of a few passes that copy a large array onto itself."""
    import mlx.core as mx

    array = mx.ones((min(COPY_BYTES, machine().available // 16) // FLOAT,))
    mx.eval(array)
    best = 0.0
    for _ in range(COPIES):
        started = time.perf_counter()
        array = array + 1  # in the same memory, since nothing else holds it: fresh pages would cost more than copying
        mx.eval(array)
        best = max(best, 2 * array.nbytes / (time.perf_counter() - started) / 1e9)
    return best
