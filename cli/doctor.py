"""`mlx-voicechat doctor`: whether this machine can run the model, and what to do if not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from .info import frame_table
from .render import Output

if TYPE_CHECKING:
    from .diagnosis import Check, Facts

LEVEL_WIDTH, NAME_WIDTH = 9, 14


def doctor(
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, not text.")] = False,
    hostfile: Annotated[
        Path | None, Option(metavar="FILE", help="Look at the hosts of a hostfile of mlx.launch too, over ssh.")
    ] = None,
) -> None:
    """Look at this machine: Python, MLX, memory, disk, the checkpoints at hand, the microphone library.

    Each line is ok, a warning, or what would stop a run; in that case the exit code is 1.
    """
    from .diagnosis import STOP, diagnose, probe

    facts = probe()
    checks = diagnose(facts)
    if hostfile is not None:
        from .hosts import look

        checks += look(hostfile)
    Output().write(json.dumps(report(facts, checks), ensure_ascii=False) + "\n" if as_json else text(checks, facts))
    if any(check.level == STOP for check in checks):
        raise typer.Exit(1)


def report(facts: Facts, checks: Sequence[Check]) -> dict[str, Any]:
    """What `--json` prints: the findings and the facts behind them."""
    from .diagnosis import STOP

    found = {entry.name: getattr(facts, entry.name) for entry in dataclasses.fields(facts)}
    cached = {name: each._asdict() | {"folder": str(each.folder or "")} for name, each in facts.cached.items()}
    found["candidates"] = [each._asdict() for each in facts.candidates]
    runs = all(check.level != STOP for check in checks)
    return {"runs": runs, "checks": [check._asdict() for check in checks], "facts": found | {"held": cached}}


def text(checks: Sequence[Check], facts: Facts | None = None) -> str:
    """The findings for a person to read, a line each, and what a frame moves in every form of every checkpoint."""
    from .diagnosis import STOP

    lines = []
    width = max([NAME_WIDTH, *(len(check.name) + 2 for check in checks)])
    for check in checks:
        remedy = f". {check.remedy}" if check.remedy else ""
        lines.append(f"{check.level:<{LEVEL_WIDTH}}{check.name:<{width}}{check.text}{remedy}")
    stopping = [check.name for check in checks if check.level == STOP]
    lines.append(f"Would stop a run: {', '.join(stopping)}." if stopping else "Nothing would stop a run.")
    for name, forms in (facts.forms if facts else {}).items():
        lines += ["", f"{name}: bytes a frame and the time to move them, after so many positions", *frame_table(forms)]
    return "\n".join(lines) + "\n"
