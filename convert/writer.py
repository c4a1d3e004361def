"""A checkpoint folder that appears whole or not at all.

Files are written into a sibling of the target, which is renamed at the end. The sibling's name is the target's own and
one that nobody else uses, and who writes it holds a lock on it, which the system releases whatever ends the program: a
sibling that is not locked was left by a conversion that was killed, and the next one removes it. Where the disk has no
locks, the sibling is its own, and one that is there already is left to who can tell whose it is.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.weights.locks import taken
from mlx_voicechat.weights.shards import INDEX_FILE

SIBLING = ".{}.mlx-voicechat-converting"
SHARD_BYTES = 5 * 10**9
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # not by this disk
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "U8": 1}  # bytes by safetensors type


# -- every change of the disk goes through one of these five -------------------------------------------------------


def write(descriptor: int, data: Any, offset: int) -> None:
    """All of `data`, a buffer of bytes, from `offset` on."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def flush(descriptor: int) -> None:
    """Until it is on the disk: a file, or the names in a folder; network shares have no such thing for folders."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def rename(old: Path, new: Path) -> None:
    os.replace(old, new)


def make_folder(folder: Path) -> None:
    folder.mkdir()


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


# -- the folder -----------------------------------------------------------------------------------------------------


def check_target(output: Path) -> Path:
    """The real path of a folder that is new or empty, beside which files can be made; raises InputError."""
    target = Path(os.path.realpath(os.path.expanduser(output)))
    if target.is_dir() and os.path.samefile(target, os.curdir):
        raise InputError(f"{output} is the folder you are in, and it is replaced whole.", "Name a new folder.")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{output} exists already and is not an empty folder.", "Name a new folder.")
    if not target.parent.is_dir():
        raise InputError(f"There is no folder {target.parent}.", "Make it first.")
    if not target.name or not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"{output} cannot be made: no permission to write in {target.parent}.")
    return target


@contextmanager
def folder(target: Path) -> Iterator[Path]:
    """A new sibling of `target` that takes its place when the block ends well, and vanishes when it raises.

    Raises InputError while another conversion writes the same target, VoiceChatError when the disk fails or is full.
    """
    sibling = target.with_name(SIBLING.format(target.name))
    lock = _locked(sibling, target)
    try:
        with _naming(target):
            yield sibling
            fault = _flushed(lock)
            rename(sibling, target)
        _flush_parent(target, fault)
    except BaseException:
        if sibling.is_dir():
            shutil.rmtree(sibling, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _locked(sibling: Path, target: Path) -> int:
    """An empty sibling and the descriptor that locks it; what a killed conversion left there is removed."""
    while True:
        made = False
        with _naming(target):
            with suppress(FileExistsError):
                make_folder(sibling)
                made = True
            try:
                lock = os.open(sibling, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # its owner has just finished
                continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = sibling.exists() and os.path.samestat(sibling.stat(), os.fstat(lock))
            if ours and not any(sibling.iterdir()):
                return lock
            if ours:
                remove(sibling)
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            raise _another(target) from None
        except OSError as error:
            if made and error.errno in UNSUPPORTED:
                return lock
            os.close(lock)
            if error.errno in UNSUPPORTED:
                raise InputError(
                    f"{sibling} is of another conversion, and this disk has no locks that would tell whether it runs.",
                    "Remove that folder if none does, or name another one.",
                ) from None
            raise VoiceChatError(f"{sibling} cannot be taken over: {error.strerror}.", "Remove it.") from None


@contextmanager
def alone(folder: Path, target: Path) -> Iterator[None]:
    """Keep other conversions of `target` out of `folder`, made if need be; a disk without locks keeps nobody out.

    Raises InputError while another has it.
    """
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            ours = taken(lock, folder)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            ours = True
        if not ours:
            raise _another(target)
        yield
    finally:
        os.close(lock)


def _another(target: Path) -> InputError:
    return InputError(f"Another conversion is writing {target}.", "Wait for it, or name another folder.")


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """The disk's own errors in a line that names the target."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise VoiceChatError(
                f"The disk is full, so {target} was not written and nothing of it is left.", "Free some space."
            ) from error
        raise VoiceChatError(
            f"{target} was not written and nothing of it is left: {error.strerror or error}.", "Check the disk."
        ) from error


def _flushed(folder: int) -> OSError | None:
    """Have the names in a folder written to the disk; what keeps them from it is no reason to give up the folder."""
    try:
        flush(folder)
    except OSError as error:
        return error
    return None


def _flush_parent(target: Path, fault: OSError | None) -> None:
    """So that the new name outlives a power cut, too; `fault` is that of the folder itself."""
    try:
        parent = os.open(target.parent, os.O_RDONLY)
    except OSError as error:
        fault = fault or error
    else:
        fault = _flushed(parent) or fault
        os.close(parent)
    if fault is not None:
        raise VoiceChatError(
            f"{target} is complete, but may not outlive a power cut: {fault.strerror or fault}.", "Check the disk."
        ) from fault


class File:
    """A new file, flushed when its block ends well."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                flush(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, data: Any, offset: int = 0) -> None:
        write(self._descriptor, data, offset)


def write_file(path: Path, data: bytes) -> None:
    """A whole new file."""
    with File(path) as file:
        file.write(data)


# -- safetensors ----------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor to write: its safetensors type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def shards(groups: Sequence[Sequence[Entry]], most: int | None = None) -> list[list[Entry]]:
    """Entries in files of at most `most` bytes (SHARD_BYTES), or of one larger tensor; groups stay together."""
    most = SHARD_BYTES if most is None else most
    found: list[list[Entry]] = [[]]
    for group in groups:
        size = sum(entry.bytes for entry in group)
        if found[-1] and sum(entry.bytes for entry in found[-1]) + size > most:
            found.append([])
        found[-1].extend(group)
    return found


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def header(entries: Sequence[Entry], facts: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and where in the file each tensor begins."""
    fields: dict[str, Any] = {"__metadata__": facts}
    end = 0
    starts = {}
    for entry in entries:
        starts[entry.name], end = end, end + entry.bytes
        fields[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [starts[entry.name], end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    return beginning, {name: start + len(beginning) for name, start in starts.items()}


def write_index(path: Path, files: Sequence[Sequence[Entry]]) -> None:
    """The index of shards, in their order."""
    names = {entry.name: shard_name(number, len(files)) for number, entries in enumerate(files, 1) for entry in entries}
    total = sum(entry.bytes for entries in files for entry in entries)
    write_json(path / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": names})


def write_json(path: Path, data: Any) -> None:
    write_file(path, (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode())
