"""Which checkpoint to take on a machine: the best one that its memory holds and moves in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from mlx_voicechat.config import ModelConfig
from mlx_voicechat.convert import plans
from mlx_voicechat.gauges import memory, traffic
from mlx_voicechat.weights import assets, layout, precision
from mlx_voicechat.weights.config_file import parse_config
from mlx_voicechat.weights.shards import Stored

from .published import headers

JUDGED_SECONDS = 120.0  # of conversation, after which a frame is judged
FRAME_PART = 0.5  # of a frame's time that moving its bytes may take: the rest is for computing
# Best first. The published ones' speech weights are held in 8 bits, the others' are stored so.
PUBLISHED_BITS = {"bf16": None, "8bit": 8, "4bit": 4}
PLANS = ("gptq-4", "gptq-3")


class Candidate(NamedTuple):
    """A checkpoint: how to get it, the memory it takes, and the least time of a frame in ms."""

    name: str
    how: str
    memory_bytes: int
    floor_ms: float


def candidates(gbps: float) -> list[Candidate]:
    """Every checkpoint that can be had, best first, on memory of so many GB a second."""
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    found = []
    for name, bits in PUBLISHED_BITS.items():
        stored = headers(config, bits)
        requantise = precision.plan(stored, "q8")
        found.append(_candidate(config, stored, requantise, gbps, name, f"mlx-voicechat download {name}"))
    for name in PLANS:
        how = f"a calibration, and `mlx-voicechat convert --plan {name}`: docs/calibration.md"
        found.append(_candidate(config, converted(config, plans.NAMED[name]), memory.AS_STORED, gbps, name, how))
    return found


def recommended(found: Sequence[Candidate], usable_bytes: int, frame_ms: float) -> Candidate | None:
    """The first that fits and leaves time to compute, else the fastest that fits; None where none fits."""
    fitting = [each for each in found if each.memory_bytes <= usable_bytes]
    in_time = [each for each in fitting if each.floor_ms <= FRAME_PART * frame_ms]
    return next(iter(in_time), min(fitting, key=lambda each: each.floor_ms, default=None))


def converted(config: ModelConfig, plan: plans.Plan) -> dict[str, Stored]:
    """The headers of a checkpoint that `convert` would make of NVIDIA's original."""
    shapes = layout.shapes(config)
    facts = {name: plans.Facts(shape, layout.is_integer(name)) for name, shape in shapes.items()}
    found = {}
    for name, setting in plan.settings(facts).items():
        shape = shapes[name]
        if isinstance(setting, plans.Quantised):
            rows, inputs = shape
            widths = {"weight": inputs * setting.bits // 32}
            for part, kind in setting.types:
                width = widths.get(part, inputs // setting.group_size)
                found[name.removesuffix("weight") + part] = Stored("", (rows, width), kind)
        else:
            kind = "I32" if layout.is_integer(name) else "BF16" if setting == "bf16" else "F32"
            found[name] = Stored("", shape, kind)
    return found


def _candidate(
    config: ModelConfig,
    stored: dict[str, Stored],
    requantise: precision.Requantisation,
    gbps: float,
    name: str,
    how: str,
) -> Candidate:
    frames = round(JUDGED_SECONDS / config.frame_seconds)
    needed = memory.announce(config, stored, frames, requantise=requantise).total
    moved = sum(traffic.traffic(config, stored, frames, requantise).values())
    return Candidate(name, how, needed, traffic.milliseconds(moved, gbps))
