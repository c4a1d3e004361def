"""What a conversation tells, as it happens: the events of a session, and of the client of a server. No MLX here."""

from __future__ import annotations

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
    """One frame of speech: float32 samples (1764 at 22.05 kHz) and its codec codes."""

    frame_index: int
    samples: np.ndarray
    codes: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AudioFrame):
            return NotImplemented
        same = (self.frame_index, self.codes) == (other.frame_index, other.codes)
        return same and np.array_equal(self.samples, other.samples)

    def __hash__(self) -> int:
        return hash((self.frame_index, self.codes))


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


@dataclass(frozen=True)
class FunctionCall:
    """The model calls a function."""

    frame_index: int
    call_id: str
    name: str
    arguments: dict[str, Any]
    raw: str


class FailureReason(str, Enum):
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class FunctionFailed:
    """What the model wrote is no call."""

    frame_index: int
    call_id: str
    reason: FailureReason
    raw: str


@dataclass(frozen=True)
class FunctionApplied:
    """Results."""

    frame_index: int
    call_ids: tuple[str, ...]
    results: tuple[str, ...]


Event: TypeAlias = (
    TranscriptDelta
    | TextDelta
    | FunctionDelta
    | FunctionCall
    | FunctionFailed
    | FunctionApplied
    | AudioFrame
    | LimitReached
    | Done
    | Cancelled
)
