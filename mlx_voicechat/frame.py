"""What one frame needs and gives: its state, what it heard, its noise, forced ids, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from .networks.codec import CodecState
from .networks.conformer import PerceptionState
from .networks.duplex_lm import LlmState
from .networks.ear_tts import TtsState
from .networks.rnnt import RnntState

NO_FORCE = -1  # not a token id: the model's own choice stands


class Calls(Enum):
    """What the start of a tool call on the function channel does to its own frame."""

    FREE = "free"  # nothing
    SILENCE = "silence"  # the text id is PAD
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

    def copy(self) -> State:
        """A state that goes on independently; arrays are shared until one of the two writes."""
        return replace(self, language=self.language.copy(), tts=self.tts.copy())

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that a frame's evaluation must cover."""
        functional = leaves((self.perception, self.rnnt, self.codec, self.text_id, self.function_id))
        return [*functional, *self.language.arrays, *self.tts.arrays]


def leaves(tree: Any) -> list[mx.array]:
    """The arrays in nested tuples and lists."""
    if isinstance(tree, mx.array):
        return [tree]
    return [leaf for branch in tree for leaf in leaves(branch)]


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


@dataclass(frozen=True)
class FrameRequest:
    """An audio frame: all five networks."""

    heard: Heard
    draws: Draws | None
    override: Override


@dataclass(frozen=True)
class SpeechRequest:
    """An audio frame while the language model stands still: transcript and speech alone, of the id `spoken`."""

    heard: Heard
    draws: Draws
    spoken: int


@dataclass(frozen=True)
class PositionsRequest:
    """Positions of the language model between two frames, text PAD, that hear `audio` (1, 1, H).

    `function_ids` are forced; empty is one position whose function id is the model's own.
    """

    function_ids: tuple[int, ...]
    audio: mx.array


Request: TypeAlias = FrameRequest | SpeechRequest | PositionsRequest
