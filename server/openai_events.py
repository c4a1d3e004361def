"""Server events of OpenAI's Realtime vocabulary: their names, GA and beta, their envelope, and the errors.

Names and shapes are those of the published API (`openai.types.realtime`); the vendor events are those of the duplex
extensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

INVALID_REQUEST, SERVER_ERROR, RATE_LIMIT = "invalid_request_error", "server_error", "rate_limit_error"
ERROR_TYPES = {  # of the codes that are no invalid_request_error
    "session_limit_reached": SERVER_ERROR,
    "slow_consumer": SERVER_ERROR,
    "internal_error": SERVER_ERROR,
    "typed_voice_failed": SERVER_ERROR,
    "resource_exhausted": RATE_LIMIT,
}
DUPLEX_CODES = {"input_audio_buffer_commit_empty": "input_audio_buffer_empty"}  # what OpenAI calls otherwise

SHARED = frozenset(
    {
        "error",
        "session.created",
        "session.updated",
        "input_audio_buffer.committed",
        "input_audio_buffer.cleared",
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "conversation.item.added",
        "conversation.item.done",
        "conversation.item.deleted",
        "conversation.item.retrieved",
        "conversation.item.truncated",
        "conversation.item.input_audio_transcription.delta",
        "conversation.item.input_audio_transcription.completed",
        "response.created",
        "response.done",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.delta",
        "response.output_audio_transcript.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "rate_limits.updated",
        "output_audio_buffer.cleared",
    }
)
BETA_NAMES: dict[str, str | None] = {  # None: it did not exist then
    "conversation.item.added": "conversation.item.created",
    "conversation.item.done": None,
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
}
VENDOR = frozenset(
    {
        "session.heartbeat_ack",
        "session.closed",
        "session.resumed",
        "session.replaced",
        "session.expired",
        "session.resync_required",
        "response.speak",
        "response.listen",
        "duplex.function_call.done",
        "playback.acknowledged",
        "overlap.decision",
        "turn.event",
    }
)


@dataclass(frozen=True)
class ServerEvent:
    """One event as it goes over the wire, but for its event_id; `frames` of speech leave the engine's queue with it."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    frames: int = 0

    @property
    def code(self) -> str | None:
        """Of an error."""
        return self.fields["error"]["code"] if self.name == "error" else None


class Emit(Protocol):
    """How what a session is made of says an event; a name that the vocabulary has not raises KeyError."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


class Wrong(Exception):
    """A message that cannot be done: the error's code and message, and the field at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def server_event(name: str, fields: dict[str, Any], frames: int, beta: bool, vendor: bool) -> ServerEvent | None:
    """The event in the names of the connection; None where that has no such event. Raises KeyError."""
    if name not in SHARED and not (vendor and name in VENDOR):
        raise KeyError(f"There is no server event {name}.")
    known = BETA_NAMES.get(name, name) if beta else name
    return None if known is None else ServerEvent(known, fields, frames)


def error_fields(
    code: str, message: str, param: str | None = None, event_id: str | None = None, duplex: bool = False
) -> dict[str, Any]:
    """The fields of an error event; `event_id` is that of the client's message that caused it."""
    kind = ERROR_TYPES.get(code, INVALID_REQUEST)
    code = DUPLEX_CODES.get(code, code) if duplex else code
    return {"error": {"type": kind, "code": code, "message": message, "param": param, "event_id": event_id}}


def usage(heard_frames: int, spoken_frames: int, text_tokens: int) -> dict[str, Any]:
    """What a response took: a token of audio is a frame of 80 ms."""
    return {
        "total_tokens": heard_frames + spoken_frames + text_tokens,
        "input_tokens": heard_frames,
        "output_tokens": spoken_frames + text_tokens,
        "input_token_details": {"text_tokens": 0, "audio_tokens": heard_frames, "cached_tokens": 0},
        "output_token_details": {"text_tokens": text_tokens, "audio_tokens": spoken_frames},
    }
