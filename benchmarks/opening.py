"""Cost of opening a session with a long system prompt: LLM part and whole opening, stepped, chunked, from a snapshot.

    python benchmarks/opening.py CHECKPOINT [--tokens 400] [--rounds 5]

Stepped is the same code with one prompt position at a time. The two take turns every half second or so, so that a busy
neighbour slows both; printed are medians over the rounds, of the times and of each round's ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import chain, islice

import mlx.core as mx

import mlx_voicechat
from mlx_voicechat.model import PREFILL_CHUNK
from mlx_voicechat.noise import seeded_draws
from mlx_voicechat.voicechat import VoiceChat

TURNS = 16  # of either side in a round


def opening(model: VoiceChat, ids: list[int], chunk: int) -> Iterator[None]:
    """The steps of an opening: one for each chunk of the LLM's, then one for each of the TTS's."""
    tts = model.config.tts
    state = model.init_state(model.voice(None), tts.guidance_scale)
    shapes = (len(tts.pass_counts), tts.mog.num_predictions), (len(tts.pass_counts), tts.latent_size)
    return model.prefill(ids, state, lambda step: seeded_draws(0, step, *shapes), chunk)


def milliseconds(work: Iterator[None], steps: int | None = None) -> float:
    """What the next `steps` of `work` take, all of them when None."""
    start = time.perf_counter()
    for _ in islice(work, steps):
        pass
    mx.synchronize()
    return (time.perf_counter() - start) * 1000


def in_turns(works: dict[str, tuple[Iterator[None], int]]) -> dict[str, float]:
    """Milliseconds each work takes when all go on in turns; given with each is how many steps it has."""
    spent = dict.fromkeys(works, 0.0)
    for turn in range(TURNS):
        for name, (work, steps) in works.items():
            spent[name] += milliseconds(work, -(-steps // TURNS) if turn < TURNS - 1 else None)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()

    model = mlx_voicechat.load(arguments.checkpoint, compile=not arguments.no_compile)
    usable = [token for token in range(model.tokenizer.vocab_size) if token > 30]
    ids = [usable[i * 7 % len(usable)] for i in range(arguments.tokens)]
    count, chunks, runs = len(ids), -(-len(ids) // PREFILL_CHUNK), TURNS // 2
    prompt = model.tokenizer.decode(ids)

    milliseconds(opening(model, ids[:8], 1))
    milliseconds(opening(model, ids, PREFILL_CHUNK))
    milliseconds(model.opening(system_prompt=prompt))
    rounds: list[dict[str, float]] = []
    for _ in range(arguments.rounds):
        chunked = [islice(opening(model, ids, PREFILL_CHUNK), chunks) for _ in range(runs)]
        language = in_turns(
            {
                "stepped": (islice(opening(model, ids, 1), count), count),
                "chunked": (chain.from_iterable(chunked), chunks * runs),
            }
        )
        whole = in_turns(
            {
                "stepped": (opening(model, ids, 1), 2 * count - 1),
                "chunked": (opening(model, ids, PREFILL_CHUNK), chunks + count - 1),
            }
        )
        language["chunked"] /= runs
        rounds.append(
            {
                **{f"language_{name}_ms": value for name, value in language.items()},
                **{f"opening_{name}_ms": value for name, value in whole.items()},
                "session_from_snapshot_ms": milliseconds(model.opening(system_prompt=prompt)),
                "language_ratio": language["chunked"] / language["stepped"],
                "opening_ratio": whole["chunked"] / whole["stepped"],
            }
        )
    report = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
    print(json.dumps({"tokens": count, "rounds": len(rounds), **report}, indent=2))


if __name__ == "__main__":
    main()
