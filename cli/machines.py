"""A command on one of several machines (`mlx.launch`): rank 0 runs it, the others do their part of the model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_voicechat.errors import InputError, MachineLostError

from .render import note

if TYPE_CHECKING:
    from mlx_voicechat.options import LoadOptions
    from mlx_voicechat.voicechat import VoiceChat
    from mlx_voicechat.weights.checkpoint import Checkpoint


def helps(model: str, options: LoadOptions) -> bool:
    """Whether this process is another rank than 0; its work is then done when this returns."""
    from mlx_voicechat.machines.ring import Ranks, own_rank

    if not own_rank():
        return False
    from mlx_voicechat.machines.loading import serve_first

    # Python's handlers would wait for the end of a wait inside MLX. Ctrl-C is rank 0's, which then ends the run.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve_first(model, options, note, Ranks())
    return True


def several() -> bool:
    """Whether this process is one of several ranks."""
    from mlx_voicechat.machines.ring import own_rank

    return own_rank() is not None


def load_on_several(
    name: str,
    opened: Checkpoint,
    options: LoadOptions,
    say: Callable[[str], None] = note,
    lost: Callable[[BaseException], None] = lambda fault: None,
) -> VoiceChat:
    """Rank 0's `load_opened`. `lost` is called, on any thread, when another rank is gone."""
    from mlx_voicechat.machines.loading import load_first
    from mlx_voicechat.machines.ring import Ranks, own_rank

    if own_rank():
        raise InputError("This command runs on one machine.", "On several: generate, serve and bench.")
    ranks = Ranks()
    ranks.watch.lost = lambda why: lost(MachineLostError(why))
    return load_first(name, opened, options, say, ranks)
