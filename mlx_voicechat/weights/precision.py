"""How weights are held: speech in float32 or its linear layers in 8 bits, LLM and encoder in what they compute in.

MLX would widen a whole bf16 weight in every call of float32 activations (spec: checkpoint.md, precision).
What is decided here from the files' headers, `checkpoint.build` does and `memory.announce` counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from ..errors import InputError
from . import layout
from .shards import Stored

Choice = Literal["f32", "q8"]
# By the stored name of a weight: {"group_size", "bits"} to quantise it to.
Requantisation = Mapping[str, Mapping[str, int]]

BITS, GROUP_SIZES = 8, (64, 32)  # the first that divides a layer's inputs; a layer with neither stays float32
SMALLEST = 4096  # weights of a layer; fewer are not worth it
COMFORTABLE = 0.6  # part of a machine's memory that is taken without being asked to
LONG_SECONDS = 600  # of conversation, for the need that must fit
HALF_TYPES = ("BF16", "F16")  # as safetensors names them
WIDER = ("F32", "F16", "F64")  # than bfloat16; float16 and bfloat16 meet as float32
PLAIN_TYPES = (*HALF_TYPES, "F32")
PACKED_TYPE = "U32"  # of quantised weights


class Types(NamedTuple):
    """What the language model and the encoder compute in.

    `narrow`: bfloat16, both, and all that meets their activations is held so. Else the encoder is float32, and the LLM
    is what its stored tensors make of it: float32 or, where all of them are bfloat16, bfloat16.
    """

    float32_llm: bool
    narrow: bool = False


def plan(stored: Mapping[str, Stored], choice: str | None, f32_fits: bool = True) -> Requantisation:
    """The weights to quantise at load; none for `f32`. Layers that the file has quantised stay as they are.

    `q8`: all that are worth it. None decides: nothing where float32 fits the machine (`fits`), else what is stored in
    16 bits. Raises InputError for any other word.
    """
    check_choice(choice)
    if choice == "f32" or (choice is None and f32_fits):
        return {}
    types = PLAIN_TYPES if choice == "q8" else HALF_TYPES
    chosen = {}
    for name in filter(layout.SPEECH_MATRIX.search, stored):
        parts = [stored[part] for part in layout.fused_with(name) if part in stored]
        if all(part.dtype in types for part in parts) and (group_size := _group_size(parts)):
            chosen[name] = {"group_size": group_size, "bits": BITS}
    return chosen


def types(stored: Mapping[str, Stored], arithmetic: str = "float32") -> Types:
    """What a checkpoint with these headers computes in, for `arithmetic` "float32" or "bfloat16"."""
    narrow = arithmetic == "bfloat16"
    return Types(llm_is_float32(stored) and not narrow, narrow)


def llm_is_rounded(stored: Mapping[str, Stored]) -> bool:
    """Whether the LLM's matrices are stored in less than float32: quantised, or in 16 bits."""
    kinds = {stored[name].dtype for name in stored if layout.LANGUAGE_MATRIX.search(name)}
    return not kinds.isdisjoint({*HALF_TYPES, PACKED_TYPE})


def llm_is_float32(stored: Mapping[str, Stored]) -> bool:
    """Whether the LLM computes in float32 rather than bfloat16: by what is stored, scales and biases among it.

    The published 4-bit and 8-bit checkpoints have float32 scales beside bfloat16 norms (spec: checkpoint.md).
    """
    return any(entry.dtype in WIDER and layout.STREAM.match(name) for name, entry in stored.items())


def check_choice(choice: str | None) -> None:
    """Raise InputError unless it is a Choice or None."""
    if choice is not None and choice not in get_args(Choice):
        raise InputError(f"Speech weights cannot be held as {choice!r}.", f"Choose {' or '.join(get_args(Choice))}.")


def fits(needed_bytes: int, machine_bytes: int) -> bool:
    """Whether a machine of so much memory has enough for this and for its other programs."""
    return needed_bytes <= COMFORTABLE * machine_bytes


def resident_bytes(tensor: Stored, settings: Mapping[str, int], scale_bytes: int = 4) -> int:
    """Memory of a weight that is quantised at load, its scales and biases of `scale_bytes` each included."""
    count = math.prod(tensor.shape)
    return count * settings["bits"] // 8 + 2 * scale_bytes * (count // settings["group_size"])


def _group_size(parts: list[Stored]) -> int | None:
    """For the matrix (out, in) of these parts, rows stacked; None if it is no matrix, too small or has odd inputs."""
    shapes = [part.shape for part in parts]
    if any(len(shape) < 2 or math.prod(shape[2:]) != 1 for shape in shapes):  # 1x1 kernels are matrices
        return None
    if sum(map(math.prod, shapes)) < SMALLEST or len({shape[1] for shape in shapes}) > 1:
        return None
    return next((size for size in GROUP_SIZES if shapes[0][1] % size == 0), None)
