"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from typer import Option

SpeechWeights = Annotated[
    str | None, Option(metavar="f32|q8", show_default=False, help="How speech weights are held; else by memory.")
]
KeyValueCache = Annotated[str, Option(metavar="f32|bf16", help="How the speech generator's keys and values are held.")]
