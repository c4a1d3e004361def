"""How much memory a checkpoint takes, told from its config and its files' headers, and how much this machine has.

Nothing is loaded: the weights in the types they will be held in, the constants that loading derives from them, and
what a conversation of a stated length keeps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten

from ..config import ModelConfig
from ..frame import rounds, rows_for
from ..networks.duplex_lm import LlmState
from ..networks.ear_tts import TtsState
from ..networks.rnnt import GreedyDecoder
from ..networks.tree import Networks
from ..weights import layout
from ..weights.precision import Requantisation, Types, llm_is_float32, resident_bytes, types
from ..weights.shards import Stored

WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
NARROWED = ("F64", "I64", "U64")  # held in 4 bytes
FLOATING = ("F32", "F16", "BF16")
FLOAT = 4  # bytes of what computes in float32: constants and state
PUBLISHED = "mlx-community/NemotronLabs-VoiceChat-11B-{bits}bit"
PUBLISHED_BITS, GROUP_SIZE, GROUP_BYTES = (8, 4), 64, 8  # a float32 scale and bias per group
SHORT_SECONDS = 60  # of conversation, for the check at load
AS_STORED: Requantisation = MappingProxyType({})  # no layer is quantised at load
KV_TYPES = {"f32": mx.float32, "bf16": mx.bfloat16}  # of the TTS's attention caches, by LoadOptions.kv_cache
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Announced:
    """Bytes by what they are for: weights by network, derived constants, an opening kept, a conversation by network.

    `row`: of a conversation what has the same size at every frame.
    """

    weights: dict[str, int]
    text_table: int
    constants: int
    opening: int
    session: dict[str, int]
    row: int
    frames: int

    @property
    def loaded(self) -> int:
        """What loading takes."""
        return sum(self.weights.values()) + self.text_table + self.constants

    @property
    def total(self) -> int:
        """What loading and one conversation of `frames` frames take."""
        return self.with_sessions(1)

    def with_sessions(self, count: int) -> int:
        """What loading and so many conversations take, the rows that they leave free in a slab as well."""
        free = sum(rows_for(taken) - taken for taken in rounds(count))
        return self.loaded + self.opening + count * sum(self.session.values()) + free * self.row


class Machine(NamedTuple):
    """Memory in bytes: all there is, and what programs can still get."""

    total: int
    available: int


def announce(
    config: ModelConfig,
    stored: Mapping[str, Stored],
    frames: int,
    prompt_tokens: int = 0,
    requantise: Requantisation = AS_STORED,
    states: States | None = None,
) -> Announced:
    """What the checkpoint with these headers takes, with one conversation of `frames` frames after a system prompt.

    `requantise`: the layers that loading quantises (`precision.plan`). `states`: what a conversation keeps and the
    networks compute in, for who has asked before or wants narrower ones.
    """
    weights, states = dict.fromkeys(layout.NETWORKS, 0), states or States(config, types(stored))
    for name, tensor in stored.items():
        if (network := layout.network(name)) is not None:  # others are a fault that loading reports
            weights[network] += resident(name, tensor, requantise, *states.types)
    opening = states.session(0, prompt_tokens)
    return Announced(
        weights=weights,
        text_table=config.llm.vocab_size * config.tts.hidden_size * FLOAT,
        constants=constants(config),
        opening=sum(opening.values()),
        session=states.session(frames, prompt_tokens),
        row=states.row(),
        frames=frames,
    )


def resident(
    name: str,
    tensor: Stored,
    requantise: Requantisation = AS_STORED,
    float32_llm: bool = False,
    narrow: bool = False,
) -> int:
    """Bytes that a tensor takes once it is loaded: 0 if no conversation needs it (see `checkpoint.settle`)."""
    left_out = layout.OPTIONAL.search(name) and not name.startswith(layout.VOICE_PREFIX)
    if left_out or layout.is_unused(name) or layout.is_added(name):
        return 0
    halved = narrow and layout.is_narrowed(name)
    if name in requantise:
        return resident_bytes(tensor, requantise[name], FLOAT // 2 if halved else FLOAT)
    if halved and tensor.dtype in (*FLOATING, "F64"):
        return math.prod(tensor.shape) * 2
    four = tensor.dtype in NARROWED or (tensor.dtype in FLOATING and layout.is_widened(name, float32_llm))
    return math.prod(tensor.shape) * (4 if four else WIDTHS.get(tensor.dtype, 1))


def constants(config: ModelConfig) -> int:
    """What the networks' `prepare` derives from weights and config and keeps, the text table excepted; the larger."""
    mel, encoder, llm, tts, codec = config.mel, config.encoder, config.llm, config.tts, config.codec
    window = encoder.left_frames + 1
    perception = mel.features * (mel.n_fft // 2 + 1) + mel.n_fft
    perception += encoder.n_layers * ((encoder.d_model + encoder.n_heads) * window)
    perception += encoder.n_layers * encoder.d_model * encoder.conv_kernel_size
    language = llm.conv_dim * (llm.conv_kernel + 1) + llm.mamba_inner + 3 * llm.mamba_num_heads
    speech = tts.num_quantizers * tts.codebook_size
    speech += tts.num_hidden_layers * (tts.num_attention_heads + tts.num_key_value_heads) * tts.head_dim
    taps = codec.blocks_per_stage * codec.block_kernel_size * codec.base_channels * sum(codec.channel_multipliers)
    return FLOAT * (perception + llm.pattern.count("M") * language + speech + taps)


class States:
    """What a conversation keeps, asked of the networks: their states, built lazily, so that nothing is allocated."""

    def __init__(self, config: ModelConfig, types: Types, kv_cache: str = "f32") -> None:
        self.config, self.types = config, types
        tree = Networks(config)
        self.language, self.tts = tree.stt_model, tree.tts_model.tts_model
        self.rnnt = GreedyDecoder(self.language.rnnt_decoder, self.language.rnnt_joint, config.rnnt)
        norm = self.language.llm.norm_f
        norm.weight = norm.weight.astype(mx.float32 if types.float32_llm else mx.bfloat16)
        self.tts.backbone.cache_dtype = KV_TYPES[kv_cache]

    def session(self, frames: int, prompt_tokens: int = 0) -> dict[str, int]:
        """Bytes after so many frames, by network. Views count with the buffer that they keep."""
        return {
            "perception": _perception_bytes(self.config, FLOAT // 2 if self.types.narrow else FLOAT),
            "rnnt": _bytes(self.rnnt.init_state()),
            "language": _bytes(self.language_state(prompt_tokens + frames).arrays),
            "tts": _bytes(self.tts_state(max(0, prompt_tokens + frames - 1)).arrays),
            "codec": FLOAT * _codec_buffers(self.config),
        }

    def row(self) -> int:
        """Bytes of what has the same size at every frame: all but the caches."""
        return sum(self.session(0).values()) - sum(cache.nbytes for cache in self.tts_state(0).caches)

    def language_state(self, positions: int) -> LlmState:
        """With room for so many positions."""
        state = self.language.init_state()
        self.language.reserve(state, positions)
        return state

    def tts_state(self, positions: int) -> TtsState:
        """With room for so many positions after the voice prompt."""
        state = self.tts.init_state()
        self.tts.reserve(state, self.config.tts.prompt_frames + positions)
        return state


def _perception_bytes(config: ModelConfig, width: int) -> int:
    """Of what the state's views are cut from, which holds a frame more: no state tells it. `width`: the encoder's."""
    mel, encoder = config.mel, config.encoder
    samples = 2 * config.frame_samples_in - mel.hop_samples + mel.n_fft // 2 + 1
    bins, channels, rows, numbers = encoder.features, 1, encoder.subsampling_factor, 0
    while rows > 1:
        numbers += rows * bins * channels
        bins, channels, rows = bins // 2 + 1, encoder.subsampling_channels, rows // 2
    numbers += encoder.n_layers * encoder.d_model * (2 * encoder.left_frames + 2 + encoder.conv_kernel_size - 1)
    return FLOAT * samples + width * numbers


def _codec_buffers(config: ModelConfig) -> int:
    """As for perception: each block's last inputs are cut from those of a frame and of its past."""
    codec, rows, numbers = config.codec, 1, 0
    for multiplier, rate in zip(codec.channel_multipliers[::-1], codec.downsample_rates[::-1], strict=True):
        rows *= rate
        inputs = (rows + codec.block_kernel_size - 1) * codec.base_channels * multiplier
        numbers += codec.blocks_per_stage * inputs
    return numbers


def _bytes(tree: Any) -> int:
    flat: Any = tree_flatten(tree, destination={})
    return sum(array.nbytes for array in flat.values())


def machine() -> Machine:
    """What this machine has: a container's limit respected on Linux, on macOS no more than the GPU's working set."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    if sys.platform == "darwin":
        return Machine(total, min(available, int(mx.device_info().get("max_recommended_working_set_size", total))))
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - int(used)))
    return Machine(total, available)


def shortfall(
    config: ModelConfig,
    stored: Mapping[str, Stored],
    have: Machine,
    requantise: Requantisation = AS_STORED,
    states: States | None = None,
    sessions: int = 1,
) -> str | None:
    """A warning when a checkpoint and short conversations do not fit, with what would; None when they do."""
    frames = round(SHORT_SECONDS / config.frame_seconds)
    needed = announce(config, stored, frames, requantise=requantise, states=states).with_sessions(sessions)
    if needed <= have.available:
        return None
    smaller = {
        bits: needed - saved for bits in PUBLISHED_BITS if (saved := _saved(config, stored, bits, frames, sessions)) > 0
    }
    fitting = [bits for bits, size in smaller.items() if size <= have.available]
    close = "close other programs, or it will be slow."
    if fitting:
        advice = f"{PUBLISHED.format(bits=fitting[0])} needs {gigabytes(smaller[fitting[0]])} and would fit."
    elif smaller:
        least = min(smaller, key=smaller.__getitem__)
        advice = f"Even {PUBLISHED.format(bits=least)} needs {gigabytes(smaller[least])}: {close}"
    else:
        advice = f"There is no smaller checkpoint: {close}"
    conversations = f" for {sessions} conversations" if sessions > 1 else ""
    return (
        f"This model needs about {gigabytes(needed)} of memory{conversations}, and {gigabytes(have.available)} of "
        f"{gigabytes(have.total)} are available. {advice}"
    )


def gigabytes(size: float) -> str:
    """Bytes for a person to read."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _saved(config: ModelConfig, stored: Mapping[str, Stored], bits: int, frames: int, sessions: int = 1) -> int:
    """Bytes saved if the LLM's matrices had so many bits, as in the published checkpoints, whose state is float32."""
    float32_llm, shapes = llm_is_float32(stored), layout.shapes(config)
    matrices = list(filter(layout.LANGUAGE_MATRIX.search, shapes))
    now = 0
    for name in matrices:
        parts = (name, name.replace(".weight", ".scales"), name.replace(".weight", ".biases"))
        now += sum(resident(part, stored[part], float32_llm=float32_llm) for part in parts if part in stored)
    elements = sum(math.prod(shapes[name]) for name in matrices)
    for sign, states in ((1, States(config, Types(float32_llm))), (-1, States(config, Types(float32_llm=True)))):
        opening, conversation = (_bytes(states.language_state(count).arrays) for count in (0, frames))
        now += sign * (opening + sessions * conversation)
    return now - elements * bits // 8 - elements // GROUP_SIZE * GROUP_BYTES


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
