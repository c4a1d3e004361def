"""A talking checkpoint's language model in few bits, by rounding and with a calibration: what it still answers.

    python benchmarks/quantised.py CHECKPOINT [--work FOLDER] [--voices 3] [--losses] [--heads N] [--only "GPTQ 3"]

CHECKPOINT knows the questions of examples/questions.json and has widths that divide into groups of 64. Needs espeak-ng.
Calibrated on each question in other voices than the tested ones; tested on examples/ and on each question in one more
of those voices. Nothing is spoken. FOLDER keeps the calibration and the checkpoints; a second run goes on with them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_voicechat.convert import bits, calibration, conversion, feeding, gptq, listening, plans, rounding
from mlx_voicechat.convert.conversations import Run, divergence, measures, run
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.sound.recordings import read_all
from mlx_voicechat.weights.checkpoint import open_model

EXAMPLES = Path(__file__).parents[1] / "examples"
CALIBRATION_VOICES = [
    ("en-gb+m3", 160, 50),
    ("en-us+f2", 150, 55),
    ("en-gb-scotland+m7", 170, 45),
    ("en-gb+f3", 145, 60),
]
TESTED_VOICES = [("en-us+m5", 165, 50), ("en-gb+f4", 150, 52)]
SILENCE_SECONDS = 4.0
LLM = ("body bf16", "rounded 4", "rounded 3", "rounded 2", "GPTQ 4", "GPTQ 3", "GPTQ 2.5 by error", "GPTQ 2")


class Question(NamedTuple):
    """A recording and what is answered to it."""

    path: Path
    text: str
    answer: str


def main() -> None:
    """Print a row for each way of quantising."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--voices", type=int, default=3, help="of the calibration, at most 4")
    parser.add_argument("--only", nargs="+", choices=LLM, metavar="NAME")
    parser.add_argument("--heads", type=int, metavar="N", help="of N recordings, the heads' divergence alone: quick")
    parser.add_argument("--losses", action="store_true", help="stop after what each layer loses")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        work = arguments.work or Path(place)
        work.mkdir(exist_ok=True)
        known = [
            Question(EXAMPLES / each["file"], each["transcript"], each["answer"])
            for each in json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
            if "weather in" not in each["transcript"]
        ]
        tested = known + spoken(known, work / "tested", TESTED_VOICES, alternate=True)
        heard = spoken(known, work / "heard", CALIBRATION_VOICES[: arguments.voices])
        gathered = calibrated(arguments.checkpoint, heard, work / "calib")
        print(f"{len(tested)} tested recordings, {len(heard)} of calibration, {gathered.positions:,} positions")
        losses(arguments.checkpoint, gathered)
        if arguments.losses:
            return
        if arguments.heads:
            heads(arguments.checkpoint, tested[: arguments.heads], gathered, work, arguments.only or LLM)
            return
        expected = answers(arguments.checkpoint, tested)
        report("as it is", arguments.checkpoint, tested, expected, expected)
        for name in arguments.only or LLM:
            folder = work / name.replace(" ", "-")
            if not folder.is_dir():
                convert(arguments.checkpoint, name, gathered, folder)
            report(name, str(folder), tested, expected)


def spoken(
    known: list[Question], folder: Path, voices: list[tuple[str, int, int]], alternate: bool = False
) -> list[Question]:
    """Each different question by espeak-ng, in all voices or in one of them after the other."""
    folder.mkdir(exist_ok=True)
    found = []
    for number, question in enumerate({each.text: each for each in known}.values()):
        for index, (voice, words, pitch) in enumerate(voices):
            if alternate and index != number % len(voices):
                continue
            path = folder / f"{question.path.stem}-{index}.wav"
            program = ["espeak-ng", "-v", voice, "-s", str(words), "-p", str(pitch), "-w", str(path), question.text]
            subprocess.run(program, check=True)
            found.append(question._replace(path=path))
    return found


def calibrated(checkpoint: str, heard: list[Question], folder: Path) -> calibration.Calibration:
    """The calibration, made or opened."""
    opened = open_model(checkpoint)
    job = calibration.Job(folder, opened, calibration.recordings([each.path for each in heard]))
    job.check()
    return job.run(listening.listener(checkpoint, opened, quiet))


def convert(checkpoint: str, name: str, gathered: calibration.Calibration, folder: Path) -> None:
    """One checkpoint; all differ in the language model's body alone, and have 8 bits elsewhere."""
    base = plans.NAMED["gptq-3"]
    body, *others = base.rules
    count = name.split()[1]
    with open_source(checkpoint) as source:
        own = gathered if name.startswith("GPTQ") else None
        if "." in count:
            plan = bits.choose(source, base, gathered, bits.Target(bits=float(count)))
        else:
            setting = "bf16" if count == "bf16" else plans.Quantised(int(count), 64)
            rule = plans.Rule(body.text, body.pattern, (setting,))
            plan = plans.Plan(name, (rule, *others))
        started = time.perf_counter()
        conversion.run(conversion.prepare(source, plan, own), folder)
        print(f"{name}: converted in {time.perf_counter() - started:.1f} s; {plan.summary}", file=sys.stderr)


def losses(checkpoint: str, gathered: calibration.Calibration) -> None:
    """What each layer of the body loses alone at 3 bits on the calibration, of what it loses by rounding."""
    with open_source(checkpoint) as source:
        job = conversion.prepare(source, plans.NAMED["gptq-3"], gathered)
        parts = {}
        for layer in job.layers:
            if layer.setting.bits == 3:
                moment = gathered.moments(layer.module, layer.tensor.shape[1]).matrix
                _, lost = rounding.rounded(source, layer, feeding.Given(moment))
                weight = np.concatenate(list(rounding.rows_of(source, layer)))
                plain = weight - gptq.nearest(weight, 3, 64).dequantised(3, 64)
                parts[layer.module] = lost / gptq.loss(plain, moment)
    most = max(parts, key=parts.__getitem__)
    print(
        f"{len(parts)} layers at 3 bits lose {min(parts.values()):.2f} to {parts[most]:.2f} ({most}) of rounding's loss"
    )


def heads(
    checkpoint: str, tested: list[Question], gathered: calibration.Calibration, work: Path, names: Sequence[str]
) -> None:
    """Equal choices and divergence, told the ids of the checkpoint as it is; all frames of a recording at once."""
    forced = [each.ids for each in answers(checkpoint, tested)]
    expected = logits(checkpoint, tested, forced)
    for name in names:
        folder = work / name.replace(" ", "-")
        if not folder.is_dir():
            convert(checkpoint, name, gathered, folder)
        found = logits(str(folder), tested, forced)
        same = (expected.argmax(-1) == found.argmax(-1)).mean(axis=0)
        apart = divergence(expected, found).mean(axis=0)
        print(
            f"{name:<20} {len(expected)} frames at once: told the ids {same[0]:.2%} text {same[1]:.2%} function; "
            f"KL text {apart[0]:.2e} function {apart[1]:.2e}",
            flush=True,
        )


def logits(checkpoint: str, tested: list[Question], forced: list[np.ndarray]) -> np.ndarray:
    """Of both heads, (frames of all recordings, 2, V)."""
    model = listening.listener(checkpoint, open_model(checkpoint), quiet)
    found = []
    for question, ids in zip(tested, forced, strict=True):
        samples = np.zeros(len(ids) * model.config.frame_samples_in, np.float32)
        spoken = np.asarray(read_all(question.path))
        samples[: len(spoken)] = spoken[: len(samples)]
        _, audio, _ = model.perception.step(mx.array(samples)[None], model.perception.init_state())
        before = mx.array(np.concatenate([np.full((1, 2), model.config.pad_id), ids[:-1]]))
        fused = model.language.fuse(before[None, :, 0], audio, before[None, :, 1])
        hidden, _ = model.language.step(fused, model.language.init_state())
        both = mx.stack(list(model.language.logits(hidden[0])), axis=1).astype(mx.float32)
        found.append(np.array(both))
    return np.concatenate(found)


def quiet(text: str) -> None:
    """Notices are not shown."""


def answers(checkpoint: str, tested: list[Question], forced: list[Run] | None = None) -> list[Run]:
    """What a checkpoint gives, each recording followed by silence; `forced` to the ids of other runs."""
    model = listening.listener(checkpoint, open_model(checkpoint), quiet)
    silence = np.zeros(round(SILENCE_SECONDS * model.config.input_rate_hz), np.float32)
    heard = [np.concatenate([np.asarray(read_all(each.path)), silence]) for each in tested]
    return [run(model, samples, None if forced is None else forced[n].ids) for n, samples in enumerate(heard)]


def report(
    name: str, checkpoint: str, tested: list[Question], expected: list[Run], own: list[Run] | None = None
) -> None:
    """A row: answers that are right, ids that are equal, and the divergence of both heads."""
    forced = answers(checkpoint, tested, expected) if own is None else own
    own = answers(checkpoint, tested) if own is None else own
    right = sum(given.text.strip() == question.answer for given, question in zip(own, tested, strict=True))
    found = [measures(first, second, 22050) for first, second in zip(expected, forced, strict=True)]
    ids = np.concatenate([first.ids == second.ids for first, second in zip(expected, own, strict=True)]).mean(axis=0)
    told_text, told_function, kl_text, kl_function = (
        float(np.average([getattr(each, what) for each in found], weights=[each.frames for each in found]))
        for what in ("same_text", "same_function", "kl_text", "kl_function")
    )
    print(
        f"{name:<20} right {right} / {len(tested)}; equal ids {ids[0]:.2%} text {ids[1]:.2%} function; "
        f"told the other's ids {told_text:.2%} {told_function:.2%}; KL text {kl_text:.2e} function {kl_function:.2e}",
        flush=True,
    )


if __name__ == "__main__":
    if shutil.which("espeak-ng") is None:
        sys.exit("espeak-ng is not installed.")
    main()
