"""One WebSocket that speaks OpenAI's vocabulary: its session, and what a connection says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket

from .connection import Connection, Patience, sessions_in_use
from .limits import LONG_INPUT_SECONDS, SLOW_SECONDS
from .openai import OpenAISession
from .openai_events import ServerEvent, error_fields
from .openai_messages import HANDLERS, take
from .settings import LONG_MESSAGE_BYTES, ServerSettings
from .typed_voice import TypedVoice

if TYPE_CHECKING:
    from .engine import Engine


class OpenAIConnection(Connection):
    """A connection of this dialect; its session ends with it."""

    def __init__(
        self,
        websocket: WebSocket,
        engine: Engine,
        settings: ServerSettings,
        voice: TypedVoice | None,
        beta: bool,
    ) -> None:
        super().__init__(websocket, engine, settings)
        self.session = self._new_session(voice, beta)
        if settings.max_message_bytes is None:
            self.allow_messages(LONG_MESSAGE_BYTES)

    def _new_session(self, voice: TypedVoice | None, beta: bool) -> OpenAISession:
        return OpenAISession(self.engine, self.settings, voice, beta, self.send, self.close)

    def greet(self) -> None:
        if self.session.start():
            self.session.greet()
        else:
            self.refuse_busy(None)

    def take(self, frame: Mapping[str, Any]) -> None:
        take(self.session, HANDLERS, frame)

    def gone(self) -> None:
        self.session.end()

    @property
    def full(self) -> bool:
        return self.session.waiting_seconds >= LONG_INPUT_SECONDS

    def left(self, event: Any) -> None:
        if isinstance(event, ServerEvent):
            self.session.frames_left(event.frames)

    def patience(self) -> Patience:
        """A client that waits for the server is not silent."""
        if self.session.at_work:
            self.heard_at = self.loop.time()
        seconds = self.settings.idle_seconds
        return Patience(self.heard_at, seconds, self._error("session_limit_reached", f"No message for {seconds:g} s."))

    def busy(self, event_id: str | None) -> ServerEvent:
        message = f"The server has {sessions_in_use(self.settings.max_sessions)} in use. Try again later."
        return self._error("resource_exhausted", message, event_id)

    def slow(self) -> ServerEvent:
        message = f"What was said waited {SLOW_SECONDS:g} s to be read: the client is slower than real time."
        return self._error("slow_consumer", message)

    def written(self, event: ServerEvent) -> tuple[str, dict[str, Any]]:
        return event.name, event.fields

    def _error(self, code: str, message: str, event_id: str | None = None) -> ServerEvent:
        return ServerEvent("error", error_fields(code, message, None, event_id, self.session.vendor))
