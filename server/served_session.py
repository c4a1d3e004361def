"""One session as the engine thread runs it: requests in, at most one frame a turn, events out."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx
import numpy as np

from mlx_voicechat.errors import InputError, LimitError
from mlx_voicechat.events import AudioFrame, Cancelled, Event, LimitReached, TurnClosed, TurnOpened

from . import messages
from .limits import LAGGING_PERIOD, LAGGING_SECONDS, OUTGOING_SECONDS
from .messages import Append, AppendRefused, EngineEvent, Relay, Request, Speech, Unopened
from .opening import opening
from .pace import Pacer

if TYPE_CHECKING:
    from mlx_voicechat.session import Session
    from mlx_voicechat.voicechat import VoiceChat

FLOAT_BYTES = 4
AT_ONCE = -math.inf
LATE_SECONDS = 0.02  # that a streaming client's audio may be late and is still expected
# A turn in steps: it yields the session that wants `Session.step`, is sent what that gave, and returns the seconds of a
# frame if there was one. What a step raises ends the turn, and the session (`fail`).
Turn: TypeAlias = "Generator[Session, list[Event], float | None]"


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
        request: messages.Open,
        voice: str | None,
        backlog: Backlog,
        tell: Callable[[list[EngineEvent], bool], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backlog = backlog
        self.ended = False
        self._model, self._voice, self._now = model, voice, now
        self._send = tell
        self._config = model.config
        self._waiting: deque[Request] = deque()
        self._at = 0  # bytes of the first append that were heard
        self._partial = 0  # samples of a frame that the session waits for the rest of
        self._heard_seconds = 0.0  # by sessions that were opened anew
        self._appended_at = -math.inf
        self._interrupts = 0
        self._interrupting = False  # the agent's turn is being ended
        self._paused = False
        self._lagging_told = -LAGGING_PERIOD
        self._session: Session | None = None
        self._open_anew(request)

    @property
    def opening(self) -> bool:
        """Whether it is being opened."""
        return self._opening is not None

    def due(self, now: float) -> float | None:
        """When a turn does something; None as long as no request comes, or two seconds of speech wait to be sent."""
        if self._paused or self.backlog.frames * self._config.frame_seconds >= OUTGOING_SECONDS:
            return None
        session = self._session
        if session is None or (self._turns and session.runnable):
            return AT_ONCE
        audio = bool(self._waiting) and isinstance(self._waiting[0], Append)
        if self._pacer is None or (self._waiting and not audio):
            return AT_ONCE if self._waiting else None
        return self._pacer.due(audio, session.turn == "agent", session.in_cycle)

    def expected(self, now: float, soon: float) -> bool:
        """Whether a frame that is not due now will be within `soon` seconds, as far as can be told.

        A client that streams has sent the rest of a frame when it has been spoken, or has not stopped and is late.
        """
        due = self.due(now)
        if due is not None:
            return now < due <= now + soon
        if self._paused or self.backlog.frames * self._config.frame_seconds >= OUTGOING_SECONDS:
            return False
        missing = self._config.frame_samples_in - self._partial
        at = self._appended_at + missing / self._config.input_rate_hz
        return at - soon <= now <= at + LATE_SECONDS

    def take(self, request: Request) -> None:
        """Note a request; some do not wait for the audio before them."""
        if isinstance(request, Append):
            self._appended_at = self._now()
            if self._pacer is not None:
                self._pacer.heard(self._appended_at)
        at_once = IMMEDIATE.get(type(request))
        if at_once is not None and (self._session is not None or type(request) in EVEN_UNOPENED):
            self.backlog.requests_taken += 1
            at_once(self, request)
        else:
            self._waiting.append(request)

    def turn(self) -> Turn:
        """Take one step of the opening, or go on to the end of the next frame."""
        if self._opening is not None:
            self._open()
            return None
        assert self._session is not None
        if self._turns and self._session.runnable:
            return (yield from self._step())
        seconds = None
        waited = bool(self._waiting)
        while seconds is None and self._waiting and not self.ended and self._session is not None:
            seconds = yield from self._advance()
            if self._turns:  # what it asked for may be frames of its own
                return seconds
        if not waited and self._pacer is not None:
            return (yield from self._silence())
        if seconds is not None:
            self._tell_lag()
        return seconds

    def fail(self, message: str) -> None:
        """End the session after an error in its turn."""
        if self.ended:
            return
        if self._opening is not None:
            unopened = [r if isinstance(r, Relay) else Unopened(getattr(r, "event_id", None)) for r in self._waiting]
            self._end([messages.OpeningFailed(message), *unopened])
            return
        first = self._waiting[0] if self._waiting else None
        rest = [request for request in self._waiting if isinstance(request, Relay)]
        self._end([messages.Broken(message, getattr(first, "event_id", None)), *rest])

    # -- requests that wait for nothing --------------------------------------------------------------------------

    def _reopen(self, request: messages.Open) -> None:
        if self._session is not None:
            self._heard_seconds += self._session.frames * self._config.frame_seconds
            self._session = None
        if self._opening is not None:
            self._opening.close()
        self._open_anew(request)

    def _open_anew(self, request: messages.Open) -> None:
        self._turns = request.stepped
        self._pacer = None if request.pace is None else Pacer(request.pace, self._config.frame_seconds, self._now())
        self._owner = request.turns
        self._speaking = self._interrupting = False
        self._partial = 0
        self._opening: Generator[None, None, Session] | None = opening(
            self._model, request, self._voice, self._heard_seconds
        )

    def _interrupt(self, request: messages.Interrupt) -> None:
        assert self._session is not None
        if self._turns:
            self._interrupting = self._session.turn == "agent"
            self._session.interrupt()
        else:
            self._session.force(text=self._config.eos_id)
        if self._pacer is None:
            self._interrupts += 1

    def _give(self, request: messages.Give | messages.Refuse) -> None:
        assert self._session is not None
        try:
            if isinstance(request, messages.Give):
                self._session.give(request.call_id, request.result)
            else:
                self._session.refuse(request.call_id, request.why)
        except InputError as fault:
            self._tell([messages.ResultRefused(request.call_id, str(fault))])

    def _clear(self, request: messages.Clear) -> None:
        for append in [one for one in self._waiting if isinstance(one, Append)]:
            self.backlog.requests_taken += 1
            self.backlog.samples_taken += (len(append.samples) - self._at) // FLOAT_BYTES
            self._at = 0
            self._waiting.remove(append)

    def _pause(self, request: messages.Pause) -> None:
        self._paused = request.paused
        if self._pacer is not None:
            (self._pacer.stand_still if request.paused else self._pacer.go_on)(self._now())

    def _cancel(self, request: messages.Cancel) -> None:
        rest: list[EngineEvent] = [request for request in self._waiting if isinstance(request, Relay)]
        if self._opening is not None:
            self._opening.close()
        events: list[Event] = [Cancelled(0)] if self._session is None else self._session.cancel()
        self._end([*rest, *self._reported(events)] if request.reported else [])

    # -- requests in order ---------------------------------------------------------------------------------------

    def _open(self) -> None:
        assert self._opening is not None
        try:
            next(self._opening)
        except StopIteration as done:
            self._opening, self._session = None, done.value
            for request in [one for one in self._waiting if type(one) in IMMEDIATE]:
                self._waiting.remove(request)
                self.backlog.requests_taken += 1
                IMMEDIATE[type(request)](self, request)
            self._tell([messages.Opened()])
            return
        mx.synchronize()  # else the device is given the whole prompt at once, and others' frames come after it

    def _advance(self) -> Turn:
        """Do the next piece of what waits; seconds of the frame, if it was one."""
        request = self._waiting[0]
        if isinstance(request, Append):
            return (yield from self._hear(request))
        if isinstance(request, messages.EndTurn) and not self._may_end_turn():
            return None
        self._waiting.popleft()
        self.backlog.requests_taken += 1
        if isinstance(request, messages.Commit):
            return self._commit(request)
        if isinstance(request, Relay):
            self._tell([request])
        else:
            self._turn_request(request)
        return None

    def _may_end_turn(self) -> bool:
        """Whether the user's turn can end now: an agent's turn that was interrupted comes to its end first."""
        assert self._session is not None
        if self._session.turn == "agent" and (self._owner == "application" or self._interrupting):
            self._session.begin_turn()
            return False
        return True

    def _turn_request(self, request: Request) -> None:
        assert self._session is not None
        if isinstance(request, messages.BeginTurn):
            self._session.begin_turn()
        elif isinstance(request, messages.OpenTurn):
            self._session.open_turn()
        elif isinstance(request, messages.EndTurn) and self._session.turn == "user":  # else it is open already
            self._session.end_turn(request.patience_frames)
            self._partial = 0
        if self._pacer is not None and not isinstance(request, messages.BeginTurn):  # so does Quiet
            self._pacer.no_more(self._now())

    def _hear(self, request: Append) -> Turn:
        frame_bytes = self._config.frame_samples_in * FLOAT_BYTES
        end = min(self._at + frame_bytes - self._partial * FLOAT_BYTES, len(request.samples))
        return (yield from self._run(np.frombuffer(request.samples[self._at : end], np.float32), (request, end)))

    def _silence(self) -> Turn:
        """A frame of silence, or what is missing of one."""
        return (yield from self._run(np.zeros(self._config.frame_samples_in - self._partial, np.float32), None))

    def _run(self, samples: np.ndarray, heard: tuple[Append, int] | None) -> Turn:
        """Hear up to the end of a frame, `heard` to that byte of an append; seconds of the frame, if it was whole."""
        session = self._session
        assert session is not None
        event_id = heard[0].event_id if heard else None
        started = time.perf_counter()
        try:
            session.add(samples, self._config.input_rate_hz)
        except LimitError as limit:
            if heard is not None:
                self._heard(heard[0], len(heard[0].samples))
            self._tell([AppendRefused(str(limit), event_id)])
            return None
        self._partial = (self._partial + len(samples)) % self._config.frame_samples_in
        events: list[Event] = (yield session) if self._turns else []
        while not self._turns and session.runnable:
            events += yield session
        seconds = time.perf_counter() - started
        limited = events[-1] if events and isinstance(events[-1], LimitReached) else None
        if heard is not None:
            self._heard(heard[0], heard[1] if limited is None else len(heard[0].samples))
        return self._ran(events, seconds, heard is not None, event_id)

    def _step(self) -> Turn:
        """A piece of work that needs no audio."""
        assert self._session is not None
        started = time.perf_counter()
        events = yield self._session
        return self._ran(events, time.perf_counter() - started, False, None)

    def _ran(self, events: list[Event], seconds: float, audio: bool, event_id: str | None) -> float | None:
        assert self._session is not None
        spoke = any(isinstance(event, AudioFrame) for event in events)
        if self._pacer is not None and spoke:
            self._pacer.ran(self._now(), audio, self._session.turn == "agent")
        if events and isinstance(events[-1], LimitReached):
            message = f"The session's limit of {events[-1].seconds:g} s is reached. Commit, and open a new one."
            self._tell([*self._reported(events[:-1], seconds), AppendRefused(message, event_id)])
        else:
            self._tell(self._reported(events, seconds, unheard=not audio))
        return seconds if spoke else None

    def _heard(self, request: Append, end: int) -> None:
        """Count it, before what it gave is reported: the connection then looks whether there is room."""
        self.backlog.samples_taken += (end - self._at) // FLOAT_BYTES
        self._at = end
        if end == len(request.samples):
            self._waiting.popleft()
            self._at = 0
            self.backlog.requests_taken += 1

    def _commit(self, request: messages.Commit) -> float | None:
        assert self._session is not None
        self._tell([messages.Committed()])
        started = time.perf_counter()
        events = self._session.finish(request.pad_partial)
        seconds = time.perf_counter() - started
        rest = [waiting for waiting in self._waiting if isinstance(waiting, Relay)]
        self._end([*rest, *self._reported(events[:-1]), *self._interrupted(self._session.frames), events[-1]])
        return seconds if len(events) > 1 else None

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

    def _reported(self, events: list[Event], seconds: float = 0.0, unheard: bool = False) -> list[EngineEvent]:
        """A session's events as they cross; what ended a turn comes before its frame's own, of so many seconds."""
        reported: list[EngineEvent] = []
        if events and isinstance(events[-1], AudioFrame):
            reported += self._interrupted(events[-1].frame_index)
        if self._turns:
            reported += self._answering(events)
        for event in events:
            if isinstance(event, AudioFrame):
                self.backlog.frames_told += 1
                cancelled = getattr(event, "cancelled", False)
                reported.append(
                    Speech(event.frame_index, event.samples.tobytes(), event.codes, cancelled, unheard, seconds)
                )
            else:
                assert not isinstance(event, LimitReached)
                reported.append(event)
        return reported

    def _answering(self, events: list[Event]) -> list[EngineEvent]:
        """The agent's BOS behind a call, which opens no other turn."""
        if self._session is None:
            return []
        before, self._speaking = self._speaking, self._session.speaking
        kinds = {type(event) for event in events}
        self._interrupting = self._interrupting and TurnClosed not in kinds
        begun = self._speaking and not before and TurnOpened not in kinds
        return [messages.Answering(self._session.frames - 1)] if begun else []

    def _interrupted(self, frame_index: int) -> list[messages.Interrupted]:
        count, self._interrupts = self._interrupts, 0
        return [messages.Interrupted(frame_index)] * count

    def _tell_lag(self) -> None:
        seconds = self.backlog.samples / self._config.input_rate_hz
        now = time.monotonic()
        if not self.ended and seconds >= LAGGING_SECONDS and now - self._lagging_told >= LAGGING_PERIOD:
            self._lagging_told = now
            self._tell([messages.Lagging(round(seconds, 3))])


# What does not wait for the audio before it; some not even for the opening.
IMMEDIATE: dict[type, Callable[[ServedSession, Any], None]] = {
    messages.Open: ServedSession._reopen,
    messages.Interrupt: ServedSession._interrupt,
    messages.Give: ServedSession._give,
    messages.Refuse: ServedSession._give,
    messages.Clear: ServedSession._clear,
    messages.Pause: ServedSession._pause,
    messages.Cancel: ServedSession._cancel,
}
EVEN_UNOPENED = frozenset({messages.Open, messages.Clear, messages.Pause, messages.Cancel})
