"""One WebSocket of a duplex session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket

from .connection import POLICY, Patience
from .duplex import DuplexSession
from .duplex_messages import DUPLEX_HANDLERS
from .duplex_sessions import DuplexSessions, waits_for_a_message
from .journal import JournalLost
from .json_messages import Malformed, is_integer, parsed
from .openai_connection import OpenAIConnection
from .openai_events import ServerEvent
from .openai_messages import take
from .settings import ServerSettings
from .typed_voice import TypedVoice

if TYPE_CHECKING:
    from .engine import Engine


class DuplexConnection(OpenAIConnection):
    """A connection of this dialect. Its session begins with it, with its first update (`autostart=0`), or before it."""

    needs_slot = False
    session: DuplexSession

    def __init__(
        self,
        websocket: WebSocket,
        engine: Engine,
        settings: ServerSettings,
        voice: TypedVoice | None,
        sessions: DuplexSessions,
    ) -> None:
        super().__init__(websocket, engine, settings, voice, False)
        self._sessions = sessions
        self._has_session = False
        self._autostart = not waits_for_a_message(websocket.query_params)
        self._early: list[Mapping[str, Any]] = []  # messages that wait for a slot
        self._beginning: asyncio.Task[None] | None = None

    def _new_session(self, voice: TypedVoice | None, beta: bool) -> DuplexSession:
        return DuplexSession(self.engine, self.settings, voice, self.send, self.close, self._forget)

    def _forget(self, session: DuplexSession) -> None:
        self._sessions.forget(session)

    def greet(self) -> None:
        if self._autostart and self._begin():
            self.session.greet()

    def _begin(self) -> bool:
        if not self.session.start():
            self.refuse_busy(None)
            return False
        self._has_session = True
        self._sessions.add(self.session)
        return True

    def take(self, frame: Mapping[str, Any]) -> None:
        if self._has_session:
            take(self.session, DUPLEX_HANDLERS, frame)
        elif self._beginning is not None:
            self._early.append(frame)
        else:
            self._first(frame)

    def _first(self, frame: Mapping[str, Any]) -> None:
        """The first message of a connection without a session."""
        try:
            message = parsed(frame)
        except Malformed:
            message = {}
        if message.get("type") == "session.resume":
            self._resume(message)
            return
        self._early.append(frame)
        self._beginning = self.loop.create_task(self._begin_with(message))

    async def _begin_with(self, message: dict[str, Any]) -> None:
        await self._sessions.make_room(self.engine)
        given = message.get("session")
        if not self._begin():
            return
        if message.get("type") == "session.update" and isinstance(given, dict):
            self.session.preview(given)
        self.session.greet()
        early, self._early = self._early, []
        for frame in early:
            self.take(frame)

    def _resume(self, message: dict[str, Any]) -> None:
        session_id, last = message.get("session_id"), message.get("last_received_server_event_seq", 0)
        found = self._sessions.find(session_id)
        event_id = message.get("event_id")
        if found is None:
            self._refuse(
                "session_resume_expired", f"Unknown or expired duplex session: {str(session_id)[:80]}.", event_id
            )
            return
        if not found.attachment.accepts(message.get("resume_token")):
            self._refuse("invalid_resume_token", "That is not the token of the session.", event_id)
            return
        if not is_integer(last):
            self._refuse("invalid_event", "last_received_server_event_seq must be an integer.", event_id)
            return
        try:
            found.attach(self.send, self.close, last)
        except JournalLost as lost:
            self.send(ServerEvent("session.resync_required", {"session_id": found.id, "reason": lost.code}))
            self._refuse(lost.code, str(lost), event_id)
            found.end()
            return
        self.session, self._has_session = found, True
        self._sessions.attached(found)
        self.watch_silence()

    def _refuse(self, code: str, message: str, event_id: Any) -> None:
        self.send(self._error(code, message, event_id if isinstance(event_id, str) else None))
        self.close(POLICY)

    def gone(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        if not self._has_session or self.session.ended or not self.session.owned_by(self.send):
            return
        self._sessions.detach(self.session)

    def patience(self) -> Patience:
        """Its lease: a client that sends nothing, no heartbeat either, has gone."""
        if not self._has_session:
            seconds = self.settings.setup_seconds
            message = f"No session.update or session.resume within {seconds:g} s."
            return Patience(self.heard_at, seconds, self._error("session_limit_reached", message))
        patience = super().patience()
        seconds = self.session.config.idle_timeout_s or self.settings.idle_seconds
        fields = {"session_id": self.session.id, "reason": "idle_ttl_expired"}
        return Patience(patience.since, seconds, ServerEvent("session.expired", fields))
