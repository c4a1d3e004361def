"""Samples as a session takes them, checked, and how loud they are."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ..errors import InputError, brief
from .pcm import MAX_AMPLITUDE

FLOOR_DBFS = -200.0  # of digital silence


def dbfs(samples: np.ndarray) -> float:
    """Root mean square of float samples in dB below full scale; FLOOR_DBFS for nothing but zeros."""
    power = float(np.square(samples).mean()) if len(samples) else 0.0
    return 10 * math.log10(power) if power > 0 else FLOOR_DBFS


def checked_samples(samples: Any, rate_hz: Any, expected: int) -> np.ndarray:
    """Float mono samples (S,) float32 at the `expected` rate; InputError says what is wrong with others, and where."""
    if not isinstance(rate_hz, numbers.Real) or isinstance(rate_hz, bool):
        raise InputError(f"rate_hz is of type {type(rate_hz).__name__}, expected the number {expected}.")
    if rate_hz != expected:
        raise InputError(f"rate_hz is {brief(rate_hz)}, the model hears {expected} Hz.", "Resample first.")
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
