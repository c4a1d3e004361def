"""strict-v3: the life of one user's turn and of one response, each from its first event to its last."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_voicechat.sound.pcm import pcm16

from .strict_v3_codes import OUTPUT_RATE_HZ, STATUSES
from .strict_v3_events import EventWriter
from .strict_v3_order import RESPONSE_OPEN, TURN_OPEN
from .strict_v3_turns import Level

MICROPHONE, TYPED = "microphone", "typed"
SILENT_DBFS = -60.0
SILENT_FRAMES = 12  # after text was said: what stays silent so long is not sent
_TRANSCRIPT = "conversation.item.input_audio_transcription"


@dataclass
class InputTurn:
    """A user's turn: `client_turn_id` of the client's, `job_id` of typed text, neither of one that the model found."""

    turn_id: str
    client_turn_id: int | None = None
    job_id: str | None = None
    calls: int = 0
    transcript: str = field(default="", init=False)

    @property
    def source(self) -> str:
        return MICROPHONE if self.job_id is None else TYPED

    def _marks(self) -> dict[str, Any]:
        return {"turn_id": self.turn_id, "source": self.source, "job_id": self.job_id}

    def start(self, wire: EventWriter) -> None:
        correlation = self.client_turn_id if self.job_id is None else self.job_id
        wire.emit("input_audio_buffer.speech_started", **self._marks(), correlation=correlation)

    def hear(self, wire: EventWriter, delta: str) -> None:
        delta = delta if self.transcript else delta.lstrip()
        if delta:
            self.transcript += delta
            wire.emit(f"{_TRANSCRIPT}.delta", **self._marks(), delta=delta, transcript=self.transcript)

    def stop(self, wire: EventWriter) -> None:
        """The turn's last events; nothing where they were sent."""
        if wire.state in TURN_OPEN:
            wire.emit("input_audio_buffer.speech_stopped", **self._marks())
            empty = not self.transcript
            wire.emit(f"{_TRANSCRIPT}.completed", **self._marks(), transcript=self.transcript, empty=empty)

    def acknowledge(self, wire: EventWriter, what: str, event_id: str) -> None:
        """`what` is turn_started or committed."""
        ids = {"client_event_id": event_id, "client_turn_id": self.client_turn_id, "turn_id": self.turn_id}
        wire.emit(f"input_audio_buffer.{what}", **ids)


@dataclass
class Response:
    """What is said to one turn, from `response.created` to `response.done`."""

    turn: InputTurn
    response_id: str
    text: str = ""
    sounded: bool = False  # some audio was sent
    frames: int = 0
    _silent: int = 0

    def _marks(self) -> dict[str, Any]:
        return {"turn_id": self.turn.turn_id, "response_id": self.response_id}

    def create(self, wire: EventWriter) -> None:
        wire.emit("response.created", **self._marks())

    def say(self, wire: EventWriter, delta: str) -> None:
        delta = delta if self.text else delta.lstrip()
        if delta:
            self.text += delta
            wire.emit("response.output_text.delta", **self._marks(), delta=delta, text=self.text)

    def sound(self, wire: EventWriter, samples: np.ndarray, level: Level) -> None:
        """One frame of speech, float samples (S,)."""
        self._silent = self._silent + 1 if level.at_most(SILENT_DBFS) else 0
        if self.text and self._silent > SILENT_FRAMES:
            return
        self.sounded = True
        delta = base64.b64encode(pcm16(samples, 32767).tobytes()).decode("ascii")
        form = {"encoding": "pcm16", "sample_rate": OUTPUT_RATE_HZ, "channels": 1}
        wire.emit("response.output_audio.delta", **self._marks(), delta=delta, **form)

    def call(self, wire: EventWriter, call_id: str, name: str, arguments: str) -> None:
        fields = {"call_id": call_id, "name": name, "arguments": arguments}
        wire.emit("response.function_call_arguments.done", **self._marks(), **fields)

    def fail_call(self, wire: EventWriter, call_id: str, reason: str) -> None:
        wire.emit("response.function_call.failed", **self._marks(), call_id=call_id, reason=reason)

    def finish(self, wire: EventWriter, reason: str) -> None:
        """The response's last events; nothing where they were sent."""
        if wire.state in RESPONSE_OPEN:
            wire.emit("response.output_text.done", **self._marks(), text=self.text, empty=not self.text)
            wire.emit("response.output_audio.done", **self._marks(), empty=not self.sounded)
            wire.emit("response.done", **self._marks(), status=STATUSES[reason], reason=reason)


def turn_state(state: str, call_open: bool) -> str:
    """What `voicechat.metrics` says of the order's state."""
    if call_open:
        return "function_call"
    if state in TURN_OPEN:
        return "user"
    return "assistant" if state in RESPONSE_OPEN else "idle"
