"""Every rank's part of a checkpoint: rank 0 gets a model to use, the others serve it to the end of the run."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..errors import InputError, MachineLostError
from ..options import LoadOptions
from ..voicechat import VoiceChat, load_opened
from ..weights import checkpoint
from .ring import Ranks
from .speaker import Speaker
from .thinker import Line, Thinker


def load_first(model: str | Path, options: LoadOptions, say: Callable[[str], None], ranks: Ranks) -> VoiceChat:
    """Rank 0's model; at the program's end the other ranks end too. Raises what `load` does, and InputError."""
    _check(ranks)
    opened = checkpoint.open_model(model, say)
    line = Line(ranks.wire(1))
    atexit.register(_end, ranks, line)
    return load_opened(str(model), opened, options, say, partial(Thinker, line))


def serve_first(model: str | Path, options: LoadOptions, say: Callable[[str], None], ranks: Ranks) -> None:
    """Any other rank's whole work. Raises what `load` does, MachineLostError when rank 0 is gone."""
    _check(ranks)
    loaded = load_opened(str(model), checkpoint.open_model(model, say), options, say, Speaker)
    assert isinstance(loaded, Speaker)
    loaded.serve(ranks.wire(0))
    ranks.watch.end()


def _check(ranks: Ranks) -> None:
    if ranks.count != 2:
        raise InputError(f"{ranks.count} machines cannot share this model: one listens and thinks, one speaks.")


def _end(ranks: Ranks, line: Line) -> None:
    ranks.watch.end()
    with suppress(MachineLostError):
        line.end()
