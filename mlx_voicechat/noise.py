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

Draw = Callable[[mx.array], tuple[mx.array, mx.array]]  # what `draw_of` makes, compiled or not


def draw_of(config: TtsConfig) -> Draw:
    """What draws a step's noise from its two keys (2, 2): uniform (5, C) in [0, 1), normal (5, Z); can be compiled."""
    shapes = draw_shapes(config)
    return lambda keys: _drawn(keys, *shapes)


def draws_from(config: TtsConfig, seed: int, noise: Noise | None, draw: Draw | None = None) -> Callable[[int], Draws]:
    """What gives the noise of a TTS step: the caller's, or drawn from the seed and the step alone, lazily."""
    drawn = draw or draw_of(config)
    if noise is None:
        return lambda step: Draws(*drawn(step_keys(seed, step)))
    return lambda step: given_draws(noise, step, *draw_shapes(config))


def seeded_draws(seed: int, step: int, uniform: tuple[int, ...], normal: tuple[int, ...]) -> Draws:
    """Noise that depends on seed and step alone: uniform (5, C) in [0, 1) and normal (5, Z), lazy."""
    return Draws(*_drawn(step_keys(seed, step), uniform, normal))


def _drawn(keys: mx.array, uniform: tuple[int, ...], normal: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    return mx.random.uniform(shape=uniform, key=keys[0]), mx.random.normal(shape=normal, key=keys[1])


def step_keys(seed: int, step: int) -> mx.array:
    """The keys (2, 2) of a step's two draws."""
    return mx.array(np.random.SeedSequence([seed, step]).generate_state(4).reshape(2, 2))


def draw_shapes(config: TtsConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a step's draws: uniform (5, C), normal (5, Z)."""
    passes = len(config.pass_counts)
    return (passes, config.mog.num_predictions), (passes, config.latent_size)


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
