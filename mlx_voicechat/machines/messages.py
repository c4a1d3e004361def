"""What the thinking rank asks of the speaking one, and what comes back: fixed words, then bytes where some are needed.

A frame is six words one way, its number, token and step among them, and codes and samples the other.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .ring import Wire

WORDS = 6


class Kind(IntEnum):
    """What a message asks for."""

    OPEN = 0  # a conversation after the voice prompt: guidance scale and latents follow
    COPY = 1  # a conversation that goes on from another, whose number is `token`
    SEED = 2  # what its noise follows from follows, in decimal
    PROMPT = 3  # a step of a system prompt: no sound is wanted
    FRAME = 4  # a frame's sound
    CLOSE = 5  # a conversation that nobody goes on with
    END = 6  # of the run


class Message(NamedTuple):
    """`number` is the conversation's; `step` the speech generator's, NO_STEP for a frame of silence."""

    kind: Kind
    number: int = 0
    token: int = 0
    step: int = 0
    payload: bytes = b""


NO_STEP = -1


def send(wire: Wire, message: Message) -> None:
    """Send a message."""
    words = (message.kind, message.number, message.token, message.step, len(message.payload), 0)
    wire.send(mx.array(words, mx.int32))
    if message.payload:
        wire.send(mx.array(np.frombuffer(message.payload, np.uint8)))


def receive(wire: Wire) -> Message:
    """Wait for the next message, for any time."""
    words = np.array(wire.receive((WORDS,), mx.int32, idle=True)).tolist()
    kind, number, token, step, size = words[:5]
    payload = bytes(np.array(wire.receive((size,), mx.uint8))) if size else b""
    return Message(Kind(kind), number, token, step, payload)


def floats(payload: bytes) -> np.ndarray:
    """A payload of float32."""
    return np.frombuffer(payload, np.float32)
