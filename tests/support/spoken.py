"""What the talking checkpoint's speech says: the nearest of its reference answers."""

from __future__ import annotations

import json
from functools import cache

import librosa
import numpy as np
import soundfile as sf

from .checkpoints import GOLDEN

ANSWERS = [answer["text"] for answer in json.loads((GOLDEN / "answers" / "answers.json").read_text(encoding="utf-8"))]


def log_mel(samples: np.ndarray) -> np.ndarray:
    """(T, 40), fifty rows a second."""
    mel = librosa.feature.melspectrogram(y=samples, sr=22050, n_fft=1024, hop_length=441, n_mels=40)
    return np.log(mel + 1e-4).T


@cache
def references() -> list[np.ndarray]:
    """answers/N.flac speaks the Nth answer."""
    files = [GOLDEN / "answers" / f"{index}.flac" for index in range(len(ANSWERS))]
    return [log_mel(sf.read(file, dtype="float32")[0]) for file in files]


def distance(spoken: np.ndarray, reference: np.ndarray) -> float:
    """Mean log-mel difference at the best alignment of the reference inside what was spoken."""
    windows = np.lib.stride_tricks.sliding_window_view(spoken, len(reference), axis=0)  # (starts, 40, T)
    return float(np.abs(windows - reference.T).mean(axis=(1, 2)).min()) if len(windows) else np.inf


def nearest_answer(samples: np.ndarray) -> str:
    """The text of the reference that `samples` (S,), 22.05 kHz, are nearest to; quiet surroundings do not count."""
    loud = np.flatnonzero(np.abs(samples) > 1e-2)
    room = 22050 // 2
    spoken = log_mel(samples[max(loud[0] - room, 0) : loud[-1] + room])
    padding = np.full((100, spoken.shape[1]), np.log(1e-4), spoken.dtype)
    spoken = np.concatenate([spoken, padding])
    return ANSWERS[int(np.argmin([distance(spoken, reference) for reference in references()]))]
