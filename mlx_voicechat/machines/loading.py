"""Every rank's part of a checkpoint: rank 0 gets a model to use, the others serve it to the end of the run."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from ..errors import InputError, MachineLostError
from ..options import LoadOptions
from ..voicechat import VoiceChat, load_opened
from ..weights import checkpoint
from ..weights.checkpoint import Checkpoint
from .ring import Ranks
from .sharing import Follower, Leader
from .slices import SharedCheckpoint, share_of
from .speaker import Speaker
from .thinker import Line, Thinker

Say = Callable[[str], None]


def load_first(name: str, opened: Checkpoint, options: LoadOptions, say: Say, ranks: Ranks) -> VoiceChat:
    """Rank 0's `load_opened`; at the program's end the other ranks end too. Raises what that does, and InputError."""
    opened = _part_of(opened, options, ranks)
    if options.shard_llm:
        leader = load_opened(name, opened, options, say, partial(Leader, ranks))
        assert isinstance(leader, Leader)
        atexit.register(_end, ranks, leader.orders.end)
        loaded: VoiceChat = leader
    else:
        line = Line(ranks.wire(1))
        atexit.register(_end, ranks, line.end)
        loaded = load_opened(name, opened, options, say, partial(Thinker, line))
    say(_parts(loaded, ranks))
    return loaded


def serve_first(model: str | Path, options: LoadOptions, say: Say, ranks: Ranks) -> None:
    """Any other rank's whole work. Raises what `load` does, MachineLostError when rank 0 is gone."""
    opened = _part_of(checkpoint.open_model(model, say), options, ranks)
    make: Any = partial(Follower, ranks) if options.shard_llm else Speaker
    loaded = load_opened(str(model), opened, options, say, make)
    say(_parts(loaded, ranks))
    if isinstance(loaded, Follower):
        loaded.serve()
    elif isinstance(loaded, Speaker):
        loaded.serve(ranks.wire(0))
    ranks.watch.end()


def _part_of(opened: Checkpoint, options: LoadOptions, ranks: Ranks) -> Checkpoint:
    if not options.shard_llm and ranks.count != 2:
        raise InputError(
            f"{ranks.count} machines are not two halves of a model: one listens and thinks, one speaks.",
            "More can share the language model: --shard-llm.",
        )
    if not options.shard_llm:
        return opened
    return SharedCheckpoint.of(opened, share_of(opened.config, ranks.rank, ranks.count))


def _parts(loaded: VoiceChat, ranks: Ranks) -> str:
    """What a rank says of itself."""
    return f"rank {ranks.rank} of {ranks.count} holds {held_bytes(loaded):,} bytes of weights."


def held_bytes(loaded: VoiceChat) -> int:
    """Bytes of the weights that a rank holds, as they are in memory."""
    trees = {"language": loaded.language, "speech": loaded.speech}
    prefixes = {"language": "stt_model", "speech": "tts_model"}
    flat: list[tuple[str, Any]] = [
        (f"{prefixes[name]}.{path}", array) for name, tree in trees.items() for path, array in _flat(tree)
    ]
    return sum(array.nbytes for path, array in flat if loaded.holds(path))


def _flat(tree: Any) -> list[tuple[str, Any]]:
    found: Any = tree_flatten(tree.parameters())
    return list(found)


def _end(ranks: Ranks, end: Callable[[], None]) -> None:
    ranks.watch.end()
    with suppress(MachineLostError):
        end()
