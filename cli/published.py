"""The memory that each of the published checkpoints takes, without one of them at hand."""

from __future__ import annotations

import json
import math

from mlx_voicechat import assets
from mlx_voicechat.config import ModelConfig, parse_config
from mlx_voicechat.gauges import memory
from mlx_voicechat.weights import inventory
from mlx_voicechat.weights.hub_cache import DOWNLOAD_BYTES
from mlx_voicechat.weights.precision import LONG_SECONDS
from mlx_voicechat.weights.shards import Stored
from mlx_voicechat.weights.synthetic import GROUP_SIZE, QUANTISED


def needs() -> dict[str, tuple[int, int]]:
    """Bytes of memory by name, after SHORT_SECONDS and LONG_SECONDS of conversation, speech weights held in 8 bits."""
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    short, long = (round(seconds / config.frame_seconds) for seconds in (memory.SHORT_SECONDS, LONG_SECONDS))
    found = {}
    for name, size in DOWNLOAD_BYTES.items():
        stored = headers(config, None if name == "bf16" else int(name.removesuffix("bit")))
        counted = sum(math.prod(tensor.shape) * memory.WIDTHS[tensor.dtype] for tensor in stored.values())
        beyond = max(0, size - counted)  # what the published files hold besides
        plan = memory.speech_plan(config, stored, "q8")
        first, later = (memory.announce(config, stored, n, requantise=plan).total for n in (short, long))
        found[name] = (first + beyond, later + beyond)
    return found


def headers(config: ModelConfig, bits: int | None) -> dict[str, Stored]:
    """What the files' headers would say: bfloat16, the LLM's matrices in `bits`."""
    found = {}
    for name, shape in inventory.tensors(config).items():
        if bits is None or not QUANTISED.search(name):
            found[name] = Stored("", shape, "I32" if inventory.is_integer(name) else "BF16")
            continue
        rows, inputs = shape
        found[name] = Stored("", (rows, inputs * bits // 32), "U32")
        for part in ("scales", "biases"):
            found[name.removesuffix("weight") + part] = Stored("", (rows, inputs // GROUP_SIZE), "BF16")
    return found
