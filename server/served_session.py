"""One session as the engine thread runs it: requests in, at most one frame a turn, events out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_voicechat.errors import LimitError
from mlx_voicechat.events import AudioFrame, Cancelled, Event, LimitReached
from mlx_voicechat.server.limits import LAGGING_PERIOD, LAGGING_SECONDS, OUTGOING_SECONDS
from mlx_voicechat.server.messages import (
    Append,
    Broken,
    Cancel,
    Commit,
    Committed,
    EngineEvent,
    Interrupt,
    Interrupted,
    Lagging,
    Open,
    Opened,
    OpeningFailed,
    Refused,
    Relay,
    Request,
    Speech,
    Unopened,
)

if TYPE_CHECKING:
    from mlx_voicechat.session import Session
    from mlx_voicechat.voicechat import VoiceChat

FLOAT_BYTES = 4


class Backlog:
    """Counts of one session that its connection and the engine both read; each is written by one of them only."""

    def __init__(self) -> None:
        self.requests_put = self.samples_put = self.frames_sent = 0  # by the connection
        self.requests_taken = self.samples_taken = self.frames_told = 0  # by the engine

    @property
    def requests(self) -> int:
        """How many requests wait."""
        return self.requests_put - self.requests_taken

    @property
    def samples(self) -> int:
        """How many samples wait."""
        return self.samples_put - self.samples_taken

    @property
    def frames(self) -> int:
        """How many frames of speech wait to be sent."""
        return self.frames_told - self.frames_sent


class ServedSession:
    """What is left to do for one session. Everything here happens on the engine thread.

    `tell` gets the events, and whether they are the last; `ended` says the same. What a turn raises goes to `fail`.
    """

    def __init__(
        self,
        model: VoiceChat,
        request: Open,
        voice: str | None,
        backlog: Backlog,
        tell: Callable[[list[EngineEvent], bool], None],
    ) -> None:
        self.backlog = backlog
        self.ended = False
        self._send = tell
        self._config = model.config
        self._opening: Generator[None, None, Session] | None = model.opening(
            system_prompt=request.system_prompt, seed=request.seed, max_seconds=request.max_seconds, voice=voice
        )
        self._session: Session | None = None
        self._waiting: deque[Request] = deque()
        self._at = 0  # bytes of the first append that were heard
        self._interrupts = 0
        self._lagging_told = -LAGGING_PERIOD

    @property
    def runnable(self) -> bool:
        """Whether a turn would do something: not while two seconds of speech wait to be sent."""
        room = self.backlog.frames * self._config.frame_seconds < OUTGOING_SECONDS
        return room and (self._opening is not None or bool(self._waiting))

    def take(self, request: Request) -> None:
        """Note a request; interrupting and cancelling do not wait for the audio before them."""
        if isinstance(request, Cancel):
            self._cancel(request.told)
        elif isinstance(request, Interrupt) and self._session is not None:
            self._interrupt()
        else:
            self._waiting.append(request)

    def turn(self) -> float | None:
        """Take one step of the opening, or go on to the end of the next frame; the frame's seconds if there was one."""
        if self._opening is not None:
            self._open()
            return None
        seconds = None
        while seconds is None and self._waiting and not self.ended:
            seconds = self._advance()
        if seconds is not None:
            self._tell_lag()
        return seconds

    def fail(self, message: str) -> None:
        """End the session after an error in its turn."""
        if self.ended:
            return
        if self._opening is not None:
            unopened = [r if isinstance(r, Relay) else Unopened(getattr(r, "event_id", None)) for r in self._waiting]
            self._end([OpeningFailed(message), *unopened])
            return
        first = self._waiting[0] if self._waiting else None
        rest = [request for request in self._waiting if isinstance(request, Relay)]
        self._end([Broken(message, getattr(first, "event_id", None)), *rest])

    # -- requests ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        assert self._opening is not None
        try:
            next(self._opening)
        except StopIteration as done:
            self._opening, self._session = None, done.value
            for request in [request for request in self._waiting if isinstance(request, Interrupt)]:
                self._waiting.remove(request)
                self._interrupt()
            self._tell([Opened()])
            return
        mx.synchronize()  # else the device is given the whole prompt at once, and others' frames come after it

    def _interrupt(self) -> None:
        assert self._session is not None
        self.backlog.requests_taken += 1
        self._interrupts += 1
        self._session.force(text=self._config.eos_id)

    def _advance(self) -> float | None:
        """Do the next piece of what waits; seconds of the frame, if it was one."""
        request = self._waiting[0]
        if isinstance(request, Append):
            return self._hear(request)
        self._waiting.popleft()
        self.backlog.requests_taken += 1
        if isinstance(request, Commit):
            return self._commit(request)
        assert isinstance(request, Relay)
        self._tell([request])
        return None

    def _hear(self, request: Append) -> float | None:
        assert self._session is not None
        end = min(self._at + self._config.frame_samples_in * FLOAT_BYTES, len(request.samples))
        piece = np.frombuffer(request.samples[self._at : end], np.float32)
        started = time.perf_counter()
        try:
            events = self._session.push(piece, self._config.input_rate_hz)
        except LimitError as limit:
            self._heard(request, len(request.samples))
            self._tell([Refused(str(limit), request.event_id)])
            return None
        seconds = time.perf_counter() - started
        if events and isinstance(events[-1], LimitReached):
            message = f"The session's limit of {events[-1].seconds:g} s is reached. Commit, and open a new one."
            self._heard(request, len(request.samples))
            self._tell([*self._told(events[:-1]), Refused(message, request.event_id)])
        else:
            self._heard(request, end)
            self._tell(self._told(events))
        return seconds if any(isinstance(event, AudioFrame) for event in events) else None

    def _heard(self, request: Append, end: int) -> None:
        """Count it, before what it gave is told: the connection then looks whether there is room."""
        self.backlog.samples_taken += (end - self._at) // FLOAT_BYTES
        self._at = end
        if end == len(request.samples):
            self._waiting.popleft()
            self._at = 0
            self.backlog.requests_taken += 1

    def _commit(self, request: Commit) -> float | None:
        assert self._session is not None
        self._tell([Committed()])
        started = time.perf_counter()
        events = self._session.finish(request.pad_partial)
        seconds = time.perf_counter() - started
        rest = [waiting for waiting in self._waiting if isinstance(waiting, Relay)]
        self._end([*rest, *self._told(events[:-1]), *self._interrupted(self._session.frames), events[-1]])
        return seconds if len(events) > 1 else None

    def _cancel(self, told: bool) -> None:
        rest: list[EngineEvent] = [request for request in self._waiting if isinstance(request, Relay)]
        if self._opening is not None:
            self._opening.close()
        events: list[Event] = [Cancelled(0)] if self._session is None else self._session.cancel()
        self._end([*rest, *self._told(events)] if told else [])

    def _end(self, last: list[Any]) -> None:
        self.ended = True
        self._opening = self._session = None
        self._waiting.clear()
        self.backlog.requests_taken, self.backlog.samples_taken = self.backlog.requests_put, self.backlog.samples_put
        self._send(last, True)

    # -- events --------------------------------------------------------------------------------------------------

    def _tell(self, events: list[EngineEvent]) -> None:
        if events:
            self._send(events, False)

    def _told(self, events: list[Event]) -> list[EngineEvent]:
        """A session's events as they cross; what ended a turn comes before its frame's own events."""
        told: list[EngineEvent] = []
        if events and isinstance(events[-1], AudioFrame):
            told += self._interrupted(events[-1].frame_index)
        for event in events:
            if isinstance(event, AudioFrame):
                self.backlog.frames_told += 1
                told.append(Speech(event.frame_index, event.samples.tobytes(), event.codes))
            else:
                assert not isinstance(event, LimitReached)
                told.append(event)
        return told

    def _interrupted(self, frame_index: int) -> list[Interrupted]:
        count, self._interrupts = self._interrupts, 0
        return [Interrupted(frame_index)] * count

    def _tell_lag(self) -> None:
        seconds = self.backlog.samples / self._config.input_rate_hz
        now = time.monotonic()
        if not self.ended and seconds >= LAGGING_SECONDS and now - self._lagging_told >= LAGGING_PERIOD:
            self._lagging_told = now
            self._tell([Lagging(round(seconds, 3))])
