"""The sampler's draws: what one step of the speech generator takes from a seed, or from the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .config import TtsConfig
from .errors import InputError
from .frame import Draws
from .options import Noise


def draws_from(config: TtsConfig, seed: int, noise: Noise | None) -> Callable[[int], Draws]:
    """What gives the noise of a TTS step: the caller's, or drawn from the seed and the step alone."""
    passes = len(config.pass_counts)
    shapes = (passes, config.mog.num_predictions), (passes, config.latent_size)
    if noise is None:
        return lambda step: seeded_draws(seed, step, *shapes)
    return lambda step: given_draws(noise, step, *shapes)


def seeded_draws(seed: int, step: int, uniform: tuple[int, ...], normal: tuple[int, ...]) -> Draws:
    """Noise that depends on seed and step alone: uniform (5, C) in [0, 1) and normal (5, Z), lazy."""
    words = np.random.SeedSequence([seed, step]).generate_state(4)
    keys = mx.array(words.reshape(2, 2))
    return Draws(mx.random.uniform(shape=uniform, key=keys[0]), mx.random.normal(shape=normal, key=keys[1]))


def given_draws(noise: Noise, step: int, uniform: tuple[int, ...], normal: tuple[int, ...]) -> Draws:
    """The caller's own noise of one step, checked: InputError names what is wrong with it."""
    given: Any = noise(step)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"noise({step}) gave {type(given).__name__}, expected a pair of arrays.")
    try:
        drawn = tuple(mx.array(a).astype(mx.float32) for a in given)
    except (TypeError, ValueError):
        kinds = " and ".join(type(a).__name__ for a in given)
        raise InputError(f"noise({step}) gave {kinds}, expected arrays of numbers.") from None
    if tuple(a.shape for a in drawn) != (uniform, normal):
        raise InputError(f"noise({step}) gave shapes {[a.shape for a in drawn]}, expected {[uniform, normal]}.")
    if not all(np.isfinite(np.array(a)).all() for a in drawn):
        raise InputError(f"noise({step}) gave NaN or infinity.")
    return Draws(*drawn)
