"""A model as every command opens it: notices on stderr, and a word when it is a demonstration."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .options import DEFAULT_MODEL
from .render import note

if TYPE_CHECKING:
    from mlx_voicechat.voicechat import VoiceChat
    from mlx_voicechat.weights.precision import Choice


def open_model(model: str, compiled: bool | None, speech_weights: str | None, kv_cache: str) -> VoiceChat:
    """`mlx_voicechat.load`, with the values of the options; the thread that calls it owns the model."""
    import mlx_voicechat

    choice = cast("Choice | None", speech_weights)
    loaded = mlx_voicechat.load(model, say=note, compile=compiled, speech_weights=choice, kv_cache=kv_cache)
    if loaded.config.demonstration:
        note(f"{loaded.name} is a demonstration, {loaded.config.demonstration}. The real model is {DEFAULT_MODEL}.")
    return loaded
