"""Time and memory of gathering and rounding one layer of each kind, at the released model's sizes.

    python benchmarks/gptq_layer.py [--bits 3] [--positions 1024] [--rows 1024] [--only down_proj]

Random weights, and random inputs that depend on each other. Each kind is a process of its own with one thread, and its
times are the processor's. So many rows are rounded and the time is scaled, since rows are independent; `convert` has
4,096 at once. Memory is the most that the process ever held, less what it held before, beside what would be announced
for so many rows. The last line adds up all layers of the model, and gathering 100,000 positions, by
`calibrate` and again by `convert`, which feeds them; running the model is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from threadpoolctl import threadpool_limits

from mlx_voicechat.config import LlmConfig
from mlx_voicechat.convert import gptq, moments
from mlx_voicechat.convert.feeding import TO_STREAM, Sums
from mlx_voicechat.convert.rounding import COPIES
from mlx_voicechat.gauges.bench import peak_resident, resident
from mlx_voicechat.weights import assets
from mlx_voicechat.weights.config_file import parse_config

GROUP_SIZE, ALL_POSITIONS = 64, 100_000


def sizes(config: LlmConfig) -> dict[str, tuple[int, int, int]]:
    """Outputs, inputs, and number of layers, by kind."""
    heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    mamba, attention, mlp = (config.pattern.count(kind) for kind in "M*-")
    hidden, inner = config.hidden_size, config.mamba_inner
    return {
        "in_proj": (inner + config.conv_dim + config.mamba_num_heads, hidden, mamba),
        "out_proj": (hidden, inner, mamba),
        "q_proj": (heads[0], hidden, attention),
        "k_proj": (heads[1], hidden, 2 * attention),
        "o_proj": (hidden, heads[0], attention),
        "up_proj": (config.intermediate_size, hidden, mlp),
        "down_proj": (hidden, config.intermediate_size, mlp),
        "lm_head": (config.vocab_size, hidden, 2),
    }


def measure(outputs: int, inputs: int, added: bool, rows: int, bits: int, positions: int) -> dict[str, float]:
    """One layer in this process, whose outputs are `added` to the residual stream or not."""
    rng = np.random.default_rng(0)
    scale = rng.lognormal(size=inputs).astype(np.float32)
    before = resident()
    sums, took = Sums(), {"gather": 0.0, "feed": 0.0}
    gathering = moments.Gathering(nn.Module(), "")
    for _ in range(0, positions, moments.CHUNK):
        common = rng.standard_normal((moments.CHUNK, 64), np.float32) @ rng.standard_normal((64, inputs), np.float32)
        x = (rng.standard_normal((moments.CHUNK, inputs), np.float32) + common / 8) * scale
        apart = rng.standard_normal((moments.CHUNK, outputs), np.float32) if added else None
        fed = x + rng.standard_normal(x.shape, np.float32) * scale / 16
        started = time.process_time()
        gathering.note("x", mx.array(x))
        took["gather"] += time.process_time() - started
        gathering.sums.clear()  # what `calibrate` takes; the next is what `convert` takes
        started = time.process_time()
        sums.add(x, fed, apart)
        took["feed"] += time.process_time() - started
    del x, common, fed, apart, gathering
    given = sums.given()
    del sums
    found = {name: each / positions * 1000 for name, each in took.items()}
    started = time.process_time()
    inverse = gptq.by_energy(given.moment, GROUP_SIZE)
    found["factor"] = time.process_time() - started
    weight = rng.standard_normal((min(outputs, rows), inputs), np.float32) / math.sqrt(inputs)
    started = time.process_time()
    moved = given.moved(weight, 0, inverse)
    _, lost = gptq.quantise(moved, given.moment, bits, GROUP_SIZE, inverse=inverse)
    found["round"] = (time.process_time() - started) * outputs / len(weight)
    found["memory"] = peak_resident() - before
    rounded = gptq.nearest(moved, bits, GROUP_SIZE).dequantised(bits, GROUP_SIZE)
    return {**found, "loss": lost / gptq.loss(moved - rounded, given.moment)}


def main() -> None:
    """A row for each kind, and all of the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--here", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        rows, inputs, added = arguments.here
        with threadpool_limits(1):
            print(json.dumps(measure(rows, inputs, bool(added), arguments.rows, arguments.bits, arguments.positions)))
        return
    raw = json.loads((assets.FOLDER / "configs" / "full.json").read_text(encoding="utf-8"))
    total = 0.0
    for kind, (rows, inputs, count) in sizes(parse_config(raw).llm).items():
        if arguments.only and kind not in arguments.only:
            continue
        options = [
            "--bits",
            str(arguments.bits),
            "--positions",
            str(arguments.positions),
            "--rows",
            str(arguments.rows),
        ]
        added = kind in TO_STREAM
        command = [sys.executable, __file__, "--here", str(rows), str(inputs), str(int(added)), *options]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        announced = 4 * ((3 * inputs + added * rows) * inputs + COPIES * min(rows, arguments.rows) * inputs)
        print(
            f"{kind:<10} {rows:>7,} x {inputs:>6,}, {count:>3} layers: gathering {found['gather']:.2f} s / 1,000 "
            f"positions, {found['feed']:.2f} s to feed them, factor {found['factor']:.1f} s, "
            f"rounding {found['round']:.1f} s, "
            f"memory {found['memory'] / 1e9:.2f} GB of {announced / 1e9:.2f} GB announced, "
            f"loss {found['loss']:.2f} of plain rounding's",
            flush=True,
        )
        sums = (found["gather"] + found["feed"]) * (kind not in ("k_proj",)) / (1 + (kind == "lm_head"))
        total += count * (found["factor"] + found["round"] + sums * ALL_POSITIONS / 1000)
    print(f"all layers, {ALL_POSITIONS:,} positions: {total / 3600:.1f} hours")


if __name__ == "__main__":
    main()
