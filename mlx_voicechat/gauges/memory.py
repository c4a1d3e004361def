"""How much memory a checkpoint takes, told from its config and its files' headers, and how much this machine has.

Nothing is loaded: the weights in the types they will be held in, the constants that loading derives from them, and
what a conversation of a stated length keeps.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..config import GLOBAL_LAYER_PERIOD, ModelConfig
from ..errors import InputError
from ..networks.cache import BLOCK
from ..weights import inventory, layout
from ..weights.checkpoint import is_widened, llm_is_float32
from ..weights.precision import LONG_SECONDS, Plan, fits, held_bytes, plan
from ..weights.shards import Stored

NETWORKS = ("perception", "rnnt", "language", "tts", "codec")
PREFIXES = (  # first match; the networks nest in the checkpoint's names
    ("stt_model.perception.", "perception"),
    ("stt_model.rnnt_", "rnnt"),
    ("stt_model.", "language"),
    ("tts_model.audio_codec.", "codec"),
    ("tts_model.", "tts"),
)
KNOWN = ("stt_model.", "tts_model.")
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
NARROWED = ("F64", "I64", "U64")  # held in 4 bytes
FLOATING = ("F32", "F16", "BF16")
SECOND_BIAS = re.compile(r"\.lstm\.bias_hh_l\d+$")  # added to the first when loaded
FLOAT = 4  # bytes of what computes in float32: constants and state
PUBLISHED = "mlx-community/NemotronLabs-VoiceChat-11B-{bits}bit"
PUBLISHED_BITS, GROUP_SIZE, GROUP_BYTES = (8, 4), 64, 8  # a float32 scale and bias per group
SHORT_SECONDS = 60  # of conversation, for the check at load
AS_STORED: Plan = MappingProxyType({})  # no layer is quantised at load
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Announced:
    """Bytes by what they are for: weights by network, derived constants, an opening kept, a conversation by network."""

    weights: dict[str, int]
    text_table: int
    constants: int
    opening: int
    session: dict[str, int]
    frames: int

    @property
    def loaded(self) -> int:
        """What loading takes."""
        return sum(self.weights.values()) + self.text_table + self.constants

    @property
    def total(self) -> int:
        """What loading and one conversation of `frames` frames take."""
        return self.loaded + self.opening + sum(self.session.values())


TTS_CACHE_BYTES = {"f32": 4, "bf16": 2}  # of a number in the TTS's attention caches, by the name of the choice


def tts_cache_bytes(choice: str) -> int:
    """Bytes of a number for `f32` or `bf16`; raises InputError for any other word."""
    if choice not in TTS_CACHE_BYTES:
        known = " or ".join(TTS_CACHE_BYTES)
        raise InputError(f"Keys and values cannot be held as {choice!r}.", f"Choose {known}.")
    return TTS_CACHE_BYTES[choice]


class Machine(NamedTuple):
    """Memory in bytes: all there is, and what programs can still get."""

    total: int
    available: int


def announce(
    config: ModelConfig,
    stored: Mapping[str, Stored],
    frames: int,
    prompt_tokens: int = 0,
    requantise: Plan = AS_STORED,
    tts_cache_bytes: int = FLOAT,
) -> Announced:
    """What the checkpoint with these headers takes, with one conversation of `frames` frames after a system prompt.

    `requantise`: the layers that loading quantises, as in `model.load` (`speech_plan`). `tts_cache_bytes`: of a number
    in the TTS's attention caches.
    """
    weights = dict.fromkeys(NETWORKS, 0)
    float32_llm, width = llm_is_float32(stored), llm_width(stored)
    for name, tensor in stored.items():
        if name.startswith(KNOWN):  # others are a fault that loading reports
            weights[network(name)] += held(name, tensor, requantise, float32_llm)
    opening = session(config, width, 0, prompt_tokens, tts_cache_bytes)
    return Announced(
        weights=weights,
        text_table=config.llm.vocab_size * config.tts.hidden_size * FLOAT,
        constants=constants(config),
        opening=sum(opening.values()),
        session=session(config, width, frames, prompt_tokens, tts_cache_bytes),
        frames=frames,
    )


def speech_plan(
    config: ModelConfig, stored: Mapping[str, Stored], choice: str | None, tts_cache_bytes: int = FLOAT
) -> Plan:
    """The layers that `model.load` quantises for `choice` (f32, q8 or None) on this machine; raises InputError."""
    frames = round(LONG_SECONDS / config.frame_seconds)
    needed = announce(config, stored, frames, tts_cache_bytes=tts_cache_bytes).total
    return plan(stored, choice, fits(needed, machine().total))


def network(name: str) -> str:
    """Which of NETWORKS a tensor belongs to; voices and the codes of silence are the TTS's."""
    return next(found for prefix, found in PREFIXES if name.startswith(prefix))


def held(name: str, tensor: Stored, requantise: Plan = AS_STORED, float32_llm: bool = False) -> int:
    """Bytes that a tensor takes once it is loaded: 0 if no conversation needs it (see `checkpoint.settle`)."""
    voice = ".audio_prompt_latents." in name
    if layout.is_unused(name) or SECOND_BIAS.search(name) or (layout.OPTIONAL.search(name) and not voice):
        return 0
    if name in requantise:
        return held_bytes(tensor, requantise[name])
    four = tensor.dtype in NARROWED or (tensor.dtype in FLOATING and is_widened(name, float32_llm))
    return math.prod(tensor.shape) * (4 if four else WIDTHS.get(tensor.dtype, 1))


def llm_width(stored: Mapping[str, Stored]) -> int:
    """Bytes of a number in the type that the LLM computes in, in which its attention caches are."""
    return FLOAT if llm_is_float32(stored) else 2


def constants(config: ModelConfig) -> int:
    """What the networks' `prepare` derives from weights and config and keeps, the text table excepted; the larger."""
    mel, encoder, llm, tts, codec = config.mel, config.encoder, config.llm, config.tts, config.codec
    window = encoder.left_frames + 1
    perception = mel.features * (mel.n_fft // 2 + 1) + mel.n_fft
    perception += encoder.n_layers * ((encoder.d_model + encoder.n_heads) * window)
    perception += encoder.n_layers * encoder.d_model * (encoder.conv_kernel_size + 1)
    language = llm.conv_dim * (llm.conv_kernel + 1) + llm.mamba_inner + 3 * llm.mamba_num_heads
    speech = tts.num_quantizers * tts.codebook_size
    speech += tts.num_hidden_layers * (tts.num_attention_heads + tts.num_key_value_heads) * tts.head_dim
    taps = codec.blocks_per_stage * codec.block_kernel_size * codec.base_channels * sum(codec.channel_multipliers)
    return FLOAT * (perception + llm.pattern.count("M") * language + speech + taps)


def session(
    config: ModelConfig, llm_bytes: int, frames: int, prompt_tokens: int = 0, tts_cache_bytes: int = FLOAT
) -> dict[str, int]:
    """What one conversation keeps after so many frames, by network. Views count with the buffer that they keep."""
    rnnt = config.rnnt
    return {
        "perception": FLOAT * _perception_state(config),
        "rnnt": FLOAT * (rnnt.joint_hidden + 2 * rnnt.pred_layers * rnnt.pred_hidden),
        "language": _language_state(config, llm_bytes, prompt_tokens + frames),
        "tts": tts_cache_bytes * _tts_caches(config, config.tts.prompt_frames + max(0, prompt_tokens + frames - 1)),
        "codec": FLOAT * _codec_state(config),
    }


def cache_positions(positions: int, phase: int = 0, window: int | None = None) -> int:
    """Positions that a `KvCache` has room for once it holds `positions`."""
    if positions == 0:
        return 0
    phase %= BLOCK
    room = -(-(positions + phase) // BLOCK) * BLOCK - phase
    return room if window is None else min(room, window)


def is_global(layer: int) -> bool:
    """Whether a layer of the TTS attends to everything rather than to a window."""
    return (layer + 1) % GLOBAL_LAYER_PERIOD == 0


def guidance_rows(config: ModelConfig) -> int:
    """Rows that the TTS runs for one conversation."""
    return 1 if config.tts.guidance_scale == 0 else 2


def machine() -> Machine:
    """What this machine has: MemAvailable on Linux (a container's limit respected), free and
    inactive pages on macOS, where no more than the GPU's working set counts."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    if sys.platform == "darwin":
        done = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=False)
        import mlx.core as mx

        working_set = int(mx.device_info().get("max_recommended_working_set_size", total))
        return Machine(total, min(working_set, parse_vm_stat(done.stdout) or total))
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read(MEMINFO), re.MULTILINE)
    available = int(found[1]) * 1024 if found else page * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - int(used)))
    return Machine(total, available)


def parse_vm_stat(text: str) -> int:
    """Bytes that macOS can hand out, from what `vm_stat` prints; 0 if it cannot be read."""
    page = re.search(r"page size of (\d+) bytes", text)
    kinds = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s*(\d+)\.", text, re.MULTILINE)
    return int(page[1]) * sum(map(int, kinds)) if page else 0


def shortfall(
    config: ModelConfig,
    stored: Mapping[str, Stored],
    have: Machine,
    requantise: Plan = AS_STORED,
    tts_cache_bytes: int = FLOAT,
) -> str | None:
    """A warning when a checkpoint and a short conversation do not fit, with what would; None when they do."""
    frames = round(SHORT_SECONDS / config.frame_seconds)
    needed = announce(config, stored, frames, requantise=requantise, tts_cache_bytes=tts_cache_bytes).total
    if needed <= have.available:
        return None
    smaller = {bits: needed - saved for bits in PUBLISHED_BITS if (saved := _saved(config, stored, bits, frames)) > 0}
    fitting = [bits for bits, size in smaller.items() if size <= have.available]
    close = "close other programs, or it will be slow."
    if fitting:
        advice = f"{PUBLISHED.format(bits=fitting[0])} needs {gigabytes(smaller[fitting[0]])} and would fit."
    elif smaller:
        least = min(smaller, key=smaller.__getitem__)
        advice = f"Even {PUBLISHED.format(bits=least)} needs {gigabytes(smaller[least])}: {close}"
    else:
        advice = f"There is no smaller checkpoint: {close}"
    return (
        f"This model needs about {gigabytes(needed)} of memory, and {gigabytes(have.available)} of "
        f"{gigabytes(have.total)} are available. {advice}"
    )


def gigabytes(size: float) -> str:
    """Bytes for a person to read."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _saved(config: ModelConfig, stored: Mapping[str, Stored], bits: int, frames: int) -> int:
    """Bytes saved if the LLM's matrices had so many bits, as in the published checkpoints, whose state is float32."""
    float32_llm, shapes = llm_is_float32(stored), inventory.tensors(config)
    matrices = [name for name, shape in shapes.items() if network(name) == "language" and len(shape) == 2]
    now = 0
    for name in matrices:
        parts = (name, name.replace(".weight", ".scales"), name.replace(".weight", ".biases"))
        now += sum(held(part, stored[part], float32_llm=float32_llm) for part in parts if part in stored)
    elements = sum(math.prod(shapes[name]) for name in matrices)
    states = [session(config, width, count) for width in (llm_width(stored), FLOAT) for count in (0, frames)]
    now += sum(sum(state.values()) for state in states[:2]) - sum(sum(state.values()) for state in states[2:])
    return now - elements * bits // 8 - elements // GROUP_SIZE * GROUP_BYTES


def _perception_state(config: ModelConfig) -> int:
    mel, encoder = config.mel, config.encoder
    numbers = 2 * config.frame_samples_in - mel.hop_samples + mel.n_fft // 2 + 1
    bins, channels, rows = encoder.features, 1, encoder.subsampling_factor
    while rows > 1:
        numbers += rows * bins * channels
        bins, channels, rows = bins // 2 + 1, encoder.subsampling_channels, rows // 2
    return numbers + encoder.n_layers * encoder.d_model * (2 * encoder.left_frames + 2 + encoder.conv_kernel_size)


def _language_state(config: ModelConfig, width: int, positions: int) -> int:
    llm = config.llm
    mamba = (llm.conv_kernel - 1) * llm.conv_dim * width + FLOAT * llm.mamba_inner * llm.ssm_state_size
    count = llm.pattern.count("*")
    room = sum(cache_positions(positions, index * BLOCK // count) for index in range(count))
    return llm.pattern.count("M") * mamba + room * 2 * llm.num_key_value_heads * llm.head_dim * width


def _tts_caches(config: ModelConfig, positions: int) -> int:
    tts = config.tts
    windows = [None if is_global(layer) else tts.sliding_window for layer in range(tts.num_hidden_layers)]
    room = sum(cache_positions(positions, layer, window) for layer, window in enumerate(windows))
    return room * guidance_rows(config) * 2 * tts.num_key_value_heads * tts.head_dim


def _codec_state(config: ModelConfig) -> int:
    codec, rows, numbers = config.codec, 1, 0
    for multiplier, rate in zip(codec.channel_multipliers[::-1], codec.downsample_rates[::-1], strict=True):
        rows *= rate
        inputs = (rows + codec.block_kernel_size - 1) * codec.base_channels * multiplier
        numbers += codec.blocks_per_stage * inputs
    return numbers


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
