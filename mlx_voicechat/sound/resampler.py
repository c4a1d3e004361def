"""The stateful resampler. soxr is imported where it is used, so that importing this module is cheap."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .pcm import Samples, floats


class Resampler:
    """One mono stream from `source_hz` to `target_hz`; pieces of any size give what one call on all would give."""

    def __init__(self, source_hz: int, target_hz: int) -> None:
        self._stream: Any = None
        self._finished = False
        if source_hz != target_hz:
            import soxr

            self._stream = soxr.ResampleStream(source_hz, target_hz, 1, dtype="float32")

    def push(self, samples: npt.ArrayLike) -> Samples:
        """samples (S,) -> what is ready (S',), a new array, possibly empty."""
        return self._next(floats(samples), last=False)

    def finish(self) -> Samples:
        """The rest of the stream (S',); after it nothing may be pushed."""
        return self._next(np.zeros(0, np.float32), last=True)

    def _next(self, samples: Samples, last: bool) -> Samples:
        if self._finished:
            raise InputError("This resampler is finished.", "Make another for another stream.")
        if samples.ndim != 1:
            raise InputError(f"A resampler takes mono samples (S,), not an array of shape {samples.shape}.")
        self._finished = last
        return samples.copy() if self._stream is None else self._stream.resample_chunk(samples, last=last)
