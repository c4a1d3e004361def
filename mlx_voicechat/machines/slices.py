"""Which part of the language model's blocks each rank holds, and how it is read from disk: nothing else is.

Mamba is cut by groups, attention by key-value heads (each with its queries), MLPs by columns; the layers that lead back
to the residual stream by their inputs, so that the sum over the ranks is the whole product (Shoeybi et al. 2019,
arXiv 1909.08053).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..config import LlmConfig, ModelConfig
from ..errors import InputError
from ..weights import layout
from ..weights.checkpoint import Checkpoint, Parameters
from ..weights.precision import types
from ..weights.shards import Stored

MIXER = re.compile(r"\.llm\.layers\.(\d+)\.mixer\.(.+)$")
READ_AS: Mapping[str, tuple[Any, mx.Dtype | None]] = {
    "F32": (np.float32, None),
    "F16": (np.float16, None),
    "BF16": (np.uint16, mx.bfloat16),  # numpy has none
    "U32": (np.uint32, None),
}
Runs = list[tuple[int, int]]


class Share(NamedTuple):
    """Rank `rank` of `ranks`. `unit`: how many columns of an MLP stay together, a quantisation's group."""

    rank: int
    ranks: int
    unit: int = 1

    def of(self, size: int) -> tuple[int, int]:
        """The part of something that divides, from and to."""
        return self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks

    def columns(self, size: int) -> tuple[int, int]:
        """The part of an MLP's columns: whole units, as evenly as they go."""
        units = size // self.unit
        start, end = self.of(units)
        return start * self.unit, size if self.rank == self.ranks - 1 else end * self.unit


def share_of(config: ModelConfig, rank: int, count: int) -> Share:
    """A rank's share. Raises InputError with the name of every size that `count` ranks cannot share."""
    llm = config.llm
    group_sizes = [
        int(entry["group_size"]) for name, entry in config.quantization.items() if MIXER.search(name) is not None
    ]
    unit = max(group_sizes, default=1)
    sizes = {
        "num_attention_heads": llm.num_attention_heads,
        "num_key_value_heads": llm.num_key_value_heads,
        "mamba_num_heads": llm.mamba_num_heads,
        "n_groups": llm.n_groups,
    }
    faults = [f"{name} {size}" for name, size in sizes.items() if size % count]
    if not faults:
        inputs = {
            "num_attention_heads * head_dim": llm.num_attention_heads * llm.head_dim,
            "mamba_num_heads * mamba_head_dim": llm.mamba_inner,
        }
        where = f"into parts of whole quantisation groups of {unit}"
        faults = [f"{name} {size} {where}" for name, size in inputs.items() if size // count % unit]
        if llm.intermediate_size // unit < count:
            faults.append(f"intermediate_size {llm.intermediate_size} {where}")
    if faults:
        raise InputError(f"{count} machines cannot share this language model: {', '.join(faults)} does not divide.")
    return Share(rank, count, unit)


def shared(llm: LlmConfig, share: Share) -> LlmConfig:
    """The sizes of a rank's part."""
    start, end = share.columns(llm.intermediate_size)
    return replace(
        llm,
        num_attention_heads=llm.num_attention_heads // share.ranks,
        num_key_value_heads=llm.num_key_value_heads // share.ranks,
        mamba_num_heads=llm.mamba_num_heads // share.ranks,
        n_groups=llm.n_groups // share.ranks,
        intermediate_size=end - start,
    )


def part_of(name: str, llm: LlmConfig, share: Share) -> tuple[int, Runs] | None:
    """The axis by which a stored tensor is cut and the runs along it that the rank holds, at full width.

    None for what every rank holds whole. Runs of inputs are of inputs, which a packed tensor has fewer of.
    """
    found = MIXER.search(name)
    if found is None:
        return None
    kind, (layer, _, leaf) = llm.pattern[int(found[1])], found[2].partition(".")
    mlp = [share.columns(llm.intermediate_size)]
    if kind == "-":
        return (0, mlp) if layer == "up_proj" else _inputs(leaf, mlp)
    if kind == "*":
        heads = llm.num_attention_heads if layer in ("q_proj", "o_proj") else llm.num_key_value_heads
        runs = [share.of(heads * llm.head_dim)]
        return (0, runs) if layer != "o_proj" else _inputs(leaf, runs)
    inner, state = llm.mamba_inner, llm.n_groups * llm.ssm_state_size
    if layer == "out_proj":
        return _inputs(leaf, [share.of(inner)])
    sections = {
        "in_proj": [inner, inner, state, state, llm.mamba_num_heads],  # gate, x, B, C, dt
        "conv1d": [inner, state, state],
        "norm": [inner],
    }.get(layer, [llm.mamba_num_heads])
    runs, before = [], 0
    for size in sections:
        start, end = share.of(size)
        runs.append((before + start, before + end))
        before += size
    return 0, runs


def _inputs(leaf: str, runs: Runs) -> tuple[int, Runs] | None:
    return None if leaf == "bias" else (1, runs)


@dataclass(frozen=True, kw_only=True)
class SharedCheckpoint(Checkpoint):
    """A checkpoint of which the language model's blocks are read in a rank's part alone; `whole` are its own sizes."""

    whole: LlmConfig
    share: Share

    @classmethod
    def of(cls, opened: Checkpoint, share: Share) -> SharedCheckpoint:
        """A rank's share of an opened checkpoint."""
        whole = opened.config.llm
        config = replace(opened.config, llm=shared(whole, share))
        opens = (opened.folder, opened.raw, opened.stored, config, opened.base)
        return cls(*opens, whole=whole, share=share)

    def parameters(self, arithmetic: str = "float32") -> Parameters:
        """See `Checkpoint.parameters`."""
        found, kinds = super().parameters(arithmetic), types(self.stored, arithmetic)
        for name, stored in self.stored.items():
            part = part_of(name, self.whole, self.share)
            if part is not None:
                read = self._read_part(name, stored, part)
                found[name] = layout.cast(name, read, *kinds)
            elif name.endswith(".bias") and MIXER.search(name) and self.share.rank > 0:
                found[name] = mx.zeros_like(found[name])  # the sum over the ranks has it once
        return found

    def _read_part(self, name: str, stored: Stored, part: tuple[int, Runs]) -> mx.array:
        axis, runs = part
        kind, view = READ_AS[stored.dtype]
        disk: Any = np.memmap(self.folder / stored.file, kind, "r", stored.start, stored.shape)
        if axis == 1:
            runs = [_packed(run, stored.shape[1], name, self.whole) for run in runs]
        pieces = [disk[start:end] if axis == 0 else disk[:, start:end] for start, end in runs]
        array = mx.array(np.concatenate(pieces, axis=axis) if len(pieces) > 1 else np.ascontiguousarray(pieces[0]))
        array = array if view is None else array.view(view)
        return layout.to_mlx_layout(name, array) if self.format == 0 else array


def _packed(run: tuple[int, int], stored: int, name: str, llm: LlmConfig) -> tuple[int, int]:
    """A run of a layer's inputs in a tensor that has `stored` columns for them: packed words, scales, biases."""
    found = MIXER.search(name)
    assert found is not None
    inputs = {"-": llm.intermediate_size, "*": llm.num_attention_heads * llm.head_dim, "M": llm.mamba_inner}
    size = inputs[llm.pattern[int(found[1])]]
    return run[0] * stored // size, run[1] * stored // size
