"""One file of a hub repository into the cache: from the byte on at which an earlier attempt stopped, looked at, linked.

`huggingface_hub` begins a file anew after an interruption, and keeps whatever a network's login page sends.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from ..errors import HubError
from . import hub_cache
from .hub_cache import PARTIAL, REPEAT
from .locks import only_one

READ_BYTES = 2**20
SHA256_DIGITS = 64
MOST_HEADER_BYTES = 10**8  # of a safetensors file (its specification)
NO_HEAD = (405, 501)  # what a mirror answers that serves files alone


class RemoteFile(NamedTuple):
    """A file of a repository at a commit; `size` and `sha256` where they are known."""

    name: str
    size: int | None
    sha256: str | None
    blob: Path  # where the cache keeps it

    @property
    def partial(self) -> Path:
        """Where it arrives."""
        return self.blob.with_name(self.blob.name + PARTIAL)

    def is_at(self, path: Path) -> bool:
        """Whether it lies there, by its size if that is known."""
        return path.exists() and self.size in (None, path.stat().st_size)

    @property
    def to_come(self) -> int:
        """Bytes that are not here yet, 0 if the size is not known."""
        if self.size is None or self.is_at(self.blob):
            return 0
        here = self.partial.stat().st_size if self.partial.exists() else 0
        return max(0, self.size - here)


def remote_file(repository: str, commit: str, listed: Any) -> RemoteFile:
    """A file as the repository lists it; of what the list of a mirror lacks, the file itself is asked."""
    size, sha256 = listed.size, listed.lfs.sha256 if listed.lfs is not None else None
    name = sha256 or listed.blob_id
    if size is None or name is None:
        said, etag = _asked(repository, commit, listed.rfilename)
        size, name = said if size is None else size, name or etag
        sha256 = name if name is not None and len(name) == SHA256_DIGITS else sha256
    blobs = hub_cache.folder_of(repository) / "blobs"
    return RemoteFile(listed.rfilename, size, sha256, blobs / (name or secrets.token_hex(20)))


def fetch(repository: str, commit: str, file: RemoteFile, say: Callable[[str], None]) -> None:
    """A file's blob into the cache, and its name into the snapshot; `say` gets what a user waits for."""
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    lock = hub_cache.root() / ".locks" / hub_cache.folder_of(repository).name / f"{file.blob.name}.lock"
    with only_one(lock, file.partial, file.name, say):
        if not file.is_at(file.blob):
            _download(repository, commit, file)
        _link(file.blob, hub_cache.folder_of(repository) / "snapshots" / commit / file.name)


def sha256(file: Path, progress: Callable[[int], Any] = lambda _: None) -> str:
    """The SHA-256 of a file, in hexadecimal digits; `progress` gets the bytes of each step."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _asked(repository: str, commit: str, name: str) -> tuple[int | None, str | None]:
    """Size and hash of a file as its own address gives them, the hash only if it can be a file's name."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        said = get_hf_file_metadata(hf_hub_url(repository, name, revision=commit))
    except errors.HfHubHTTPError as error:
        if error.response.status_code not in NO_HEAD:
            raise
        return None, None
    known = said.etag is not None and hub_cache.HASH.fullmatch(said.etag)
    return said.size, said.etag if known else None


def _download(repository: str, commit: str, file: RemoteFile) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    with file.partial.open("ab") as stream:
        if file.size is None or stream.tell() > file.size:
            stream.truncate(0)
        if stream.tell() != file.size:
            http_get(
                hf_hub_url(repository, file.name, revision=commit),
                cast(BinaryIO, _Arriving(stream, file.name, repository)),
                resume_size=stream.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.name,
            )
    if file.sha256 is not None and sha256(file.partial) != file.sha256:
        file.partial.unlink()
        raise HubError(f"{file.name} of {repository} arrived damaged (its SHA-256 differs).", REPEAT)
    file.partial.replace(file.blob)


class _Arriving:
    """What `http_get` writes into: looks at a file's beginning before it gives up what is there already.

    It goes back and cuts when the server sends the whole file in place of the rest, as a login page does, too.
    """

    def __init__(self, stream: BinaryIO, name: str, repository: str) -> None:
        self._stream, self._name, self._repository = stream, name, repository
        self._start: int | None = 0 if stream.tell() == 0 else None

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int) -> int:
        self._start = offset
        return offset

    def truncate(self) -> int:
        return self._start or 0

    def write(self, data: bytes) -> int:
        if self._start is not None:
            _check_beginning(data, self._name, self._repository)
            self._stream.truncate(self._start)
            self._stream.seek(self._start)
            self._start = None
        return self._stream.write(data)


def _check_beginning(data: bytes, name: str, repository: str) -> None:
    """Raise HubError for the beginning of something else than the file."""
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if name.endswith(".safetensors"):
        right = int.from_bytes(data[:8], "little") <= MOST_HEADER_BYTES and data[8:9] == b"{"
    else:
        right = not name.endswith(".json") or text[:1] in (b"{", b"[")
    if right:
        return
    if text[:1] == b"<":
        raise HubError(
            f"A web page came in place of {name} of {repository}: the login page of this network, or a proxy's.",
            f"Log in with a browser. {REPEAT}",
        )
    raise HubError(f"What came in place of {name} of {repository} is no such file.", "Check HF_ENDPOINT and proxy.")


def _link(blob: Path, name: Path) -> None:
    """The blob's name in a snapshot; where the disk has no symbolic links, the file itself, as huggingface_hub does."""
    name.parent.mkdir(parents=True, exist_ok=True)
    new = name.with_name(f".{name.name}.{secrets.token_hex(4)}")
    try:
        new.symlink_to(os.path.relpath(blob, name.parent))
    except OSError:
        blob.replace(name)
    else:
        new.replace(name)
