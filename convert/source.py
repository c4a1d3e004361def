"""A checkpoint to convert from, in any of the three layouts: its runtime config, and its tensors in blocks of rows."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from mlx_voicechat.config import ModelConfig
from mlx_voicechat.errors import CheckpointError, HubError, InputError
from mlx_voicechat.text import Tokenizer
from mlx_voicechat.weights import checkpoint, hub, layout, original
from mlx_voicechat.weights.config_file import check_parts, is_original, parse_config, read_json
from mlx_voicechat.weights.hub_cache import COMMIT, patterns_for
from mlx_voicechat.weights.shards import Stored, some_of, verify

from .plans import Facts, Quantised, known_settings

Layout: TypeAlias = Literal["nvidia", "mlx-community", "ours"]
Say: TypeAlias = Callable[[str], None]

BLOCK_BYTES = 8 * 2**20  # of a source tensor in memory at once
# safetensors type: what numpy reads it as, and what MLX then views it as
TYPES: dict[str, tuple[Any, mx.Dtype]] = {
    "F32": (np.float32, mx.float32),
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.uint16, mx.float16),
    "F64": (np.float64, mx.float32),
    "I64": (np.int64, mx.int64),
    "I32": (np.int32, mx.int32),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}
INTEGER_TYPES = ("I64", "I32", "U32", "U8")


def stored_bytes(entry: Stored) -> int:
    """What a tensor takes in its file."""
    return math.prod(entry.shape) * np.dtype(TYPES[entry.dtype][0]).itemsize


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: `shape` in MLX's axis order, and the stored parts (three when it is quantised)."""

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, Stored]  # by suffix: weight, scales, biases; "" when it is one tensor
    quantised: Quantised | None = None

    @property
    def dtype(self) -> str:
        """Of its values, as safetensors names it."""
        if self.quantised is None:
            return self.parts[""].dtype
        scales = self.parts["scales"].dtype
        return "BF16" if scales == "U8" else scales

    @property
    def facts(self) -> Facts:
        return Facts(self.shape, self.dtype in INTEGER_TYPES)


class Rows(NamedTuple):
    """Rows from `row` on, in MLX's axis order."""

    row: int
    array: mx.array


@dataclass
class Source:
    """An opened checkpoint. `name`: as others would know it; `revision`: the hub's, when it came from there."""

    name: str
    folder: Path
    layout: Layout
    revision: str | None
    tokenizer_name: str
    tokenizer_folder: Path
    tokenizer_revision: str | None
    raw: dict[str, Any]
    config: ModelConfig
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]
    _open: dict[str, io.FileIO] = field(default_factory=dict)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()
        self._open.clear()

    def blocks(self, name: str, rows: int | None = None) -> Iterator[Rows]:
        """The values of a tensor in its own type, dequantised where need be, `rows` or about BLOCK_BYTES at a time."""
        tensor = self.tensors[name]
        if tensor.quantised is None:
            yield from self.stored(name, "", rows)
            return
        settings = tensor.quantised.arguments()
        for row, count in _runs(tensor.shape[0], rows or BLOCK_BYTES // (4 * tensor.shape[1])):
            weight, *parts = (self._rows(entry, row, count) for entry in tensor.parts.values())
            # As loading does: the same numbers whatever type holds the scales, and no rounding between.
            scales, *biases = (a if a.dtype == mx.uint8 else a.astype(mx.float32) for a in parts)
            yield Rows(row, mx.dequantize(weight, scales, biases[0] if biases else None, **settings))

    def stored(self, name: str, part: str, rows: int | None = None) -> Iterator[Rows]:
        """One stored part of a tensor as it stands, re-laid only."""
        tensor = self.tensors[name]
        entry = tensor.parts[part]
        torch = self.layout != "ours" and part == ""
        count = entry.shape[0] if entry.shape else 1
        width = stored_bytes(entry) // max(1, count)
        at_once = count if self.read_whole(tensor) else rows or BLOCK_BYTES // max(1, width)
        for row, some in _runs(count, at_once):
            yield Rows(row, self._rows(entry, row, some, name if torch else None))

    def read_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor cannot be re-laid by rows."""
        entry = tensor.parts.get("")
        return entry is not None and self.layout != "ours" and layout.mixes_rows(tensor.name, entry.shape)

    def _rows(self, entry: Stored, row: int, rows: int, torch_name: str | None = None) -> mx.array:
        kind, dtype = TYPES[entry.dtype]
        shape = (rows, *entry.shape[1:]) if entry.shape else ()
        values = np.empty(shape, kind)
        stride = values.nbytes // max(1, rows)
        stream = self._stream(entry.file)
        stream.seek(entry.start + row * stride)
        data: Any = values.reshape(-1).view(np.uint8)
        view = memoryview(data)
        while view:
            read = stream.readinto(view)
            if not read:
                raise CheckpointError(f"{self.folder / entry.file} ends early.", "It was changed meanwhile.")
            view = view[read:]
        if torch_name is not None:
            values = layout.to_mlx_layout(torch_name, values)
        array = mx.array(values)
        return array.view(dtype) if kind is np.uint16 else array.astype(dtype)

    def _stream(self, file: str) -> io.FileIO:
        if file not in self._open:
            # Unbuffered reads and no memory map: pages of a map would count as this process's memory.
            self._open[file] = io.FileIO(self.folder / file)
        return self._open[file]


def _runs(count: int, at_once: int) -> Iterator[tuple[int, int]]:
    at_once = max(1, at_once)
    for start in range(0, count, at_once):
        yield start, min(at_once, count - start)


def open_source(
    source: str,
    tokenizer: str | None = None,
    revision: str | None = None,
    tokenizer_revision: str | None = None,
    say: Say = checkpoint.print_notice,
) -> Source:
    """Find, verify and describe a checkpoint; nothing is read but headers, configs and the tokenizer.

    `source` and `tokenizer` are folders or hub ids; the tokenizer's, which for an original also holds the base LLM's
    config, is by default the checkpoint's own, or the base LLM's. Raises CheckpointError, HubError and InputError.
    """
    folder, source_revision = _find(source, revision, ["config.json"], "--source", say)
    raw = read_json(folder)
    check_parts(raw, str(folder / "config.json"))
    kind = _layout(raw, folder)
    if not os.path.isdir(os.path.expanduser(source)):  # only now is it known which files it takes
        patterns = patterns_for(folder)
        folder, source_revision = _find(source, source_revision, patterns, "--source", say)
    if tokenizer is not None or kind == "nvidia":
        given = tokenizer or str(original.local_base(raw, folder) or original.BASE_LLM)
        beside, beside_revision = _find(given, tokenizer_revision, hub.BASE_PATTERNS, "--tokenizer", say)
    elif tokenizer_revision is not None:
        raise InputError("--tokenizer-revision needs --tokenizer: this checkpoint has a tokenizer of its own.")
    else:
        beside, beside_revision = folder, source_revision
    words = Tokenizer(beside)
    stored = verify(folder)
    checkpoint.check_whole(stored, folder)
    if kind == "nvidia":
        raw = original.translate(raw, folder, beside, words, stored)
    config = parse_config(raw, str(folder / "config.json"), {name: entry.shape for name, entry in stored.items()})
    checkpoint.check_tokenizer(words, beside, config)
    return Source(
        name=_public_name(folder),
        folder=folder,
        layout=kind,
        revision=source_revision,
        tokenizer_name=_public_name(beside),
        tokenizer_folder=beside,
        tokenizer_revision=beside_revision,
        raw=raw,
        config=config,
        tokenizer=words,
        tensors=tensors(stored, config, kind, folder),
    )


def _find(name: str, revision: str | None, patterns: list[str], option: str, say: Say) -> tuple[Path, str | None]:
    """The folder, and the hub's revision of it when it is one of its snapshots."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        if revision is not None:
            raise InputError(f"{option} is the folder {name}: a folder has no revisions.", "Leave the revision out.")
        folder = path
    elif hub.is_repository_id(name) and not path.is_file():
        try:
            folder = hub.fetch(name, revision=revision, patterns=patterns, say=say)
        except HubError as error:
            instead = f"Name a folder that holds it instead: {option} FOLDER."
            raise HubError(error.message, error.remedy.replace(hub.ELSEWHERE, instead)) from error
    elif name == checkpoint.DEMONSTRATION and revision is not None:
        raise InputError(f"{option} is {name}, which is built in and has no revisions.", "Leave the revision out.")
    else:
        folder = checkpoint.find(name, say)  # `tiny`, or an error that says what it is instead
    snapshot = folder.resolve().name
    return folder, snapshot if COMMIT.fullmatch(snapshot) else None


def _public_name(folder: Path) -> str:
    """A hub id, or a folder's own name: where it lies on this machine is nobody else's business."""
    parents = folder.resolve().parts
    cached = next((part for part in parents if part.startswith("models--")), None)
    if cached is not None:
        return cached.removeprefix("models--").replace("--", "/")
    return folder.resolve().name.encode(errors="replace").decode()  # bytes of a file name that are no text


def _layout(raw: Mapping[str, Any], folder: Path) -> Layout:
    if is_original(raw):
        return "nvidia"
    return "ours" if checkpoint.stored_format(raw, folder) else "mlx-community"


def tensors(stored: Mapping[str, Stored], config: ModelConfig, kind: Layout, folder: Path) -> dict[str, Tensor]:
    """The model's tensors by name, those that no use needs left out; quantised ones with their parts.

    Raises CheckpointError that lists what is missing, unknown or of wrong shape.
    """
    quantisation = {name: _settings(f"{folder}: {name}", entry) for name, entry in config.quantization.items()}
    found: dict[str, Tensor] = {}
    wrong: list[str] = []
    voices = layout.voices(stored)
    expected = {n: s for n, s in layout.shapes(config, voices or None).items() if not layout.is_unused(n)}
    names = {name for name in stored if not layout.is_unused(name)}
    for name in sorted(names):
        module, _, part = name.rpartition(".")
        settings = quantisation.get(module)
        if settings and part in ("scales", "biases"):
            continue
        tensor = _quantised(name, module, settings, stored, folder) if settings and part == "weight" else None
        tensor = tensor or Tensor(name, _mlx_shape(name, stored[name].shape, kind), {"": stored[name]})
        found[name] = tensor
        if tensor.dtype not in TYPES:
            wrong.append(f"{name} is {tensor.dtype}, which is not read")
        needed = expected.get(name)
        if needed is not None and tensor.shape != (shape := _mlx_shape(name, needed, "nvidia")):
            wrong.append(f"{name} is {tensor.shape}, expected {shape}")
    optional = {name for name in expected if layout.OPTIONAL.search(name)}
    idle = sorted(layer for layer in quantisation if f"{layer}.weight" not in expected)
    faults = {
        "missing": sorted(expected.keys() - found.keys() - optional),
        "unknown": sorted(found.keys() - expected.keys()),
        "wrong shape or type": wrong,
        "named in `quantization` alone": idle,
    }
    if any(faults.values()):
        listed = "; ".join(f"{kind} {len(names)}: {some_of(names)}" for kind, names in faults.items() if names)
        raise CheckpointError(
            f"{folder}: tensors {listed}.", "The checkpoint and its config do not belong together: get it again."
        )
    return found


def _settings(module: str, entry: Mapping[str, Any]) -> Quantised:
    settings = known_settings(entry.get("bits"), entry.get("group_size"), entry.get("mode", "affine"))
    if settings is None:
        raise CheckpointError(f"{module}: `quantization` in config.json is {dict(entry)}, which MLX does not have.")
    return settings


def _quantised(name: str, module: str, settings: Quantised, stored: Mapping[str, Stored], folder: Path) -> Tensor:
    parts = {part: stored[f"{module}.{part}"] for part, _ in settings.types if f"{module}.{part}" in stored}
    if absent := [f"{module}.{part}" for part, _ in settings.types if part not in parts]:
        raise CheckpointError(f"{folder}: {module} is quantised as {settings}, missing are {' and '.join(absent)}.")
    rows, words = (*parts["weight"].shape, 0, 0)[:2]
    inputs = words * 32 // settings.bits
    expected = {"weight": (rows, words)} | dict.fromkeys(("scales", "biases"), (rows, inputs // settings.group_size))
    for part, dtype in settings.types:
        types = ("U32",) if part == "weight" else ("U8",) if dtype == "U8" else ("F32", "BF16", "F16")
        if parts[part].shape != expected[part] or parts[part].dtype not in types:
            found = f"{parts[part].dtype} {parts[part].shape}"
            raise CheckpointError(
                f"{folder}: {module}.{part} is {found}, which does not fit {settings} of config.json."
            )
    return Tensor(name, (rows, inputs), parts, settings)


def _mlx_shape(name: str, shape: tuple[int, ...], kind: Layout) -> tuple[int, ...]:
    if kind == "ours":
        return shape
    return tuple(layout.to_mlx_layout(name, np.broadcast_to(np.int8(0), shape)).shape)
