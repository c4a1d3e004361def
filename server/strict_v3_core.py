"""strict-v3: the rules of one connection, without a socket, a model or a clock of their own.

Messages come in by `receive`, what the session tells by `observe`; what is to be done goes to a `Host`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_voicechat.events import (
    FunctionApplied,
    FunctionCall,
    FunctionFailed,
    SettleTimeout,
    TextDelta,
    TranscriptDelta,
    TurnClosed,
    TurnOpened,
)

from .strict_v3_codes import NORMAL, SIGN_SECONDS, Refused
from .strict_v3_events import CLIENT_TURNS, EventWriter, Terms
from .strict_v3_floor import Floor
from .strict_v3_jobs import FED_FRAMES, Job, Jobs
from .strict_v3_messages import (
    KEEP,
    Append,
    Commit,
    Item,
    Stop,
    TextRequest,
    TurnStart,
    Update,
    event_id_of,
    parsed,
    result_of,
    understood,
    update_of,
)
from .strict_v3_order import NEW
from .strict_v3_requests import (
    Broken,
    Host,
    Limited,
    Mark,
    Open,
    Opened,
    OpeningFailed,
    ResultRefused,
)
from .strict_v3_scopes import InputTurn
from .strict_v3_turns import Blocks, Deferred, PreRoll, TurnMemory
from .strict_v3_work import Spoken


class StrictV3:
    """One connection. Every public method leaves it sound, whatever came. Raises OutOfOrder, of a defect alone."""

    SESSION_EVENTS = (
        TranscriptDelta,
        TextDelta,
        TurnOpened,
        TurnClosed,
        FunctionCall,
        FunctionFailed,
        FunctionApplied,
        SettleTimeout,
    )

    def __init__(self, terms: Terms, host: Host, session_id: str | None = None) -> None:
        self.wire = EventWriter(terms, self._send, session_id)
        self._sent_at = host.now()
        self.configured = self.ended = False
        self._terms, self._host = terms, host
        self._floor = Floor(self.wire, host, self._freed)
        self._jobs = Jobs()
        self._started, self._completed = TurnMemory(), TurnMemory()
        self._blocks, self._preroll, self._deferred = Blocks(), PreRoll(), Deferred()
        self._open: InputTurn | None = None  # started and not committed
        self._negotiated: str | None = None
        self._agreed = self._locked = False  # a first update was taken; a first turn has begun
        self._opening: Update | None = None
        self._instructions = terms.instructions
        self._tools: tuple[dict[str, Any], ...] | None = None  # the server's
        self._observers: dict[type, Callable[[Any], None]] = {
            TranscriptDelta: self._floor.heard,
            TextDelta: self._floor.said,
            TurnOpened: self._floor.opened,
            TurnClosed: self._floor.closed,
            FunctionCall: self._floor.called,
            FunctionFailed: self._floor.call_failed,
            FunctionApplied: self._floor.applied,
            Spoken: self._framed,
            Mark: lambda mark: self._floor.mark(mark.what),
            SettleTimeout: self._unsettled,
            Opened: self._opened,
            OpeningFailed: self._opening_failed,
            ResultRefused: lambda r: self._floor.take_back(r.call_id, r.message),
            Limited: self._limited,
            Broken: self._broken,
        }

    # -- the connection ------------------------------------------------------------------------------------------

    def _send(self, event: dict[str, Any]) -> None:
        self._sent_at = self._host.now()
        self._host.send(event)

    def greet(self) -> None:
        """The first event."""
        self.wire.created()

    def busy(self, message: str) -> dict[str, Any]:
        """The one event of a connection for which there is no session; it closes with the code of FATES."""
        self.ended = True
        return self.wire.event("error", error={"code": "server_busy", "message": message, "fatal": True})

    def cut(self, reason: str) -> dict[str, Any]:
        """The last event of a connection whose other events are not sent any more."""
        self.ended = True
        return self.wire.event("session.closed", status="failed", reason=reason)

    def receive(self, frame: Mapping[str, Any]) -> None:
        """A WebSocket message: `text` or `bytes`."""
        event_id = None
        if self.ended:
            return
        try:
            message = parsed(frame)
            event_id = event_id_of(message)
            if message["type"] == "session.update":
                self._update(update_of(message, self._agreed, self._negotiated), frame)
            else:
                self._take(understood(message, self.configured), frame)
        except Refused as refused:
            self._refuse(refused, refused.event_id or event_id)

    def observe(self, event: Any) -> None:
        """An event of the session."""
        if self.ended:
            return
        try:
            self._observers[type(event)](event)
        except Refused as refused:
            self._refuse(refused, refused.event_id)

    def tick(self) -> None:
        """Do what is due by the clock."""
        if self.ended:
            return
        try:
            self._floor.tick()
        except Refused as refused:
            self._refuse(refused, refused.event_id)

    @property
    def deadline(self) -> float | None:
        """When `tick` is to be called next."""
        return None if self.ended else self._floor.calls.deadline

    @property
    def waits(self) -> bool:
        """Whether the client waits for the server."""
        return (
            self._opening is not None
            or bool(self._jobs)
            or self._floor.work.turning
            or self._floor.response is not None
        )

    def hang_up(self, reason: str, code: int) -> None:
        """End for a reason outside the protocol: a client that is silent for too long, say."""
        if not self.ended:
            self._close_all("client_stop")
            self.wire.closed("failed", reason)
            self._end(code)

    def _refuse(self, refused: Refused, event_id: str | None) -> None:
        fate = refused.fate
        if not fate.fatal:
            self.wire.error(refused.code, refused.message, False, event_id)
            return
        if refused.code in ("session_position_limit", "function_call_loop_limit"):
            self._close_all(refused.code)
        else:
            self._close_jobs("error")
        self.wire.error(refused.code, refused.message, True, event_id)
        if fate.announced:
            self.wire.closed("failed", refused.code)
        self._end(fate.close_code)

    def _end(self, code: int) -> None:
        self.ended = True
        self._host.stop_synthesis()
        self._host.close(code)

    def _close_all(self, reason: str) -> None:
        self._close_jobs("cancelled" if reason == "client_stop" else "error")
        self._floor.end_response(reason)
        self._floor.end_turn()

    def _close_jobs(self, disposition: str) -> None:
        for job in (self._jobs.running, self._jobs.waiting):
            if job is not None:
                self._finish_job(job, disposition)
        self._jobs.running = self._jobs.waiting = None

    # -- messages ------------------------------------------------------------------------------------------------

    def _take(self, message: Any, frame: Mapping[str, Any]) -> None:
        if isinstance(message, TurnStart | Commit | Append):
            self._take_input(message, frame)
        elif isinstance(message, TextRequest):
            self._request_text(message)
        elif isinstance(message, Item):
            self._result(message)
        else:
            assert isinstance(message, Stop)
            self._close_all("client_stop")
            self.wire.closed("completed", "client_stop")
            self._end(NORMAL)

    def _take_input(self, message: TurnStart | Commit | Append, frame: Mapping[str, Any]) -> None:
        if not isinstance(message, Append):
            if self._terms.turns != CLIENT_TURNS:
                raise Refused("unsupported_event", "This server finds the turns itself (serve --turns server).")
            if self._repeated(message):
                return
        if self._floor.in_cycle or self._opening is not None or self._deferred:
            self._deferred.push(message, len(frame["text"].encode()))
        else:
            self._run(message)

    def _repeated(self, message: TurnStart | Commit) -> bool:
        """Acknowledge again what was taken before."""
        start = isinstance(message, TurnStart)
        turn_id = (self._started if start else self._completed).find(message.client_turn_id)
        if turn_id is None:
            return False
        what = "turn_started" if start else "committed"
        self._floor.again(turn_id, message.client_turn_id, what, message.event_id)
        return True

    def _run(self, message: TurnStart | Commit | Append | Update) -> None:
        if isinstance(message, Append):
            self._append(message)
        elif isinstance(message, Update):
            self._apply(message)
        elif not self._repeated(message):
            (self._start if isinstance(message, TurnStart) else self._commit)(message)  # type: ignore[arg-type]

    def _append(self, message: Append) -> None:
        if self._jobs:
            return
        for block in self._blocks.push(message.pcm):
            if self._open is not None or self._terms.turns != CLIENT_TURNS:
                self._locked = True
                self._floor.hear(block)
            else:
                self._preroll.push(block)
                if self._host.now() - self._sent_at >= SIGN_SECONDS:
                    self._floor.unheard(block)

    def _start(self, message: TurnStart) -> None:
        if self._open is not None:
            raise Refused("input_turn_conflict", f"Turn {self._open.client_turn_id} is open.", message.event_id)
        if self._jobs:
            raise Refused("input_turn_conflict", "Typed text is being heard.", message.event_id)
        turn = self._open = InputTurn(self.wire.next_turn_id(), message.client_turn_id)
        self._locked = True
        self._started.add(message.client_turn_id, turn.turn_id)
        self._floor.begin(turn, message.event_id)
        for block in self._preroll.take():
            self._floor.hear(block)

    def _commit(self, message: Commit) -> None:
        turn = self._open
        if turn is None or turn.client_turn_id != message.client_turn_id:
            raise Refused("input_turn_conflict", f"Turn {message.client_turn_id} is not open.", message.event_id)
        self._open = None
        self._completed.add(message.client_turn_id, turn.turn_id)
        for block in self._blocks.padded():
            self._floor.hear(block)
        self._floor.end(turn, message.event_id)

    def _result(self, message: Item) -> None:
        call_id, result = result_of(message.item, self._negotiated is not None)
        if not (self._terms.default_tools if self._tools is None else self._tools):
            raise Refused("tools_not_set", "The session has no tools.")
        self._floor.give(call_id, result, message.event_id)

    def _freed(self) -> None:
        """A cycle or a boundary is over: what waited for it goes on."""
        running = self._jobs.running
        if running is not None and running.frames is None and not self._floor.work.turning:
            self._jobs.running = None  # its end was told
        while self._deferred and not self._floor.in_cycle and self._opening is None:
            message = self._deferred.pop()
            try:
                if not (self.configured or isinstance(message, Update)):
                    raise Refused("session_not_configured", "The session could not be opened.")
                self._run(message)
            except Refused as refused:
                if refused.fate.fatal:
                    wrong = f"What waited cannot follow: {refused.message}"
                    raise Refused("deferred_input_lifecycle_failure", wrong, message.event_id) from refused
                self._refuse(refused, message.event_id)
        self._feed()

    # -- settings ------------------------------------------------------------------------------------------------

    def _update(self, update: Update, frame: Mapping[str, Any]) -> None:
        if self._locked:
            raise Refused("settings_locked", "Settings stand since the first turn began.")
        self._agreed, self._negotiated = True, update.model_output
        if self._opening is not None or self._deferred:
            self._deferred.push(update, len(frame["text"].encode()))
        else:
            self._apply(update)

    def _apply(self, update: Update) -> None:
        if self._locked:
            raise Refused("settings_locked", "Settings stand since the first turn began.")
        before = (self._instructions, self._tools)
        if update.instructions is not KEEP:
            self._instructions = self._terms.instructions if update.instructions is None else update.instructions
        if update.tools is not KEEP:
            self._tools = update.tools
        self._floor.ours = self._tools is None
        if self.configured and before == (self._instructions, self._tools):
            self._confirm()
            return
        self._opening = update
        self._host.put(Open(self._instructions, self._tools, self._terms.most_frames))

    def _confirm(self) -> None:
        tools = self._terms.default_tools if self._tools is None else self._tools
        self.wire.updated(self._instructions, tools, self._negotiated)

    def _opened(self, event: Opened) -> None:
        self._opening = None
        self.configured = True
        self._confirm()
        self._freed()

    def _opening_failed(self, event: OpeningFailed) -> None:
        update, self._opening = self._opening, None
        self._agreed = self.configured = False
        self._refuse(Refused("invalid_session_update", event.message), None if update is None else update.event_id)
        self._freed()

    # -- typed text ----------------------------------------------------------------------------------------------

    def _request_text(self, message: TextRequest) -> None:
        reason = self._unfit() or self._jobs.rejection(message.job_id, message.text)
        if reason is not None:
            job_id = message.job_id[:512] if isinstance(message.job_id, str) else None
            self.wire.emit("input_text.rejected", job_id=job_id, reason=reason)
            return
        job = Job(message.job_id, message.text, message.event_id)
        replaced = self._jobs.add(job)
        if replaced is not None:
            self._host.stop_synthesis()
            self._finish_job(replaced, "replaced")
        self._locked = True
        self._blocks.clear()
        self._preroll.clear()
        self.wire.emit("input_text.accepted", job_id=job.job_id)
        self._host.synthesise(job.job_id, job.text)

    def _unfit(self) -> str | None:
        """Why no text can be typed now."""
        if not self.configured:
            return "session_not_configured"
        if not self._terms.typed_input:
            return "typed_input_unavailable"
        if self._floor.in_cycle:
            return "function_cycle_active"
        turning = self._jobs.running is None and (self._floor.listening or self._deferred)
        return "input_turn_active" if self._open is not None or turning else None

    def synthesised(self, job_id: str, pcm: bytes) -> None:
        """The speech of a job, PCM16 at 16 kHz."""
        job = self._jobs.waiting
        if job is not None and job.job_id == job_id and not self.ended:
            job.speak(pcm)
            self._feed()

    def synthesis_failed(self, job_id: str, message: str) -> None:
        """The speech of a job could not be made."""
        job = self._jobs.waiting
        if job is not None and job.job_id == job_id and not self.ended:
            self._jobs.waiting = None
            self._finish_job(job, "error")
            self._refuse(Refused("typed_input_failed", message), job.event_id)
            self._freed()

    def _finish_job(self, job: Job, disposition: str) -> None:
        self.wire.emit("input_text.injection_finished", job_id=job.job_id, disposition=disposition)

    def _feed(self) -> None:
        """Begin the job that waits, where nothing else is under way; more frames of the one that runs."""
        jobs, floor = self._jobs, self._floor
        ready = jobs.waiting is not None and jobs.waiting.frames is not None
        if ready and jobs.running is None and not (floor.in_cycle or floor.work.turning or self._opening):
            assert jobs.waiting is not None
            turn = InputTurn(self.wire.next_turn_id(), job_id=jobs.waiting.job_id)
            jobs.start(turn)
            floor.begin(turn)
        job = jobs.running
        if job is None or job.frames is None:
            return
        while job.frames and floor.work.frames < FED_FRAMES:
            floor.hear(job.frames.popleft())
        if not job.frames:
            job.frames = None
            assert job.turn is not None
            floor.end(job.turn)

    def _framed(self, frame: Spoken) -> None:
        self._floor.framed(frame)
        self._feed()

    # -- failures ------------------------------------------------------------------------------------------------

    def _unsettled(self, event: SettleTimeout) -> None:
        raise Refused("input_turn_settle_timeout", "The transcript did not come to rest after the turn.")

    def _limited(self, event: Limited) -> None:
        raise Refused("session_position_limit", event.message)

    def _broken(self, event: Broken) -> None:
        if self._jobs.running is not None:
            raise Refused("typed_input_failed", event.message, final=True)
        raise Refused("internal_error", event.message)

    def broke(self, message: str) -> None:
        """A defect of the server's own."""
        if self.ended:
            return
        defect = Refused("internal_error", message)
        if self.wire.state == NEW:
            self._end(defect.fate.close_code)
            return
        self._jobs = Jobs()  # what is told of them may be what is out of order
        self._refuse(defect, None)
