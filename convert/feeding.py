"""What a layer is given once the layers before it are rounded, beside what the model as it is would give it.

The inputs of a calibration go through both models block by block; the inputs of the next block are files, so that
who is stopped goes on there. For asymmetric calibration: rounding makes up for what earlier layers have lost, too.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from scipy.linalg import blas

from mlx_voicechat.networks.duplex_lm import Block
from mlx_voicechat.networks.linear import product_of_many_rows
from mlx_voicechat.networks.mamba import MambaMixer
from mlx_voicechat.weights import layout

from . import moments
from .calibration import HIDDEN_STATE, Calibration
from .gptq import Inverse, towards
from .source import Source

FED = "fed"  # tensor of a file: the residual stream of the model whose layers are rounded
TO_STREAM = ("out_proj", "down_proj", "o_proj")  # what they give is added to the residual stream
PASSES = 6  # operations for each of a block's weights: both models, and half of what gives the next block's inputs
IN_BLOCK = re.compile(r"llm\.layers\.(\d+)\.")


class Given(NamedTuple):
    """Sums over positions, for a layer that is given x in the model as it is and q once those before it are rounded.

    `moment` (in, in) of q q^T; `drift` (in, in) of (x - q) q^T; `stream` (H, in) of (r - s) q^T, r and s the residual
    streams that the layer's output is added to; None where it is added to none. All float32.
    """

    moment: np.ndarray
    drift: np.ndarray | None = None
    stream: np.ndarray | None = None

    def moved(self, weight: np.ndarray, row: int, inverse: Inverse) -> np.ndarray:
        """Rows `weight` (n, in) of a layer, from `row` on, moved to where they give for q what they gave for x.

        And r - s more where they are added to a stream. By least squares; `inverse` is of the moment.
        """
        if self.drift is None:
            return weight
        wanted = weight @ self.drift
        if self.stream is not None:
            wanted += self.stream[row : row + len(weight)]
        return towards(weight, wanted, inverse)


class Sums:
    """A `Given` that is being gathered, in place and in Fortran's order."""

    def __init__(self) -> None:
        self._found: dict[str, np.ndarray] = {}

    def add(self, x: np.ndarray, fed: np.ndarray, apart: np.ndarray | None) -> None:
        """Positions x and fed (T, in) of both models; `apart` (T, H) is by how much their streams differ."""
        half = self._zeros("moment", fed.shape[1], fed.shape[1])
        self._found["moment"] = blas.ssyrk(1.0, fed.T, beta=1.0, c=half, overwrite_c=1)
        for name, rows in (("drift", x - fed), ("stream", apart)):
            if rows is not None:
                sums = self._zeros(name, rows.shape[1], fed.shape[1])
                self._found[name] = blas.sgemm(1.0, rows.T, fed.T, beta=1.0, c=sums, trans_b=1, overwrite_c=1)

    def _zeros(self, name: str, rows: int, columns: int) -> np.ndarray:
        if name not in self._found:
            self._found[name] = np.zeros((rows, columns), np.float32, order="F")
        return self._found[name]

    def given(self) -> Given:
        moments.mirror(self._found["moment"])
        return Given(**self._found)


class _Noting:
    """A block, and the Product that notes what its layer `name` is given."""

    def __init__(self, block: Block, name: str) -> None:
        self.block, self.given = block, np.empty((0, 0), np.float32)
        self._layer, self._product = block.mixer[name], product_of_many_rows()

    def multiply(self, layer: nn.Module, x: mx.array) -> mx.array:
        """x (T, in) -> (T, out)."""
        if layer is self._layer:
            self.given = _wide(x)
        return self._product(layer, x)


@dataclass(frozen=True)
class Feeding:
    """Both models' residual streams, in `folder`: before one block, or two while the next one's are made.

    `marks` tell by block all that its inputs depend on; `rounded` gives the layers that are rounded.
    """

    source: Source
    calibration: Calibration
    folder: Path
    marks: Sequence[str]
    rounded: Callable[[str], mx.array | None]  # a layer's module -> what it was rounded to (out, in), if it was

    def given(self, key: str) -> Given:
        """For the layers that share moments by the name `key`; those before them must be rounded."""
        count = self.source.config.llm.num_hidden_layers
        index = count if key == moments.HEADS else int(key.split(".")[2])
        self._reach(index)
        sums = Sums()
        if index == count:
            self._gather_heads(sums)
        else:
            self._gather(sums, index, key.rpartition(".")[2])
        return sums.given()

    def _gather(self, sums: Sums, index: int, name: str) -> None:
        pair = [_Noting(block, name) for block in self._pair(index)]
        for streams in self._streams(index):
            start = 0
            runs = [moments.chunks(each.block, x, each.multiply) for each, x in zip(pair, streams, strict=True)]
            for _ in zip(*runs, strict=True):
                rows = slice(start, start + len(pair[0].given))
                stream, fed = (_wide(each[rows]) for each in streams)
                sums.add(pair[0].given, pair[1].given, stream - fed if name in TO_STREAM else None)
                start = rows.stop

    def _gather_heads(self, sums: Sums) -> None:
        config = self.source.config.llm
        norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        norm.load_weights(list(self._read("llm.norm_f.").items()))
        for streams in self._streams(config.num_hidden_layers):
            for start in range(0, len(streams[0]), moments.CHUNK):
                x, fed = (_wide(norm(each[start : start + moments.CHUNK])) for each in streams)
                sums.add(x, fed, None)

    def _reach(self, index: int) -> None:
        """Have the streams before a block, from the last ones that are there."""
        there = next(at for at in range(index, -1, -1) if at == 0 or self._is_there(at))
        for place in self.folder.iterdir() if self.folder.is_dir() else ():
            if place != self._place(there):
                shutil.rmtree(place)
        for at in range(there, index):
            pair, multiply = self._pair(at), product_of_many_rows()
            self._place(at + 1).mkdir(parents=True)
            for path, streams in zip(self.calibration.inputs, self._streams(at), strict=True):
                after = [moments.run_block(block, x, multiply) for block, x in zip(pair, streams, strict=True)]
                tensors = dict(zip((HIDDEN_STATE, FED), after, strict=True))
                moments.save(self._place(at + 1) / path.name, tensors, {"mark": self.marks[at + 1]})
            shutil.rmtree(self._place(at), ignore_errors=True)
            mx.clear_cache()

    def _is_there(self, index: int) -> bool:
        files = [self._place(index) / path.name for path in self.calibration.inputs]
        return all(path.exists() and moments.read(path)[1].get("mark") == self.marks[index] for path in files)

    def _streams(self, index: int) -> Iterator[tuple[mx.array, mx.array]]:
        """Both (T, H) before a block, recording by recording."""
        for path in self.calibration.inputs:
            tensors, _ = moments.read(self._place(index) / path.name if index else path)
            yield tensors[HIDDEN_STATE], tensors.get(FED, tensors[HIDDEN_STATE])

    def _place(self, index: int) -> Path:
        return self.folder / str(index)

    def _pair(self, index: int) -> list[Block]:
        """A block as it is, and with those of its layers that are rounded."""
        prefix = f"llm.layers.{index}."
        stored = self._read(prefix)
        found = {name: self.rounded(f"{prefix}{name}".removesuffix(".weight")) for name in stored}
        changed = {name: weight.astype(stored[name].dtype) for name, weight in found.items() if weight is not None}
        return [self._block(index, weights) for weights in (stored, stored | changed)]

    def _block(self, index: int, weights: Mapping[str, mx.array]) -> Block:
        config = self.source.config.llm
        block = Block(config, config.pattern[index])
        block.load_weights(list(weights.items()))
        if isinstance(block.mixer, MambaMixer):
            block.mixer.prepare()
        mx.eval(block.parameters())
        return block

    def _read(self, prefix: str) -> dict[str, mx.array]:
        """Tensors of the language model by their names behind `prefix`, in the types of who heard the conversations."""
        wide = next(self._streams(0))[0].dtype == mx.float32
        names = {name: layout.own_name(name) for name in self.source.tensors if layout.STACK.match(name)}
        return {
            own.removeprefix(prefix): layout.cast(name, self._whole(name), wide, not wide)
            for name, own in names.items()
            if own.startswith(prefix)
        }

    def _whole(self, name: str) -> mx.array:
        return mx.concatenate([rows.array for rows in self.source.blocks(name)])


def _wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


# -- what it takes --------------------------------------------------------------------------------------------------


def operations(key: str, source: Source, positions: int) -> int:
    """Floating-point operations, about, for what layers are given that share moments by the name `key`."""
    width = moments.keys(source.config.llm)[key]
    block = 0 if key == moments.HEADS else block_weights(source)[int(key.split(".")[2])]
    return positions * (3 * width**2 + PASSES * block)


def block_weights(source: Source) -> list[int]:
    """How many weights each block has."""
    counts = [0] * source.config.llm.num_hidden_layers
    for name, tensor in source.tensors.items():
        if found := IN_BLOCK.match(layout.own_name(name)):
            counts[int(found[1])] += math.prod(tensor.shape)
    return counts


def disk_bytes(calibration: Calibration) -> int:
    """Of both models' streams before two blocks."""
    return 4 * sum(path.stat().st_size for path in calibration.inputs)
