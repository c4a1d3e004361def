"""The layers of a conversion that are rounded with a calibration, one after the other, each for what it is given then.

Each finished layer is a file beside the target until the checkpoint is written: who is stopped goes on there.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.weights import layout

from . import feeding, gptq, moments
from .calibration import Calibration, check_model
from .feeding import Feeding, Given
from .plans import Quantised, Setting
from .source import Source, Tensor

FOLDER = ".{}.mlx-voicechat-layers"  # beside the target
ROWS = 4096  # of a weight in memory at once
COPIES = 10  # of those rows: read, moved, in MLX, what is left, what each lost, two dequantised, and MLX's buffers
STREAMS = "streams"  # in the folder of finished layers
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
        """Most that is there at once while it is rounded: sums, the moments' factor, and rows of the weight."""
        rows, inputs = self.tensor.shape
        return self.sums_bytes + 4 * (inputs**2 + COPIES * min(rows, ROWS) * inputs)

    @property
    def sums_bytes(self) -> int:
        """Of what it is given."""
        rows, inputs = self.tensor.shape
        return 4 * (2 * inputs + (rows if self.module.endswith(feeding.TO_STREAM) else 0)) * inputs


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
        """Round what is not there yet, in the order of the model; layers that share moments one after the other."""
        total, done = operations(self.source, self.layers, self.calibration), 0
        keys, marks = self._keys()
        self._remove_others(keys)
        feed = Feeding(self.source, self.calibration, self.folder / STREAMS, marks, self._matrix)
        for name, layers in by_moments(self.source, self.layers).items():
            progress(done, total)
            missing = [layer for layer in layers if not self._file(layer.tensor.name).exists()]
            given = feed.given(name) if missing else None
            done += feeding.operations(name, self.source, self.calibration.positions)
            for layer in layers:
                progress(done, total)
                if given is not None and layer in missing:
                    parts, _ = rounded(self.source, layer, given)
                    moments.save(self._file(layer.tensor.name), parts._asdict(), {"key": keys[layer.tensor.name]})
                    del parts
                    mx.clear_cache()
                done += layer.operations
        progress(total, total)

    def _remove_others(self, keys: Mapping[str, str]) -> None:
        """Layers that were rounded otherwise."""
        for name, key in keys.items():
            path = self._file(name)
            if path.exists() and moments.read(path)[1].get("key") != key:
                path.unlink()

    def _keys(self) -> tuple[dict[str, str], list[str]]:
        """Of each layer by its name, and before each block: what depends on all layers before."""
        before, keys = self.calibration.identity, {}
        marks = [before] * (self.source.config.llm.num_hidden_layers + 1)
        for name, layers in by_moments(self.source, self.layers).items():
            for layer in layers:
                before = fingerprint(self.source, layer, self.calibration, f"{layer.setting} after {before}")
                keys[layer.tensor.name] = before
            if name != moments.HEADS:
                after = int(name.split(".")[2]) + 1
                marks[after:] = [before] * (len(marks) - after)
        return keys, marks

    def _matrix(self, module: str) -> mx.array | None:
        """What a finished layer stands for, by its name within the language model."""
        layer = next((layer for layer in self.layers if layer.module == module), None)
        if layer is None or not self._file(layer.tensor.name).exists():
            return None
        weight, *others = self.parts(layer.tensor.name)
        scales, biases = (each.astype(mx.float32) for each in others)
        bits, group_size, _ = layer.setting
        return mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)

    @property
    def names(self) -> set[str]:
        """Of the layers, as stored."""
        return {layer.tensor.name for layer in self.layers}

    def parts(self, name: str) -> gptq.Rounded:
        """A finished layer."""
        tensors, _ = moments.read(self._file(name))
        return gptq.Rounded(**tensors)

    def digests(self) -> dict[str, str]:
        """Of finished layers by their names as stored, for who verifies what was written."""
        return {name: digest(self.parts(name)) for name in sorted(self.names)}

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def digest(parts: Iterable[mx.array]) -> str:
    """Of a layer's packed codes, scales and biases."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(np.array(part.view(mx.uint8)).tobytes())
    return found.hexdigest()


def fingerprint(source: Source, layer: Layer, calibration: Calibration, what: str) -> str:
    """Of a weight, what it was calibrated with, and what is to be done with it."""
    found = hashlib.blake2b(f"{calibration.identity} {what}".encode(), digest_size=32)
    for block in source.blocks(layer.tensor.name):
        found.update(np.array(block.array.astype(mx.float32)).tobytes())
    return found.hexdigest()


def rounded(source: Source, layer: Layer, given: Given) -> tuple[gptq.Rounded, float]:
    """A layer, and what its outputs lose, squared and summed over positions. Raises CheckpointError at NaN.

    The loss is to what the weight is moved to: what that loses itself, no rounding can change.
    """
    bits, group_size, _ = layer.setting
    inverse = gptq.by_energy(given.moment, group_size)
    parts, lost, row = [], 0.0, 0
    for weight in rows_of(source, layer):
        moved = given.moved(weight, row, inverse)
        part, more = gptq.quantise(moved, given.moment, bits, group_size, inverse=inverse)
        parts.append(part)
        lost += more
        row += len(weight)
    return gptq.Rounded(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))), lost


def by_moments(source: Source, layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Layers by the name of the moments that they share, in the order of the model."""
    found: dict[str, list[Layer]] = {name: [] for name in moments.keys(source.config.llm)}
    for layer in layers:
        found[moments.key_of(layer.module)].append(layer)
    return {name: some for name, some in found.items() if some}


def operations(source: Source, layers: Sequence[Layer], calibration: Calibration) -> int:
    """Floating-point operations, about, to gather what all layers are given, and to round them."""
    gathering = (feeding.operations(n, source, calibration.positions) for n in by_moments(source, layers))
    return sum(gathering) + sum(layer.operations for layer in layers)


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
