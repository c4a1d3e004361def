"""What one frame needs and gives: its state, what it heard, its noise, forced ids, and what came out."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from .errors import InputError, VoiceChatError, brief
from .networks.cache import CacheRows, filled
from .networks.codec import CodecState
from .networks.conformer import PerceptionState
from .networks.duplex_lm import LlmState
from .networks.ear_tts import TtsState
from .networks.rnnt import RnntState
from .sound.samples import checked_samples, dbfs

QUIET_DBFS = -50.0  # what is louder is somebody who speaks
ROWS = (1, 2, 4, 8)  # that a slab may have: a compiled trace for each, and no other in a conversation
MOST_ROWS = ROWS[-1]
NO_FORCE = -1  # not a token id: the model's own choice stands


class Calls(Enum):
    """What the start of a tool call on the function channel does to its own frame."""

    FREE = "free"  # nothing
    SILENCE = "silence"  # the text id is PAD
    ALONE = "alone"  # so it is, and any other function id is PAD
    REFUSE = "refuse"  # it is replaced by PAD, and told


class Override(NamedTuple):
    """What replaces the model's own choice in one frame, inside its graph: ids, or NO_FORCE.

    `spoken` is what the speech generator gets in place of the text id. `held_back`: an own BOS becomes PAD.
    """

    text: int = NO_FORCE
    function: int = NO_FORCE
    spoken: int = NO_FORCE
    held_back: bool = False
    calls: Calls = Calls.FREE


OWN = Override()


class Draws(NamedTuple):
    """Noise of one TTS step: uniform (5, C), normal (5, Z); one row per pass that fills codebooks."""

    uniform: mx.array
    normal: mx.array


class Heard(NamedTuple):
    """What perception makes of n frames: encoded (B, n, D) for the transcript, projected (B, n, H) for the LLM."""

    encoded: mx.array
    projected: mx.array


Sound: TypeAlias = "np.ndarray | Heard"  # a frame's samples (1280,) float32, or what perception made of them before
Fixed: TypeAlias = Any  # nested tuples of arrays: a State's without its caches


@dataclass
class State:
    """Everything one conversation carries from frame to frame, and nothing of the weights.

    Networks' states are replaced by a step; only the attention caches inside them are written in place.
    """

    perception: PerceptionState
    rnnt: RnntState
    language: LlmState
    tts: TtsState
    codec: CodecState
    text_id: mx.array  # (B,) fed back to the LLM
    function_id: mx.array  # (B,)
    position: int = 0  # on the whole timeline, prompt included
    steps: int = 0  # TTS steps so far
    slab: Slab | None = None  # where its arrays of fixed shape are, while it steps with others

    def copy(self) -> State:
        """A state that goes on independently; arrays are shared until one of the two writes."""
        self.leave()
        return replace(self, language=self.language.copy(), tts=self.tts.copy())

    def leave(self) -> None:
        """Step with no others from here on: its arrays are its own again."""
        if self.slab is not None:
            self.slab.dissolve()

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that a frame's evaluation must cover."""
        functional = leaves((self.perception, self.rnnt, self.codec, self.text_id, self.function_id))
        return [*functional, *self.language.arrays, *self.tts.arrays]

    @property
    def fixed(self) -> Fixed:
        """What has the same shape at every position."""
        tts, ids = (self.tts.latent, self.tts.controls), (self.text_id, self.function_id)
        text_id, function_id = (each.astype(mx.uint32) for each in ids)  # as choices have them: one trace for all
        return self.perception, self.rnnt, self.language.mamba, tts, self.codec, text_id, function_id

    @fixed.setter
    def fixed(self, fixed: Fixed) -> None:
        self.perception, self.rnnt, mamba, (latent, controls), self.codec, self.text_id, self.function_id = fixed
        self.language = self.language._replace(mamba=mamba)
        self.tts = self.tts._replace(latent=latent, controls=controls)


class Slab:
    """What has a fixed shape of several conversations, as the rows of one State; the caches stay each its own.

    `size` rows, of which the first conversation's stands again in those that no conversation has. As long as the same
    ones step, nothing is copied; for others the slab is dissolved.
    """

    def __init__(self, members: Sequence[State], size: int) -> None:
        self.size = size
        self._members = [weakref.ref(member) for member in members]  # one that has ended must not wait for the others
        going = {id(member) for member in members}
        for member in members:
            if member.slab is not None:
                member.slab.dissolve(going)
        fixed = mapped(lambda *rows: mx.concatenate(filled(rows, size)), *(member.fixed for member in members))
        language, tts = ([each.language.caches for each in members], [each.tts.caches for each in members])
        self._language = tuple(CacheRows(layer, size) for layer in zip(*language, strict=True))
        self._tts = tuple(CacheRows(layer, size) for layer in zip(*tts, strict=True))
        self.state = replace(
            members[0],
            language=LlmState((), self._language),
            tts=members[0].tts._replace(
                caches=self._tts, guidance_rows=max(member.tts.guidance_rows for member in members)
            ),
        )
        self.state.fixed = fixed
        nothing = mapped(lambda row: mx.zeros((0,), row.dtype), fixed)  # the memory is the rows'
        for member in members:
            member.fixed, member.slab = nothing, self

    def step_language(self, rows: Sequence[bool], step: Callable[[LlmState], tuple[Any, LlmState]]) -> Any:
        """Step the language model of some of the rows, and no other; what `step` gave besides the state."""
        before = self.state.language
        out, after = step(before._replace(caches=tuple(cache.only(rows) for cache in self._language)))
        self.state.language = LlmState(kept(after.mamba, before.mamba, rows), self._language)
        return out

    def step_tts(self, rows: Sequence[bool], step: Callable[[TtsState], tuple[Any, TtsState]]) -> Any:
        """The same of the speech generator."""
        before = self.state.tts
        out, after = step(before._replace(caches=tuple(cache.only(rows) for cache in self._tts)))
        self.state.tts = before._replace(latent=kept(after.latent, before.latent, rows))
        return out

    @staticmethod
    def of(states: Sequence[State]) -> Slab:
        """The slab whose rows are these states', as it is or made anew; `states` are at most MOST_ROWS."""
        slab = states[0].slab
        if slab is not None and [id(member) for member in slab.members] == [id(state) for state in states]:
            return slab
        return Slab(states, rows_for(len(states)))

    @property
    def members(self) -> list[State | None]:
        """Whose the rows are, in their order; None where a conversation is no more."""
        return [member() for member in self._members]

    def dissolve(self, going: Collection[int] = ()) -> None:
        """Give each its arrays back; those that go on to another slab (by their `id`) need no copy of them."""
        rows = mapped(lambda whole: mx.split(whole, self.size), self.state.fixed)
        for index, member in enumerate(self.members):
            if member is None:
                continue
            fixed = mapped(lambda row: row[index], rows, leaf=list)  # noqa: B023
            if id(member) not in going:  # a view of the rows would keep all of them in memory
                fixed = mapped(mx.contiguous, fixed)
                mx.async_eval(leaves(fixed))
            member.fixed, member.slab = fixed, None


def kept(after: Any, before: Any, rows: Sequence[bool]) -> Any:
    """A tree of arrays (B, ...) as it is after a step of some of the rows; the others are as they were before it."""
    still = [index for index, goes in enumerate(rows) if not goes]

    def restored(new: mx.array, old: mx.array) -> mx.array:
        new = new[...]  # an object of its own: a shifted past stands in both trees, and assigning changes the object
        for index in still:
            new[index : index + 1] = old[index : index + 1]
        return new

    return mapped(restored, after, before) if still else after


def rows_for(count: int) -> int:
    """The rows of a slab for so many conversations."""
    return next(rows for rows in ROWS if rows >= count)


def rounds(count: int) -> list[int]:
    """How many of so many conversations step together, one slab after the other."""
    full, rest = divmod(count, MOST_ROWS)
    return [MOST_ROWS] * full + [rest] * (rest > 0)


def leaves(tree: Any) -> list[mx.array]:
    """The arrays in nested tuples and lists."""
    if isinstance(tree, mx.array):
        return [tree]
    return [leaf for branch in tree for leaf in leaves(branch)]


def mapped(make: Callable[..., Any], *trees: Any, leaf: type = mx.array) -> Any:
    """A tree of the same nested tuples, with `make` of the trees' leaves at each place."""
    first = trees[0]
    if isinstance(first, leaf):
        return make(*trees)
    branches = [mapped(make, *parts, leaf=leaf) for parts in zip(*trees, strict=True)]
    return type(first)(*branches) if hasattr(first, "_fields") else type(first)(branches)


@dataclass(frozen=True)
class Frame:
    """What one frame gave: ids after the override, RNNT symbols, samples (1764,) float32 and Q codes.

    `refused`: the model asked for a tool call that the override did not let begin.
    """

    text_id: int
    function_id: int
    symbols: tuple[int, ...]
    samples: np.ndarray
    codes: tuple[int, ...]
    refused: bool = False


class Forcing:
    """The ids that a caller forces; `vocab_size` is the text vocabulary's."""

    def __init__(self, vocab_size: int) -> None:
        self.text: int | None = None  # of the next frame
        self.functions: deque[int] = deque()  # of the next positions
        self._vocab_size = vocab_size

    def force(self, text: int | None, function: int | Sequence[int] | None) -> None:
        """Force a channel, or with None leave it as it was. Raises InputError for what is no token id."""
        several: list[Any] = list(function) if isinstance(function, list | tuple) else [function]
        for name, token in [("text", text), *(("function", each) for each in several)]:
            valid = (
                isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= token < self._vocab_size
            )
            if token is not None and not valid:
                last = self._vocab_size - 1
                raise InputError(f"force({name}={brief(token)}): a token id is an integer in 0..{last}.")
        if text is not None:
            self.text = int(text)
        if function is not None:
            self.functions = deque(int(token) for token in several)

    @property
    def function(self) -> int | None:
        """The function id of the next position."""
        return self.functions[0] if self.functions else None

    def frame_ran(self, override: Override) -> None:
        """A frame ran with this override: what it took of the forced ids is used up."""
        self.text = None
        if self.functions and override.function == self.functions[0]:
            self.functions.popleft()

    def position_ran(self) -> None:
        """A position without audio took the next function id."""
        self.functions.popleft()


@dataclass(frozen=True)
class FrameRequest:
    """An audio frame: all five networks."""

    sound: Sound
    draws: Draws | None
    override: Override


@dataclass(frozen=True)
class SpeechRequest:
    """An audio frame while the language model stands still: transcript and speech alone, of the id `spoken`."""

    sound: Sound
    draws: Draws
    spoken: int


@dataclass(frozen=True)
class PositionsRequest:
    """Positions of the language model between two frames, text PAD, that hear `audio` (1, 1, H).

    `function_ids` are forced; empty is one position whose function id is the model's own. `opens`: the last takes BOS.
    """

    function_ids: tuple[int, ...]
    audio: mx.array
    opens: bool = False


Request: TypeAlias = FrameRequest | SpeechRequest | PositionsRequest


def joins(request: Request) -> bool:
    """Whether a request can run beside others in one evaluation.

    Not so a frame that perception has heard ahead, and a run of several positions: those run alone.
    """
    if isinstance(request, PositionsRequest):
        return len(request.function_ids) <= 1
    return not isinstance(request.sound, Heard)


def groups(states: Sequence[State]) -> list[list[int]]:
    """Which of the states, by their index, run together: at most MOST_ROWS.

    A slab of exactly these states stays as it is, whatever their order now, and so does a full one.
    """
    left, found = {id(state): index for index, state in enumerate(states)}, []
    for slab in {id(state.slab): state.slab for state in states if state.slab is not None}.values():
        members = [id(member) for member in slab.members]
        if len(members) in (MOST_ROWS, len(states)) and all(member in left for member in members):
            found.append([left.pop(member) for member in members])
    rest = list(left.values())
    return [*found, *(rest[at : at + MOST_ROWS] for at in range(0, len(rest), MOST_ROWS))]


class Piece(NamedTuple):
    """One frame's input: whether it was `loud`, and whether it is a `zero` frame that no audio brought."""

    sound: Sound
    loud: bool
    zero: bool


class Hearing:
    """The input of one session, in frames of `frame_samples` at `rate_hz`."""

    def __init__(self, frame_samples: int, rate_hz: int, max_seconds: float | None) -> None:
        self.limited = False
        self.limit_due = False  # it is to be announced
        self._frame_samples, self._rate_hz = frame_samples, rate_hz
        self._most = math.inf if max_seconds is None else round(max_seconds * rate_hz)
        self._received = 0
        self._waiting = np.zeros(0, np.float32)
        self._in_turn = 0  # how many of those were there when the user's turn ended
        self._pieces: deque[Piece] = deque()

    @property
    def waits(self) -> bool:
        """Whether a whole frame waits."""
        return bool(self._pieces) or len(self._waiting) >= self._frame_samples

    @property
    def waits_in_turn(self) -> bool:
        """Whether a frame waits that came before the end of the user's turn."""
        return bool(self._pieces) or self._in_turn >= self._frame_samples

    def add(self, samples: Any, rate_hz: Any) -> None:
        """Add samples (S,) up to the limit. Raises InputError and takes none."""
        chunk = checked_samples(samples, rate_hz, self._rate_hz)
        self._received += len(chunk)
        excess = self._received - self._most
        if excess > 0:
            self.limited = self.limit_due = True
            chunk = chunk[: len(chunk) - int(excess)]
        self._waiting = np.concatenate([self._waiting, chunk])

    def end(self, pad_partial: bool) -> None:
        """No more will come: fill a partial frame with zeros, or drop it."""
        whole = len(self._waiting) // self._frame_samples * self._frame_samples
        if not pad_partial:
            self._waiting = self._waiting[:whole]
        elif len(self._waiting) > whole:
            padding = np.zeros(whole + self._frame_samples - len(self._waiting), np.float32)
            self._waiting = np.concatenate([self._waiting, padding])

    def end_turn(self) -> None:
        """The user's turn ends with what waits, a partial frame included."""
        self.end(not self.limited)
        self._in_turn = len(self._waiting)

    def clear(self) -> None:
        """Drop everything that waits."""
        self._waiting = self._waiting[:0]
        self._pieces.clear()
        self._in_turn = 0

    def next_piece(self, zero: bool, ahead: int, hear: Callable[[np.ndarray], list[Heard]]) -> Piece:
        """The next frame's input; it stays the next until `done`.

        `hear` runs perception over several whole frames, at most `ahead`, where they are there: then they are heard
        before their own turn. `zero` asks for a frame of zeros.
        """
        if not self._pieces and zero:
            self._pieces.append(Piece(np.zeros(self._frame_samples, np.float32), False, True))
        elif not self._pieces:
            count = min(ahead, len(self._waiting) // self._frame_samples)
            taken = self._waiting[: count * self._frame_samples]
            frames = taken.reshape(count, -1)
            sounds: Sequence[Sound] = hear(taken) if count > 1 else list(frames)
            self._waiting = self._waiting[len(taken) :]
            self._in_turn = max(0, self._in_turn - len(taken))
            for sound, samples in zip(sounds, frames, strict=True):
                self._pieces.append(Piece(sound, dbfs(samples) > QUIET_DBFS, False))
        return self._pieces[0]

    def done(self) -> Piece:
        """The next frame's input was used."""
        return self._pieces.popleft()


def check_sound(samples: np.ndarray, index: int, name: str) -> None:
    """Raise VoiceChatError for samples that are no numbers, in frame `index` of the model `name`."""
    if not np.isfinite(samples).all():
        raise VoiceChatError(
            f"The model computed NaN or infinity in frame {index}.",
            f"The checkpoint {name} is probably damaged: get it again.",
        )
