"""`mlx-voicechat synth`: a checkpoint of random weights, for tests and benchmarks without a download."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .render import Output


class Kind(str, Enum):
    """What can be written."""

    RANDOM = "random"
    DEEP = "deep"
    FULL_4BIT = "full-4bit"


def synth(
    kind: Annotated[
        Kind,
        typer.Argument(help="random: small; deep: all layers, narrow; full-4bit: the real sizes, about 9 GB."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write: new, or empty.")],
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same weights.")] = 0,
) -> None:
    """Write a checkpoint of random weights: it loads and runs like a real one, and says nothing sensible."""
    from mlx_voicechat.weights.synthetic import write_random

    Output().write(f"{write_random(kind.value, out, seed)}\n")
