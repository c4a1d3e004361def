"""Checkpoints as people publish them: any mixture of quantisation, names, types and files, from one set of weights."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_voicechat.weights import layout
from mlx_voicechat.weights.config_file import read_config

from .checkpoints import tensors_of
from .originals import nvidia_config

Setting = tuple[int, int, str]  # bits, group size, mode of `mx.quantize`
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
METADATA = {"tool": "gptq", "calibration": {"conversations": 256}, "bits": 3.5, "symmetric": False}
SHARDS = 3


@dataclass(frozen=True)
class Mixture:
    """How a checkpoint is written. What it computes follows from `precision` alone, the rest is form.

    `settings`: a pattern of module names -> a Setting, the first that matches and whose groups divide the inputs.
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    rest: str = "f32"  # type of what is not quantised
    scales: str = "f32"  # and of scales and biases
    config: str = "runtime"  # or nvidia, its tokenizer and base config beside it; nvidia-text, in it
    entries: str = "modules"  # setting and modules, copy (quantization_config alone), block (mlx_conversion), list
    metadata: bool = False  # a block that is no layer's, in the config and in its quantization
    files: str = "index"  # or one, shard, numbered (shards without an index)
    pointwise: str = "torch"  # plain 1x1 convolutions as PyTorch has them, or linear
    dropped: tuple[str, ...] = ()  # patterns of tensors that are left out

    @property
    def precision(self) -> tuple[Any, ...]:
        """Equal for mixtures that must give equal ids: scales are bfloat16 numbers, whatever type holds them."""
        # float32 or float16 scales widen the whole LLM
        wide = self.rest != "bf16" or self.scales != "bf16"
        return tuple(self.settings.items()), self.rest, wide


def write(base: Path, out: Path, mixture: Mixture) -> Path:
    """A mixture of the float32 weights of the runtime checkpoint `base`, in the new folder `out`."""
    raw: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    tensors, entries = _tensors(base, mixture)
    out.mkdir()
    _write_config(raw, entries, base, out, mixture)
    kept = {
        name: array
        for name, array in tensors.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in mixture.dropped)
    }
    mx.eval(kept)
    _write_files(kept, out, mixture.files)
    return out


def layers(base: Path) -> dict[str, tuple[int, int]]:
    """Every layer that `mlx.nn.quantize` would take: linear ones and embeddings by name, (outputs, inputs)."""
    found = {}
    for name, shape in layout.shapes(read_config(base)).items():
        matrix = layout.matrix_shape(shape)
        if name.endswith(".weight") and len(matrix) == 2:
            found[name.removesuffix(".weight")] = (matrix[0], matrix[1])
    return found


def _tensors(base: Path, mixture: Mixture) -> tuple[dict[str, mx.array], dict[str, dict[str, Any]]]:
    matrices, tensors = layers(base), {}
    entries: dict[str, dict[str, Any]] = {}
    for name, array in tensors_of(base).items():
        layer = name.removesuffix(".weight")
        inputs = matrices[layer][1] if name.endswith(".weight") and layer in matrices else 0
        setting = next(_fitting(layer, inputs, mixture.settings), None) if inputs else None
        if setting is not None:
            entries[layer] = _entry(setting)
            tensors |= _quantised(layer, array.reshape(array.shape[:2]), setting, mixture.scales)
        elif not mx.issubdtype(array.dtype, mx.floating) or name.endswith(".A_log"):
            tensors[name] = array
        else:
            matrix = inputs and mixture.pointwise == "linear"
            # of bfloat16 numbers only where that is the type: the others differ in width alone
            tensors[name] = (array.reshape(array.shape[:2]) if matrix else array).astype(TYPES[mixture.rest])
    return tensors, entries


def _fitting(layer: str, inputs: int, settings: Mapping[str, Setting]) -> Iterator[Setting]:
    for pattern, setting in settings.items():
        if fnmatch.fnmatchcase(layer, pattern) and inputs % setting[1] == 0:
            yield setting


def _entry(setting: Setting) -> dict[str, Any]:
    bits, group_size, mode = setting
    return {"group_size": group_size, "bits": bits} | ({} if mode == "affine" else {"mode": mode})


def _quantised(layer: str, matrix: mx.array, setting: Setting, scales: str) -> dict[str, mx.array]:
    """As `tiny-4bit` was made: weight rounded to bfloat16 first, so that scales are bfloat16 numbers."""
    bits, group_size, mode = setting
    parts = mx.quantize(matrix.astype(mx.bfloat16), group_size=group_size, bits=bits, mode=mode)
    names = [f"{layer}.{part}" for part in ("weight", "scales", "biases")]
    found = dict(zip(names, parts, strict=False))
    for name in names[1:]:
        if name in found and mode == "affine":
            found[name] = found[name].astype(TYPES[scales])
    return found


def _write_config(
    raw: dict[str, Any], entries: dict[str, dict[str, Any]], base: Path, out: Path, form: Mixture
) -> None:
    text, tokenizer = raw["text_config"], out
    if form.config != "runtime":
        raw = nvidia_config(raw)
    if form.config == "nvidia":
        tokenizer = out / "tokenizer"
        tokenizer.mkdir()
        (tokenizer / "config.json").write_text(json.dumps(text), encoding="utf-8")
    elif form.config == "nvidia-text":
        raw["text_config"] = text
    for name in TOKENIZER_FILES:
        shutil.copyfile(base / name, tokenizer / name)
    if entries:
        _state(raw, entries, form)
    if form.metadata:
        raw["quantization_details"] = METADATA
    (out / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def _state(raw: dict[str, Any], entries: dict[str, dict[str, Any]], form: Mixture) -> None:
    """Say in `raw` how layers are quantised, as `form.entries` has it."""
    alike = [*entries.values()]
    common = max(alike, key=alike.count)
    extra: dict[str, Any] = {"details": METADATA, "quant_method": "gptq", "desc_act": False} if form.metadata else {}
    if form.entries == "setting":
        assert all(entry == common for entry in alike), "one setting cannot say this"
        raw["quantization"] = raw["quantization_config"] = common | extra
    elif form.entries == "copy":
        raw["quantization_config"] = common | entries | extra
        raw["quantization"] = extra
    elif form.entries == "block":
        raw["mlx_conversion"] = {"quantization": common | {"modules": entries} | extra, "tool": "public"}
    elif form.entries == "list":
        others = {name: entry for name, entry in entries.items() if entry != common}
        raw["quantization"] = common | others | {"modules": sorted(entries.keys() - others.keys())} | extra
    else:
        raw["quantization"] = common | entries | extra


def _write_files(tensors: dict[str, mx.array], out: Path, files: str) -> None:
    if files in ("one", "shard"):
        name = "model.safetensors" if files == "one" else "model-00001-of-00001.safetensors"
        mx.save_safetensors(str(out / name), tensors, metadata={"format": "mlx", "made_by": "a test"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):  # scales may lie in another file than their weight
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = {name: tensors[name] for name in names[number::SHARDS]}
        mx.save_safetensors(str(out / file), part)
        weight_map |= dict.fromkeys(part, file)
    if files == "index":
        index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
