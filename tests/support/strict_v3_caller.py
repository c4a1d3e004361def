"""A client of strict-v3 for tests: one message at a time over a real socket, its whole trace checked at the end."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.support.strict_v3 import Trace, short

WAIT_SECONDS = 120
FRAME_SAMPLES = 1280
CREATED, DONE = "response.created", "response.done"
CALL = "response.function_call_arguments.done"
APPLIED = "conversation.item.function_call_output.applied"
COMPLETED = "conversation.item.input_audio_transcription.completed"


class StrictCaller:
    """One connection; `events` are all that came."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []
        self._turns = 0

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def receive(self, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        data = self.socket.recv(timeout)
        assert isinstance(data, str), "a binary frame"
        event: dict[str, Any] = json.loads(data)
        self.events.append(event)
        self.times.append(time.monotonic())
        return event

    def until(self, kind: str, since: int | None = None, seconds: float = WAIT_SECONDS, **want: Any) -> dict[str, Any]:
        """The first event of a kind from `since` on (from now on without it)."""
        at = len(self.events) if since is None else since
        deadline = time.monotonic() + seconds
        while True:
            while at < len(self.events):
                event = self.events[at]
                if event["type"] == kind and all(event.get(key) == value for key, value in want.items()):
                    return event
                assert event["type"] != "error" or kind in ("error", "session.closed"), event
                at += 1
            assert time.monotonic() < deadline, f"no {kind} within {seconds:g} s: {self.kinds[-8:]}"
            self.receive(seconds)

    def append(self, samples: np.ndarray) -> None:
        audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
        self.say("input_audio_buffer.append", encoding="pcm16", sample_rate=16000, channels=1, audio=audio)

    def speak(self, samples: np.ndarray, number: int = 0, sizes: Iterator[int] | None = None) -> int:
        """A whole turn, int16 (S,): onset, turn_start, the rest in packets of `sizes` samples, commit."""
        self._turns = number or self._turns + 1
        onset = 2 * FRAME_SAMPLES
        self.append(samples[:onset])
        self.say("input_audio_buffer.turn_start", event_id=f"start{self._turns}", client_turn_id=self._turns)
        at = onset
        while at < len(samples):
            size = next(sizes) if sizes is not None else 4 * FRAME_SAMPLES
            self.append(samples[at : at + size])
            at += size
        self.say("input_audio_buffer.commit", event_id=f"commit{self._turns}", client_turn_id=self._turns)
        return self._turns

    def result(self, call_id: str, output: str, **fields: Any) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": output, **fields}
        self.say("conversation.item.create", event_id="result", item=item)

    def stop(self) -> None:
        """End the session in order, and check the whole trace."""
        self.say("session.stop")
        assert self.until("session.closed", seconds=WAIT_SECONDS)["status"] == "completed"
        assert self.closed() == 1000
        self.check(1000)

    def closed(self) -> int:
        """The code of the closing, after what still comes."""
        deadline = time.monotonic() + WAIT_SECONDS
        with suppress(ConnectionClosed):
            while time.monotonic() < deadline:
                self.receive()
        assert self.socket.protocol.close_rcvd, "the server does not close"
        return self.socket.protocol.close_rcvd.code

    def check(self, closed: int | None = None) -> None:
        Trace(self.events, closed).check()

    @property
    def kinds(self) -> list[str]:
        return [short(event) for event in self.events if event["type"] != "voicechat.metrics"]

    def of(self, kind: str, **want: Any) -> list[dict[str, Any]]:
        found = [event for event in self.events if event["type"] == kind]
        return [event for event in found if all(event.get(key) == value for key, value in want.items())]

    def audio(self, response_id: str) -> np.ndarray:
        """What one response said, int16 (S,)."""
        deltas = self.of("response.output_audio.delta", response_id=response_id)
        return np.frombuffer(b"".join(base64.b64decode(event["delta"]) for event in deltas), "<i2")


@contextmanager
def strict_calling(url: str, configured: bool = True, **session: Any) -> Iterator[StrictCaller]:
    """A connection, with a session unless it is not to be `configured`."""
    address = url if "protocol=" in url or url.endswith("/v3") else f"{url}?protocol=strict-v3"
    with connect(address, compression=None, proxy=None, open_timeout=WAIT_SECONDS, max_size=None) as socket:
        caller = StrictCaller(socket)
        assert caller.receive()["type"] == "session.created"
        if configured:
            caller.say("session.update", session={"protocol_version": 3, **session})
            caller.until("session.updated", 0)
        yield caller
