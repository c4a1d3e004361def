"""What lets a dropped connection go on: the events it may not have got, its token, the time it has to come back.

A journal numbers every event of a session from 1 and keeps those that the client has not acknowledged, within a bound
of bytes. What was dropped for want of room is never passed over in silence: a resume that needs it is refused.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MOST_BYTES = 4 << 20  # 60 s of speech in base64 at 24 kHz
GRACE_SECONDS = 30.0
TOKEN_PREFIX = "rt_"

Loss = Literal["journal_gap", "journal_overflow"]


class JournalLost(Exception):
    """The events after `last_received` cannot be replayed.

    journal_overflow: some were dropped for want of room. journal_gap: the client acknowledged them, so that they were
    dropped, or names a number that was never sent.
    """

    def __init__(self, code: Loss, last_received: int) -> None:
        super().__init__(f"The events after number {last_received} cannot be replayed: {code}.")
        self.code, self.last_received = code, last_received


@dataclass(frozen=True)
class Entry:
    """One event as it goes over the wire."""

    number: int
    text: str


class Journal:
    """The events of one session that its client has not acknowledged, oldest first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._entries: deque[Entry] = deque()
        self._sizes: deque[int] = deque()
        self._overflowed = 0  # the newest event that was dropped for want of room
        self.last_number = 0
        self.acknowledged = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def number(self) -> int:
        """The number of the event that is about to be written: exactly one `write` follows."""
        self.last_number += 1
        return self.last_number

    def write(self, number: int, text: str) -> None:
        """Keep an event under the number it got, the last one given out."""
        assert number == self.last_number
        size = len(text.encode())
        self._entries.append(Entry(number, text))
        self._sizes.append(size)
        self.size_bytes += size
        while self.size_bytes > self._most_bytes:
            self._overflowed = self._drop()

    def acknowledge(self, number: int) -> None:
        """The client has every event up to `number`; older and unheard-of numbers change nothing."""
        if number > self.last_number:
            return
        self.acknowledged = max(self.acknowledged, number)
        while self._entries and self._entries[0].number <= self.acknowledged:
            self._drop()

    def after(self, last_received: int) -> list[Entry]:
        """The events that a client needs whose last one was `last_received`. Raises JournalLost."""
        if not 0 <= last_received <= self.last_number:
            raise JournalLost("journal_gap", last_received)
        if last_received < self._overflowed:
            raise JournalLost("journal_overflow", last_received)
        if last_received < self.acknowledged:
            raise JournalLost("journal_gap", last_received)
        return [entry for entry in self._entries if entry.number > last_received]

    def _drop(self) -> int:
        self.size_bytes -= self._sizes.popleft()
        return self._entries.popleft().number


@dataclass
class Attachment:
    """Which socket a session has: a `generation` for each, a token for the next, and how long it may be without one."""

    grace_seconds: float = GRACE_SECONDS
    now: Callable[[], float] = time.monotonic
    generation: int = 1
    detached_at: float | None = None
    token: str = ""

    def __post_init__(self) -> None:
        self.token = _token()

    @property
    def detached(self) -> bool:
        return self.detached_at is not None

    @property
    def expires_at(self) -> float | None:
        """When a detached session ends, on the clock of `now`."""
        return None if self.detached_at is None else self.detached_at + self.grace_seconds

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.now() >= self.expires_at

    def detach(self) -> None:
        """The socket is gone; the grace period begins."""
        if self.detached_at is None:
            self.detached_at = self.now()

    def accepts(self, token: object) -> bool:
        """Whether this is the session's token, compared in constant time."""
        return isinstance(token, str) and hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def attach(self) -> str:
        """A new socket has the session: another generation, and another token, which is returned."""
        self.detached_at = None
        self.generation += 1
        self.token = _token()
        return self.token


def _token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(24)
