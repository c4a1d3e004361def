"""Samples as numpy float32 with full scale +-1, and as 16-bit PCM. Nothing is narrowed by a cast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import AudioError, InputError

Samples = npt.NDArray[np.float32]

MAX_AMPLITUDE = 100.0  # 40 dB above full scale: no clipping, but another scale; the model's state would not recover


def pcm16(samples: npt.ArrayLike, scale: int = 32768) -> npt.NDArray[np.int16]:
    """Float samples of any shape -> little-endian int16: clipped, then scaled and rounded; nothing wraps.

    Files scale by 32768, the wire by 32767. Raises InputError on integers, AudioError on NaN.
    """
    x = floats(samples)
    if np.isnan(x).any():
        raise AudioError("The samples to write hold NaN.")
    return np.minimum(np.rint(np.clip(x, -1, 1) * np.float32(scale)), 32767).astype("<i2")


def floats(samples: npt.ArrayLike) -> Samples:
    """Any float samples as float32, without a copy where they are. Raises InputError on integers."""
    x = np.asarray(samples)
    if x.dtype.kind != "f":
        raise InputError(f"Samples must be floats in -1..1, not {x.dtype}.", "Divide integers by their full scale.")
    with np.errstate(over="ignore"):
        return x.astype(np.float32, copy=False)


def shown(path: str | Path) -> str:
    """A path in a message of one line."""
    return str(path) if str(path).isprintable() else repr(str(path))
