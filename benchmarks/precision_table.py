"""In which form ten Macs hold the published checkpoints, and what a frame then moves: a table in Markdown.

    python benchmarks/precision_table.py

Nothing is loaded or measured: headers as the published files have them, bandwidths as Apple specifies them. A floor is
the time to move a frame's bytes, of 80 ms; a checkpoint that does not fit with ten minutes of conversation has none.
"""

from __future__ import annotations

import json

from mlx_voicechat.cli import published
from mlx_voicechat.config import ModelConfig
from mlx_voicechat.gauges import memory, plans
from mlx_voicechat.gauges.chips import BANDWIDTH_GBPS
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.weights import assets
from mlx_voicechat.weights.config_file import parse_config
from mlx_voicechat.weights.precision import LONG_SECONDS
from mlx_voicechat.weights.shards import Stored

GPU_PART = 0.75  # of a Mac's memory that its GPU may take
BITS = {"4bit": 4, "8bit": 8, "bf16": None}
WIDEST, AT = plans.Plan("f32", "f32", "float32"), plans.JUDGED_POSITIONS
MACS = [
    ("M1", 16),
    ("M2", 24),
    ("M4", 32),
    ("M5", 32),
    ("M3 Pro", 36),
    ("M4 Pro", 48),
    ("M1 Max", 64),
    ("M4 Max", 64),
    ("M2 Ultra", 128),
    ("M3 Ultra", 256),
]


def main() -> None:
    """Print the table."""
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    print("| Mac | GB/s | chosen | GB a frame | 4bit: ms after 100 / 1,500 / 7,500 frames | all in f32 | 8bit | bf16 |")
    print("|---|---|---|---|---|---|---|---|")
    for chip, gigabytes in MACS:
        gbps = float(BANDWIDTH_GBPS[chip])
        place = plans.Place(True, gigabytes * 10**9, lambda gbps=gbps: gbps)
        rows = {name: _row(config, published.headers(config, bits), place) for name, bits in BITS.items()}
        narrow, wide = rows["4bit"], plans.row(config, published.headers(config, 4), WIDEST, gbps)
        floors = " / ".join(f"{ms:.0f}" for ms in narrow.floor_ms.values()) if narrow else "-"
        others = [f"{row.floor_ms[AT]:.0f}" if (row := rows[name]) else "-" for name in ("8bit", "bf16")]
        chosen, size = (", ".join(narrow.plan), f"{narrow.moved[AT] / 1e9:.2f}") if narrow else ("-", "-")
        cells = (f"{chip}, {gigabytes} GB", f"{gbps:.0f}", chosen, size, floors, f"{wide.floor_ms[AT]:.0f}", *others)
        print(f"| {' | '.join(cells)} |")


def _row(config: ModelConfig, stored: dict[str, Stored], place: plans.Place) -> plans.Row | None:
    form, frames = plans.choose(config, stored, LoadOptions(), place), round(LONG_SECONDS / config.frame_seconds)
    announced = memory.announce(config, stored, frames, requantise=form.requantise, states=form.states)
    fits = announced.total <= GPU_PART * place.memory_bytes
    return plans.row(config, stored, form.plan, place.gbps()) if fits else None


if __name__ == "__main__":
    main()
