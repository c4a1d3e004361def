"""Frames of several conversations in one evaluation, against one conversation's frame, in turns in one run.

    python benchmarks/batching.py CHECKPOINT [--sessions 1,2,4,8] [--frames 80] [--compile] [--processor-time]

Prints JSON: the median frame of each company in ms, and its ratio to that of the first. Kernels are fused as in a
server: on a GPU, elsewhere with `--compile`. Other programs of the machine disturb `--processor-time` less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import mlx_voicechat
from mlx_voicechat.gauges.bench import faint_noise
from mlx_voicechat.gauges.company import frame_times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--sessions", default="1,2,4,8")
    parser.add_argument("--frames", type=int, default=80)
    parser.add_argument("--compile", action="store_true", default=None)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()

    model = mlx_voicechat.load(arguments.checkpoint, compile=arguments.compile)
    counts = [int(count) for count in arguments.sessions.split(",")]
    clock = time.process_time if arguments.processor_time else time.perf_counter
    times = frame_times(model, counts, arguments.frames, faint_noise(model.config), clock)
    medians = {count: statistics.median(found) for count, found in times.items()}
    first = medians[counts[0]]
    report = {count: {"p50_ms": round(ms, 2), "of_the_first": round(ms / first, 2)} for count, ms in medians.items()}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
