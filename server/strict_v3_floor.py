"""strict-v3: who has the floor. The session's work in order, and what it tells as events of turns and responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_voicechat.events import (
    FunctionApplied,
    FunctionCall,
    FunctionFailed,
    TextDelta,
    TranscriptDelta,
    TurnClosed,
    TurnOpened,
)

from .strict_v3_calls import Calls, PendingCall, arguments_text
from .strict_v3_codes import BOS_FRAMES, MOST_CALLS, Refused
from .strict_v3_events import SERVER_TURNS, EventWriter, FrameTimes, metrics
from .strict_v3_order import CALL, IDLE, TURN_OPEN
from .strict_v3_requests import BeginTurn, EndTurn, Give, Hear, Host, Mark, Refuse
from .strict_v3_scopes import InputTurn, Response, turn_state
from .strict_v3_turns import level_of, samples_of
from .strict_v3_work import BEGIN, END, HEAR, NOTHING, SILENCE, Again, Backlog, Done, Given, Spoken, Work

# Why the session ended the agent's turn (`CloseReason`) -> the reason on the wire; else it is the model's own end.
REASONS = {
    "decoded_silence": "decoded_silence_watchdog",
    "no_text": "no_text_since_bos_watchdog",
    "no_audio": "no_audio_since_bos_watchdog",
    "function_repetition": "function_repetition_watchdog",
    "longest_turn": "max_response_cap",
}
# Reasons of a failed call (`FailureReason`) that are more than that.
TOO_MANY, TIMED_OUT, UNCLOSED = "too_many_cycles", "timed_out", "unclosed"
NO_OUTPUT = "function_call_output_timeout"


class Floor:
    """Turns, responses and calls of one connection. What cannot go on raises Refused; `freed` says that more can."""

    def __init__(self, wire: EventWriter, host: Host, freed: Callable[[], None]) -> None:
        self.frames = 0
        self.calls = Calls()
        self.turn: InputTurn | None = None  # the last that began
        self.response: Response | None = None
        self.ours = False  # the tools are the server's
        self._wire, self._host, self._freed = wire, host, freed
        self.work = Backlog()
        self._early: list[TranscriptDelta] = []  # of a turn that the model finds while it still speaks
        self._opening = False  # the response of the step that is being told
        self._owed = False  # a BOS
        self._owed_frames = self._applied = 0
        self._heard_frames = 0
        self._framed_at = 0.0

    # -- asked ---------------------------------------------------------------------------------------------------

    @property
    def in_cycle(self) -> bool:
        """Whether a function cycle is open, so that input waits."""
        return self.calls.open is not None

    @property
    def listening(self) -> bool:
        """Whether the user's turn is open, or was ended and has no response yet."""
        return self.work.turning or self._wire.state in TURN_OPEN

    def hear(self, pcm: bytes) -> None:
        """One frame for the session."""
        self.work.push(Work(HEAR, self._host.now(), level_of(samples_of(pcm))))
        self._host.put(Hear(pcm))

    def begin(self, turn: InputTurn, event_id: str | None = None) -> None:
        """Open a turn; a response that is open is ended first."""
        self._boundary(BeginTurn(), Work(BEGIN, self._host.now(), turn=turn, event_id=event_id))

    def end(self, turn: InputTurn, event_id: str | None = None) -> None:
        """End a turn, and open the response to it."""
        self._boundary(EndTurn(), Work(END, self._host.now(), turn=turn, event_id=event_id))

    def _boundary(self, request: BeginTurn | EndTurn, work: Work) -> None:
        self.work.push(work)
        self._host.put(request)
        self._host.put(Mark(Done(work)))

    def again(self, turn_id: str, client_turn_id: int, what: str, event_id: str) -> None:
        """Acknowledge once more, after the first acknowledgement."""
        self._host.put(Mark(Again(turn_id, client_turn_id, what, event_id)))

    def give(self, call_id: str, result: str, event_id: str | None) -> None:
        """A result from the client. Raises Refused."""
        call = self.calls.require(call_id)
        call.given, call.event_id = True, event_id
        self._host.put(Give(call_id, result))
        self._host.put(Mark(Given(call)))

    def take_back(self, call_id: str, message: str) -> None:
        """The session refused a result: the call stays open. Raises Refused."""
        call = self.calls.open
        if call is not None and call.call_id == call_id and not call.failed:
            call.given = False
            raise Refused("invalid_function_call_output", message, call.event_id)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due. Raises Refused."""
        deadline = self.calls.deadline
        if deadline is not None and self._host.now() >= deadline:
            self._time_out()

    def _time_out(self) -> None:
        """The open call gets an error for its result; where its turn has no BOS yet, that is the end."""
        call, response = self.calls.open, self.response
        assert call is not None
        assert response is not None
        message = f"No result of {call.call_id} came within {self._wire.terms.function_seconds:g} s."
        response.fail_call(self._wire, call.call_id, NO_OUTPUT)
        call.failed = True
        if self._owed:
            raise Refused(NO_OUTPUT, message)
        self._host.put(Refuse(call.call_id, message))
        self._next_call()

    # -- told ----------------------------------------------------------------------------------------------------

    def mark(self, what: Any) -> None:
        """All that was asked before it is done. Raises Refused."""
        if isinstance(what, Again):
            ids = {"client_event_id": what.event_id, "client_turn_id": what.client_turn_id, "turn_id": what.turn_id}
            self._wire.emit(f"input_audio_buffer.{what.what}", **ids)
        elif isinstance(what, Given):
            another = any(not call.failure for call in self.calls.waiting)
            if what.call is self.calls.open and what.call.given and another:
                self._wire.emit("conversation.item.function_call_output.applied", call_id=what.call.call_id)
                self._next_call()
        else:
            assert isinstance(what, Done)
            self.work.finish(what.work)
            (self._begun if what.work.kind == BEGIN else self._ended)(what.work)
            self._freed()

    def _begun(self, work: Work) -> None:
        turn = work.turn
        assert turn is not None
        if self.response is not None:
            raise Refused("response_cancel_timeout", "The response could not be ended for the next turn.")
        before, self.turn = self.turn, turn
        self._opening, self._owed, self._applied = False, False, 0
        self.calls.clear()
        if turn.job_id is not None:
            self.end_turn(before)  # of one that the model has found meanwhile
            self._wire.emit("input_text.injection_started", job_id=turn.job_id)
        turn.start(self._wire)
        if work.event_id is not None:
            turn.acknowledge(self._wire, "turn_started", work.event_id)

    def _ended(self, work: Work) -> None:
        """After the step that took the BOS, or whose function id was the beginning of a call. Raises Refused."""
        turn = work.turn
        assert turn is not None
        if self._wire.state in TURN_OPEN:
            raise Refused("missing_terminal_bos", "The turn was ended, and no response began.")
        if turn.job_id is not None:
            self._wire.emit("input_text.injection_finished", job_id=turn.job_id, disposition="completed")

    def _close_turn(self, turn: InputTurn, event_id: str | None) -> None:
        if event_id is not None:
            turn.acknowledge(self._wire, "committed", event_id)
        turn.stop(self._wire)

    def heard(self, event: TranscriptDelta) -> None:
        """The user said more."""
        if self._wire.terms.turns == SERVER_TURNS and self._wire.state not in TURN_OPEN:
            if self.response is not None:
                self._early.append(event)
                return
            self._find_turn()
        if self._wire.state in TURN_OPEN and self.turn is not None:
            self.turn.hear(self._wire, event.delta)

    def _find_turn(self) -> None:
        """The model found a turn by itself."""
        self.turn, self._applied = InputTurn(self._wire.next_turn_id()), 0
        self.turn.start(self._wire)

    def opened(self, event: TurnOpened) -> None:
        """The agent's turn opened: by a BOS, or by the beginning of a call. Raises Refused."""
        if self.response is None:
            self._end_turn()
            self._opening = True

    def _end_turn(self) -> None:
        """The user's turn is over: the step tells whether by a BOS. Raises Refused."""
        if self._wire.state in TURN_OPEN:
            head = self.work.head
            ending = head is not None and head.kind == END
            assert self.turn is not None
            if self._wire.terms.turns != SERVER_TURNS and not ending:
                raise Refused("pre_eou_function_activity", "The response began before the turn was ended.")
            self._close_turn(self.turn, head.event_id if head is not None and ending else None)
        elif self._wire.terms.turns == SERVER_TURNS and self._wire.state == IDLE:
            self._find_turn()
            self.end_turn()

    def _open_response(self) -> None:
        assert self.turn is not None
        self.response = Response(self.turn, self._wire.next_response_id())
        self.response.create(self._wire)

    def said(self, event: TextDelta) -> None:
        """The assistant said more."""
        if self._opening and self.response is None:
            self._step(bos=True)
        if self.response is not None and not self.work.at(BEGIN):
            self.response.say(self._wire, event.delta)

    def called(self, event: FunctionCall) -> None:
        """The model wants a function called. Raises Refused."""
        if self.work.beginning is not None:  # the next turn suppresses what was not sent yet
            return
        self._enter_cycle()
        assert self.turn is not None
        if self.in_cycle and event.frame_index != self.calls.frame_index:
            raise Refused("function_cycle_mismatch", "A call came while another is open.")
        self.turn.calls += 1
        if self.turn.calls > MOST_CALLS:
            self._loop_limit()
        self.calls.frame_index = event.frame_index
        call = PendingCall(event.call_id, event.name, arguments_text(event.arguments), self.ours)
        self.calls.waiting.append(call)
        if not self.in_cycle:
            self._next_call()

    def _enter_cycle(self) -> None:
        """What is sent before the first event of a cycle. Raises Refused."""
        before_end = self._wire.state in TURN_OPEN and not self.work.at(END)
        if before_end and self._wire.terms.turns != SERVER_TURNS:
            raise Refused("pre_eou_function_activity", "A function call came before the turn was ended.")
        if self.response is None:
            self._end_turn()
            self._open_response()
            self._owe()
            self._opening = False

    def _owe(self) -> None:
        """A BOS has to come; a session that owns its turns may do without."""
        self._owed, self._owed_frames = self._wire.terms.turns != SERVER_TURNS, 0

    def _next_call(self) -> None:
        """Send the next call of the cycle, and what failed before it; the last stays open until all are applied."""
        assert self.response is not None
        while self.calls.waiting:
            call = self.calls.waiting.popleft()
            if call.failure:
                if not call.ours:
                    self.response.fail_call(self._wire, call.call_id, call.failure)
                continue
            self.calls.open, self.calls.ticks = call, 0
            call.deadline = self._host.now() + self._wire.terms.function_seconds
            if not call.ours:
                self.response.call(self._wire, call.call_id, call.name, call.arguments)
            return

    def _loop_limit(self) -> None:
        raise Refused("function_call_loop_limit", f"More than {MOST_CALLS} function calls in one turn.")

    def call_failed(self, event: FunctionFailed) -> None:
        """A call that could not be read, or not be answered. Raises Refused."""
        reason = str(getattr(event.reason, "value", event.reason))
        if self.work.beginning is not None or reason == UNCLOSED:
            return
        self._enter_cycle()
        if reason == TOO_MANY:
            self._loop_limit()
        call = self.calls.open
        if call is not None and call.call_id == event.call_id:
            self._fail_open(call, reason)
        else:
            self.calls.waiting.append(PendingCall(event.call_id, "", "", self.ours, failure=reason))
            if call is None:
                self._next_call()

    def _fail_open(self, call: PendingCall, reason: str) -> None:
        if call.failed:
            return
        if reason == TIMED_OUT and not call.ours:
            self._time_out()
        assert self.response is not None
        if not (call.failed or call.ours):
            self.response.fail_call(self._wire, call.call_id, reason)
        call.failed = True

    def applied(self, event: FunctionApplied) -> None:
        """The results of a cycle are in the model, and it goes on. Raises Refused."""
        call = self.calls.open
        if call is None:
            return
        if call.call_id not in event.call_ids:
            raise Refused("function_cycle_mismatch", f"Results of {', '.join(event.call_ids)} came for {call.call_id}.")
        if not (call.failed or call.ours):
            self._wire.emit("conversation.item.function_call_output.applied", call_id=call.call_id)
        self.calls.open = None
        self._next_call()  # there can be failed ones alone
        self.calls.clear()
        self._applied += 1
        self._owe()
        self._freed()

    def closed(self, event: TurnClosed) -> None:
        """The agent's turn ended."""
        self._owed = self._opening = False
        if self.response is None:
            return
        reason = REASONS.get(str(getattr(event.reason, "value", event.reason)), "model_or_turn_taking")
        head = self.work.head
        if head is not None and head.kind == BEGIN:
            assert head.turn is not None
            reason = "client_vad" if head.turn.job_id is None else "typed_input"
        self.end_response(reason)
        early, self._early = self._early, []
        for heard in early:
            self.heard(heard)
        self._freed()

    def end_response(self, reason: str) -> None:
        """Send what ends the response and its open call, where there are any."""
        response, call = self.response, self.calls.open
        if response is None:
            return
        if call is not None and self._wire.state == CALL:
            response.fail_call(self._wire, call.call_id, reason)
        self.calls.clear()
        response.finish(self._wire, reason)
        self.response = None

    def end_turn(self, turn: InputTurn | None = None) -> None:
        """Send what ends the user's turn, where one is open: the last, or this."""
        turn = turn or self.turn
        if turn is not None:
            turn.stop(self._wire)

    def framed(self, frame: Spoken) -> None:
        """The session ran a frame. Raises Refused."""
        now = self._host.now()
        level = level_of(frame.samples)
        self._step(frame.bos)
        if self.response is not None and not self.work.at(BEGIN):
            self.response.sound(self._wire, frame.samples, level)
        heard = self.work.take_frame()
        self._heard_frames += heard is not None
        step_seconds = frame.seconds if heard is None else now - max(self._framed_at, heard.asked_at)
        values = metrics(
            self.frames,
            self._heard_frames,
            FrameTimes(frame.seconds, max(step_seconds, frame.seconds)),
            SILENCE if heard is None else heard.level,
            level,
            turn_state(self._wire.state, self.in_cycle),
        )
        self._wire.emit("voicechat.metrics", **values)
        self.frames += 1
        self._framed_at = now
        self._check_frame()

    def unheard(self, pcm: bytes) -> None:
        """A sign of life for a client whose audio is kept, and not heard yet: the metrics of this frame of it."""
        heard, times = level_of(samples_of(pcm)), FrameTimes(0.0, 0.0)
        state = turn_state(self._wire.state, self.in_cycle)
        values = metrics(max(0, self.frames - 1), self._heard_frames, times, heard, NOTHING, state)
        self._wire.emit("voicechat.metrics", **values)

    def _step(self, bos: bool) -> None:
        """What a step's text id says: a BOS begins the response, else a call will, and owes one."""
        if self._opening:
            self._opening = False
            if bos:
                self._open_response()
            else:
                self._owe()
        elif bos:
            self._owed = False

    def _check_frame(self) -> None:
        if self.frames >= self._wire.terms.most_frames:
            raise Refused("session_position_limit", f"The session has heard its {self.frames:,} frames.")
        self.calls.tick()
        if self._owed and not self.in_cycle and not self.work.turning:
            self._owed_frames += 1
            if self._owed_frames > BOS_FRAMES:
                code = "missing_post_fc_terminal_bos" if self._applied else "missing_terminal_bos"
                raise Refused(code, f"The response did not begin within {BOS_FRAMES} frames.")
