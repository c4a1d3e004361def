"""How far bfloat16 arithmetic of language model and encoder goes with float32: ids, transcript symbols, codes.

    python benchmarks/arithmetic.py tiny examples/question.wav
    python benchmarks/arithmetic.py deep examples/question.wav --frames 500

The same recording and seed. First each run feeds its own ids back; then the second is given those of the first, so that
one difference does not make all that follow.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
import soundfile as sf

import mlx_voicechat
from mlx_voicechat.frame import Frame
from mlx_voicechat.voicechat import VoiceChat

PARTS = ("text ids", "function ids", "transcript", "codes")


class Chosen(NamedTuple):
    """A run by frame: what PARTS names, each a tuple; the ids are the model's own, whatever was fed back."""

    text: list[tuple[int, ...]]
    function: list[tuple[int, ...]]
    symbols: list[tuple[int, ...]]
    codes: list[tuple[int, ...]]


def run(model: VoiceChat, audio: np.ndarray, given: Chosen | None = None) -> Chosen:
    """All frames of a recording; `given`: a run whose ids are fed back in place of the model's own."""
    session, size, seen, own = model.session(seed=0), model.config.frame_samples_in, list[Frame](), list[Any]()
    choose = model.language.choose
    session.observe(seen.append)

    def recorded(hidden: Any) -> Any:
        own.append(choose(hidden))
        return own[-1]

    model.language.choose = recorded
    try:
        for index, start in enumerate(range(0, len(audio) - size + 1, size)):
            if given is not None:
                session.force(text=given.text[index][0], function=given.function[index][0])
            session.push(audio[start : start + size])
    finally:
        del model.language.choose
    ids = [tuple((int(each.item()),) for each in pair) for pair in own]
    text, function = map(list, zip(*ids, strict=True))
    return Chosen(text, function, [frame.symbols for frame in seen], [frame.codes for frame in seen])


def compared(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> str:
    """The share of equal entries, and the first frame with a difference."""
    equal = [
        i < len(a) and i < len(b) and a[i] == b[i]
        for a, b in zip(first, second, strict=True)
        for i in range(max(len(a), len(b)))
    ]
    different = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), None)
    share = f"{100 * sum(equal) / len(equal):.1f} % of {len(equal)}" if equal else "none"
    return f"{share}, " + ("no difference" if different is None else f"first difference in frame {different}")


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description="Compares bfloat16 with float32 arithmetic.")
    parser.add_argument("model")
    parser.add_argument("audio")
    parser.add_argument("--frames", type=int, default=None, help="Silence is added, or the recording cut, to so many.")
    asked = parser.parse_args()
    audio = sf.read(asked.audio, dtype="float32")[0]
    wide, narrow = (mlx_voicechat.load(asked.model, arithmetic=kind) for kind in ("float32", "bfloat16"))
    size = wide.config.frame_samples_in
    samples = size * (asked.frames or len(audio) // size + 50)
    audio = np.pad(audio[:samples], (0, max(0, samples - len(audio))))
    reference = run(wide, audio)
    for name, other in (
        ("own ids fed back", run(narrow, audio)),
        ("float32's fed back", run(narrow, audio, reference)),
    ):
        print(f"{asked.model}, {len(reference.text)} frames, {name}:")
        for part, first, second in zip(PARTS, reference, other, strict=True):
            print(f"  {part:<14}{compared(first, second)}")


if __name__ == "__main__":
    main()
