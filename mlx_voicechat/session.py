"""One conversation: sample buffer, opening, override point, text, tools, turns, limits and events.

Every way to use the model (offline and streamed command, WebSocket, Python) drives this object; the timeline is the
one of NeMo's streaming duplex inference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .errors import InputError, LimitError, SessionClosedError, brief
from .events import Cancelled, CloseReason, Done, Event, FunctionCall, LimitReached
from .frame import (
    NO_FORCE,
    Forcing,
    Frame,
    FrameRequest,
    Heard,
    Hearing,
    Override,
    Piece,
    PositionsRequest,
    Request,
    SpeechRequest,
    check_sound,
)
from .gauges.profile import Profile
from .machines.late import Sounds
from .noise import draws_from
from .options import SessionOptions
from .sound.samples import dbfs
from .text import Captions
from .tools.channel import Channel
from .tools.prompt import prompt_with_tools
from .turns import Ids, Passed, Phase, Turns

if TYPE_CHECKING:
    from .model import Model


class Session:
    """One conversation with a loaded model; made and opened by `VoiceChat.session`, used from one thread.

    Opening it runs the voice prompt and the system prompt, one step of the speech generator for each of its tokens:
    a prompt of a thousand tokens takes as long as a thousand frames. Errors: InputError for a bad argument or a call
    from inside a frame (the session stays usable), LimitError after the limit, SessionClosedError after `finish` or
    `cancel`, VoiceChatError when the model computes NaN. What finished frames gave before an error comes first at the
    next call.
    """

    def __init__(self, model: Model, options: SessionOptions) -> None:
        config = model.config
        self.model = model
        self.options = options
        self.seed = int(options.seed)
        self.max_seconds = None if options.max_seconds is None else float(options.max_seconds)
        self.profile = Profile(config.budget_ms) if options.profile else None
        self.frames = 0
        self.closed = False
        self._captions = Captions(config, model.tokenizer)
        self._hearing = Hearing(config.frame_samples_in, config.input_rate_hz, self.max_seconds)
        self._undelivered: deque[Event] = deque()  # of frames that are done
        self._busy = False
        self._request: Request | None = None
        self._forcing = Forcing(config.llm.vocab_size)
        self._turn_open = False
        self._observers: list[Callable[[Frame], None]] = []
        self._sounds = Sounds(model.late, options.turns, model.late_sound)
        self._draws = draws_from(config.tts, self.seed, options.noise, model.draw)
        self._channel = Channel(model, options)
        self._turns = Turns(
            Ids(config.bos_id, config.eos_id, config.pad_id),
            application=options.turns == "application",
            tools=self._channel.tools,
            emitted=options.turn_events,
            longest_frames=None if options.longest_turn is None else round(options.longest_turn / config.frame_seconds),
        )
        prompt = config.default_system_prompt if options.system_prompt is None else options.system_prompt
        prompt = prompt_with_tools(prompt, options.tools, options.tool_key_order)
        scale = config.tts.guidance_scale if options.guidance_scale is None else float(options.guidance_scale)
        seed = self.seed if options.noise is None else None
        self._opening = model.open(prompt, options.voice, scale, self._draws, seed, options.prompt_copies)

    def open(self) -> Generator[None, None, None]:
        """Run the voice prompt and the system prompt, in steps; the session is of use when they are done."""
        self.state = yield from self._opening

    # -- what it is at -------------------------------------------------------------------------------------------

    @property
    def transcript(self) -> str:
        """What the user said so far; in turns that the application owns, in this turn."""
        return self._captions.transcript

    @property
    def text(self) -> str:
        """What the assistant said so far."""
        return self._captions.text

    @property
    def function(self) -> str:
        """The function channel so far."""
        return self._captions.function

    @property
    def speaking(self) -> bool:
        """Whether the assistant's turn is open: it began to speak and has not ended its turn."""
        return self._turn_open

    @property
    def limited(self) -> bool:
        """Whether the session has had all the audio that it may have."""
        return self._hearing.limited

    @property
    def turn(self) -> Phase:
        """Whose turn it is; the agent's lasts until it has ended for the ear."""
        return self._turns.phase

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """The tool calls that wait for `give` or `refuse`."""
        return self._channel.asked

    @property
    def in_cycle(self) -> bool:
        """Whether a tool call is written, waits for its result, or is being told it."""
        return self._channel.active

    @property
    def results_pending(self) -> bool:
        """Whether the function of a tool still runs."""
        return self._channel.runner.pending

    @property
    def runnable(self) -> bool:
        """Whether `step` has something to do now."""
        ready = self._channel.between_frames or self._channel.runner.due or self._sounds.due
        return bool(self._undelivered) or ready or self._frame_waits or self._hearing.limit_due

    # -- audio ---------------------------------------------------------------------------------------------------

    def push(self, samples: Any, rate_hz: int = 16000) -> list[Event]:
        """Add float mono samples (S,) of any length; returns the events of the whole frames that ran."""
        self.add(samples, rate_hz)
        return self._run_all()

    def feed(self, samples: Any, rate_hz: int = 16000, block_frames: int = 1) -> Iterator[Event]:
        """Like `push`, but yields each event as its frame is done.

        `block_frames` > 1 lets perception run over that many waiting frames at once where that gives the same events
        (`VoiceChat.block_frames`): the offline form.
        Frames that a caller does not wait for stay in the buffer and run at the next call, which first gives the
        events that were not taken.
        """
        if not isinstance(block_frames, int) or block_frames < 1:
            raise InputError(f"block_frames is {brief(block_frames)}, expected an integer of at least 1.")
        self.add(samples, rate_hz)
        return self._run(block_frames)

    def add(self, samples: Any, rate_hz: int = 16000) -> None:
        """Add samples as `push` does, and run nothing: `step` does."""
        self._require_idle()
        if self.limited:
            raise LimitError(f"The session's limit of {self.max_seconds:g} s is reached.", "Open a new session.")
        if isinstance(samples, mx.array) and mx.issubdtype(samples.dtype, mx.floating):
            samples = samples.astype(mx.float32)  # numpy has no bfloat16
        self._hearing.add(samples, rate_hz)

    def step(self) -> list[Event]:
        """Do one piece of what waits: an audio frame, a run of LLM positions between two, or the limit's announcement.

        Returns what it gave, nothing when nothing waits. For who holds several conversations.
        """
        self._advance(1)
        return self._taken()

    def observe(self, observer: Callable[[Frame], None]) -> None:
        """Call `observer` with every frame as the model gave it, ids of the quiet tokens included."""
        self._observers.append(observer)

    def finish(self, pad_partial: bool = True) -> list[Event]:
        """Run what waits (a partial frame zero-padded, unless `pad_partial` is False) and close with Done."""
        self._require_idle()
        self._hearing.end(pad_partial and not self.limited)
        events = self._run_all()
        return [*events, *self._sounds.rest(self.state), *self._close(), Done(self.frames)]

    def cancel(self) -> list[Event]:
        """Drop what waits and close with Cancelled, after the events of finished frames that were not taken."""
        self._require_idle()
        self._hearing.clear()
        return [*self._taken(), *self._close(), Cancelled(self.frames)]

    def _close(self) -> list[Event]:
        """What is open ends with the session."""
        events = [*self._channel.drop(self.frames - 1), *self._turns.close(self.frames - 1)]
        self.closed = True
        return events

    # -- the override point --------------------------------------------------------------------------------------

    def force(self, text: int | None = None, function: int | Sequence[int] | None = None) -> None:
        """Force the next frame's text id and/or function id; the last call for a channel wins, the other's stays.

        BOS opens the agent's turn, EOS ends it, PAD keeps it silent. Several function ids are taken one a position.
        """
        self._require_open()
        self._forcing.force(text, function)

    # -- tools and turns -----------------------------------------------------------------------------------------

    def give(self, call_id: str, result: Any) -> None:
        """The result of a tool call: text (JSON stands as JSON) or a JSON value; the next step takes it up.

        Raises InputError for a call that is not open and for more than 16 KiB or 128 tokens; the call stays open.
        """
        self._require_open()
        self._channel.cycle.give(call_id, result)

    def refuse(self, call_id: str, why: str) -> None:
        """A tool call that will not be run: the model gets `{"error": why}`. Raises InputError if it is not open."""
        self._require_open()
        self._channel.cycle.refuse(call_id, str(why))

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on a tool's thread, when its function has ended and `step` has something to do."""
        self._channel.runner.ready = callback

    def wait_results(self, seconds: float | None = None) -> bool:
        """Wait until the function of a tool has ended or run out of time; False when `seconds` are over before."""
        return self._channel.runner.wait(seconds)

    def begin_turn(self) -> None:
        """The user's turn begins. A turn of the agent, or a tool call, is driven to its end first: EOS, then frames of
        zeros, at most 27, whose audio is marked `cancelled`; they run before audio that waits.
        """
        self._require_open()
        in_cycle = self.in_cycle
        self._undelivered.extend(self._channel.drop(self.frames - 1))
        if self._turns.begin(in_cycle):
            self._captions.new_turn(forget=self._turns.application)
        self._channel.new_turn()

    def end_turn(self, patience_frames: int = 0) -> None:
        """The user's turn ends: what waits is heard, frames of zeros let the transcript settle, then BOS.

        A model that owns its turns may open its own meanwhile, and `patience_frames` longer. Raises InputError when it
        is not the user's turn.
        """
        self._require_open()
        self._turns.end(patience_frames)
        self._hearing.end_turn()

    def open_turn(self) -> None:
        """Open the agent's turn at the next frame, a frame of zeros, whatever the transcript does."""
        self._require_open()
        self._turns.open()
        self._hearing.end_turn()

    def interrupt(self) -> None:
        """EOS at the next frame; a tool call is dropped."""
        self._require_open()
        self._turns.interrupt(self.in_cycle)
        self._undelivered.extend(self._channel.drop(self.frames - 1))

    # -- requests and outcomes -----------------------------------------------------------------------------------

    def next_request(self, block_frames: int = 1) -> Request | None:
        """What the session needs of the model next, None for nothing; `take` its outcome before the next one.

        `push`, `feed` and `step` do both. An engine may run the requests of several sessions together.
        """
        with self._inside():
            if self.options.wait_for_tools:
                self._channel.wait()
            self._undelivered.extend(self._channel.collect(self.frames - 1))
            self._request = self._next_request(block_frames)
            return self._request

    def take(self, outcome: Frame | int) -> list[Event]:
        """What `model.run(request, session.state)` gave for the last request; returns its events."""
        if self._request is None:
            raise InputError("No request is open.", "Ask for one with next_request().")
        with self._inside():
            self._take(outcome)
        return self._taken()

    def _next_request(self, block_frames: int) -> Request | None:
        channel = self._channel
        if channel.between_frames:
            ids = channel.run_ids or tuple(self._forcing.functions)[:1]
            audio = self.model.between(self.options.tool_audio)
            return PositionsRequest(ids, audio, channel.cycle.opens(len(ids)))
        if not self._frame_waits:
            return None
        zero = self._turns.zero_frame(self._hearing.waits_in_turn)
        ahead = 1 if self._turns.application else min(block_frames, self.model.block_frames)
        piece = self._hearing.next_piece(zero, ahead, self._hear)
        draws = self._draws(self.state.steps) if self.state.position else None
        if channel.stands_still and draws is not None:
            return SpeechRequest(piece.sound, draws, channel.cycle.spoken)
        return FrameRequest(piece.sound, draws, self._override())

    def _hear(self, samples: np.ndarray) -> list[Heard]:
        return self.model.hear(mx.array(samples)[None], self.state)

    @property
    def _frame_waits(self) -> bool:
        return self._turns.zero_frame(self._hearing.waits_in_turn) or self._hearing.waits

    def _override(self) -> Override:
        """What replaces the model's own choice in the next frame: turns first, then a tool cycle, then `force`."""
        turns = self._turns.forced(self.in_cycle)
        cycle = self._channel.forced(in_turn=self.turn == Phase.AGENT)

        def first(*ids: int | None) -> int:
            return next((token for token in ids if token is not None), NO_FORCE)

        text = first(turns.text, cycle.text, self._forcing.text)
        function = first(turns.function, cycle.function, self._forcing.function)
        return Override(text, function, first(cycle.spoken), turns.held_back, cycle.calls)

    # -- frames --------------------------------------------------------------------------------------------------

    def _run(self, block_frames: int) -> Iterator[Event]:
        while self._undelivered or self._advance(block_frames):
            while self._undelivered:
                yield self._undelivered.popleft()

    def _run_all(self) -> list[Event]:
        while self._advance(1):
            pass
        return self._taken()

    def _taken(self) -> list[Event]:
        events = list(self._undelivered)
        self._undelivered.clear()
        return events

    def _advance(self, block_frames: int) -> bool:
        """Do one request, or announce the limit after the last; False when nothing is left to do."""
        self._require_idle()
        if self.profile:
            self.profile.start()
        request = self.next_request(block_frames)
        if request is not None:
            with self._inside():
                self._take(self.model.run(request, self.state, self.profile))
            return True
        if self._hearing.limit_due:
            self._hearing.limit_due = False
            self._undelivered += [*self._sounds.rest(self.state), LimitReached(self.frames, self.max_seconds or 0.0)]
            return True
        rest = self._sounds.rest(self.state) if self._sounds.due else []
        self._undelivered.extend(rest)
        return bool(rest)

    def _take(self, outcome: Frame | int) -> None:
        request, self._request = self._request, None
        if isinstance(request, PositionsRequest):
            assert isinstance(outcome, int)
            if request.function_ids and not self._channel.run_ids:
                self._forcing.position_ran()
            for token in request.function_ids or (outcome,):
                self._undelivered.extend(self._captions.called(token, self.frames - 1))
                self._undelivered.extend(self._channel.cycle.took(token, self.frames - 1))
            self._watch_repetition()
            return
        assert isinstance(outcome, Frame)
        assert request is not None
        piece = self._hearing.done()
        check_sound(outcome.samples, self.frames, self.model.name)
        if isinstance(request, FrameRequest):  # of the others, the language model takes no part in a frame
            self._forcing.frame_ran(request.override)
        self._undelivered.extend(self._events(outcome, piece, isinstance(request, SpeechRequest)))
        self._watch_repetition()
        if self.profile:
            self.profile.stop()
        for observer in self._observers:  # last: the frame is done, whatever they raise
            observer(outcome)

    def _watch_repetition(self) -> None:
        """A watchdog of application turns: a call that begins again and again."""
        if self._turns.application and self._channel.repeats:
            self._undelivered.extend(self._channel.drop(self.frames - 1))
            self._turns.give_up(CloseReason.FUNCTION_REPETITION)

    def _events(self, frame: Frame, piece: Piece, still: bool) -> Iterable[Event]:
        index, self.frames = self.frames, self.frames + 1
        captions, config, cancelled = self._captions, self.model.config, self._turns.cancelled
        events: list[Event] = [*captions.heard(frame.symbols, index)]
        if events and not self._turns.application:
            self._channel.new_turn()
        was_active = self.in_cycle
        called = self._channel.passed(frame, index, still)
        passed = Passed(
            frame_index=index,
            text_id=frame.text_id,
            text=captions.says(frame.text_id),
            function=captions.says(frame.function_id),
            spoke=bool(frame.symbols),
            loud=piece.loud,
            zero=piece.zero,
            cycle=self.in_cycle,
            called=self.in_cycle and not was_active,
        )
        openings = self._turns.openings
        before, after = self._turns.took(passed, lambda: dbfs(frame.samples), captions.turn_transcript)
        if self._turns.openings > openings:  # in application turns the recogniser's own text starts anew too
            captions.new_turn(forget=self._turns.application)
            if self._turns.application:
                self.model.forget_transcript(self.state)
        if passed.text or frame.text_id in (config.bos_id, config.eos_id):
            self._turn_open = frame.text_id != config.eos_id
        events += [*before, *captions.said(frame.text_id, index), *captions.called(frame.function_id, index), *called]
        return [*events, *self._sounds.came(frame, index, cancelled), *after]

    # -- checks --------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.closed:
            raise SessionClosedError("The session is closed.", "Open a new one with model.session().")

    def _require_idle(self) -> None:
        self._require_open()
        if self._busy:
            raise InputError("The session is inside a frame.", "Push, finish or cancel after it, not in a callback.")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Inside a frame: callbacks must not run another."""
        self._require_idle()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
