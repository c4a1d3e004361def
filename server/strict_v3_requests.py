"""strict-v3: what its rules ask of the world around them; see `strict_v3_core`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from .messages import BeginTurn, EndTurn, Give, Opened, OpeningFailed, Refuse

__all__ = ["BeginTurn", "EndTurn", "Give", "Opened", "OpeningFailed", "Refuse"]


@dataclass(frozen=True)
class Open:
    """A session with these settings, in place of the one before."""

    instructions: str | None
    tools: tuple[dict[str, Any], ...] | None  # None: those of the server
    frames: int  # of its longest life


@dataclass(frozen=True)
class Hear:
    """One frame, PCM16."""

    pcm: bytes


@dataclass(frozen=True)
class Mark:
    """Comes back when all before it was done."""

    what: Any


# What comes back, besides the session's own events, frames and marks


@dataclass(frozen=True)
class ResultRefused:
    """A result that the session does not take; the call stays open."""

    call_id: str
    message: str


@dataclass(frozen=True)
class Limited:
    """The session has heard all that it may."""

    message: str


@dataclass(frozen=True)
class Broken:
    """The model failed: the session is no more."""

    message: str


Request: TypeAlias = Open | Hear | BeginTurn | EndTurn | Give | Refuse | Mark


class Host(Protocol):
    """Where the rules run. What `put` asks for is done in order, and told back in order."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def send(self, event: dict[str, Any]) -> None:
        """Send a server event."""

    def close(self, code: int) -> None:
        """Close after what was sent; nothing follows."""

    def put(self, request: Request) -> None:
        """Ask something of the session."""

    def synthesise(self, job_id: str, text: str) -> None:
        """Make speech of a text; `StrictV3.synthesised` or `StrictV3.synthesis_failed` follows."""

    def stop_synthesis(self) -> None:
        """The text is not wanted any more; nothing follows."""
