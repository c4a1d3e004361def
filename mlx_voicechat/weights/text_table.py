"""The text conditioning table (V, W) kept on disk: building it takes 30 TFLOP at the released size, reading it 604 MB.

It is a file of a checkpoint that `convert` made, else it is kept beside the model or in the user's cache directory. The
fingerprint covers everything the table is made of, so a file is used only when it is whole and says that it is this
table; any other is replaced, a checkpoint's own is passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from ..networks.linear import product_of_many_rows
from .shards import header

if TYPE_CHECKING:
    from ..config import CharacterEncoderConfig
    from ..networks.ear_tts import EarTts

FORMAT_VERSION = "1"  # of the file, and of what SubwordEncoder and GatedFusion.text compute
LONG_CHARACTERS = 2**14  # of all tokens together; fewer are encoded in well under a second
OWN_FILE = "text-table.safetensors"  # a checkpoint's own, which `convert` writes
FOLDER = ".mlx-voicechat"  # beside the model
PREFIX, SUFFIX, TENSOR = "text-table-", ".safetensors", "text_rows"
NAME_DIGITS = 16  # of the fingerprint in a file's name; the file holds all of them
STALE_SECONDS = 3600  # a temporary file of this age belongs to no running program

Build = Callable[[], mx.array]


def cached_rows(
    tts: EarTts,
    config: CharacterEncoderConfig,
    char_ids: Sequence[Sequence[int]],
    folder: Path,
    say: Callable[[str], None],
) -> mx.array:
    """The table of a model in `folder`, built once and read ever after; `tts` has its weights.

    `char_ids`: the characters of ids 0 .. V-1. A table that is built quickly is never written.
    """
    if sum(map(len, char_ids)) < LONG_CHARACTERS and not (folder / OWN_FILE).is_file():
        return tts.text_rows(char_ids)
    identity, shape = fingerprint_of(tts, config, char_ids)
    return cached(lambda: tts.text_rows(char_ids, product_of_many_rows()), identity, shape, folder, say)


def fingerprint_of(
    tts: EarTts, config: CharacterEncoderConfig, char_ids: Sequence[Sequence[int]]
) -> tuple[str, tuple[int, int]]:
    """The fingerprint of the table that `tts` has with its weights, and the table's shape (V, W)."""
    fusion = tts.gated_fusion_audio_text
    inputs = {"subword": tts.embed_subword.parameters(), "proj": fusion.text_proj.parameters()}
    inputs |= {"gate": fusion.gate, "scale": fusion.residual_scale}
    weights: Any = tree_flatten(inputs, destination={})
    return fingerprint(weights, char_ids, config), (len(char_ids), fusion.gate.shape[0])


def facts(fingerprint: str) -> dict[str, str]:
    """What a table's file says of itself."""
    return {"version": FORMAT_VERSION, "fingerprint": fingerprint}


def fingerprint(weights: Mapping[str, mx.array], char_ids: Sequence[Sequence[int]], facts: object) -> str:
    """SHA-256 in hex over everything a table is made of: weights and flags by name, characters, `facts` (its repr)."""
    digest = hashlib.sha256(f"{FORMAT_VERSION} {facts!r}".encode())
    for name, array in sorted(weights.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        data: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
        digest.update(memoryview(data))
    lengths = np.fromiter(map(len, char_ids), np.int32, len(char_ids))
    characters = np.fromiter((c for token in char_ids for c in token), np.int32, int(lengths.sum()))
    digest.update(lengths.tobytes() + characters.tobytes())
    return digest.hexdigest()


def cached(
    build: Build, fingerprint: str, shape: tuple[int, int], folder: Path, say: Callable[[str], None]
) -> mx.array:
    """The table of `shape` (V, W) float32, evaluated: read when it was kept for this model, else built and kept.

    Never fails for want of a place: `say` gets one line when the table is built, another when it cannot be kept.
    """
    if (table := read(folder / OWN_FILE, fingerprint, shape)) is not None:
        return table
    places = list(_places(folder))
    name = f"{PREFIX}{fingerprint[:NAME_DIGITS]}{SUFFIX}"
    for place in places:
        if (table := read(place / name, fingerprint, shape)) is not None:
            return table
    size = f"{shape[0]:,} tokens, {4 * shape[0] * shape[1] / 1e6:,.0f} MB"
    say(f"Preparing the text table, once: {size}. Later starts read it.")
    table = build()
    for place in places:
        _tidy(place, name)
    fault = _keep(table, fingerprint, [place / name for place in places])
    if fault is not None:
        say(f"The text table cannot be kept, so the next start prepares it again: {_one_line(fault)}.")
    return table


def _places(folder: Path) -> Iterator[Path]:
    """Where the table of a model may lie, the best first; in the user's cache every model has a folder of its own."""
    yield folder / FOLDER
    home = Path(os.path.expanduser("~"))
    own = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or own)
    if cache.is_absolute():
        yield cache / "mlx-voicechat" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:NAME_DIGITS]


def read(path: Path, fingerprint: str, shape: tuple[int, int]) -> mx.array | None:
    """The table in `path`, None when there is none or it is another, an older one or broken."""
    try:
        if not path.is_file() or header(path) != {TENSOR: (shape, "F32")}:
            return None
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, said = loaded
        if not facts(fingerprint).items() <= said.items():
            return None
        mx.eval(arrays[TENSOR])
        return arrays[TENSOR]
    except (CheckpointError, OSError, RuntimeError, ValueError):  # among them: removed since we looked
        return None


def _keep(table: mx.array, fingerprint: str, paths: Sequence[Path]) -> Exception | None:
    """Write the table to the first of `paths` that can be written; None, or what was wrong with the last."""
    fault: Exception | None = None
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, table, facts(fingerprint))
            return None
        except (OSError, RuntimeError) as error:  # MLX reports a full disk as RuntimeError
            fault = error
    return fault


def _write(path: Path, table: mx.array, said: dict[str, str]) -> None:
    """Whole or not at all, whoever else writes it: a file of our own beside it takes its place."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")
    try:
        mx.save_safetensors(str(partial), {TENSOR: table}, metadata=said)
        with contextlib.suppress(OSError), partial.open("rb+") as stream:  # not every disk can
            os.fsync(stream.fileno())  # or a power cut could leave a file of the right size without its data
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _tidy(place: Path, name: str) -> None:
    """Remove older tables of this model, and what interrupted programs left."""
    with contextlib.suppress(OSError):
        for path in place.glob(f"{PREFIX}*{SUFFIX}"):
            if path.name != name:
                path.unlink(missing_ok=True)
        for path in place.glob(f".{PREFIX}*{SUFFIX}"):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink(missing_ok=True)


def _one_line(error: Exception) -> str:
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(f"{where}{reason}".split()).rstrip(".")
