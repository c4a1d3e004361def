"""A model as every command opens it: notices on stderr, and a word when it is a demonstration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import DEFAULT_MODEL
from .render import note

if TYPE_CHECKING:
    from mlx_voicechat.options import LoadOptions
    from mlx_voicechat.voicechat import VoiceChat


def open_model(model: str, options: LoadOptions) -> VoiceChat:
    """`mlx_voicechat.load`; the thread that calls it owns the model."""
    import mlx_voicechat

    loaded = mlx_voicechat.load(model, say=note, **vars(options))
    if loaded.config.demonstration:
        note(f"{loaded.name} is a demonstration, {loaded.config.demonstration}. The real model is {DEFAULT_MODEL}.")
    return loaded
