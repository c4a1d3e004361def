"""Cost of opening a session with a long system prompt: LLM part and whole opening, stepped, chunked, from a snapshot.

    python benchmarks/opening.py CHECKPOINT [--tokens 400] [--rounds 5]

Stepped is the same code with one prompt position at a time. Prints medians of alternating rounds and their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

import mlx_voicechat
from mlx_voicechat import model as engine
from mlx_voicechat.model import VoiceChat
from mlx_voicechat.session import seeded_draws


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def language_part(model: VoiceChat, ids: list[int], chunk: int) -> None:
    """Only the LLM's share of `VoiceChat.prefill`, in chunks of `chunk`."""
    state = model.language.init_state()
    for start in range(0, len(ids), chunk):
        tokens = mx.array([ids[start : start + chunk]])
        pad = mx.full(tokens.shape, model.config.pad_id)
        _, state = model.language.step(model.language.fuse(pad, model.language.embed(tokens), pad), state)
        mx.eval(state.arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()

    model = mlx_voicechat.load(arguments.checkpoint, compile=not arguments.no_compile)
    config, chunk = model.config, engine.PREFILL_CHUNK
    usable = [token for token in range(model.tokenizer.vocab_size) if token > 30]
    ids = [usable[i * 7 % len(usable)] for i in range(arguments.tokens)]

    def whole(size: int) -> None:
        engine.PREFILL_CHUNK = size
        state = model.init_state(model.voice(None), config.tts.guidance_scale)
        tts = config.tts
        shapes = (len(tts.pass_counts), tts.mog.num_predictions), (len(tts.pass_counts), tts.latent_size)
        for _ in model.prefill(ids, state, lambda step: seeded_draws(0, step, *shapes)):
            pass
        mx.eval(state.arrays)
        engine.PREFILL_CHUNK = chunk

    language_part(model, ids[:8], 1)
    whole(chunk)
    prompt = model.tokenizer.decode(ids)
    model.session(system_prompt=prompt)
    times: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, work in (
            ("language_stepped", lambda: language_part(model, ids, 1)),
            ("language_chunked", lambda: language_part(model, ids, chunk)),
            ("opening_stepped", lambda: whole(1)),
            ("opening_chunked", lambda: whole(chunk)),
            ("session_from_snapshot", lambda: model.session(system_prompt=prompt)),
        ):
            times.setdefault(name, []).append(milliseconds(work))
    medians = {name: statistics.median(values) for name, values in times.items()}
    report = {f"{name}_ms": round(value, 1) for name, value in medians.items()}
    report["language_ratio"] = round(medians["language_chunked"] / medians["language_stepped"], 3)
    report["opening_ratio"] = round(medians["opening_chunked"] / medians["opening_stepped"], 3)
    print(json.dumps({"tokens": len(ids), **report}, indent=2))


if __name__ == "__main__":
    main()
