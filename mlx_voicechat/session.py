"""One conversation: sample buffer, opening, override point, text, limits and events.

Every way to use the model (offline and streamed command, WebSocket, Python) drives this object; the timeline is the
one of NeMo's streaming duplex inference.
"""

from __future__ import annotations

import math
import numbers
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .errors import InputError, LimitError, SessionClosedError, VoiceChatError
from .events import (
    AudioFrame,
    Cancelled,
    Done,
    Event,
    FunctionDelta,
    LimitReached,
    TextDelta,
    TranscriptDelta,
)
from .frame import NO_FORCE, Draws, Frame, Heard
from .gauges.profile import Profile
from .noise import Noise, given_draws, seeded_draws
from .sound.recordings import MAX_AMPLITUDE
from .text import IncrementalDecoder, TranscriptText

if TYPE_CHECKING:
    from .model import Model

MAX_SECONDS = 1e9  # 30 years: a limit beyond it is a mistake
MAX_GUIDANCE = 1e6  # logits stay finite


class Session:
    """One conversation with a loaded model; made and opened by `VoiceChat.session`, used from one thread.

    Opening it runs the voice prompt and the system prompt, one step of the speech generator for each of its tokens:
    a prompt of a thousand tokens takes as long as a thousand frames. Errors: InputError for a bad argument or a call
    from inside a frame (the session stays usable), LimitError after the limit, SessionClosedError after `finish` or
    `cancel`, VoiceChatError when the model computes NaN. What finished frames gave before an error comes first at the
    next call.
    """

    def __init__(
        self,
        model: Model,
        system_prompt: str | None = None,
        seed: int = 0,
        max_seconds: float | None = None,
        voice: str | None = None,
        guidance_scale: float | None = None,
        noise: Noise | None = None,
        profile: bool = False,
    ) -> None:
        config = model.config
        self.model = model
        self.seed = _checked_seed(seed)
        self.max_seconds = (
            None if max_seconds is None else checked_number("max_seconds", max_seconds, MAX_SECONDS, True)
        )
        self.profile = Profile(config.budget_ms) if profile else None
        self.frames = 0
        self.closed = False
        self.limited = False
        self._noise = noise
        self._quiet_ids = config.quiet_ids
        self._text = IncrementalDecoder(model.tokenizer)
        self._function = IncrementalDecoder(model.tokenizer)
        self._transcript = TranscriptText(config.rnnt.pieces)
        self._waiting = np.zeros(0, np.float32)
        self._heard: deque[Heard] = deque()  # perception may run ahead of the frames
        self._undelivered: deque[Event] = deque()  # of frames that are done
        self._limit_due = False
        self._busy = False
        self._received = 0
        self._forced = [NO_FORCE, NO_FORCE]
        self._turn_open = False
        self._observers: list[Callable[[Frame], None]] = []
        prompt = config.default_system_prompt if system_prompt is None else system_prompt
        if not isinstance(prompt, str):
            raise InputError(f"system_prompt must be a string, not {type(prompt).__name__}.")
        _check_unicode(prompt)
        if voice is not None and not isinstance(voice, str):
            raise InputError(f"voice must be a name, not {type(voice).__name__}.")
        if noise is not None and not callable(noise):
            raise InputError(f"noise must be callable, not {type(noise).__name__}.")
        scale = config.tts.guidance_scale
        if guidance_scale is not None:
            scale = checked_number("guidance_scale", guidance_scale, MAX_GUIDANCE)
        self._opening = model.open(prompt, voice, scale, self._draws, self.seed if noise is None else None)

    def open(self) -> Generator[None, None, None]:
        """Run the voice prompt and the system prompt, in steps; the session is of use when they are done."""
        self._state = yield from self._opening

    @property
    def transcript(self) -> str:
        """What the user said so far."""
        return self._transcript.text

    @property
    def text(self) -> str:
        """What the assistant said so far."""
        return self._text.text

    @property
    def function(self) -> str:
        """The function channel so far."""
        return self._function.text

    @property
    def speaking(self) -> bool:
        """Whether the assistant's turn is open: it began to speak and has not ended its turn."""
        return self._turn_open

    def push(self, samples: Any, rate_hz: int = 16000) -> list[Event]:
        """Add float mono samples (S,) of any length; returns the events of the whole frames that ran."""
        self._accept(samples, rate_hz)
        return self._run_all()

    def feed(self, samples: Any, rate_hz: int = 16000, block_frames: int = 1) -> Iterator[Event]:
        """Like `push`, but yields each event as its frame is done.

        `block_frames` > 1 lets perception run over that many waiting frames at once where that gives the same events
        (`VoiceChat.block_frames`): the offline form.
        Frames that a caller does not wait for stay in the buffer and run at the next call, which first gives the
        events that were not taken.
        """
        if not isinstance(block_frames, int) or block_frames < 1:
            raise InputError(f"block_frames is {_brief(block_frames)}, expected an integer of at least 1.")
        self._accept(samples, rate_hz)
        return self._run(block_frames)

    def _accept(self, samples: Any, rate_hz: int) -> None:
        self._require_idle()
        if self.limited:
            raise LimitError(f"The session's limit of {self.max_seconds:g} s is reached.", "Open a new session.")
        chunk = self._checked(samples, rate_hz)
        self._received += len(chunk)
        excess = self._received - self._limit_samples()
        if excess > 0:
            self.limited = self._limit_due = True
            chunk = chunk[: len(chunk) - excess]
        self._waiting = np.concatenate([self._waiting, chunk])

    def observe(self, observer: Callable[[Frame], None]) -> None:
        """Call `observer` with every frame as the model gave it, ids of the quiet tokens included."""
        self._observers.append(observer)

    def finish(self, pad_partial: bool = True) -> list[Event]:
        """Run what waits (a partial frame zero-padded, unless `pad_partial` is False) and close with Done."""
        self._require_idle()
        frame_samples = self.model.config.frame_samples_in
        whole = len(self._waiting) // frame_samples * frame_samples
        if self.limited or not pad_partial:
            self._waiting = self._waiting[:whole]
        elif len(self._waiting) > whole:
            padding = whole + frame_samples - len(self._waiting)
            self._waiting = np.concatenate([self._waiting, np.zeros(padding, np.float32)])
        events = self._run_all()
        self.closed = True
        return [*events, Done(self.frames)]

    def cancel(self) -> list[Event]:
        """Drop what waits and close with Cancelled, after the events of finished frames that were not taken."""
        self._require_idle()
        self._waiting = self._waiting[:0]
        self._heard.clear()
        self.closed = True
        return [*self._taken(), Cancelled(self.frames)]

    def force(self, text: int | None = None, function: int | None = None) -> None:
        """Force the next frame's text id and/or function id; the last call before the frame wins.

        None leaves that channel to the model. BOS opens the agent's turn, EOS ends it, PAD keeps it silent.
        """
        self._require_open()
        vocabulary = self.model.config.llm.vocab_size
        for name, token in (("text", text), ("function", function)):
            valid = isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= token < vocabulary
            if token is not None and not valid:
                raise InputError(f"force({name}={_brief(token)}): a token id is an integer in 0..{vocabulary - 1}.")
        self._forced = [NO_FORCE if token is None else int(token) for token in (text, function)]

    # -- frames --------------------------------------------------------------------------------------------------

    def _draws(self, step: int) -> Draws:
        """The sampler's noise of one TTS step: the caller's, or drawn from the seed and the step alone."""
        mog, tts = self.model.config.tts.mog, self.model.config.tts
        shapes = (len(tts.pass_counts), mog.num_predictions), (len(tts.pass_counts), tts.latent_size)
        if self._noise is None:
            return seeded_draws(self.seed, step, *shapes)
        return given_draws(self._noise, step, *shapes)

    def _run(self, block_frames: int) -> Iterator[Event]:
        while self._undelivered or self._advance(block_frames):
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
        """Run one frame, or announce the limit after the last; False when nothing is left to do."""
        waiting = len(self._waiting) // self.model.config.frame_samples_in
        if self._heard or waiting:
            self._require_idle()
            self._busy = True
            try:
                self._frame(min(block_frames, self.model.block_frames, waiting))
            finally:
                self._busy = False
            return True
        if self._limit_due:
            self._limit_due = False
            self._undelivered.append(LimitReached(self.frames, float(self.max_seconds or 0.0)))
            return True
        return False

    def _frame(self, block_frames: int) -> None:
        if self.profile:
            self.profile.start()
        if not self._heard:
            taken = block_frames * self.model.config.frame_samples_in
            self._heard.extend(self.model.hear(mx.array(self._waiting[:taken])[None], self._state))
            self._waiting = self._waiting[taken:]
        draws = self._draws(self._state.steps) if self._state.position else None
        frame = self.model.frame(self._heard[0], self._state, draws, self._forced, self.profile)
        self._heard.popleft()
        self._forced = [NO_FORCE, NO_FORCE]
        if not np.isfinite(frame.samples).all():
            raise VoiceChatError(
                f"The model computed NaN or infinity in frame {self.frames}.",
                f"The checkpoint {self.model.name} is probably damaged: get it again.",
            )
        self._undelivered.extend(self._events(frame))
        if self.profile:
            self.profile.stop()
        for observer in self._observers:  # last: the frame is done, whatever they raise
            observer(frame)

    def _events(self, frame: Frame) -> list[Event]:
        index, self.frames = self.frames, self.frames + 1
        config = self.model.config
        events: list[Event] = []
        if frame.symbols:
            delta = self._transcript.push(frame.symbols)
            events.append(TranscriptDelta(index, delta, self._transcript.text))
        if frame.text_id not in self._quiet_ids:
            delta = self._text.push(frame.text_id)
            events.append(TextDelta(index, frame.text_id, delta, self._text.text))
            self._turn_open = True
        elif frame.text_id in (config.bos_id, config.eos_id):
            self._turn_open = frame.text_id == config.bos_id
        if frame.function_id not in self._quiet_ids:
            delta = self._function.push(frame.function_id)
            events.append(FunctionDelta(index, frame.function_id, delta, self._function.text))
        events.append(AudioFrame(index, frame.samples, frame.codes))
        return events

    # -- checks --------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.closed:
            raise SessionClosedError("The session is closed.", "Open a new one with model.session().")

    def _require_idle(self) -> None:
        self._require_open()
        if self._busy:
            raise InputError("The session is inside a frame.", "Push, finish or cancel after it, not in a callback.")

    def _limit_samples(self) -> float:
        if self.max_seconds is None:
            return math.inf
        return round(self.max_seconds * self.model.config.input_rate_hz)

    def _checked(self, samples: Any, rate_hz: int) -> np.ndarray:
        expected = self.model.config.input_rate_hz
        if not isinstance(rate_hz, numbers.Real) or isinstance(rate_hz, bool):
            raise InputError(f"rate_hz is of type {type(rate_hz).__name__}, expected the number {expected}.")
        if rate_hz != expected:
            raise InputError(f"rate_hz is {_brief(rate_hz)}, the model hears {expected} Hz.", "Resample first.")
        if isinstance(samples, mx.array) and mx.issubdtype(samples.dtype, mx.floating):
            samples = samples.astype(mx.float32)  # numpy has no bfloat16
        try:
            array = np.asarray(samples)
        except (TypeError, ValueError):
            raise InputError("samples are no array: rows of unlike length, or no numbers.") from None
        if array.dtype.kind not in "biufc":
            raise InputError(f"samples are of type {type(samples).__name__}, expected an array of floats in -1..1.")
        if array.ndim == 2 and 1 in array.shape:
            array = array.reshape(-1)
        if array.ndim != 1:
            raise InputError(f"samples have shape {array.shape}, expected one channel (S,).", "Mix down to mono first.")
        if not np.issubdtype(array.dtype, np.floating):
            raise InputError(
                f"samples are {array.dtype}, expected floating point in -1..1.", "Divide 16-bit integers by 32768."
            )
        wrong = np.flatnonzero(~(np.abs(array) <= MAX_AMPLITUDE))
        if len(wrong):
            where, value = int(wrong[0]), float(array[wrong[0]])
            if not math.isfinite(value):
                raise InputError(f"samples[{where}] is {value}: NaN or infinity cannot be heard.")
            raise InputError(f"samples[{where}] is {value:g}: full scale is -1..1.", "Divide by the full scale first.")
        return array.astype(np.float32, copy=False)


def checked_number(name: str, value: Any, most: float, above_zero: bool = False) -> float:
    """`value` as a float when it is a real number in 0..most, 0 itself excluded by `above_zero`; else InputError."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value <= most or (above_zero and not value):
        least = "above 0" if above_zero else "of at least 0"
        raise InputError(f"{name} is {_brief(value)}, expected a number {least} and at most {most:g}.")
    return float(value)


def _brief(value: Any) -> str:
    """`value` in a message; Python refuses to print integers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "too long a number"
    return text if len(text) <= 50 else f"{text[:50]}..."


def _check_unicode(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The system prompt is not valid Unicode: character {error.start} is {prompt[error.start]!a}, half a pair.",
            "Give it as UTF-8.",
        ) from None


def _checked_seed(seed: int) -> int:
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"seed is {_brief(seed)}, expected an integer of at least 0.")
    return int(seed)
