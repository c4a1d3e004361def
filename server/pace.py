"""When the next frame of a session is due whose time the server keeps. Seconds of a monotonic clock; no MLX here."""

from __future__ import annotations

import math

from .messages import Pace

PAUSE_SECONDS = 0.25  # without audio from a client that streams: then it has stopped, and silence takes its place


class Pacer:
    """The clock of one session.

    A frame of waiting audio is due at once, unless the agent's speech would be too far ahead of who plays it; where
    none waits, a frame of silence is due in real time, once the client has sent nothing for a quarter of a second
    (its pieces of 20 to 200 ms come late now and then: silence in the middle of a word would be heard).
    """

    def __init__(self, pace: Pace, frame_seconds: float, now: float) -> None:
        self._pace = pace
        self._frame_seconds = frame_seconds
        self._quiet_from = now  # before it the client may still send what belongs to the last piece
        self._silence_at = now  # the next frame of silence in real time
        self._played_at = now  # when all speech so far will have been played
        self._still_from: float | None = None

    def heard(self, now: float) -> None:
        """Audio came."""
        self._quiet_from = now + PAUSE_SECONDS

    def no_more(self, now: float) -> None:
        """The client has said that no audio comes now."""
        self._quiet_from = now

    def stand_still(self, now: float) -> None:
        """No time passes from now on."""
        self._still_from = now

    def go_on(self, now: float) -> None:
        """Time passes again."""
        if self._still_from is not None:
            still = now - self._still_from
            self._quiet_from, self._silence_at, self._played_at = (
                at + still for at in (self._quiet_from, self._silence_at, self._played_at)
            )
            self._still_from = None

    def due(self, audio: bool, speaking: bool, calling: bool) -> float | None:
        """The moment of the next frame, which may be past; None while there is none to come."""
        ahead = self._played_at - self._pace.ahead_seconds
        if audio:
            return ahead if speaking else -math.inf
        if speaking:
            return max(ahead, self._quiet_from)
        return max(self._silence_at, self._quiet_from) if self._pace.when_idle or calling else None

    def ran(self, now: float, audio: bool, speaking: bool) -> None:
        """A frame ran: of audio or of silence, and with the agent's speech or without."""
        begun = now if audio else max(self._silence_at, now - self._frame_seconds)
        self._silence_at = begun + self._frame_seconds
        if speaking:
            self._played_at = max(self._played_at, now) + self._frame_seconds
