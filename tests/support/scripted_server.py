"""A scripted server of /v1/realtime on 127.0.0.1, for what a real one does not do when asked: hang up, babble."""

from __future__ import annotations

import base64
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from threading import Thread
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

FORMATS = {
    "input_audio_format": {"type": "pcm16", "sample_rate": 16000},
    "output_audio_format": {"type": "pcm16", "sample_rate": 22050},
}


@dataclass
class Peer:
    """One connection, seen from the server: messages both ways, and `heard`, all that the client sent."""

    socket: ServerConnection
    heard: list[dict[str, Any]] = field(default_factory=list)
    frames: int = 0

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, "event_id": "event_0123456789abcdef", **fields}))

    def receive(self, timeout: float = 10) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.socket.recv(timeout))
        self.heard.append(message)
        return message

    def greet(self, **fields: Any) -> None:
        """created, update, updated; `fields` are also of the session."""
        self.send("session.created", session={"id": "sess_0", "state": "configuring", **FORMATS})
        self.receive()
        ready = {"id": "sess_0", "state": "ready", "model": "stand-in", "frame_samples": 1280, **FORMATS, **fields}
        self.send("session.updated", session=ready)

    def audio(self, pcm: np.ndarray | None = None) -> None:
        """The next frame of speech; without `pcm`, all its samples are its number."""
        index, self.frames = self.frames, self.frames + 1
        delta = base64.b64encode((np.full(1764, index, "<i2") if pcm is None else pcm).tobytes()).decode()
        audio = {"format": "pcm16", "sample_rate": 22050, "channels": 1, "audio_codes": [index] * 31}
        self.send("response.audio.delta", frame_index=index, delta=delta, **audio)

    def text(self, delta: str, text: str = "") -> None:
        self.send("response.text.delta", frame_index=self.frames, token_id=7, delta=delta, text=text or delta)

    def answer(self, frames: int = 1 << 30) -> dict[str, Any]:
        """A frame for each append, `frames` at most or up to another message, which is returned."""
        message = self.receive()
        while message["type"] == "input_audio_buffer.append":
            self.audio()
            frames -= 1
            if not frames:
                break
            message = self.receive()
        return message

    def finish(self) -> None:
        self.send("input_audio_buffer.committed")
        self.send("response.done", frame_index=self.frames)

    def vanish(self) -> None:
        """Hang up without a word, once the client has what was sent: a reset connection loses what is on its way."""
        assert self.socket.ping().wait(10)
        self.socket.socket.shutdown(socket.SHUT_RDWR)

    def error(self, code: str, message: str) -> None:
        self.send("error", error={"code": code, "message": message})


@dataclass
class StandIn:
    """A running stand-in: its address, the headers and messages of its last connection, refusals still to be given."""

    url: str
    refusals: list[tuple[int, str]]
    headers: dict[str, str] = field(default_factory=dict)
    path: str = ""
    peer: Peer | None = None

    @property
    def heard(self) -> list[dict[str, Any]]:
        return self.peer.heard if self.peer else []


@contextmanager
def standing_in(
    script: Callable[[Peer], object], refusals: list[tuple[int, str]] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[StandIn]:
    """Run `script` for every connection, after the HTTP `refusals` (status, body) were used up."""
    here = StandIn("", list(refusals or []))

    def refuse(connection: ServerConnection, request: Request) -> Response | None:
        here.headers, here.path = dict(request.headers.raw_items()), request.path
        if not here.refusals:
            return None
        status, body = here.refusals.pop(0)
        return connection.respond(HTTPStatus(status), body)

    def handle(socket: ServerConnection) -> None:
        here.peer = Peer(socket)
        with suppress(ConnectionClosed, OSError):
            script(here.peer)

    with serve(handle, "127.0.0.1", 0, process_request=refuse, ssl=tls, compression=None) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        scheme = "wss" if tls else "ws"
        here.url = f"{scheme}://127.0.0.1:{server.socket.getsockname()[1]}/v1/realtime"
        try:
            yield here
        finally:
            server.shutdown()
            thread.join()
