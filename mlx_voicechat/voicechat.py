"""A loaded checkpoint and its conversations: load it, warm it, open sessions, answer a recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import InputError
from .events import AudioFrame, Event
from .frame import (
    MOST_ROWS,
    NO_FORCE,
    OWN,
    ROWS,
    Calls,
    Frame,
    FrameRequest,
    Heard,
    PositionsRequest,
    Request,
    Slab,
    SpeechRequest,
    State,
    groups,
    joins,
    kept,
    rows_for,
)
from .gauges import memory, plans
from .model import BLOCK_FRAMES, Model
from .networks.cache import filled
from .options import LoadOptions, SessionOptions, checked_number
from .session import Session
from .weights import checkpoint
from .weights.wired import wire

CACHE_VARIABLE = "MLX_VOICECHAT_CACHE_MB"
CACHE_PART, MAX_CACHE_BYTES = 16, 2**31
MLX_CPU_CACHE_BYTES = 2**25  # what MLX keeps on a CPU unless told otherwise
MAX_EXTRA_SECONDS = 1e6  # of silence at once: it is all in memory


@dataclass(frozen=True)
class Answer:
    """A whole conversation, n frames: texts, ids (n,), codes (n, Q) and samples (n * 1764,) at `rate_hz`."""

    transcript: str
    text: str
    function: str
    text_ids: list[int]
    function_ids: list[int]
    codes: np.ndarray
    samples: np.ndarray
    rate_hz: int


class VoiceChat(Model):
    """A loaded checkpoint: any number of sessions of one thread. `form`: how it is held, where `load` decided it."""

    form: plans.Form | None = None

    def session(self, **options: Any) -> Session:
        """Open a conversation; `options` are those of `SessionOptions`. Raises InputError."""
        session = Session(self, SessionOptions(**options))
        for _ in session.open():
            pass
        return session

    def opening(self, **options: Any) -> Generator[None, None, Session]:
        """`session` in steps: yields between the pieces of a long prompt, returns what `session` would.

        For who holds several conversations: others can have their frames between two steps.
        """
        session = Session(self, SessionOptions(**options))
        yield from session.open()
        return session

    def step(self, sessions: Sequence[Session]) -> Iterator[tuple[Session, list[Event] | Exception]]:
        """`Session.step` of several sessions at once: their frames are one evaluation, in which weights are read once.

        Yields each with what it gave, or with what ended it, as soon as that is there: first those whose frames ran
        together, then what runs alone (a tool's result that the model is told, a limit that is announced). What one
        raises leaves the others as they were; a session that raised is of no more use. InputError if one stands twice.
        """
        if len({id(session) for session in sessions}) < len(sessions):
            raise InputError("A session is there twice.", "Each takes one step.")
        together: list[tuple[Session, Request]] = []
        alone: list[Session] = []
        for session in sessions:
            try:
                request = None if session.profile else session.next_request()
            except Exception as fault:
                yield session, fault
                continue
            if request is not None and joins(request) and self.batches:
                together.append((session, request))
            else:
                alone.append(session)
        if len(together) == 1:
            alone.insert(0, together.pop()[0])
        for rows in groups([session.state for session, _ in together]):
            yield from self._step_together([together[row] for row in rows])
        for session in alone:
            yield session, _outcome(session.step)

    def _step_together(
        self, members: Sequence[tuple[Session, Request]]
    ) -> Iterator[tuple[Session, list[Event] | Exception]]:
        requests, states = [request for _, request in members], [session.state for session, _ in members]
        try:
            outcomes = run_together(self, requests, states)
        except Exception as fault:
            yield from ((session, fault) for session, _ in members)
            return
        for (session, _), outcome in zip(members, outcomes, strict=True):
            yield session, _outcome(lambda: session.take(outcome))  # noqa: B023

    def warm(self, voice: str | None = None, sessions: int = 1) -> None:
        """Run every path of a frame once on this thread, so that no conversation waits for a kernel to compile.

        That is: a system prompt, silence, speech, a transcript symbol; the same for `sessions` that step together; then
        the very first frame of a session without a prompt, whose opening is kept. Raises what `session` raises for
        `voice`.
        """
        session = self.session(system_prompt="Hello.", voice=voice)
        silence = np.zeros(self.config.frame_samples_in, np.float32)
        spoken = next(token for token in range(self.config.llm.vocab_size) if token not in self.config.quiet_ids)
        for text in (self.config.pad_id, self.config.bos_id, spoken, self.config.eos_id):
            session.force(text=text)
            session.push(silence)
        for rows in ROWS[: ROWS.index(rows_for(min(sessions, MOST_ROWS))) + 1]:
            if rows > 1:
                company = [self.session(voice=voice) for _ in range(rows)]
                for _ in range(2):  # the first frame has no speech
                    for session in company:
                        session.add(silence)
                    for _, outcome in self.step(company):
                        if isinstance(outcome, Exception):
                            raise outcome
            state = self.rnnt.init_state(rows)
            first = self.rnnt.first(mx.zeros((rows, 1, self.config.encoder.d_model)), state)
            self.rnnt.finish(first, [0] * rows, state)
        if self.call_tokens is not None:
            self.between("silence")
        self.forget_openings()
        self.session(voice=voice).push(silence)

    def answer(self, audio: Any, rate_hz: int = 16000, extra_seconds: float = 0.0, **options: Any) -> Answer:
        """The offline form: a whole recording (S,), float mono, and `extra_seconds` of silence after it -> Answer.

        `options` are those of `session`; a tool's function is waited for. Equals the events of a session that was
        pushed the same samples.
        """
        extra_seconds = checked_number("extra_seconds", extra_seconds, MAX_EXTRA_SECONDS)
        session = self.session(**{"wait_for_tools": True, **options})
        silence = np.zeros(round(extra_seconds * self.config.input_rate_hz), np.float32)
        frames: list[Frame] = []
        session.observe(frames.append)
        events: list[Event] = []
        for samples in (audio, silence):
            events += session.feed(samples, rate_hz, block_frames=BLOCK_FRAMES)
        sounds = [event for event in [*events, *session.finish()] if isinstance(event, AudioFrame)]
        quantizers = self.config.codec.num_quantizers
        return Answer(
            transcript=session.transcript,
            text=session.text,
            function=session.function,
            text_ids=[frame.text_id for frame in frames],
            function_ids=[frame.function_id for frame in frames],
            codes=np.array([sound.codes for sound in sounds], np.int32).reshape(-1, quantizers),
            samples=np.concatenate([np.zeros(0, np.float32), *(sound.samples for sound in sounds)]),
            rate_hz=self.config.output_rate_hz,
        )


def run_together(model: Model, requests: Sequence[Request], states: Sequence[State]) -> list[Frame | int]:
    """What `Model.run` gives for each of the requests, at most MOST_ROWS and such as `joins`; in one evaluation.

    Advances the states. Each transcript symbol costs one more evaluation, for all that go on emitting together. What it
    raises leaves none of the states of use.
    """
    slab = Slab.of(states)
    rows, state = filled(requests, slab.size), slab.state
    listens = [not isinstance(request, PositionsRequest) for request in rows]
    heard = _hear(model, rows, listens, state)
    first = model.rnnt.first(heard.encoded, state.rnnt)
    functions, spoken = _think(model, rows, heard, slab)
    samples, codes = _speak(model, rows, spoken, listens, slab)

    outputs = samples, codes, functions, state.text_id, state.function_id, first.ids
    mx.eval(outputs, state.arrays)  # the one wait
    read = [np.asarray(each) for each in outputs]
    blank = model.rnnt.blank
    chosen = [token if hears else blank for token, hears in zip(read[-1].tolist(), listens, strict=True)]
    symbols, state.rnnt = model.rnnt.finish(first, chosen, state.rnnt)
    outcomes = [_outcome_of(model, *row) for row in zip(requests, symbols, *read[:-1], strict=False)]
    for request, each in zip(requests, states, strict=True):
        each.steps += not isinstance(request, PositionsRequest) and request.draws is not None
        if not isinstance(request, SpeechRequest):
            model._advance(each, 1)
    return outcomes


def _hear(model: Model, rows: Sequence[Request], listens: Sequence[bool], state: State) -> Heard:
    """Perception of those that hear; the others' rows are what the language model hears between two frames."""
    silence = np.zeros(model.config.frame_samples_in, np.float32)
    sounds = np.stack([silence if isinstance(request, PositionsRequest) else request.sound for request in rows])
    before = state.perception
    (heard,) = model.hear(mx.array(sounds), state)
    state.perception = kept(state.perception, before, listens)
    if all(listens):
        return heard
    projected = mx.split(heard.projected, len(rows))
    between = [
        request.audio.astype(own.dtype) if isinstance(request, PositionsRequest) else own
        for request, own in zip(rows, projected, strict=True)
    ]
    return heard._replace(projected=mx.concatenate(between))


def _think(model: Model, rows: Sequence[Request], heard: Heard, slab: Slab) -> tuple[mx.array, mx.array]:
    """The language model of those that think -> its own function ids (B,), and the text ids (B,) that are spoken."""
    state, thinks = slab.state, [not isinstance(request, SpeechRequest) for request in rows]
    before = state.text_id, state.function_id
    functions = state.function_id
    if any(thinks):
        fused = model.language.fuse(state.text_id, heard.projected, state.function_id)
        hidden = slab.step_language(thinks, lambda language: model.language.step(fused, language))
        texts, functions = model.language.choose(hidden)
        state.text_id, state.function_id = texts, functions
    if all(isinstance(request, FrameRequest) and request.override == OWN for request in rows):
        return functions, state.text_id
    parts = [mx.split(ids, len(rows)) for ids in (state.text_id, state.function_id)]
    ids = [_fed_back(model, *row) for row in zip(rows, *parts, strict=True)]
    texts, fed, spoken = (mx.concatenate(list(each)) for each in zip(*ids, strict=True))
    state.text_id, state.function_id = kept((texts, fed), before, thinks)
    return functions, spoken


def _fed_back(model: Model, request: Request, text: mx.array, function: mx.array) -> tuple[mx.array, ...]:
    """The model's own ids (1,) of a row -> the text and function id that feed back, and the text id that is spoken."""

    def one(token: int) -> mx.array:
        return mx.array([token], text.dtype)

    if isinstance(request, SpeechRequest):
        return text, function, one(request.spoken)
    if isinstance(request, PositionsRequest):
        opened = one(model.config.bos_id if request.opens else model.config.pad_id)
        return opened, one(request.function_ids[0]) if request.function_ids else function, opened
    fed = model._overridden(text, function, request.override)
    return *fed, fed[0] if request.override.spoken == NO_FORCE else one(request.override.spoken)


def _speak(
    model: Model, rows: Sequence[Request], spoken: mx.array, listens: Sequence[bool], slab: Slab
) -> tuple[mx.array, mx.array]:
    """Speech of those that hear -> samples (B, S) and codes (B, Q); at position 0, without draws, of silence."""
    state = slab.state
    draws = [None if isinstance(request, PositionsRequest) else request.draws for request in rows]
    speaks = [each is not None for each in draws]
    codes = mx.broadcast_to(model._silence, (len(rows), model._silence.shape[1]))
    some = next((each for each in draws if each is not None), None)
    if some is not None:
        noise = [mx.stack(list(each)) for each in zip(*(each or some for each in draws), strict=True)]
        made = slab.step_tts(speaks, lambda tts: model.tts.step(spoken, tts, *noise))
        codes = kept(made, codes.astype(made.dtype), speaks)
    samples, after = model._decode(codes[:, None], state.codec)
    state.codec = kept(after, state.codec, listens)
    return samples, codes


def _outcome_of(
    model: Model,
    request: Request,
    symbols: list[int],
    samples: np.ndarray,
    codes: np.ndarray,
    asked: np.ndarray,
    text: np.ndarray,
    function: np.ndarray,
) -> Frame | int:
    if isinstance(request, PositionsRequest):
        return int(function)
    frame = Frame(
        text_id=model.config.pad_id,
        function_id=model.config.pad_id,
        symbols=tuple(symbols),
        samples=samples.copy(),  # the rows of the others need not live as long
        codes=tuple(codes.tolist()),
    )
    if isinstance(request, SpeechRequest):
        return frame
    start = NO_FORCE if model.call_tokens is None else model.call_tokens.start
    refused = request.override.calls == Calls.REFUSE and int(asked) == start
    return replace(frame, text_id=int(text), function_id=int(function), refused=refused)


def _outcome(work: Callable[[], list[Event]]) -> list[Event] | Exception:
    try:
        return work()
    except Exception as fault:
        return fault


def load(
    model: str | Path,
    say: Callable[[str], None] = checkpoint.print_notice,
    **options: Any,
) -> VoiceChat:
    """Open a checkpoint: a folder, a hub id (from the cache or fetched) or `tiny`, the packaged demonstration.

    `options` are those of `LoadOptions`: `compile`, `speech_weights`, `kv_cache`, `arithmetic`, `sessions`. `say` gets
    notices: the size of a download, too little memory. Raises CheckpointError, HubError and InputError.
    """
    chosen = LoadOptions(**options)
    if chosen.shard_llm:
        raise InputError("One machine cannot share the LLM.", "Start the command on several, by mlx.launch.")
    return load_opened(str(model), checkpoint.open_model(model, say), chosen, say)


def load_opened(
    name: str,
    opened: checkpoint.Checkpoint,
    options: LoadOptions,
    say: Callable[[str], None] = checkpoint.print_notice,
    kind: Callable[..., VoiceChat] = VoiceChat,
) -> VoiceChat:
    """`load` of a checkpoint that is open already; `name` is what it is called, `kind` what it becomes."""
    config, stored = opened.config, opened.stored
    form = plans.choose(config, stored, options)
    parameters = opened.parameters(form.plan.arithmetic)
    limit_buffer_cache()
    warning = memory.shortfall(config, stored, memory.machine(), form.requantise, form.states, options.sessions)
    if warning is not None:
        say(warning)
    loaded = kind(name, config, opened.tokenizer, parameters, say, form.requantise)
    loaded.form = form
    wire(loaded)
    loaded.tts.backbone.cache_dtype = memory.KV_TYPES[form.plan.kv_cache]
    on_gpu = mx.default_device().type == mx.gpu
    if (on_gpu if options.compile is None else options.compile) and not loaded.compile():
        say("Frames run uncompiled, which is slower: MLX found no C++ compiler (g++) here.")
    return loaded


def limit_buffer_cache() -> None:
    """Bound the buffers that MLX keeps for reuse: CACHE_VARIABLE in MB, else a part of the machine's memory.

    On a CPU nothing is kept: malloc is as fast there, and attention asks for larger buffers each frame. A smaller
    limit than MLX's own, which on a GPU is all memory, is the program's and stays.
    """
    own = os.environ.get(CACHE_VARIABLE)
    if own and not own.isdecimal():
        raise InputError(f"{CACHE_VARIABLE} is {own!r}, expected a whole number of megabytes.")
    on_cpu = mx.default_device().type == mx.cpu
    part = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // CACHE_PART
    limit = int(own) * 2**20 if own else 0 if on_cpu else min(part, MAX_CACHE_BYTES)
    before = mx.set_cache_limit(limit)
    if not own and before < (MLX_CPU_CACHE_BYTES if on_cpu else mx.get_memory_limit()):
        mx.set_cache_limit(before)
