"""strict-v3: the server's events as they are sent: envelope, ids, and the larger objects in them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .strict_v3_codes import (
    CLIENT_AUTHORED,
    FRAME_SECONDS,
    INPUT_RATE_HZ,
    MOST_CALLS,
    MOST_FRAMES,
    MOST_RESULT_BYTES,
    MOST_RESULT_TOKENS,
    OUTPUT_RATE_HZ,
    PROTOCOL,
    RECOVERY_FRAMES,
    VERSION,
)
from .strict_v3_order import Order
from .strict_v3_turns import Level

CLIENT_TURNS, SERVER_TURNS = "client", "server"
BUDGET_MS = 1000 * FRAME_SECONDS


@dataclass(frozen=True)
class Terms:
    """What a server tells of itself and holds its sessions to; `default_tools` are for clients that bring none."""

    checkpoint: str
    turns: str = CLIENT_TURNS
    typed_input: bool = False
    single_client: bool = True
    function_calling: bool = True
    instructions: str | None = None
    default_tools: tuple[dict[str, Any], ...] = ()
    function_seconds: float = 30.0
    most_frames: int = MOST_FRAMES

    def capabilities(self) -> dict[str, Any]:
        client = self.turns == CLIENT_TURNS
        return {
            "server_turn_detection": None if client else "rnnt",
            "input_turn_detection": "client_smart_turn_v1" if client else "server_rnnt",
            "input_transcription": True,
            "function_calling": self.function_calling,
            "typed_input": self.typed_input,
            "settings_mutable_until": "first_model_input_frame",
            "single_client": self.single_client,
            "function_call_timeout_seconds": _whole(self.function_seconds),
            "function_output_max_bytes": MOST_RESULT_BYTES,
            "function_output_max_tokens": MOST_RESULT_TOKENS,
            "function_output_recovery_max_frames": RECOVERY_FRAMES,
            "function_output_ack_timeout_seconds": 30,
            "max_function_calls_per_response": MOST_CALLS,
            "function_event_emit_timeout_seconds": 5,
            "max_session_model_frames": self.most_frames,
            "binary_audio": False,
            "function_output_model_output": {"mode": CLIENT_AUTHORED},
        }


def _whole(seconds: float) -> float | int:
    return int(seconds) if seconds == int(seconds) else seconds


class EventWriter:
    """The outgoing side: every event gets its envelope and passes the table of the order."""

    def __init__(self, terms: Terms, send: Callable[[dict[str, Any]], None], session_id: str | None = None) -> None:
        self.session_id = session_id or str(uuid.uuid4())
        self.order = Order()
        self.terms = terms
        self._send = send
        self._events = self._turns = self._responses = 0

    @property
    def state(self) -> str:
        return self.order.state

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event in its envelope."""
        self._events += 1
        event_id = f"evt_{self.session_id}_{self._events}"
        return {"type": kind, "event_id": event_id, "session_id": self.session_id, **fields}

    def emit(self, kind: str, **fields: Any) -> None:
        """Send an event. Raises OutOfOrder."""
        event = self.event(kind, **fields)
        self.order.take(event)
        self._send(event)

    def next_turn_id(self) -> str:
        self._turns += 1
        return f"turn_{self.session_id}_{self._turns}"

    def next_response_id(self) -> str:
        self._responses += 1
        return f"response_{self.session_id}_{self._responses}"

    def error(self, code: str, message: str, fatal: bool, event_id: str | None) -> None:
        echoed = {} if event_id is None else {"client_event_id": event_id}
        self.emit("error", error={"code": code, "message": message, "fatal": fatal, **echoed})

    def created(self) -> None:
        session = {"id": self.session_id, **self._audio(), "frame_duration_ms": round(BUDGET_MS)}
        session["checkpoint"] = self.terms.checkpoint
        self.emit("session.created", protocol=PROTOCOL, capabilities=self.terms.capabilities(), session=session)

    def updated(self, instructions: str | None, tools: tuple[dict[str, Any], ...], negotiated: str | None) -> None:
        session = {
            "id": self.session_id,
            "protocol_version": VERSION,
            "instructions": instructions,
            "tools": list(tools),
            **self._audio(),
            "capabilities": {"function_output_model_output": negotiated},
        }
        self.emit("session.updated", protocol=PROTOCOL, capabilities=self.terms.capabilities(), session=session)

    def closed(self, status: str, reason: str) -> None:
        self.emit("session.closed", status=status, reason=reason)

    @staticmethod
    def _audio() -> dict[str, Any]:
        return {
            "input_audio_format": "pcm16",
            "input_audio_sample_rate": INPUT_RATE_HZ,
            "output_audio_format": "pcm16",
            "output_audio_sample_rate": OUTPUT_RATE_HZ,
        }


@dataclass(frozen=True)
class FrameTimes:
    """Seconds of one frame: in the model, and in the server from its request to its events."""

    model_seconds: float
    step_seconds: float


def metrics(frame: int, heard_frames: int, times: FrameTimes, heard: Level, said: Level, state: str) -> dict[str, Any]:
    """The fields of `voicechat.metrics`: frames from 0, `heard_frames` of them with audio of the client's."""
    step_ms = 1000 * times.step_seconds
    return {
        "frame": frame,
        "transport_frame": heard_frames,
        "inference_ms": round(1000 * times.model_seconds, 3),
        "server_step_ms": round(step_ms, 3),
        "budget_ms": round(BUDGET_MS),
        "over_budget": step_ms > BUDGET_MS,
        "input_audio": _level(heard),
        "output_audio": _level(said),
        "turn_state": state,
    }


def _level(level: Level) -> dict[str, Any]:
    dbfs = level.dbfs
    return {
        "samples": level.samples,
        "rms": round(level.rms, 6),
        "rms_dbfs": None if dbfs is None else round(dbfs, 2),
        "peak": round(level.peak, 6),
    }
