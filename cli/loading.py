"""A model as every command opens it: notices on stderr, and a word when it is a demonstration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .options import DEFAULT_MODEL
from .render import note

if TYPE_CHECKING:
    from mlx_voicechat.options import LoadOptions
    from mlx_voicechat.voicechat import VoiceChat


def open_model(
    model: str, options: LoadOptions, lost: Callable[[BaseException], None] = lambda fault: None
) -> VoiceChat:
    """`mlx_voicechat.load`, or a part of it under `mlx.launch`; the thread that calls it owns the model.

    `lost` is called, on any thread, when another machine of the model is gone.
    """
    import mlx_voicechat

    from .machines import load_on_several, several

    if several():
        from mlx_voicechat.weights import checkpoint

        loaded = load_on_several(model, checkpoint.open_model(model, note), options, note, lost)
    else:
        loaded = mlx_voicechat.load(model, say=note, **vars(options))
    if loaded.config.demonstration:
        note(f"{loaded.name} is a demonstration, {loaded.config.demonstration}. The real model is {DEFAULT_MODEL}.")
    return loaded
