"""strict-v3: what the session was asked and has not done yet, in order: frames to hear, turns to begin and to end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .strict_v3_calls import PendingCall
from .strict_v3_codes import FRAME_BYTES
from .strict_v3_scopes import InputTurn
from .strict_v3_turns import Level

HEAR, BEGIN, END = "hear", "begin", "end"
SILENCE, NOTHING = Level(FRAME_BYTES // 2, 0.0, 0.0), Level(0, 0.0, 0.0)


@dataclass(frozen=True)
class Spoken:
    """One frame that the session ran: float samples (S,) of speech, the model's seconds, whether its text was BOS."""

    samples: np.ndarray
    seconds: float
    bos: bool = False


@dataclass(frozen=True)
class Work:
    """One thing that was asked; `event_id` is that of the client's message to acknowledge."""

    kind: str
    asked_at: float
    level: Level = SILENCE
    turn: InputTurn | None = None
    event_id: str | None = None


@dataclass(frozen=True)
class Done:
    """All work up to a boundary was done."""

    work: Work


@dataclass(frozen=True)
class Again:
    """A message that came twice; `what` is turn_started or committed."""

    turn_id: str
    client_turn_id: int
    what: str
    event_id: str


@dataclass(frozen=True)
class Given:
    """The session took the result of a call."""

    call: PendingCall


class Backlog:
    """The work that waits."""

    def __init__(self) -> None:
        self._work: deque[Work] = deque()

    def push(self, work: Work) -> None:
        self._work.append(work)

    @property
    def head(self) -> Work | None:
        """What the session is at."""
        return self._work[0] if self._work else None

    @property
    def frames(self) -> int:
        """How many frames wait to be heard."""
        return sum(work.kind == HEAR for work in self._work)

    @property
    def turning(self) -> bool:
        """Whether a turn is being begun or ended."""
        return any(work.kind != HEAR for work in self._work)

    @property
    def beginning(self) -> Work | None:
        """The next turn, where one was asked for."""
        return next((work for work in self._work if work.kind == BEGIN), None)

    def at(self, kind: str) -> bool:
        """Whether the session is at this kind of work."""
        return bool(self._work) and self._work[0].kind == kind

    def take_frame(self) -> Work | None:
        """A frame ran: the one that was asked for, or None where it is the session's own."""
        return self._work.popleft() if self.at(HEAR) else None

    def finish(self, work: Work) -> None:
        """This was done, and all before it."""
        while self._work and self._work.popleft() is not work:
            pass
