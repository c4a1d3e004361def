"""The README of a converted checkpoint: a model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plans import Plan
    from .source import Source

ORIGINAL = "nvidia/NVIDIA-NemotronLabs-VoiceChat-11B"
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

Weights of [{original}](https://huggingface.co/{original}), converted with
`{program}` for Apple Silicon.

    pip install mlx-voicechat
    mlx-voicechat generate --model FOLDER --audio question.wav

**Licence.** The weights are NVIDIA's and stay under the licence that NVIDIA names on the
[model card](https://huggingface.co/{original}); converting them changes nothing about it. Read it before use.

| | |
|---|---|
{rows}

How the weights are stored, the first rule that matches decides:

| weights | stored as |
|---|---|
{rules}
| all others | bf16 |
"""


def model_card(source: Source, plan: Plan, facts: Mapping[str, Any]) -> str:
    """Markdown with the hub's front matter: origin, licence, plan."""
    rows = {
        "source": facts["source"],
        "source revision": facts["source_revision"] or "not from the hub",
        "tokenizer": facts["tokenizer"],
        "tokenizer revision": facts["tokenizer_revision"] or "not from the hub",
        "default voice": source.config.speaker,
    }
    return CARD.format(
        original=ORIGINAL,
        plan=plan.name,
        program=facts["program"],
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        rules="\n".join(f"| `{text}` | {setting} |" for text, setting in plan.described().items()),
    )
