"""Clients that do what clients should not: vanish, stop reading, send what is no message."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close, Frame, Opcode
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

MOMENTS = (
    "handshake",
    "before update",
    "opening",
    "between appends",
    "inside a frame",
    "inside a message",
    "during commit",
)
PROMPT = "Be concise and answer in one sentence. " * 8
WAIT_SECONDS = 60
ECHOED = 512  # characters of an event_id that an error names


def audio(samples: int, amplitude: float = 3000.0) -> str:
    """Noise as an append carries it."""
    noise = np.random.default_rng(samples).normal(size=samples) * amplitude
    return base64.b64encode(noise.astype("<i2").tobytes()).decode()


def usage(pid: int) -> dict[str, int]:
    """Resident bytes, threads and open files of a process (Linux)."""
    place = Path(f"/proc/{pid}")
    pages = int((place / "statm").read_text(encoding="ascii").split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list((place / "task").iterdir())),
        "files": len(list((place / "fd").iterdir())),
    }


class RawClient:
    """A WebSocket over a plain socket, whose reading and closing are the caller's."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname, place.port), timeout=WAIT_SECONDS)
        self.protocol = ClientProtocol(parse_uri(url))
        self.protocol.send_request(self.protocol.connect())
        self.socket.sendall(b"".join(self.protocol.data_to_send()))
        self.waiting: list[Any] = []

    def greeted(self) -> RawClient:
        """Wait for the acceptance and session.created; itself."""
        while self.protocol.state.name == "CONNECTING":
            self._read()
        self.event()
        return self

    def _read(self) -> bool:
        data = self.socket.recv(65536)
        if data:
            self.protocol.receive_data(data)
            self.waiting += self.protocol.events_received()
        return bool(data)

    def framed(self, message: dict[str, Any]) -> bytes:
        """The bytes of a message on the wire."""
        self.protocol.send_text(json.dumps(message).encode())
        return b"".join(self.protocol.data_to_send())

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(self.framed(message))

    def event(self) -> dict[str, Any] | int | None:
        """The next event; the code of a closing frame; None when the connection ended without one."""
        while True:
            for frame in self.waiting:
                self.waiting = self.waiting[1:]
                if isinstance(frame, Frame) and frame.opcode is Opcode.TEXT:
                    event: dict[str, Any] = json.loads(frame.data)
                    return event
                if isinstance(frame, Frame) and frame.opcode is Opcode.CLOSE:
                    return int(Close.parse(frame.data).code)
            try:
                if not self._read():
                    return None
            except ConnectionError:
                return None

    def append(self, samples: int) -> None:
        self.send({"type": "input_audio_buffer.append", "audio": audio(samples)})

    def vanish(self, reset: bool) -> None:
        """Close without a word, by a reset or an orderly end of the connection."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def vanish(url: str, moment: str, rng: random.Random) -> None:
    """Connect, get as far as `moment`, and vanish after a random while."""
    client = RawClient(url)
    if moment == "handshake":
        client.vanish(reset=rng.random() < 0.5)
        return
    client.greeted()
    if moment != "before update":
        client.send({"type": "session.update", "session": {"system_prompt": PROMPT if moment == "opening" else ""}})
        if moment != "opening":
            client.event()
    if moment == "between appends":
        for _ in range(rng.randrange(1, 4)):
            client.append(1280)
            client.event()
    elif moment == "inside a frame":
        client.append(32000)
    elif moment == "inside a message":
        message = client.framed({"type": "input_audio_buffer.append", "audio": audio(16000)})
        client.socket.sendall(message[: rng.randrange(1, len(message))])
    elif moment == "during commit":
        client.append(9000)
        client.send({"type": "input_audio_buffer.commit"})
    time.sleep(rng.random() * 0.1)
    client.vanish(reset=rng.random() < 0.5)


def stalled(url: str, seconds: float, fast: bool) -> list[Any]:
    """Talk in real time, or as fast as is taken, and read nothing; then read: last error and closing code."""
    client = RawClient(url).greeted()
    client.send({"type": "session.update"})
    client.event()
    message = client.framed({"type": "input_audio_buffer.append", "audio": audio(1280)})
    begin, sent, rest = time.monotonic(), 0, b""
    client.socket.settimeout(0.05)
    while (now := time.monotonic()) < begin + seconds:
        if not rest and (fast or sent * 0.08 <= now - begin):
            rest, sent = message, sent + 1
        try:
            if rest:
                rest = rest[client.socket.send(rest) :]
            else:
                time.sleep(0.01)
        except TimeoutError:
            pass
        except OSError:
            break
    client.socket.settimeout(WAIT_SECONDS)
    error, event = None, client.event()
    while isinstance(event, dict):
        error = event["error"]["code"] if event["type"] == "error" else error
        event = client.event()
    client.socket.close()
    return [error, event]


# -- messages that are none --------------------------------------------------------------------------------------------

PLAIN: list[dict[str, Any]] = [
    {
        "type": "session.update",
        "session": {"system_prompt": "Hi", "seed": 3, "max_streaming_seconds": 5.5, "model": ""},
    },
    {"type": "input_audio_buffer.append", "audio": audio(100), "sample_rate": 16000},
    {"type": "input_audio_buffer.append", "audio": audio(640)},
    {"type": "input_audio_buffer.commit", "pad_partial": False},
    {"type": "session.cancel"},
    {"type": "response.cancel"},
    {"type": "response.interrupt"},
    {"type": "session.ping"},
]
characters = st.text(st.characters(exclude_categories=()), max_size=12)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**30, 10**60), st.floats(), characters, st.just(16000)
)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(characters, v, max_size=3), max_leaves=5
)
bad_audio = st.one_of(
    st.sampled_from(
        ["A", "AA", "AAA", "AAAA=", "AA==AAAA", "AAAAA===", "AB==", "AA=A", "====", "AAA\n=", " AAAA", "AAA-"]
    ),
    st.binary(max_size=9).map(lambda data: base64.b64encode(data).decode()),
    st.integers(1, 40).map(lambda count: audio(100)[:count]),
)


@st.composite
def mutated(draw: st.DrawFn) -> str | bytes:
    """A plain message with a field changed, gone or renamed, or with its text damaged; or no message at all."""
    message = json.loads(json.dumps(draw(st.sampled_from(PLAIN))))
    if draw(st.booleans()):
        message["event_id"] = draw(st.one_of(characters, values, st.just("x" * 600)))
    inner = message["session"] if "session" in message and draw(st.integers(0, 3)) else message
    key = draw(st.sampled_from(sorted(inner)))
    kind = draw(st.sampled_from(["value", "value", "audio", "gone", "renamed", "long", "text", "plain", "other"]))
    if kind == "value":
        inner[key] = draw(values)
    elif kind == "audio":
        message |= {"type": "input_audio_buffer.append", "audio": draw(bad_audio)}
    elif kind == "gone":
        del inner[key]
    elif kind == "renamed":
        inner[draw(characters)] = inner.pop(key)
    elif kind == "long":
        inner[key] = draw(characters) + "x" * draw(st.sampled_from([1000, 40_000, 300_000]))
    text = json.dumps(message)
    if kind == "text":
        at, count = draw(st.integers(0, len(text))), draw(st.integers(0, 5))
        text = text[:at] + draw(st.text(max_size=4)) + text[at + count :]
    if kind == "other":
        depth = draw(st.sampled_from([50, 1000, 5000]))
        return draw(
            st.one_of(
                st.binary(max_size=40),
                st.text(max_size=40),
                values.map(json.dumps),
                st.sampled_from(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth]),
            )
        )
    return text


def verdict(raw: str | bytes, configured: bool) -> str | None:
    """What the protocol says of a message: an error's code, "opens", "ends", or None for one that is in order."""
    try:
        message = json.loads(raw) if isinstance(raw, str) else None
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        return "invalid_request"
    kind = message.get("type")
    if kind == "session.ping":
        return None
    if kind == "session.update":
        return "invalid_request" if configured else _update(message)
    if not configured:
        return "invalid_request"
    if kind == "input_audio_buffer.append":
        return _append(message)
    if kind == "input_audio_buffer.commit":
        return "ends" if isinstance(message.get("pad_partial", True), bool) else "invalid_request"
    if kind == "response.interrupt":
        return None
    return "ends" if kind in ("session.cancel", "response.cancel") else "invalid_request"


SESSION = {"system_prompt", "seed", "max_streaming_seconds", "model", "voice", "input_audio_format"}


def _update(message: dict[str, Any]) -> str:
    failed, session = "session_initialization_failed", message.get("session", {})
    if not isinstance(session, dict):
        return failed
    if {key for key in message if message[key] is not None} - {"type", "event_id", "session"}:
        return failed
    if {key for key in session if session[key] is not None} - SESSION - {"output_audio_format"}:
        return failed
    prompt, number, seconds = (session.get(key) for key in ("system_prompt", "seed", "max_streaming_seconds"))
    if prompt is not None and (type(prompt) is not str or len(prompt) > 32768 or re.search("[\ud800-\udfff]", prompt)):
        return failed
    if number is not None and (type(number) is not int or number < 0):
        return failed
    if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):
        return failed
    return "opens"


def _append(message: dict[str, Any]) -> str | None:
    rate, text = message.get("sample_rate", 16000), message.get("audio")
    if type(rate) is not int or rate != 16000 or type(text) is not str:
        return "inference_error"
    if not re.fullmatch("([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", text) or text.endswith("\n"):
        return "inference_error"
    data = base64.b64decode(text)
    return "inference_error" if len(data) % 2 or base64.b64encode(data).decode() != text else None


class Fuzzer:
    """Sends mutated messages to a server with two slots, on an open and on a new connection in turns.

    After each comes one whose error has a name: the events before that error are the answer. `wrong` holds messages
    whose answer is not the protocol's.
    """

    def __init__(self, url: str, number: int) -> None:
        self.url, self.number = url, number
        self.sent = self.malformed = self.connections = 0
        self.codes: list[str] = []
        self.wrong: list[tuple[Any, ...]] = []
        self._sockets: dict[bool, ClientConnection] = {}
        self._open = {True: ExitStack(), False: ExitStack()}

    def run(self, count: int, progress: Callable[[], None] = lambda: None) -> None:
        @seed(self.number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(mutated(), st.booleans())
        def one(raw: str | bytes, configured: bool) -> None:
            self.attempt(raw, configured)
            progress()

        with self._open[True], self._open[False]:
            one()

    def attempt(self, raw: str | bytes, configured: bool) -> None:
        """Send one message and compare its answer."""
        self.sent += 1
        expected, connection = verdict(raw, configured), self._socket(configured)
        connection.send(raw)
        try:
            if expected == "opens":
                errors = self._errors(connection, "session.updated", None)
                connection.send(json.dumps({"type": "session.cancel"}))
            if expected in ("opens", "ends"):
                errors = self._errors(connection, None, None)
        except ConnectionClosed as closed:
            del self._sockets[configured]
            self._open[configured].close()
            errors = [] if closed.rcvd and closed.rcvd.code == 1000 else [("closed", str(closed))]
        else:
            fence = f"fence {self.sent}"
            connection.send(json.dumps({"type": fence, "event_id": fence}))
            errors = self._errors(connection, "error", fence)
        named = [(expected, _named(raw))] if expected not in (None, "opens", "ends") else []
        self.malformed += len(named)
        self.codes += [code for code, _ in errors]
        if errors != named:
            self.wrong.append((raw[:300], configured, expected, errors))

    def _socket(self, configured: bool) -> ClientConnection:
        if configured not in self._sockets:
            self.connections += 1
            connecting = connect(self.url, compression=None, ping_timeout=None)
            connection = self._open[configured].enter_context(connecting)
            connection.recv(WAIT_SECONDS)
            if configured:
                connection.send(json.dumps({"type": "session.update"}))
                assert json.loads(connection.recv(WAIT_SECONDS))["type"] == "session.updated"
            self._sockets[configured] = connection
        return self._sockets[configured]

    def _errors(self, connection: ClientConnection, last: str | None, name: str | None) -> list[tuple[Any, Any]]:
        """Errors (code, event id) up to the event of type `last` (and event id `name`), or to the closing."""
        errors = []
        while True:
            event = json.loads(connection.recv(WAIT_SECONDS))
            error = event.get("error", {})
            if event["type"] == last and error.get("event_id") == name:
                return errors
            if event["type"] == "error":
                errors.append((error["code"], error.get("event_id")))


def _named(raw: str | bytes) -> str | None:
    """The event id that an error about a message must name."""
    try:
        message = json.loads(raw) if isinstance(raw, str) else None
    except (ValueError, RecursionError):
        return None
    name = message.get("event_id") if isinstance(message, dict) else None
    return name if isinstance(name, str) and len(name) <= ECHOED else None
