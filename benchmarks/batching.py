"""Frames of several conversations in one evaluation, against one conversation's frame, alternating in one run.

    python benchmarks/batching.py CHECKPOINT [--sessions 1,2,4,8] [--rounds 30] [--frames 4] [--eager]

Every round gives each company `frames` frames; printed are medians over all of them and ratios to one conversation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

import mlx_voicechat
from mlx_voicechat.gauges.bench import faint_noise
from mlx_voicechat.session import Session
from mlx_voicechat.voicechat import VoiceChat

COLD = 8  # frames of each company before the first that is timed


def stepped(model: VoiceChat, sessions: list[Session], samples: np.ndarray) -> float:
    """Milliseconds of one frame of all of them."""
    for session in sessions:
        session.add(samples)
    started = time.perf_counter()
    for _, outcome in model.step(sessions):
        if isinstance(outcome, Exception):
            raise outcome
    return (time.perf_counter() - started) * 1000


def main() -> None:
    """Print JSON: the median frame of each company in ms, and its ratio to the smallest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--sessions", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--eager", action="store_true", help="do not fuse kernels first")
    arguments = parser.parse_args()

    model = mlx_voicechat.load(arguments.checkpoint, compile=not arguments.eager)
    noise = faint_noise(model.config)
    counts = [int(count) for count in arguments.sessions.split(",")]
    companies = {count: [model.session(seed=seed) for seed in range(count)] for count in counts}
    times: dict[int, list[float]] = {count: [] for count in counts}
    for sessions in companies.values():
        for _ in range(COLD):
            stepped(model, sessions, next(noise))
    for _ in range(arguments.rounds):
        for count, sessions in companies.items():
            times[count] += [stepped(model, sessions, next(noise)) for _ in range(arguments.frames)]
    medians = {count: statistics.median(found) for count, found in times.items()}
    report = {
        count: {"p50_ms": round(median, 2), "of_one": round(median / medians[counts[0]], 2)}
        for count, median in medians.items()
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
