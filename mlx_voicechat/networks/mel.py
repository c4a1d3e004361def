"""Log-mel front end: pre-emphasis, centred STFT, Slaney mel bands, natural logarithm. No weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np

from ..config import MelConfig


def _filter_bank() -> Any:
    """librosa's `filters.mel`. Its import has numba look for a folder for compiled code, and fails if there is none."""
    try:
        from librosa.filters import mel
    except RuntimeError:
        config: Any = import_module("numba.core.config")
        before, config.DISABLE_JIT = config.DISABLE_JIT, True  # the filter bank needs nothing that is compiled
        try:
            from librosa.filters import mel
        finally:
            config.DISABLE_JIT = before
    return mel


class LogMel:
    """Samples (B, S) to log-mel rows (B, T, F), as NeMo's AudioToMelSpectrogramPreprocessor without dither.

    `frame_rows` is the number of rows per input frame (the encoder's subsampling factor). Row m is centred on
    sample `m * hop`; after input frame j the rows up to `frame_rows * j` are released, so that all of them are final.
    """

    def __init__(self, config: MelConfig, frame_rows: int) -> None:
        self.config = config
        self.frame_samples = frame_rows * config.hop_samples
        self._half = config.n_fft // 2
        # What the first released row reaches back to, and the one sample before it for pre-emphasis.
        self._tail_samples = self.frame_samples - config.hop_samples + self._half + 1

    def prepare(self) -> None:
        """Build window, filter bank (F, n_fft // 2 + 1) and guard; imports librosa, which takes a while."""
        mel = _filter_bank()
        c = self.config
        window = np.zeros(c.n_fft, np.float32)
        start = (c.n_fft - c.window_samples) // 2
        window[start : start + c.window_samples] = np.hanning(c.window_samples)
        self._window = mx.array(window)
        filters = mel(sr=c.sample_rate, n_fft=c.n_fft, n_mels=c.features).T
        self._filters = mx.array(np.ascontiguousarray(filters))  # half the time of the transposed layout on a CPU
        self._guard = mx.array(c.log_guard, mx.float32)
        mx.eval(self._window, self._filters, self._guard)

    def init_state(self, batch: int = 1) -> mx.array:
        """The kept tail (B, tail) of nothing: zeros, which are also NeMo's padding before the first sample."""
        return mx.zeros((batch, self._tail_samples))

    def step(self, samples: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        """Whole frames (B, n * frame_samples), tail -> rows (B, n * frame_rows, F), tail.

        The last row is the one centred on the start of the last frame. Of a first push all but the last of the
        first `frame_rows` rows are centred before the recording; the encoder does not look at them.
        """
        signal = mx.concatenate([state, samples], axis=1)
        emphasised = signal[:, 1:] - self.config.preemphasis * signal[:, :-1]
        rows = samples.shape[1] // self.config.hop_samples
        return self._rows(emphasised, rows), signal[:, -self._tail_samples :]

    def whole(self, samples: mx.array) -> mx.array:
        """A whole signal (B, S), S >= 1 -> all rows (B, S // hop + 1, F); zeros stand around the emphasised signal."""
        before = mx.pad(samples, [(0, 0), (1, 0)])[:, :-1]
        padded = mx.pad(samples - self.config.preemphasis * before, [(0, 0), (self._half, self._half)])
        return self._rows(padded, samples.shape[1] // self.config.hop_samples + 1)

    def _rows(self, emphasised: mx.array, rows: int) -> mx.array:
        """The first `rows` rows (B, rows, F) of a padded signal (B, S)."""
        batch, length = emphasised.shape
        shape, strides = (batch, rows, self.config.n_fft), (length, self.config.hop_samples, 1)
        frames = mx.as_strided(emphasised, shape, strides)
        power = mx.square(mx.abs(mx.fft.rfft(frames * self._window)))
        return mx.log(mx.addmm(self._guard, power, self._filters))
