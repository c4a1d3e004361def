"""A stand-in for the Hugging Face hub on 127.0.0.1: a model's info, its tree, and its files with ranges."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

COMMIT = "a" * 40
PAGE = b"<!DOCTYPE html><html><title>Log in to our network</title>" + b" " * 1000 + b"</html>"
LARGE = ".safetensors"  # kept in LFS: known by SHA-256, other files by git's SHA-1


@dataclass
class Refusal:
    """How the hub refuses a repository."""

    status: int
    code: str = ""
    message: str = ""


@dataclass
class Hub:
    """Repositories by id: a folder that is served, or a refusal; `requests` records what was asked for.

    The files of a repository in `locked` are refused although its card and file list are public, as gated ones are.
    `revisions`: commits by branch or tag. `cut`: bytes of a file after which its next transfer breaks off, once.
    `stall`: bytes of a file after which every transfer waits until `release` is set. `ranges` are the asked ones,
    by file, None for a whole one.
    """

    repositories: dict[str, Path | Refusal]
    locked: dict[str, Refusal] = field(default_factory=dict)
    card: dict[str, str] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    cut: dict[str, int] = field(default_factory=dict)
    stall: dict[str, int] = field(default_factory=dict)
    page: set[str] = field(default_factory=set)  # files in whose place a login page comes
    sized: bool = True  # whether the list of files has sizes and hashes
    with_head: bool = True  # whether HEAD is answered
    release: Event = field(default_factory=Event)
    requests: list[str] = field(default_factory=list)
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.revisions.values() else self.revisions.get(revision)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").removeprefix("api/models/").split("/")
        name, is_file = "/".join(parts[:2]), parts[2:3] == ["resolve"]
        place = self.hub.repositories.get(name, Refusal(404, "RepoNotFound"))
        if is_file and name in self.hub.locked:
            place = self.hub.locked[name]
        commit = self.hub.commit(parts[3] if len(parts) > 3 else "main")
        if isinstance(place, Path) and commit is None:
            place = Refusal(404, "RevisionNotFound", "Invalid rev id")
        if isinstance(place, Refusal):
            headers = {"X-Error-Code": place.code, "X-Error-Message": place.message}
            return self._send(place.status, b"", body, {k: v for k, v in headers.items() if v})
        if is_file:
            return self._file(place / parts[4], body, str(commit))
        siblings = [_sibling(file) for file in sorted(place.iterdir()) if file.is_file()]
        if not self.hub.sized:
            siblings = [{"rfilename": one["rfilename"]} for one in siblings]
        return self._json({"id": name, "sha": commit, "siblings": siblings, "tags": [], "cardData": self.hub.card})

    def _file(self, file: Path, body: bool, commit: str) -> None:
        if not body and not self.hub.with_head:
            return self._send(405, b"", body, {})
        if file.name in self.hub.page:
            return self._send(200, PAGE, body, {"Content-Type": "text/html"})
        if not file.is_file():
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
        content, status = file.read_bytes(), 200
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if body:
            self.hub.ranges.append((file.name, self.headers.get("Range")))
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        self._send(status, content, body, headers, file.name)

    def _json(self, data: Any) -> None:
        self._send(200, json.dumps(data).encode(), True, {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        try:
            if file in self.hub.cut:
                self.wfile.write(content[: self.hub.cut.pop(file)])
                self.close_connection = True
            elif file in self.hub.stall and not self.hub.release.is_set():
                self.wfile.write(content[: self.hub.stall[file]])
                self.hub.release.wait(60)
                self.close_connection = True
            else:
                self.wfile.write(content)
        except ConnectionError:  # the client is gone
            self.close_connection = True


def _sibling(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    lfs = {"lfs": {"sha256": _etag(file), "size": size, "pointerSize": 134}} if file.suffix == LARGE else {}
    return {"rfilename": file.name, "size": size, "blobId": _git_hash(file)} | lfs


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == LARGE else _git_hash(file)


def _git_hash(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the stand-in; `hub.url` is its address meanwhile."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
