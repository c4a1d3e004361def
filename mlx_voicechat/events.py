"""What a conversation tells, as it happens: the events of a session, and of the client of a server. No MLX here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class TranscriptDelta:
    """The user was understood to say more: `delta` was added, `text` is the transcript so far."""

    frame_index: int
    delta: str
    text: str


@dataclass(frozen=True)
class TextDelta:
    """The assistant's text channel carries `token_id`; `delta` may be empty inside a UTF-8 sequence."""

    frame_index: int
    token_id: int
    delta: str
    text: str


@dataclass(frozen=True)
class FunctionDelta:
    """The function channel carries `token_id`."""

    frame_index: int
    token_id: int
    delta: str
    text: str


@dataclass(frozen=True, eq=False)
class AudioFrame:
    """One frame of speech: float32 samples (1764 at 22.05 kHz) and its codec codes.

    `cancelled`: it belongs to an agent's turn that `begin_turn` has ended, and should not be played.
    """

    frame_index: int
    samples: np.ndarray
    codes: tuple[int, ...]
    cancelled: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AudioFrame):
            return NotImplemented
        own, others = ((e.frame_index, e.codes, e.cancelled) for e in (self, other))
        same = own == others
        return same and np.array_equal(self.samples, other.samples)

    def __hash__(self) -> int:
        return hash((self.frame_index, self.codes))


class FailureReason(str, Enum):
    """Why a call failed. The model gets an error as its result, except after `TOO_MANY` and `UNCLOSED`."""

    MALFORMED = "malformed"  # no JSON of a call in it, or bytes that are no UTF-8
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"  # a required one is missing, or one is not of the declared type
    TIMED_OUT = "timed_out"
    RAISED = "raised"  # the tool's own function raised, or gave what is no result
    TOO_LONG = "too_long"  # no end of the call within its limit
    TOO_MANY = "too_many_cycles"  # in one turn of the user
    UNCLOSED = "unclosed"  # the model did not take note of the results; call_id is empty
    CANCELLED = "cancelled"  # by the user's turn, an interruption or the end of the session


class CloseReason(str, Enum):
    """Why an agent's turn ended; all but the first four are watchdogs."""

    MODEL = "model"  # it ended its turn
    CANCELLED = "cancelled"  # begin_turn
    INTERRUPTED = "interrupted"
    ENDED = "ended"  # the session did
    DECODED_SILENCE = "decoded_silence"
    NO_TEXT = "no_text"
    NO_AUDIO = "no_audio"
    FUNCTION_REPETITION = "function_repetition"
    LONGEST_TURN = "longest_turn"


@dataclass(frozen=True)
class FunctionCall:
    """The model calls tool `name`; `raw` is the text of its call as it wrote it."""

    frame_index: int
    call_id: str
    name: str
    arguments: Mapping[str, Any]
    raw: str


@dataclass(frozen=True)
class FunctionFailed:
    """A call that has no result of its tool."""

    frame_index: int
    call_id: str
    reason: FailureReason
    raw: str


@dataclass(frozen=True)
class FunctionApplied:
    """The model has got the results, JSON texts, of these calls."""

    frame_index: int
    call_ids: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class OnHold:
    """The assistant begins to say `text` while a call waits for its result; the model does not know of it."""

    frame_index: int
    text: str


@dataclass(frozen=True)
class TurnOpened:
    """The agent's turn begins; `transcript` is what the user said in the turn before it."""

    frame_index: int
    transcript: str


@dataclass(frozen=True)
class TurnClosed:
    """The agent's turn has ended, for the ear too: frame `frame_index` was the last of it."""

    frame_index: int
    reason: CloseReason


@dataclass(frozen=True)
class SettleTimeout:
    """`end_turn` did not see the transcript come to rest, and has not opened the agent's turn."""

    frame_index: int


@dataclass(frozen=True)
class LimitReached:
    """The session has consumed its `seconds` of audio; later pushes raise LimitError."""

    frame_index: int
    seconds: float


@dataclass(frozen=True)
class Done:
    """The session finished after `frame_index` audio frames."""

    frame_index: int


@dataclass(frozen=True)
class Cancelled:
    """The session was cancelled after `frame_index` audio frames."""

    frame_index: int


Event: TypeAlias = (
    TranscriptDelta
    | TextDelta
    | FunctionDelta
    | AudioFrame
    | FunctionCall
    | FunctionFailed
    | FunctionApplied
    | OnHold
    | TurnOpened
    | TurnClosed
    | SettleTimeout
    | LimitReached
    | Done
    | Cancelled
)
