"""A stand-in for the Hugging Face hub on 127.0.0.1: a model's info, its tree, and its files with ranges."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "a" * 40


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
    """

    repositories: dict[str, Path | Refusal]
    locked: dict[str, Refusal] = field(default_factory=dict)
    card: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""


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
        if isinstance(place, Refusal):
            headers = {"X-Error-Code": place.code, "X-Error-Message": place.message}
            return self._send(place.status, b"", body, {k: v for k, v in headers.items() if v})
        if is_file:
            return self._file(place / parts[4], body)
        files = sorted(file for file in place.iterdir() if file.is_file())
        if parts[2:3] == ["tree"]:
            return self._json(
                [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)} for f in files]
            )
        siblings = [{"rfilename": f.name, "size": f.stat().st_size, "blobId": _etag(f)} for f in files]
        return self._json({"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "cardData": self.hub.card})

    def _file(self, file: Path, body: bool) -> None:
        if not file.is_file():
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
        return self._send(200, file.read_bytes(), body, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT})

    def _json(self, data: Any) -> None:
        self._send(200, json.dumps(data).encode(), True, {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the stand-in; `hub.url` is its address meanwhile."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
