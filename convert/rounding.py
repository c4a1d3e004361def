"""The layers of a conversion that are rounded with a calibration, one after the other.

Each finished layer is a file beside the target until the checkpoint is written: who is stopped goes on there.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.weights import layout

from . import gptq, moments
from .calibration import Calibration, check_model
from .plans import Quantised, Setting
from .source import Source, Tensor

FOLDER = ".{}.mlx-voicechat-layers"  # beside the target
ROWS = 4096  # of a weight in memory at once
COPIES = 9  # of those rows: read, in MLX, what is left of them, what each lost, two dequantised, and MLX's buffers
TRIAL, TRIALS = 1024, 3  # width and number of the products that tell how fast this machine multiplies

Progress = Callable[[int, int], Any]  # operations done, of how many


class Layer(NamedTuple):
    """A weight to round: its name as stored and within the language model."""

    tensor: Tensor
    setting: Quantised

    @property
    def module(self) -> str:
        return layout.own_name(self.tensor.name).removesuffix(".weight")

    @property
    def operations(self) -> int:
        """Floating-point operations, about: two factorisations and an inverse, then what the columns lose."""
        rows, inputs = self.tensor.shape
        return 4 * inputs**3 // 3 + 6 * rows * inputs**2

    @property
    def memory_bytes(self) -> int:
        """Most that is there at once: moments, their factor, and rows of the weight."""
        rows, inputs = self.tensor.shape
        return 4 * (2 * inputs**2 + COPIES * min(rows, ROWS) * inputs)


def calibrated(source: Source, settings: Mapping[str, Setting]) -> list[Layer]:
    """The layers that a calibration can round: those of the language model that become affine integers."""
    known = moments.keys(source.config.llm)
    found = []
    for name, setting in settings.items():
        tensor = source.tensors[name]
        if not isinstance(setting, Quantised) or setting.mode != "affine" or tensor.quantised == setting:
            continue
        layer = Layer(tensor, setting)
        if layout.LANGUAGE_MATRIX.match(name) and moments.key_of(layer.module) in known:
            found.append(layer)
    return found


def check(source: Source, calibration: Calibration) -> None:
    """Raise InputError unless the calibration is of the source's language model."""
    by_own_name = {layout.own_name(name): name for name in source.tensors}
    count = source.config.llm.num_hidden_layers
    names = [f"llm.layers.{index}.norm.weight" for index in range(count)] + ["llm.norm_f.weight"]
    norms = [mx.concatenate([b.array for b in source.blocks(by_own_name[name])]) for name in names]
    check_model(calibration, source.config.llm, norms, source.name)


def seconds(operations: float) -> float:
    """How long so many operations take on this machine, about."""
    square = np.ones((TRIAL, TRIAL), np.float32)
    taken = []
    for _ in range(TRIALS):
        started = time.perf_counter()
        square @ square
        taken.append(time.perf_counter() - started)
    return operations / (2 * TRIAL**3) * min(taken)


@dataclass(frozen=True)
class Rounding:
    """What is rounded for one target, and where finished layers are."""

    source: Source
    calibration: Calibration
    layers: Sequence[Layer]
    folder: Path

    def run(self, progress: Progress = lambda done, total: None) -> None:
        """Round what is not there yet, in the order in which the layers share moments."""
        self.folder.mkdir(exist_ok=True)
        total, done = sum(layer.operations for layer in self.layers), 0
        order = {key: index for index, key in enumerate(moments.keys(self.source.config.llm))}
        for layer in sorted(self.layers, key=lambda layer: order[moments.key_of(layer.module)]):
            progress(done, total)
            key = self._key(layer)
            path = self._file(layer.tensor.name)
            if not path.exists() or moments.read(path)[1].get("key") != key:
                parts, _ = rounded(self.source, layer, self.calibration)
                moments.save(path, parts._asdict(), {"key": key})
                del parts
                mx.clear_cache()
            done += layer.operations
        progress(total, total)

    @property
    def names(self) -> set[str]:
        """Of the layers, as stored."""
        return {layer.tensor.name for layer in self.layers}

    def parts(self, name: str) -> gptq.Rounded:
        """A finished layer."""
        tensors, _ = moments.read(self._file(name))
        return gptq.Rounded(**tensors)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _key(self, layer: Layer) -> str:
        return fingerprint(self.source, layer, self.calibration, str(layer.setting))


def fingerprint(source: Source, layer: Layer, calibration: Calibration, what: str) -> str:
    """Of a weight, what it was calibrated with, and what is to be done with it."""
    digest = hashlib.blake2b(f"{calibration.identity} {what}".encode(), digest_size=32)
    for block in source.blocks(layer.tensor.name):
        digest.update(np.array(block.array.astype(mx.float32)).tobytes())
    return digest.hexdigest()


def rounded(source: Source, layer: Layer, calibration: Calibration) -> tuple[gptq.Rounded, float]:
    """A layer, and what its outputs lose, squared and summed over positions. Raises CheckpointError at NaN."""
    _, inputs = layer.tensor.shape
    moment = calibration.moments(layer.module, inputs).matrix
    inverse = gptq.by_energy(moment, layer.setting.group_size)
    parts, lost = [], 0.0
    for weight in rows_of(source, layer):
        part, more = gptq.quantise(weight, moment, layer.setting.bits, layer.setting.group_size, inverse=inverse)
        parts.append(part)
        lost += more
    return gptq.Rounded(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))), lost


def rows_of(source: Source, layer: Layer) -> Iterator[np.ndarray]:
    """A weight (out, in) float32 in runs of rows. Raises CheckpointError at NaN or infinity."""
    for block in source.blocks(layer.tensor.name, ROWS):
        weight = np.array(block.array.astype(mx.float32))
        if not np.isfinite(weight).all():
            raise CheckpointError(
                f"{source.folder}: {layer.tensor.name} holds NaN or infinity.", "The file is damaged: get it again."
            )
        yield weight


def layers_bytes(layers: Sequence[Layer]) -> int:
    """Disk that finished layers take."""
    sizes = ((math.prod(layer.tensor.shape), layer.setting) for layer in layers)
    return sum(count * setting.bits // 8 + 4 * count // setting.group_size for count, setting in sizes)
