"""A plain client of OpenAI's vocabulary for tests: it sends, reads, and holds every trace to the legal order."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from tests.support.openai_order import Order

WAIT_SECONDS = 10
SPEECH_HZ = 200


def audio(seconds: float, loud: bool = True, rate_hz: int = 24_000) -> str:
    """PCM16 in base64: a tone or silence."""
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    samples = np.sin(2 * np.pi * SPEECH_HZ * t) * (0.3 if loud else 0.0)
    return base64.b64encode((samples * 32767).astype("<i2").tobytes()).decode()


def said(seconds: float, loud: bool = True, rate_hz: int = 24_000) -> dict[str, Any]:
    """The message that says it."""
    return {"type": "input_audio_buffer.append", "audio": audio(seconds, loud, rate_hz)}


class Talker:
    """One connection; `events` holds all that came."""

    def __init__(self, socket: ClientConnection, beta: bool = False) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.order = Order(beta)

    def send(self, *sent: Any) -> None:
        for message in sent:
            self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    def receive(self, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.socket.recv(timeout))
        self.events.append(event)
        self.order.take(event)
        return event

    def until(self, *kinds: str, count: int = 1) -> dict[str, Any]:
        """Read up to the `count`th of these types from here on; it."""
        while True:
            event = self.receive()
            count -= event["type"] in kinds
            if not count:
                return event

    def ask(self, message: Any, kind: str) -> dict[str, Any]:
        """Send, and read up to an event of this type."""
        self.send(message)
        return self.until(kind)

    def error(self, message: Any) -> dict[str, Any]:
        """The error that a message is answered with."""
        return self.ask(message, "error")["error"]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def configure(self, **session: Any) -> dict[str, Any]:
        """A session.update; the session it gave."""
        return self.ask({"type": "session.update", "session": session}, "session.updated")["session"]


@contextmanager
def talking(url: str, query: str = "model=any", beta: bool = False, **options: Any) -> Iterator[Talker]:
    """A connection that was greeted."""
    headers = {"OpenAI-Beta": "realtime=v1"} if beta else {}
    with connect(f"{url}?{query}", additional_headers=headers, max_size=None, **options) as socket:
        talker = Talker(socket, beta)
        talker.until("session.created")
        yield talker
