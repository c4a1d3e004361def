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
from ..networks.cache import KvCache
from ..weights import layout
from ..weights.precision import Requantisation, types
from ..weights.shards import Stored
from .memory import AS_STORED, FLOAT, States, machine, resident

# Tensors by network and the name within it.
ONCE = {
    "perception": re.compile(r"(?!.*\.linear_pos\.)"),  # positions are projected at load
    "rnnt": re.compile(r"rnnt_joint\.(enc|joint_net)\."),
    "language": re.compile(r"(llm|lm_head|function_head)\."),
    "tts": re.compile(r"(backbone\.|rvq_embs|gated_fusion_audio_text\.(audio_proj|final_norm)\.)"),
    "codec": re.compile(r"decoder\."),
}
EVERY_PASS = re.compile(r"(embed_code\.|mog_head\.(mlp_stack|proj_logits|proj_logs|proj_else)\.)")
ONE_COMPONENT = re.compile(r"mog_head\.(proj_mus\.|low_mat)")  # of C, in every pass
EMBEDDING = re.compile(r"embed_tokens\.")
COPY_BYTES, COPIES = 2**28, 7  # of the measured copy: far larger than any processor's caches


def traffic(
    config: ModelConfig,
    stored: Mapping[str, Stored],
    positions: int,
    requantise: Requantisation = AS_STORED,
    states: States | None = None,
    rows: int = 1,
) -> dict[str, int]:
    """Bytes a frame by stage, after `positions` positions of the timeline; the options are `memory.announce`'s.

    `rows` conversations whose frames run together read the weights once, tables, states and caches each for itself.
    """
    states = states or States(config, types(stored))
    sizes = {name: resident(name, tensor, requantise, *states.types) for name, tensor in stored.items()}

    def of(network: str, pattern: re.Pattern[str]) -> int:
        names = (name for name in sizes if layout.network(name) == network)
        return sum(sizes[name] for name in names if pattern.match(layout.own_name(name)))

    moved = {stage: of(stage, pattern) for stage, pattern in ONCE.items()}
    encoder, tts, codec, own = config.encoder, config.tts, config.codec, dict.fromkeys(ONCE, 0)
    language, speech = states.language_state(positions), states.tts_state(positions)
    width = FLOAT // 2 if states.types.narrow else FLOAT
    own["perception"] += width * encoder.n_layers * encoder.d_model * (3 * encoder.left_frames + 1)
    own["language"] += 2 * of("language", EMBEDDING) // config.llm.vocab_size
    own["language"] += 2 * sum(state.ssm.nbytes for state in language.mamba)
    own["language"] += sum(_read_bytes(cache, positions) for cache in language.caches)
    passes = len(tts.pass_counts)
    moved["tts"] += passes * of("tts", EVERY_PASS)
    own["tts"] += passes * (of("tts", ONE_COMPONENT) // tts.mog.num_predictions)
    own["tts"] += FLOAT * (tts.hidden_size + tts.num_quantizers * tts.latent_size)
    own["tts"] += sum(_read_bytes(cache, tts.prompt_frames + positions) for cache in speech.caches)
    own["codec"] += FLOAT * codec.num_quantizers * codec.latent_dim
    return {stage: weights + rows * own[stage] for stage, weights in moved.items()}


def _read_bytes(cache: KvCache, positions: int) -> int:
    """What attention reads of a cache with room for `positions`: those it holds, not its room."""
    cached = positions if cache.window is None else min(positions, cache.window)
    return cache.nbytes // max(1, cache.room(positions)) * cached


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
