"""strict-v3: what is kept of turns: which were started and completed, the audio before one, messages that must wait."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .strict_v3_codes import DEFERRED_BYTES, FRAME_BYTES, Refused
from .strict_v3_messages import Append, Commit, TurnStart, Update

Waiting: TypeAlias = TurnStart | Append | Commit | Update

REMEMBERED = 16
LOUD_DBFS = -50.0
PREROLL_FRAMES = 12
LEAD_FRAMES = 2  # before the first loud one


class TurnMemory:
    """The last client_turn_ids of one kind, each with the server's turn_id."""

    def __init__(self) -> None:
        self._turns: OrderedDict[int, str] = OrderedDict()

    def add(self, client_turn_id: int, turn_id: str) -> None:
        self._turns[client_turn_id] = turn_id
        self._turns.move_to_end(client_turn_id)
        while len(self._turns) > REMEMBERED:
            self._turns.popitem(last=False)

    def find(self, client_turn_id: int) -> str | None:
        return self._turns.get(client_turn_id)


@dataclass(frozen=True)
class Level:
    """How loud samples are, full scale being 1; `dbfs` is None for digital silence."""

    samples: int
    rms: float
    peak: float

    @property
    def dbfs(self) -> float | None:
        return 20 * float(np.log10(self.rms)) if self.rms > 0 else None

    def at_most(self, dbfs: float) -> bool:
        return self.dbfs is None or self.dbfs <= dbfs


def level_of(samples: np.ndarray) -> Level:
    """Level of float samples (S,)."""
    if not len(samples):
        return Level(0, 0.0, 0.0)
    wide = samples.astype(np.float64)
    return Level(len(samples), float(np.sqrt(np.mean(wide * wide))), float(np.max(np.abs(wide))))


def samples_of(pcm: bytes) -> np.ndarray:
    """Little-endian PCM16 -> float32 samples (S,)."""
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)


class Blocks:
    """Audio of any packet size -> frames of PCM16; a partial frame stays."""

    def __init__(self) -> None:
        self._partial = b""

    def push(self, pcm: bytes) -> list[bytes]:
        """Whole frames, in order."""
        data = self._partial + pcm
        end = len(data) // FRAME_BYTES * FRAME_BYTES
        self._partial = data[end:]
        return [data[at : at + FRAME_BYTES] for at in range(0, end, FRAME_BYTES)]

    def padded(self) -> list[bytes]:
        """The partial frame filled with zeros, if there is one."""
        partial, self._partial = self._partial, b""
        return [partial.ljust(FRAME_BYTES, b"\0")] if partial else []

    def clear(self) -> None:
        self._partial = b""


class PreRoll:
    """The last frames before a turn, of which it gets what its detector needed to notice it."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=PREROLL_FRAMES)

    def push(self, frame: bytes) -> None:
        self._frames.append(frame)

    def take(self) -> list[bytes]:
        """From two frames before the first loud one, all where none is loud; and begin anew."""
        frames = list(self._frames)
        self._frames.clear()
        for index, frame in enumerate(frames):
            if not level_of(samples_of(frame)).at_most(LOUD_DBFS):
                return frames[max(0, index - LEAD_FRAMES) :]
        return frames

    def clear(self) -> None:
        self._frames.clear()


class Deferred:
    """Messages that wait for the end of a function cycle or of a prefill, in order; 1 MiB of them. Raises Refused."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Waiting, int]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def push(self, message: Waiting, size: int) -> None:
        """`size` is that of the message as it came, in bytes."""
        if self._bytes + size > DEFERRED_BYTES:
            overflow = f"More than {DEFERRED_BYTES:,} bytes of messages wait for the end of the function call."
            raise Refused("deferred_input_overflow", overflow, message.event_id)
        self._messages.append((message, size))
        self._bytes += size

    def pop(self) -> Waiting:
        message, size = self._messages.popleft()
        self._bytes -= size
        return message
