"""Second moments of what each linear layer of the language model is given, gathered block by block.

The inputs of a block, of all recordings, are run through that block alone: what it gives are the inputs of the next.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from scipy.linalg import blas, lapack

from mlx_voicechat.config import LlmConfig
from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.networks.cache import KvCache
from mlx_voicechat.networks.duplex_lm import Attention, Block, DuplexLm
from mlx_voicechat.networks.linear import Product, add_product, product_of_many_rows
from mlx_voicechat.networks.mamba import MambaMixer, MambaState

CHUNK = 512  # positions of a block at once
HEADS = "lm_head"  # both heads are given the same
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj"}  # layers that are given what another one is
UPPER = "upper"  # tensor of a file: the upper half of a symmetric matrix, column by column (LAPACK's packed form)


class Energy(NamedTuple):
    """Sums of squares over positions: of the residual stream after a block, and of what the block added to it."""

    stream: float
    added: float


class Moments(NamedTuple):
    """`matrix` (in, in) float32, the sum of x x^T over `positions`; symmetric, in Fortran's order."""

    matrix: np.ndarray
    positions: int
    energy: Energy


def key_of(module: str) -> str:
    """The file with the moments of a layer, by its name within the language model: `llm.layers.0.mixer.q_proj`."""
    if module == "function_head":
        return HEADS
    before, _, name = module.rpartition(".")
    return f"{before}.{SHARED.get(name, name)}" if before else module


def keys(config: LlmConfig) -> dict[str, int]:
    """Every file's name and its matrix' width, in the order in which they are gathered."""
    attended = config.num_attention_heads * config.head_dim
    wide = {"in_proj": config.hidden_size, "out_proj": config.mamba_inner}
    of_kind = {
        "M": wide,
        "*": {"q_proj": config.hidden_size, "o_proj": attended},
        "-": {"up_proj": config.hidden_size, "down_proj": config.intermediate_size},
    }
    found = {
        f"{block_name(index)}.{name}": width
        for index, kind in enumerate(config.pattern)
        for name, width in of_kind[kind].items()
    }
    return found | {HEADS: config.hidden_size}


def block_name(index: int) -> str:
    return f"llm.layers.{index}.mixer"


def packed_bytes(width: int) -> int:
    """Of half a symmetric matrix."""
    return width * (width + 1) // 2 * 4


def fingerprint(config: LlmConfig, norms: Iterable[mx.array]) -> str:
    """Of a language model whatever precision it is stored in: its sizes, and its norms, which no plan quantises.

    `norms` are those of the blocks in order, then the last one.
    """
    digest = hashlib.sha256(json.dumps(asdict(replace(config, max_positions=None)), sort_keys=True).encode())
    for norm in norms:
        digest.update(np.array(norm.astype(mx.bfloat16).astype(mx.float32)).tobytes())
    return digest.hexdigest()


def norms_of(language: DuplexLm) -> list[mx.array]:
    """What `fingerprint` is made of."""
    return [block.norm.weight for block in language.llm.layers] + [language.llm.norm_f.weight]


# -- gathering ------------------------------------------------------------------------------------------------------


class Gathering:
    """Sums of one block's layers; `multiply` is the Product that notes what they are given.

    `module` is the block's mixer or whatever has the layers as attributes, `prefix` what stands before their names.
    """

    def __init__(self, module: nn.Module, prefix: str) -> None:
        layers = {name: layer for name, layer in module.children().items() if isinstance(layer, nn.Module)}
        self._names = {id(layer): f"{prefix}.{name}" for name, layer in layers.items() if name not in SHARED}
        self._product = product_of_many_rows()
        self.sums: dict[str, np.ndarray] = {}

    def multiply(self, layer: nn.Module, x: mx.array) -> mx.array:
        """x (T, in) -> (T, out)."""
        name = self._names.get(id(layer))
        if name is not None:
            self.note(name, x)
        return self._product(layer, x)

    def note(self, name: str, x: mx.array) -> None:
        """Add x x^T of x (T, in), in place; half of it, since it is symmetric."""
        rows = np.array(x.astype(mx.float32))
        if name not in self.sums:
            self.sums[name] = np.zeros((rows.shape[1],) * 2, np.float32, order="F")
        self.sums[name] = blas.ssyrk(1.0, rows.T, beta=1.0, c=self.sums[name], overwrite_c=1)


def run_block(block: Block, x: mx.array, multiply: Product) -> mx.array:
    """A conversation x (T, H) through one block, from its first position on -> (T, H), evaluated."""
    parts = list(chunks(block, x, multiply))
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def chunks(block: Block, x: mx.array, multiply: Product) -> Iterator[mx.array]:
    """As `run_block`, CHUNK positions at a time."""
    mixer = block.mixer
    cache = KvCache()
    state = mixer.init_state(1, x.dtype) if isinstance(mixer, MambaMixer) else None
    for start in range(0, len(x), CHUNK):
        rows = x[start : start + CHUNK]
        out, state = _advance(block, rows, state, cache, multiply)
        mx.eval(out, state if state is not None else cache.arrays)
        yield out


def _advance(
    block: Block, rows: mx.array, state: MambaState | None, cache: KvCache, multiply: Product
) -> tuple[mx.array, MambaState | None]:
    mixer, normed = block.mixer, block.norm(rows)
    if isinstance(mixer, Attention):
        attended = mixer.attend(mixer.project(normed, 1, multiply), cache)
        return mixer.output(rows, attended, multiply), state
    if state is not None:
        mixed, state = mixer.mix(normed, state, multiply)
        return add_product(rows, mixer.out_proj, mixed, multiply=multiply), state
    return mixer(rows, normed, multiply), state


# -- files ----------------------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, mx.array], facts: Mapping[str, Any]) -> None:
    """A safetensors file that appears whole or not at all. Raises VoiceChatError when the disk fails."""
    partial = path.with_name(f".{path.stem}.partial.safetensors")
    try:
        mx.save_safetensors(str(partial), dict(tensors), {name: str(value) for name, value in facts.items()})
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            partial.unlink()
        why = getattr(error, "strerror", None) or error
        raise VoiceChatError(f"{path} was not written: {why}.", "Free some space, and start it again.") from None


def read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Tensors and facts of a file that `save` wrote. Raises InputError."""
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}.", "Remove it, and calibrate again.") from None
    tensors, facts = loaded
    return dict(tensors), dict(facts)


def save_moments(path: Path, half: np.ndarray, facts: Mapping[str, Any], energy: Energy) -> None:
    """`half` (in, in) in Fortran's order, of which the upper half counts."""
    packed, _ = lapack.strttp(half, uplo="U")
    save(path, {UPPER: mx.array(packed)}, {**facts, **energy._asdict()})


def read_moments(path: Path, width: int) -> Moments:
    """What `save_moments` wrote, for a layer of so many inputs. Raises InputError."""
    tensors, facts = read(path)
    packed = np.array(tensors.get(UPPER, mx.zeros((0,))), np.float32)
    if packed.size != width * (width + 1) // 2:
        raise InputError(f"{path} is no matrix of {width:,} inputs.", "It is of another model: calibrate this one.")
    matrix, _ = lapack.stpttr(width, packed, uplo="U")
    del packed
    mirror(matrix)
    return Moments(matrix, int(facts["positions"]), Energy(float(facts["stream"]), float(facts["added"])))


def mirror(matrix: np.ndarray) -> None:
    """Make a matrix (in, in) symmetric, whose upper half counts; in place."""
    width = len(matrix)
    for start in range(0, width, CHUNK):
        end = min(width, start + CHUNK)
        matrix[start:end, :start] = matrix[:start, start:end].T
        square = matrix[start:end, start:end]
        matrix[start:end, start:end] = np.triu(square) + np.triu(square, 1).T


def save_json(path: Path, value: Any, change: Callable[[Path, Path], None] = os.replace) -> None:
    """A JSON file that is replaced whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        change(partial, path)
    except OSError as error:
        raise VoiceChatError(f"{path} was not written: {error.strerror or error}.") from None
