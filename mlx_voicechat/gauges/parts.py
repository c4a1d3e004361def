"""Times the parts of a frame's stages by wrapping methods of a loaded model for as long as a profile needs them.

The networks know nothing of it. A part begins and ends with a barrier; what a stage does outside its parts is its rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .profile import REST

if TYPE_CHECKING:
    from ..voicechat import VoiceChat
    from .profile import Profile


class TimedPart(NamedTuple):
    """`owner.name`, a method or a module, is timed as `label`.

    `fixed`: inside what `VoiceChat.compile` compiles as a whole, so it is compiled by itself meanwhile.
    """

    owner: Any
    name: str
    label: str
    fixed: bool = False


def parts(model: VoiceChat) -> list[TimedPart]:
    """What is timed, in the order of a frame."""
    encoder, fourier = model.perception.encoder, model.codec._fourier
    return [
        TimedPart(model.perception._mel, "step", "perception.mel", True),
        TimedPart(encoder.pre_encode, "step", "perception.pre_encode", True),
        TimedPart(encoder, "_blocks", "perception.layers", True),
        TimedPart(model.perception, "proj", "perception.projection", True),
        TimedPart(model.rnnt, "first", "rnnt.joint"),
        TimedPart(model.rnnt, "finish", "rnnt.symbols"),
        TimedPart(model.language, "fuse", "language.embed"),
        TimedPart(model.language, "step", "language.layers"),
        TimedPart(model.language, "choose", "language.heads"),
        TimedPart(model.tts, "_embed", "tts.embed"),
        TimedPart(model.tts, "backbone", "tts.backbone"),
        TimedPart(model.tts, "_generate", "tts.codes"),
        TimedPart(model.codec, "dequantise", "codec.codebooks", True),
        TimedPart(model.codec, "decoder", "codec.decoder", True),
        TimedPart(fourier, "synthesise", "codec.decoder_istft", True),
        TimedPart(fourier, "overlap_add", "codec.decoder_istft", True),
    ]


@contextmanager
def timed(model: VoiceChat, profile: Profile) -> Iterator[None]:
    """Time the parts of `model` into `profile` until the block ends; no other session may use the model meanwhile."""
    whole: dict[str, Any] = {"_hear": model.perception.step, "_decode": model.codec.step}
    undo = [(model, name, getattr(model, name)) for name in whole]
    compiled = model._hear != whole["_hear"]
    for name, step in whole.items():
        setattr(model, name, step)
    for part in parts(model):
        original = getattr(part.owner, part.name)
        undo.append((part.owner, part.name, original))
        run = mx.compile(original) if part.fixed and compiled else original
        _put(part.owner, part.name, _timed(run, part.label, profile))
    profile.finer = True
    try:
        yield
    finally:
        profile.finer = False
        for owner, name, original in reversed(undo):
            _put(owner, name, original)


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute where it was: a module's own children are items of it, methods come from its class."""
    if isinstance(owner, nn.Module) and name in owner:
        owner[name] = value
    elif getattr(type(owner), name, None) is not None and getattr(value, "__self__", None) is owner:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _timed(run: Callable[..., Any], label: str, profile: Profile) -> Callable[..., Any]:
    stage = label.partition(".")[0]

    def timed_part(*args: Any, **kwargs: Any) -> Any:
        mx.eval(_arrays(args))
        profile.part(f"{stage}.{REST}")
        out = run(*args, **kwargs)
        mx.eval(_arrays(out))
        profile.part(label)
        return out

    return timed_part


def _arrays(tree: Any) -> list[mx.array]:
    """All arrays in arguments or results, those of states and caches included."""
    if isinstance(tree, mx.array):
        return [tree]
    if hasattr(tree, "arrays"):
        return list(tree.arrays)
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for branch in branches for leaf in _arrays(branch)]
