"""The README of a converted checkpoint: a model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_voicechat.weights.hub_cache import ORIGINAL

if TYPE_CHECKING:
    from .plans import Plan
    from .source import Source

CARD = """---
base_model: {original}
library_name: mlx
license: other
license_link: https://huggingface.co/{original}
tags:
- mlx
- speech-to-speech
---

# NemotronLabs VoiceChat for MLX, {plan}

{origin}
Converted with `{program}` for Apple Silicon.

    pip install mlx-voicechat
    mlx-voicechat generate --model FOLDER --audio question.wav

| | |
|---|---|
{rows}

How the weights are stored (`keep`: as in the source); the first line that fits decides:

| weights | stored as |
|---|---|
{rules}
"""

NVIDIAS = """Weights of [{original}](https://huggingface.co/{original}).

**Licence.** The weights are NVIDIA's and stay under the licence that NVIDIA names on the
[model card](https://huggingface.co/{original}); converting them changes nothing about it. Read it before use.
"""
OTHERS = {True: "Random weights, for tests.\n", False: "Not NVIDIA's weights: {demonstration}.\n"}


def model_card(source: Source, plan: Plan, facts: Mapping[str, Any]) -> str:
    """Markdown with the hub's front matter: origin, licence, plan."""
    rows = {
        "source": facts["source"],
        "source revision": facts["source_revision"] or "not from the hub",
        "tokenizer": facts["tokenizer"],
        "tokenizer revision": facts["tokenizer_revision"] or "not from the hub",
        "default voice": source.config.speaker,
    }
    config = source.config
    origin = OTHERS[config.synthetic] if config.synthetic or config.demonstration else NVIDIAS
    return CARD.format(
        original=ORIGINAL,
        origin=origin.format(original=ORIGINAL, demonstration=config.demonstration),
        plan=plan.name,
        program=facts["program"],
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        rules="\n".join(f"| `{text}` | {setting} |" for text, setting in plan.described().items()),
    )
