"""strict-v3: typed text on its way to being heard: one job that runs, and one that waits and can be replaced."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from .strict_v3_codes import MOST_JOB_CHARACTERS, MOST_TEXT_CHARACTERS
from .strict_v3_scopes import InputTurn
from .strict_v3_turns import Blocks

REMEMBERED_JOBS = 1024
FED_FRAMES = 8  # of a job that wait for the session at once


@dataclass
class Job:
    """One accepted text; `frames` are its speech, PCM16, once it was made."""

    job_id: str
    text: str
    event_id: str | None
    frames: deque[bytes] | None = None
    turn: InputTurn | None = None

    def speak(self, pcm: bytes) -> None:
        """Its speech has been made."""
        blocks = Blocks()
        self.frames = deque([*blocks.push(pcm), *blocks.padded()])


class Jobs:
    """The jobs of one connection."""

    def __init__(self) -> None:
        self.running: Job | None = None
        self.waiting: Job | None = None
        self._known: OrderedDict[str, None] = OrderedDict()

    def __bool__(self) -> bool:
        return self.running is not None or self.waiting is not None

    def rejection(self, job_id: Any, text: Any) -> str | None:
        """What is wrong with a request by itself."""
        if not isinstance(job_id, str) or not 0 < len(job_id) <= MOST_JOB_CHARACTERS:
            return "invalid_job_id"
        if job_id in self._known:
            return "duplicate_job_id"
        if not isinstance(text, str) or not text.strip():
            return "empty_text"
        return "text_too_long" if len(text) > MOST_TEXT_CHARACTERS else None

    def add(self, job: Job) -> Job | None:
        """A new job; the one that it replaces."""
        self._known[job.job_id] = None
        while len(self._known) > REMEMBERED_JOBS:
            self._known.popitem(last=False)
        replaced, self.waiting = self.waiting, job
        return replaced

    def start(self, turn: InputTurn) -> None:
        """The job that waits begins as `turn`."""
        self.running, self.waiting = self.waiting, None
        assert self.running is not None
        self.running.turn = turn
