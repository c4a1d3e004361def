"""The server's events as typed objects; `raw` is always the wire's own."""

from __future__ import annotations

import base64
import binascii
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DuplexEvent:
    """One event of the server; a type that is not known here is one of these too."""

    raw: dict[str, Any]
    received_at: float = field(default_factory=time.monotonic, compare=False)  # on time.monotonic's clock

    @property
    def type(self) -> str:
        return str(self.raw.get("type", ""))

    @property
    def event_id(self) -> str | None:
        return _string(self.raw.get("event_id"))

    @property
    def session_id(self) -> str | None:
        session = self.raw.get("session")
        inside = session.get("id") if isinstance(session, dict) else None
        return _string(self.raw.get("session_id")) or _string(inside)

    @property
    def response_id(self) -> str | None:
        response = self.raw.get("response")
        inside = response.get("id") if isinstance(response, dict) else None
        return _string(self.raw.get("response_id")) or _string(inside)

    @property
    def item_id(self) -> str | None:
        item = self.raw.get("item")
        inside = item.get("id") if isinstance(item, dict) else None
        return _string(self.raw.get("item_id")) or _string(inside)

    @property
    def server_event_seq(self) -> int | None:
        number = self.raw.get("server_event_seq")
        return number if isinstance(number, int) and not isinstance(number, bool) else None

    @property
    def audio(self) -> bytes:
        """The bytes of an audio delta; of other events none."""
        return b""

    @property
    def text(self) -> str:
        """The piece of a delta, the whole of what is done."""
        for key in ("delta", "transcript", "text"):
            if isinstance(self.raw.get(key), str):
                return str(self.raw[key])
        return ""


class SessionCreated(DuplexEvent):
    """session.created"""


class SessionClosed(DuplexEvent):
    """session.closed: the last event of a session."""


class SessionExpired(DuplexEvent):
    """session.expired: the server gave the session up."""


class ConnectionResumed(DuplexEvent):
    """The client's own: the connection was lost and is back, nothing is missing."""


class ResponseCreated(DuplexEvent):
    """response.created"""


class ResponseDone(DuplexEvent):
    """response.done"""

    @property
    def status(self) -> str:
        """completed, cancelled or failed."""
        response = self.raw.get("response")
        return str(response.get("status", "")) if isinstance(response, dict) else ""


class AudioDelta(DuplexEvent):
    """response.output_audio.delta"""

    @property
    def audio(self) -> bytes:
        try:
            return base64.b64decode(self.raw.get("delta", ""), validate=True)
        except (binascii.Error, TypeError, ValueError):
            return b""

    @property
    def text(self) -> str:
        return ""

    @property
    def sample_rate_hz(self) -> int | None:
        rate = self.raw.get("sample_rate_hz")
        return rate if isinstance(rate, int) else None


class TranscriptDelta(DuplexEvent):
    """response.output_audio_transcript.delta"""


class TextDelta(DuplexEvent):
    """response.output_text.delta"""


class ListenDecision(DuplexEvent):
    """response.listen: the model goes on listening."""


class SpeakDecision(DuplexEvent):
    """response.speak: the model begins to speak."""


class ErrorEvent(DuplexEvent):
    """error, in OpenAI's shape or in the flat one of a handshake."""

    @property
    def code(self) -> str:
        return str(self._body.get("code") or "")

    @property
    def message(self) -> str:
        return str(self._body.get("message") or "")

    @property
    def related_event_id(self) -> str | None:
        """The client's message that it is about."""
        return _string(self._body.get("event_id"))

    @property
    def _body(self) -> dict[str, Any]:
        error = self.raw.get("error")
        return error if isinstance(error, dict) else {"message": error, "code": self.raw.get("code")}


CONNECTION_RESUMED = "connection.resumed"
KINDS: dict[str, type[DuplexEvent]] = {
    "session.created": SessionCreated,
    "session.closed": SessionClosed,
    "session.expired": SessionExpired,
    CONNECTION_RESUMED: ConnectionResumed,
    "response.created": ResponseCreated,
    "response.done": ResponseDone,
    "response.output_audio.delta": AudioDelta,
    "response.output_audio_transcript.delta": TranscriptDelta,
    "response.output_text.delta": TextDelta,
    "response.listen": ListenDecision,
    "response.speak": SpeakDecision,
    "error": ErrorEvent,
}


def typed(raw: dict[str, Any]) -> DuplexEvent:
    """A message of the wire as the event it is."""
    return KINDS.get(str(raw.get("type")), DuplexEvent)(raw)


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None
