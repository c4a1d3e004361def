"""One conversation with two checkpoints, and how far what they gave is apart."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_voicechat.frame import Frame
from mlx_voicechat.voicechat import VoiceChat

SILENT_SECONDS = 1.0
MEL_BANDS, MEL_WINDOW, MEL_HOP = 80, 1024, 256
MEL_FLOOR = 1e-5  # of magnitude: below it, silence is silence


class Run(NamedTuple):
    """What a model gave for n frames: ids (n, 2) of text and function, their logits (n, 2, V), codes (n, Q), speech."""

    ids: np.ndarray
    logits: np.ndarray
    codes: np.ndarray
    samples: np.ndarray
    transcript: str
    text: str


class Measures(NamedTuple):
    """Two runs of `frames` frames, the second told the first one's ids: parts of choices and codes that are equal, the
    divergence of both heads in nats, and the mean distance of the speech's log-mel spectra."""

    frames: int
    same_text: float
    same_function: float
    same_code: float
    kl_text: float
    kl_function: float
    log_mel: float


def run(model: VoiceChat, samples: np.ndarray, ids: np.ndarray | None = None, **options: Any) -> Run:
    """One conversation; `ids` (n, 2) replace the model's choices after the logits are noted.

    `options` are those of a session; its seed is 0 unless they say another.
    """
    frames: list[Frame] = []
    logits: list[np.ndarray] = []
    choose = model.language.choose

    def noted(hidden: mx.array) -> tuple[mx.array, mx.array]:
        both = mx.stack(list(model.language.logits(hidden[:, -1]))).squeeze(1).astype(mx.float32)
        logits.append(np.array(both))
        return choose(hidden)

    session = model.session(**{"seed": 0, **options})
    session.observe(frames.append)
    model.language.choose = noted  # type: ignore[method-assign]
    try:
        size = model.config.frame_samples_in
        for index, start in enumerate(range(0, len(samples) - size + 1, size)):
            if ids is not None:
                session.force(text=int(ids[index, 0]), function=int(ids[index, 1]))
            session.push(samples[start : start + size])
    finally:
        model.language.choose = choose  # type: ignore[method-assign]
    return Run(
        np.array([(frame.text_id, frame.function_id) for frame in frames]),
        np.stack(logits),
        np.array([frame.codes for frame in frames]),
        np.concatenate([frame.samples for frame in frames]),
        session.transcript,
        session.text,
    )


def measures(expected: Run, got: Run, rate_hz: int) -> Measures:
    """`got` was told the ids of `expected`; speech is at `rate_hz`."""
    same = (expected.logits.argmax(-1) == got.logits.argmax(-1)).mean(axis=0)
    apart = divergence(expected.logits, got.logits).mean(axis=0)
    return Measures(
        frames=len(expected.ids),
        same_text=float(same[0]),
        same_function=float(same[1]),
        same_code=float((expected.codes == got.codes).mean()),
        kl_text=float(apart[0]),
        kl_function=float(apart[1]),
        log_mel=log_mel_distance(expected.samples, got.samples, rate_hz),
    )


def silence_dbfs(model: VoiceChat) -> float:
    """Level of what the codes of silence decode to."""
    frames = round(SILENT_SECONDS / model.config.frame_seconds)
    codes = mx.broadcast_to(model.speech.codec_silence_tokens, (1, frames, model.config.codec.num_quantizers))
    power = float(mx.mean(mx.square(model.codec.whole(codes))))
    return 10 * math.log10(max(power, 1e-20))


def divergence(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence in nats of softmax(got) from softmax(expected), logits (..., V) -> (...)."""
    first, second = (_log_softmax(logits.astype(np.float64)) for logits in (expected, got))
    return np.sum(np.exp(first) * (first - second), axis=-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def log_mel_distance(first: np.ndarray, second: np.ndarray, rate_hz: int) -> float:
    """Mean absolute difference of two recordings' log-mel spectra (natural logarithm), frame by frame."""
    return float(np.abs(_log_mel(first, rate_hz) - _log_mel(second, rate_hz)).mean())


def _log_mel(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """samples (S,) -> (frames, MEL_BANDS)"""
    import librosa

    bank = librosa.filters.mel(sr=rate_hz, n_fft=MEL_WINDOW, n_mels=MEL_BANDS)
    padded = np.pad(samples, MEL_WINDOW // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, MEL_WINDOW)[::MEL_HOP] * np.hanning(MEL_WINDOW)
    return np.log(np.maximum(np.abs(np.fft.rfft(windows)) @ bank.T, MEL_FLOOR))


def word_edits(expected: str, got: str) -> tuple[int, int]:
    """Words to insert, delete or replace to make `got` of `expected`, and how many `expected` has."""
    first, second = expected.split(), got.split()
    row = list(range(len(second) + 1))
    for index, word in enumerate(first, 1):
        diagonal, row[0] = row[0], index
        for place, other in enumerate(second, 1):
            best = min(row[place] + 1, row[place - 1] + 1, diagonal + (word != other))
            diagonal, row[place] = row[place], best
    return row[-1], len(first)
