"""The safetensors files of a checkpoint folder: which tensors they hold, and whether every file is whole.

Reads headers only and needs no MLX, so that a download can be checked before anything is loaded.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")  # all of a number are whole without an index
GET_AGAIN = "The download was interrupted: repeat it, or the command that started it."
NAMED_AT_MOST = 5  # tensors or files spelled out in a message; the rest is counted
_PREFIX_BYTES = 8  # safetensors: the header's length, little-endian, then the header, then the data
_MOST_HEADER_BYTES = 10**8  # safetensors' own limit: else a damaged length reads a whole file
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2"), 8),
}


class Stored(NamedTuple):
    """One tensor as its file holds it: `start` is its first byte there."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    start: int = 0


def some_of(names: list[str]) -> str:
    """The first few of `names` and a count of the others, for a message."""
    rest = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


def files(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the checkpoint; raises CheckpointError when one is absent."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
        if shards and _is_whole(shards):
            return shards
        if shards:
            raise CheckpointError(f"{folder} has safetensors shards but no {INDEX_FILE}, and not all.", GET_AGAIN)
        raise CheckpointError(f"{folder} has no weights: neither {INDEX_FILE} nor {SINGLE_FILE}.", GET_AGAIN)
    named = sorted(set(_weight_map(index).values()))
    absent = [name for name in named if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the {len(named)} files that {INDEX_FILE} names: {some_of(absent)}.",
            GET_AGAIN,
        )
    return named


def _is_whole(shards: list[str]) -> bool:
    """Whether sorted names of shards are 1 to N of N."""
    numbers = [tuple(map(int, found.groups())) for found in map(SHARD.fullmatch, shards) if found]
    return numbers == [(number, len(shards)) for number in range(1, len(shards) + 1)]


def verify(folder: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint by name, after checking that all files are there and whole.

    Raises CheckpointError: no weights, a file absent, cut off, or not safetensors, a tensor absent from its file.
    """
    found: dict[str, Stored] = {}
    for name in files(folder):
        found |= {tensor: Stored(name, *entry) for tensor, entry in places(folder / name).items()}
    if (folder / INDEX_FILE).is_file():
        lost = sorted(
            t for t, file in _weight_map(folder / INDEX_FILE).items() if t not in found or found[t].file != file
        )
        if lost:
            raise CheckpointError(
                f"{folder}: {len(lost)} tensors are not in the file that {INDEX_FILE} names: {some_of(lost)}.",
                GET_AGAIN,
            )
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        if any(Path(file).name != file for file in names.values()):
            raise ValueError("a file name is not a plain name")
        return dict(names)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error}.", GET_AGAIN) from None


def header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each tensor of one file, whose size must be what its header says."""
    return {name: entry[:2] for name, entry in places(path).items()}


def places(path: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape, type and first byte in the file of each tensor, checked like `header`."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(_PREFIX_BYTES)
            length = int.from_bytes(prefix, "little")
            text = stream.read(min(length, size, _MOST_HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if prefix == b"version ":
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself.", "Run `git lfs pull` in its folder.")
    if text[:1] not in (b"{", b"") or (length > _MOST_HEADER_BYTES and size > _MOST_HEADER_BYTES):
        raise CheckpointError(f"{path} is not a safetensors file.", GET_AGAIN)
    start = _PREFIX_BYTES + length
    if len(prefix) < _PREFIX_BYTES or size < start:
        raise CheckpointError(f"{path} is cut off after {size:,} bytes, inside its header.", GET_AGAIN)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        end = start + _check_entries(entries)
        tensors = {
            name: (tuple(entry["shape"]), str(entry["dtype"]), start + entry["data_offsets"][0])
            for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is not a safetensors file: its header cannot be read.", GET_AGAIN) from None
    if size < end:
        raise CheckpointError(f"{path} is cut off: it has {size:,} of {end:,} bytes.", GET_AGAIN)
    if size > end:
        raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, its header says {end:,}.", GET_AGAIN)
    return tensors


def _check_entries(entries: dict[str, Any]) -> int:
    """Where the data of a header's tensors ends: they lie one after the other, and each takes what its shape says.

    Raises what a header of other types raises, and ValueError.
    """
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
        first, last = entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (first, last, *entry["shape"])) or first != end:
            raise ValueError(entry)
        bits = _BITS.get(entry["dtype"])
        if last < first or (bits is not None and bits * math.prod(entry["shape"]) != 8 * (last - first)):
            raise ValueError(entry)
        end = last
    return end
