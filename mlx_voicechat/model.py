"""The five networks together: one frame in, one frame out, one evaluation between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from . import checkpoint
from .codec import Codec, replace_control_codes
from .config import ModelConfig, read_config
from .conformer import Perception
from .duplex_lm import DuplexLm
from .ear_tts import EarTts
from .errors import CheckpointError, InputError
from .rnnt import Joint, PredictionNet
from .text import Tokenizer, character_table

if TYPE_CHECKING:
    from .profile import Profile
    from .session import Session

NO_FORCE = -1  # no token id: the model's own choice stands
BLOCK_FRAMES = 512  # frames of perception at once in the offline form


class Draws(NamedTuple):
    """Noise of one TTS step: uniform (5, C), normal (5, Z); one row per pass that fills codebooks."""

    uniform: mx.array
    normal: mx.array


@dataclass
class State:
    """Everything one conversation carries from frame to frame, and nothing of the weights."""

    perception: Any
    rnnt: Any
    language: Any
    tts: Any
    codec: Any
    text_id: mx.array  # (B,) fed back
    function_id: mx.array  # (B,) fed back
    position: int = 0  # on the whole timeline, prompt included
    steps: int = 0  # TTS steps so far


@dataclass(frozen=True)
class Frame:
    """What one frame gave: ids after the override, RNNT symbols, samples (1764,) float32 and Q codes."""

    text_id: int
    function_id: int
    symbols: tuple[int, ...]
    samples: np.ndarray
    codes: tuple[int, ...]
