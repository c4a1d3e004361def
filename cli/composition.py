"""What a checkpoint is made of: parameters and bytes by network and precision, and how long a conversation it can hold.

Told from the files' headers; nothing is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlx_voicechat.config import ModelConfig
from mlx_voicechat.gauges.memory import WIDTHS, Announced, States
from mlx_voicechat.weights.layout import NETWORKS, network
from mlx_voicechat.weights.shards import Stored

OTHER = "other"  # tensors of no network
PACKED = ("scales", "biases")  # beside a quantised weight; they are no parameters
LONGEST_FRAMES = 2**30  # a search ends here: two years


class Size(NamedTuple):
    """Values, and the bytes that store them."""

    parameters: int
    bytes: int

    def __add__(self, other: Any) -> Size:
        return Size(self.parameters + other.parameters, self.bytes + other.bytes)


class Longest(NamedTuple):
    """Seconds of conversation: until the memory is full, which nothing else ends; what the LLM's config says it was
    made for, None if it does not; and how far back most layers of the speech generator look."""

    memory_seconds: float
    positions_seconds: float | None
    window_seconds: float


def composition(
    stored: Mapping[str, Stored], quantization: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Size]]:
    """By network and by precision (`f32`, `bf16`, `4-bit`, `mxfp4` ...), in the order of NETWORKS."""
    found: dict[str, dict[str, Size]] = {name: {} for name in (*NETWORKS, OTHER)}
    for name, tensor in stored.items():
        place = found[network(name) or OTHER]
        precision, part = _part(name, tensor, quantization)
        place[precision] = place.get(precision, Size(0, 0)) + part
    return {name: dict(sorted(parts.items())) for name, parts in found.items() if parts}


def _part(name: str, tensor: Stored, quantization: Mapping[str, Mapping[str, Any]]) -> tuple[str, Size]:
    values, size = math.prod(tensor.shape), WIDTHS.get(tensor.dtype, 1)
    module, _, kind = name.rpartition(".")
    entry = quantization.get(module)
    if entry is None or kind not in ("weight", *PACKED):
        return tensor.dtype.lower(), Size(values, values * size)
    mode = str(entry.get("mode", "affine"))
    precision = f"{_bits(entry)}-bit" if mode == "affine" else mode
    return precision, Size(0 if kind in PACKED else values * 8 * size // _bits(entry), values * size)


def _bits(entry: Mapping[str, Any]) -> int:
    bits = entry.get("bits")
    return bits if isinstance(bits, int) and bits > 0 else 8


def longest(config: ModelConfig, states: States, announced: Announced, available_bytes: int) -> Longest:
    """How long a conversation can be, in so much memory: keys and values grow with it.

    `announced`: of this checkpoint, with a conversation of any length.
    """
    room = available_bytes - announced.loaded - announced.opening
    low, high = 0, LONGEST_FRAMES
    while low < high:  # the most frames that fit
        middle = (low + high + 1) // 2
        if sum(states.session(middle).values()) <= room:
            low = middle
        else:
            high = middle - 1
    positions, frame = config.llm.max_positions, config.frame_seconds
    return Longest(
        memory_seconds=round(low * frame, 3),
        positions_seconds=None if positions is None else round(positions * frame, 3),
        window_seconds=round(config.tts.sliding_window * frame, 3),
    )
