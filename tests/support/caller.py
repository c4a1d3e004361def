"""A plain client of /v1/realtime for tests: one message at a time, every event checked for what all events have."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mlx_voicechat import AudioFrame, Cancelled, Done, Event, FunctionDelta, TextDelta, TranscriptDelta
from mlx_voicechat.sound.pcm import pcm16

WAIT_SECONDS = 20
FRAME_SAMPLES = 1280


def append(samples: np.ndarray, **fields: Any) -> dict[str, Any]:
    """The message that says int16 samples (S,)."""
    audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
    return {"type": "input_audio_buffer.append", "audio": audio, **fields}


def on_the_wire(event: Event) -> dict[str, Any]:
    """A session's event as the protocol has it, without its `event_id`."""
    index = {"frame_index": event.frame_index}
    if isinstance(event, TranscriptDelta):
        kind = "conversation.item.input_audio_transcription.delta"
        return {"type": kind, **index, "delta": event.delta, "transcript": event.text}
    if isinstance(event, TextDelta | FunctionDelta):
        kind = "response.text.delta" if isinstance(event, TextDelta) else "response.function.delta"
        return {"type": kind, **index, "token_id": event.token_id, "delta": event.delta, "text": event.text}
    if isinstance(event, AudioFrame):
        delta = base64.b64encode(pcm16(event.samples, 32767).tobytes()).decode()
        audio = {"delta": delta, "format": "pcm16", "sample_rate": 22050, "channels": 1}
        return {"type": "response.audio.delta", **index, **audio, "audio_codes": list(event.codes)}
    assert isinstance(event, Done | Cancelled)
    return {"type": "response.done" if isinstance(event, Done) else "response.cancelled", **index}


class Caller:
    """One connection; `events` holds all that came, in order, without the event ids.

    session.lagging depends on the machine: it is set aside, in `lags` with its time.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.lags: list[tuple[float, float]] = []
        self._ids: set[str] = set()

    def send(self, message: Any) -> None:
        """An object as JSON, a str or bytes as they are."""
        self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    def receive(self, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        """The next event, without its id."""
        data = self.socket.recv(timeout)
        assert isinstance(data, str), "a binary frame"
        event: dict[str, Any] = json.loads(data)
        name = event.pop("event_id")
        assert re.fullmatch(r"event_[0-9a-f]{16}", name)
        assert name not in self._ids
        self._ids.add(name)
        if event["type"] == "session.lagging":
            assert set(event) == {"type", "backlog_seconds"}
            self.lags.append((time.monotonic(), event["backlog_seconds"]))
            return self.receive(timeout)
        self.events.append(event)
        return event

    def until(self, *kinds: str) -> list[dict[str, Any]]:
        """Events up to the first of these types, which is the last of them."""
        events = [self.receive()]
        while events[-1]["type"] not in kinds:
            events.append(self.receive())
        return events

    def frames(self, count: int) -> list[dict[str, Any]]:
        """Events up to the `count`th audio event from here."""
        return [event for _ in range(count) for event in self.until("response.audio.delta")]

    def ask(self, message: Any) -> dict[str, Any]:
        """The one event that answers a message; a ping after it shows that no other does."""
        self.send(message)
        event = self.receive()
        self.ping()
        return event

    def ping(self) -> None:
        self.send({"type": "session.ping"})
        assert self.receive() == {"type": "session.pong"}

    def refusal(self, message: Any) -> tuple[str, str]:
        """Code and text of the error that a message gets, and nothing but that."""
        event = self.ask(message)
        assert set(event) == {"type", "error"}
        assert event["type"] == "error"
        error = event["error"]
        assert set(error) in ({"code", "message"}, {"code", "message", "event_id"})
        named = message.get("event_id") if isinstance(message, dict) else None
        assert error.get("event_id") == named
        assert error["message"].strip()
        return error["code"], error["message"]

    def open(self, **session: Any) -> dict[str, Any]:
        """session.update -> session.updated."""
        self.send({"type": "session.update", "session": session})
        event = self.receive()
        assert event["type"] == "session.updated", event
        return event

    def closed(self) -> tuple[int, str]:
        """Code and reason of the closing, after any events that are still to come (kept in `events`)."""
        deadline = time.monotonic() + WAIT_SECONDS
        with suppress(ConnectionClosed):
            while time.monotonic() < deadline:
                self.receive()
        assert self.socket.protocol.close_rcvd, "the server does not close, or without a word"
        return self.socket.protocol.close_rcvd.code, self.socket.protocol.close_rcvd.reason


@contextmanager
def calling(url: str, **options: Any) -> Iterator[Caller]:
    """A connection with nothing received yet."""
    with connect(url, compression=None, proxy=None, open_timeout=WAIT_SECONDS, **options) as socket:
        yield Caller(socket)


@contextmanager
def greeted(url: str, **options: Any) -> Iterator[Caller]:
    """A connection whose session.created was received."""
    with calling(url, **options) as caller:
        assert caller.receive()["type"] == "session.created"
        yield caller


@contextmanager
def opened(url: str, **session: Any) -> Iterator[Caller]:
    """A connection with a session."""
    with greeted(url) as caller:
        caller.open(**session)
        yield caller
