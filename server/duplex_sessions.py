"""The duplex sessions of a server, which outlive their WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .duplex import DuplexSession
    from .engine import Engine

ROOM_SECONDS = 1.0  # for a slot to become free whose session was sent away: the frame that runs
LOOK_SECONDS = 0.005
NO = ("0", "false", "off")


def waits_for_a_message(query: Mapping[str, str]) -> bool:
    """Whether a connection has no session before its first message, which may resume one."""
    return query.get("autostart", "1").lower() in NO or "resume" in query


class DuplexSessions:
    """The duplex sessions of a server: those with a socket, and those that wait to be resumed."""

    def __init__(self) -> None:
        self._sessions: dict[str, DuplexSession] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, session: DuplexSession) -> None:
        """A session begins."""
        self._sessions[session.id] = session

    def forget(self, session: DuplexSession) -> None:
        """A session has ended."""
        self._sessions.pop(session.id, None)
        self._stop_timer(session)

    def find(self, session_id: object) -> DuplexSession | None:
        """The session of this id, if it has not ended."""
        return self._sessions.get(session_id) if isinstance(session_id, str) else None

    def detach(self, session: DuplexSession) -> None:
        """Its socket dropped: it has a while to come back."""
        session.detach()
        seconds = session.attachment.grace_seconds
        self._timers[session.id] = session.loop.call_later(seconds, session.expire, "disconnect_grace_expired")

    def attached(self, session: DuplexSession) -> None:
        """It came back."""
        self._stop_timer(session)

    def __len__(self) -> int:
        return len(self._sessions)

    async def make_room(self, engine: Engine) -> None:
        """Where all slots are taken, send away the session that has waited longest to be resumed."""
        waiting = [session for session in self._sessions.values() if session.attachment.detached]
        if not engine.busy or not waiting:
            return
        min(waiting, key=lambda session: session.attachment.detached_at or 0.0).expire("evicted")
        deadline = asyncio.get_running_loop().time() + ROOM_SECONDS
        while engine.busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(LOOK_SECONDS)

    def _stop_timer(self, session: DuplexSession) -> None:
        timer = self._timers.pop(session.id, None)
        if timer is not None:
            timer.cancel()
