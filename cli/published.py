"""The memory that each of the published checkpoints takes, without one of them at hand."""

from __future__ import annotations

import json

from mlx_voicechat.config import ModelConfig
from mlx_voicechat.gauges import memory, plans
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.weights import assets, layout
from mlx_voicechat.weights.config_file import parse_config
from mlx_voicechat.weights.hub_cache import DOWNLOAD_BYTES
from mlx_voicechat.weights.precision import LONG_SECONDS
from mlx_voicechat.weights.shards import Stored
from mlx_voicechat.weights.synthetic import GROUP_SIZE


def needs() -> dict[str, tuple[int, int]]:
    """Bytes of memory by name, after SHORT_SECONDS and LONG_SECONDS of conversation, speech weights held in 8 bits."""
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    short, long = (round(seconds / config.frame_seconds) for seconds in (memory.SHORT_SECONDS, LONG_SECONDS))
    found = {}
    for name in DOWNLOAD_BYTES:
        stored = headers(config, _bits(name))
        form = plans.choose(config, stored, LoadOptions(speech_weights="q8"))
        first, later = (
            memory.announce(config, stored, n, requantise=form.requantise, states=form.states).total
            for n in (short, long)
        )
        found[name] = (first, later)
    return found


def forms() -> dict[str, list[plans.Row]]:
    """By name: the forms in which this machine can hold it, and what a frame then moves (`plans.table`)."""
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    return {name: plans.table(config, headers(config, _bits(name)), LoadOptions()) for name in DOWNLOAD_BYTES}


def _bits(name: str) -> int | None:
    return None if name == "bf16" else int(name.removesuffix("bit"))


def headers(config: ModelConfig, bits: int | None) -> dict[str, Stored]:
    """What the files' headers say: bfloat16 but for `A_log`, the LLM's matrices in `bits` with float32 scales.

    For 4 bits 1,878 tensors: the original's 1,632, and scales and biases of 123 layers.
    """
    found = {}
    for name, shape in layout.shapes(config, buffers=True).items():
        if bits is None or not layout.LANGUAGE_MATRIX.search(name):
            kind = "I32" if layout.is_integer(name) else "F32" if name.endswith(".A_log") else "BF16"
            found[name] = Stored("", shape, kind)
            continue
        rows, inputs = shape
        found[name] = Stored("", (rows, inputs * bits // 32), "U32")
        for part in ("scales", "biases"):
            found[name.removesuffix("weight") + part] = Stored("", (rows, inputs // GROUP_SIZE), "F32")
    return found
