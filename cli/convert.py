"""`mlx-voicechat convert`: a checkpoint in another precision; NVIDIA's original into one that loads."""

from __future__ import annotations

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from .render import Output, complain, note, progress_bar

PLANS = "f32, bf16, 8bit, 6bit, 5bit, 4bit, mixed-5, mixed-4, gptq-4, gptq-3, mxfp8, mxfp4"
TARGETED = "gptq-3"  # what a target is a variant of, where no plan is named


def convert(
    source: Annotated[
        str, Option("--source", "-s", metavar="SOURCE", help="A folder or a Hub repository, in any of the layouts.")
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Folder to write: new, or empty.")],
    plan: Annotated[
        str, Option(metavar="PLAN", help=f"{PLANS}; or a .toml file of rules.", show_default=True)
    ] = "bf16",
    tokenizer: Annotated[
        str | None,
        Option(
            metavar="SOURCE",
            show_default=False,
            help="The base LLM's config and tokenizer, for an original: nvidia/NVIDIA-Nemotron-Nano-9B-v2 if absent.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        Option(metavar="DIR", show_default=False, help="What `calibrate` wrote: the LLM is rounded by GPTQ."),
    ] = None,
    target_bits: Annotated[
        float | None,
        Option(metavar="X", show_default=False, help="Average bits of the LLM's body: chosen per layer by its error."),
    ] = None,
    target_gb: Annotated[
        float | None, Option(metavar="X", show_default=False, help="The same, for a checkpoint of X * 10^9 bytes.")
    ] = None,
    revision: Annotated[str | None, Option(metavar="REV", help="Branch, tag or commit of the source.")] = None,
    tokenizer_revision: Annotated[str | None, Option(metavar="REV", help="The same of the tokenizer.")] = None,
    verify: Annotated[
        bool, Option("--verify", help="Then compare every tensor and a short conversation with the source.")
    ] = False,
    audio: Annotated[
        Path | None,
        Option(metavar="FILE", show_default=False, help="Recording for --verify; the packaged question if absent."),
    ] = None,
) -> None:
    """Convert a checkpoint: NVIDIA's original into one that loads, or any other into another precision.

    What it will take is said first. The folder appears whole or not at all.
    """
    if audio is not None and not verify:
        raise typer.BadParameter("--audio is for --verify, which was not asked for.")

    from mlx_voicechat.convert import conversion, plans, writer
    from mlx_voicechat.convert.source import open_source

    targets = (target_bits, target_gb)
    _check_targets(targets, calibration)
    if any(targets) and plan == "bf16":
        plan = TARGETED
    chosen, target = plans.find(plan), writer.check_target(output)
    gathered = None
    if calibration is not None:
        from mlx_voicechat.convert.calibration import open_calibration

        gathered = open_calibration(calibration.expanduser())
    samples = None
    if verify:
        from mlx_voicechat.convert import agreement

        tempfile.gettempdir()  # raises where there is none, which is better known before the work
        samples = agreement.recording(audio)
    with open_source(source, tokenizer, revision, tokenizer_revision, note) as opened:
        if gathered is not None and any(targets):
            from mlx_voicechat.convert import bits

            with _bar("measuring layers", " layers") as bar:
                wanted = bits.Target(*targets)
                chosen = bits.choose(opened, chosen, gathered, wanted, partial(_show, bar))
        job = conversion.prepare(opened, chosen, gathered)
        for line in job.describe(target):
            complain(line)
        with _bar("rounding", "FLOP") as rounding, _bar("converting") as bar:
            conversion.run(job, target, partial(_show, bar), complain, partial(_show, rounding))
        if samples is not None:
            complain(f"{target} is written; now it is verified.")
            from mlx_voicechat.convert.verify import verify_tensors

            with _bar("comparing") as bar:
                complain(verify_tensors(job, target, partial(_show, bar)))
            complain(agreement.compare(opened, target, samples, note))
    Output().write(f"{target}\n")


def _check_targets(targets: tuple[float | None, float | None], calibration: Path | None) -> None:
    given = [value for value in targets if value is not None]
    if len(given) > 1:
        raise typer.BadParameter("--target-bits and --target-gb exclude each other.")
    if given and calibration is None:
        raise typer.BadParameter("--target-bits and --target-gb need --calibration.")
    if given and not 0 < given[0] < math.inf:
        raise typer.BadParameter(f"the target {given[0]:g} is not a number above 0.")


def _bar(what: str, unit: str = "B") -> Any:
    return progress_bar(desc=what, unit=unit, unit_scale=True)


def _show(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
