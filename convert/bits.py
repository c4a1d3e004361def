"""How many bits each layer of the language model gets, for a size that is asked for.

What a layer loses at so many bits was measured on its calibrated inputs; a knapsack chooses, and no recording is heard.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_voicechat.errors import InputError
from mlx_voicechat.gauges.memory import gigabytes

from . import conversion, gptq, moments, rounding
from .calibration import Calibration
from .feeding import TO_STREAM
from .plans import AFFINE_BITS, Plan, Quantised
from .rounding import Layer, Progress
from .source import Source

ERRORS = "errors"  # in a calibration's folder: what layers lose, so that another target measures nothing again
MOST_UNITS = 50_000  # of size that the knapsack counts in


class Choice(NamedTuple):
    """A layer of so many weights, and its share of the noise in the residual stream at each number of bits."""

    name: str
    weights: int
    costs: Mapping[int, float]


class Target(NamedTuple):
    """One of the two: average bits of the layers' weights (scales not counted), or 10^9 bytes of the checkpoint."""

    bits: float | None = None
    gigabytes: float | None = None

    def budget(self, job: conversion.Job, body: Sequence[Layer]) -> int:
        """Bits for all weights of the layers. Raises InputError for what no choice reaches."""
        weights = sum(math.prod(layer.tensor.shape) for layer in body)
        if self.bits is not None:
            wanted, least = self.bits * weights, f"{min(AFFINE_BITS)} bits"
        else:
            bits = sum(math.prod(layer.tensor.shape) * layer.setting.bits for layer in body)
            wanted = ((self.gigabytes or 0) * 1e9 - job.bytes) * 8 + bits
            least = gigabytes(job.bytes + (min(AFFINE_BITS) * weights - bits) / 8)
        if wanted < min(AFFINE_BITS) * weights:
            raise InputError(
                f"The target is out of reach with plan {job.plan.name}: its least is {least}.",
                "Choose a larger one, or a plan that stores the rest in fewer bits.",
            )
        return int(wanted)


def choose(
    source: Source,
    base: Plan,
    calibration: Calibration,
    target: Target,
    progress: Progress = lambda done, total: None,
) -> Plan:
    """`base` with bits per layer of the language model's body, heads as they are. Raises what `prepare` raises."""
    job = conversion.prepare(source, base, calibration)
    body = [layer for layer in job.layers if moments.key_of(layer.module) != moments.HEADS]
    budget = target.budget(job, body)
    bits = knapsack(measure(source, body, calibration, progress), budget)
    chosen = {layer.tensor.name: Quantised(bits[layer.tensor.name], layer.setting.group_size) for layer in body}
    sizes = {layer.tensor.name: math.prod(layer.tensor.shape) for layer in body}
    average = sum(sizes[name] * count for name, count in bits.items()) / sum(sizes.values())
    counted = ", ".join(f"{count} in {each}" for each, count in sorted(Counter(bits.values()).items()))
    name = f"{base.name}, {average:.2f} bits"
    return base.with_bits(chosen, name, f"bits per layer by measured error: {counted}; the rest as in {base.name}")


def measure(
    source: Source, layers: Sequence[Layer], calibration: Calibration, progress: Progress = lambda done, total: None
) -> list[Choice]:
    """What each layer loses at each number of bits; kept in the calibration's folder, layer by layer."""
    folder = calibration.folder / ERRORS
    folder.mkdir(exist_ok=True)
    total, found = len(layers), []
    for done, layer in enumerate(layers):
        progress(done, total)
        path = folder / f"{layer.module}.json"
        key = rounding.fingerprint(source, layer, calibration, f"errors {layer.setting.group_size}")
        costs = _read(path, key)
        if costs is None:
            costs = _costs(source, layer, calibration)
            moments.save_json(path, {"key": key, "costs": {str(bits): cost for bits, cost in costs.items()}})
        found.append(Choice(layer.tensor.name, math.prod(layer.tensor.shape), costs))
    progress(total, total)
    return found


def _read(path: Path, key: str) -> dict[int, float] | None:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {int(bits): float(cost) for bits, cost in saved["costs"].items()} if saved["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _costs(source: Source, layer: Layer, calibration: Calibration) -> dict[int, float]:
    """The noise that a layer's rounding adds to the residual stream, as a part of the stream after its block.

    A layer that does not add to the stream itself disturbs what its block adds as much as its own output.
    """
    given = calibration.moments(layer.module, layer.tensor.shape[1])
    inverse = gptq.by_energy(given.matrix, layer.setting.group_size)
    lost, whole = dict.fromkeys(AFFINE_BITS, 0.0), 0.0
    for weight in rounding.rows_of(source, layer):
        whole += gptq.loss(weight, given.matrix)
        for bits in AFFINE_BITS:
            lost[bits] += gptq.quantise(weight, given.matrix, bits, layer.setting.group_size, inverse=inverse)[1]
    scale = 1.0 if layer.module.endswith(TO_STREAM) else given.energy.added / max(whole, 1e-30)
    return {bits: error * scale / max(given.energy.stream, 1e-30) for bits, error in lost.items()}


def knapsack(choices: Sequence[Choice], budget: int) -> dict[str, int]:
    """Bits by layer of the least total cost whose weights take at most `budget` bits.

    Exact where the weights' common divisor is no smaller than the budget's MOST_UNITS-th part; else sizes are rounded
    up to that. Raises InputError when the fewest bits are too many.
    """
    unit = max(math.gcd(*(choice.weights for choice in choices)), -(-budget // MOST_UNITS))
    room = budget // unit
    best, taken = np.zeros(room + 1), np.zeros((len(choices), room + 1), np.uint8)
    for index, choice in enumerate(choices):
        before, best = best, np.full(room + 1, np.inf)
        for bits, cost in sorted(choice.costs.items()):
            size = -(-choice.weights * bits // unit)
            if size > room:
                continue
            better = before[: room + 1 - size] + cost < best[size:]
            best[size:][better] = before[: room + 1 - size][better] + cost
            taken[index, size:][better] = bits
    if not np.isfinite(best[room]):
        raise InputError("The fewest bits are too many for this target.", "Choose a larger one.")
    chosen, left = {}, room
    for index in reversed(range(len(choices))):
        choice = choices[index]
        chosen[choice.name] = bits = int(taken[index, left])
        left -= -(-choice.weights * bits // unit)
    return dict(reversed(chosen.items()))
