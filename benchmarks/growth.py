"""A long session: does a frame grow, and does memory? Against the attention calls alone at the same lengths.

    python benchmarks/growth.py CHECKPOINT [--frames 7500] [--window 500]

Compares the median of the first window (after 200 warm frames) with that of the last. Attention must grow with its
caches; it is timed alone, at the lengths in the middle of the two windows, as all layers of one frame in one
evaluation. Resident memory is compared with the caches' own bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlx_voicechat
from mlx_voicechat.networks.cache import KvCache
from mlx_voicechat.networks.ear_tts import attend
from mlx_voicechat.voicechat import VoiceChat

WARM = 200


def resident_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def attention_alone(model: VoiceChat, length: int, repeats: int = 101) -> float:
    """Median milliseconds of all attention calls of one frame over caches of `length` positions."""
    tts, llm = model.config.tts, model.config.llm
    state = model.init_state(model.voice(None), tts.guidance_scale)
    rng = np.random.default_rng(0)

    def filled(cache: KvCache, rows: int, heads: int, width: int) -> tuple[mx.array, mx.array]:
        count = length if cache.window is None else min(length, cache.window)
        twin = KvCache(cache.window, cache.phase)
        keys = mx.array(rng.normal(size=(rows, heads, count, width)).astype(np.float32))
        return twin.update(keys, keys)[:2]

    speech = [filled(c, state.tts.guidance_rows, tts.num_key_value_heads, tts.head_dim) for c in state.tts.caches]
    language = [filled(c, 1, llm.num_key_value_heads, llm.head_dim) for c in state.language.caches]
    spoken = mx.zeros((state.tts.guidance_rows, tts.num_attention_heads, 1, tts.head_dim))
    thought = mx.zeros((1, llm.num_attention_heads, 1, llm.head_dim))
    mx.eval(speech, language, spoken, thought)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = [attend(spoken, keys, values, None) for keys, values in speech]
        out += [mx.fast.scaled_dot_product_attention(thought, k, v, scale=1.0) for k, v in language]
        mx.eval(out)
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--frames", type=int, default=7500)
    parser.add_argument("--window", type=int, default=500)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()

    model = mlx_voicechat.load(arguments.checkpoint, compile=not arguments.no_compile)
    session = model.session()
    noise = np.random.default_rng(0).normal(0, 0.05, (64, model.config.frame_samples_in)).astype(np.float32)
    times: list[float] = []
    first_resident = first_caches = 0

    def caches() -> int:
        state = session.state
        return sum(cache.nbytes for cache in (*state.tts.caches, *state.language.caches))

    for index in range(arguments.frames):
        start = time.perf_counter()
        session.push(noise[index % len(noise)])
        times.append((time.perf_counter() - start) * 1000)
        if index == WARM:
            gc.collect()
            first_resident, first_caches = resident_bytes(), caches()
        if index % 500 == 0 and sys.stderr.isatty():
            print(f"{index} frames", file=sys.stderr)
    gc.collect()
    resident, cached = resident_bytes() - first_resident, caches() - first_caches
    early = statistics.median(times[WARM : WARM + arguments.window])
    late = statistics.median(times[-arguments.window :])
    lengths = (WARM + arguments.window // 2, arguments.frames - arguments.window // 2)
    alone = [attention_alone(model, length) for length in lengths]
    print(
        json.dumps(
            {
                "frames": arguments.frames,
                "p50_ms": {"early": round(early, 2), "late": round(late, 2), "increase": round(late - early, 2)},
                "attention_alone_ms": [round(value, 2) for value in alone],
                "increase_over_attention": round((late - early) / (alone[1] - alone[0]), 2),
                "resident_growth_mb": round(resident / 2**20, 1),
                "caches_growth_mb": round(cached / 2**20, 1),
                "growth_beyond_caches_mb": round((resident - cached) / 2**20, 1),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
