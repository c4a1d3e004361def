"""Find, verify, read and check a checkpoint, and load it into a tree of modules.

`open_model` -> `Checkpoint.parameters` -> `build` is the whole way; nothing is read from disk but headers before
`build` has checked every name and shape. The rules are those of the specification's checkpoint page.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..config import ModelConfig
from ..errors import CheckpointError, InputError
from ..networks.parted import Parted
from ..text import Tokenizer
from . import assets, hub, layout, original, precision
from .config_file import HALF, check_kind, check_parts, is_original, parse_config, read_json
from .hub import print_notice
from .shards import Stored, some_of, verify

DEMONSTRATION = "tiny"  # the model name that stands for the packaged checkpoint
FORMAT_KEY = "mlx_voicechat_format"  # in config.json: MLX tensor layouts, written by `convert`
FORMAT_VERSION = 1
CONVERSION_KEY = "mlx_voicechat_conversion"  # in config.json: where a converted checkpoint comes from, and how
NETWORK_NAMES = {
    "perception": "the speech encoder",
    "rnnt": "the transcriber",
    "language": "the language model",
    "tts": "the speech generator (TTS)",
    "codec": "the audio codec",
}
STEP_BYTES = 256 * 2**20  # weights evaluated at once, so that what they are made from is freed early


class Parameters(dict[str, mx.array]):
    """Parameters by module path, not evaluated yet, and `stored`: the file and shape of each tensor they come from."""

    def __init__(self, arrays: Mapping[str, mx.array], folder: Path, stored: Mapping[str, Stored]) -> None:
        super().__init__(arrays)
        self.folder = folder
        self.stored = stored


def find(model: str | Path, say: Callable[[str], None] = print_notice) -> Path:
    """The folder of a checkpoint: a folder, the word `tiny` (`./tiny` is a folder), or a hub id, fetched when absent.

    `say` gets what a user should know before a download. Raises CheckpointError, HubError and InputError.
    """
    if not isinstance(model, str | os.PathLike):
        raise InputError(f"The model is {type(model).__name__}, expected a folder, a hub id or `{DEMONSTRATION}`.")
    if str(model) == DEMONSTRATION:
        return assets.TINY
    path = Path(os.path.expanduser(model))
    if os.fspath(model) and os.path.isdir(path):
        return path
    if path.suffix == ".nemo":
        raise CheckpointError(
            f"{model} is a NeMo archive, which does not load.",
            "Use for example mlx-community/NemotronLabs-VoiceChat-11B-4bit.",
        )
    if os.path.isfile(path):
        raise CheckpointError(f"{model} is a file, and a checkpoint is a folder.", f"Name its folder: {path.parent}")
    if isinstance(model, str) and hub.is_repository_id(model):
        return hub.locate(model, say)
    raise CheckpointError(
        f"There is no folder {model}.",
        "Name a checkpoint folder, a hub id such as mlx-community/NemotronLabs-VoiceChat-11B-4bit, or `tiny`.",
    )


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: what its config.json and its files' headers say, read once.

    No weight is read before `build` evaluates what `parameters` gives.
    """

    folder: Path
    raw: Mapping[str, Any]  # config.json as it stands, of an original what it comes to
    stored: Mapping[str, Stored]
    config: ModelConfig
    base: Path | None = None  # where the tokenizer lies when it is not in `folder`

    @property
    def format(self) -> int:
        """0 for PyTorch tensor layouts (mlx-community), else our format's version; CheckpointError for a newer one."""
        return stored_format(self.raw, self.folder)

    @property
    def files(self) -> list[str]:
        """Names of the files with weights."""
        return sorted({entry.file for entry in self.stored.values()})

    @property
    def voices(self) -> list[str]:
        return layout.voices(self.stored)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError when it is absent, broken or another model's."""
        folder = self.base or self.folder
        tokenizer = Tokenizer(folder)
        check_tokenizer(tokenizer, folder, self.config)
        return tokenizer

    def parameters(self, arithmetic: str = "float32") -> Parameters:
        """Parameters by module path in MLX layouts and computing types; lazy, so that unused tensors are never read.

        Raises CheckpointError: a file broken, a newer format, a tokenizer or a speaker at odds with the config.
        """
        torch_layout = self.format == 0
        _ = self.tokenizer  # what is wrong with it is said first
        weights: dict[str, mx.array] = {}
        for file in self.files:
            weights |= _read(self.folder / file)
        apart = layout.held_in_parts(self.config.quantization)
        whole = {name: array for name, array in weights.items() if _fits(name, weights, self.stored, apart)}
        assembled = layout.assemble(whole, torch_layout, apart)
        types = precision.types(self.stored, arithmetic)
        parameters = {path: layout.cast(path, array, *types) for path, array in assembled.items()}
        if self.config.speaker not in (voices := layout.voices(parameters)):
            raise CheckpointError(
                f"{self.folder}: the speaker of config.json, {self.config.speaker!r}, has no {layout.VOICE_PREFIX}* "
                "of its own.",
                f"Voices in this checkpoint: {', '.join(voices) or 'none'}.",
            )
        return Parameters(parameters, self.folder, self.stored)


def open_folder(folder: Path, say: Callable[[str], None] = print_notice) -> Checkpoint:
    """Open the checkpoint in a folder; raises what `read_json`, `shards.verify` and `parse_config` raise.

    With NVIDIA's own config it needs the base LLM's, and a tokenizer: `original.base_folder` says where they are.
    """
    raw, where = read_json(folder), str(folder / "config.json")
    check_kind(raw, where)
    check_parts(raw, where)
    stored = verify(folder)
    check_whole(stored, folder)
    base = None
    if is_original(raw):
        base = original.base_folder(raw, folder, say)
        raw = original.translate(raw, folder, base, Tokenizer(base), stored)
    config = parse_config(raw, where, {name: tensor.shape for name, tensor in stored.items()})
    return Checkpoint(folder, raw, stored, config, base)


def open_model(model: str | Path, say: Callable[[str], None] = print_notice) -> Checkpoint:
    """`find`, then `open_folder`."""
    return open_folder(find(model, say), say)


def stored_format(raw: Mapping[str, Any], folder: Path) -> int:
    """See `Checkpoint.format`; `raw` is the config.json in `folder`."""
    version = raw.get(FORMAT_KEY, 0)
    if not isinstance(version, int) or not 0 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: {FORMAT_KEY} is {version!r}, this program reads up to {FORMAT_VERSION}.",
            "Update mlx-voicechat.",
        )
    return version


def check_whole(stored: Mapping[str, Stored], folder: Path) -> None:
    """Raise CheckpointError for half a model: one of the five networks has no tensor at all."""
    absent = layout.absent_networks(stored)
    if 0 < len(absent) < len(layout.NETWORKS):
        raise CheckpointError(
            f"{folder} is half a model: its files have nothing of {', '.join(NETWORK_NAMES[name] for name in absent)}.",
            HALF,
        )


def check(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, mx.array]) -> None:
    """Compare parameters with what the modules need; raises CheckpointError that lists all faults. Reads no data.

    Any tensor that is neither needed, nor in layout.UNUSED, nor in layout.OPTIONAL is a fault.
    """
    stored = (
        actual.stored if isinstance(actual, Parameters) else {n: None for p in actual for n in layout.stored_names(p)}
    )
    needed = {name for path in expected for name in layout.stored_names(path)}
    known = {name for name in stored if not layout.is_unused(name) and not layout.OPTIONAL.search(name)}
    wrong = [_shape_fault(p, e, actual) for p, e in expected.items() if p in actual and tuple(actual[p].shape) != e]
    faults = []
    if missing := sorted(needed - stored.keys()):
        faults.append(f"missing {len(missing)}: {some_of(missing)}")
    if unknown := sorted(known - needed):
        faults.append(f"unknown {len(unknown)}: {some_of([_where(name, stored) for name in unknown])}")
    if wrong:
        faults.append(f"wrong shape {len(wrong)}: {some_of(wrong)}")
    if not faults:
        return
    remedy = "The checkpoint and its config.json do not belong together, or it is of another model: get it again."
    place = f"{actual.folder}: " if isinstance(actual, Parameters) else ""
    raise CheckpointError(f"{place}tensors {'; '.join(faults)}.", remedy)


def quantise_modules(module: nn.Module, config: ModelConfig, where: str = "config.json") -> None:
    """Replace the layers that `config.quantization` names by quantised ones of the same bits, group size and mode.

    A fused layer whose parts have unlike settings becomes `Parted`. Raises CheckpointError: a name that is no such
    layer, settings that MLX does not have or a group size that does not divide the inputs.
    """
    unused = {layer for layer in config.quantization if not layout.OPTIONAL.search(f"{layer}.weight")}
    if not config.quantization:
        return
    _hold_in_parts(module, layout.held_in_parts(config.quantization))

    def settings(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        parts = layout.stored_names(path)
        unused.difference_update(parts)
        entry = config.quantization.get(parts[0])
        if entry is None:
            return False
        chosen = {key: value for key, value in entry.items() if key in ("group_size", "bits", "mode")}
        try:
            layer.to_quantized(**chosen)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{where}: {' + '.join(parts)} cannot be quantised as {chosen}: {error}") from None
        return chosen

    nn.quantize(module, class_predicate=settings)
    if unused:
        raise CheckpointError(f"{where}: `quantization` names layers that this model lacks: {some_of(sorted(unused))}.")


def _hold_in_parts(module: nn.Module, layers: Collection[str]) -> None:
    if not layers:
        return
    own = _shapes(module)
    parted: list[tuple[str, Any]] = []
    for path, layer in module.named_modules():
        if path in layers:
            shapes = layout.stored_shapes(f"{path}.weight", own)
            made = (type(layer)(shape[1], shape[0], bias="bias" in layer) for _, shape in shapes)
            names = (name.split(".")[-2] for name, _ in shapes)
            parted.append((path, Parted(dict(zip(names, made, strict=True)))))
    module.update_modules(tree_unflatten(parted))


def build(
    module: nn.Module,
    parameters: Parameters,
    config: ModelConfig,
    requantise: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    holds: Callable[[str], bool] = lambda name: True,
) -> None:
    """Quantise `module` as the config says, check, load and evaluate its weights; peak memory stays near their size.

    `requantise` (`precision.plan`): weights to quantise as well, by stored name; replaces them in `parameters`.
    What `holds` denies, by the name of its path or tensor, is not read.
    """
    quantise_modules(module, config, str(parameters.folder / "config.json"))
    check(_shapes(module), parameters)
    _check_types(module, parameters)
    _requantise(module, parameters, {name: how for name, how in requantise.items() if holds(name)})
    expected = sorted(path for path in _shapes(module) if holds(path))
    module.load_weights([(path, parameters[path]) for path in expected], strict=all(map(holds, _shapes(module))))
    for step in _steps([parameters[path] for path in expected]):
        mx.eval(step)
        mx.clear_cache()


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    flat: Any = tree_flatten(module.parameters(), destination={})
    return {path: tuple(array.shape) for path, array in flat.items()}


def _check_types(module: nn.Module, parameters: Parameters) -> None:
    """Raise CheckpointError, by name, unless packed weights, bytes and numbers are stored as such."""
    flat: Any = tree_flatten(module.parameters(), destination={})
    wrong = []
    for path, made in flat.items():
        packed, dtype = made.dtype in (mx.uint32, mx.uint8), parameters[path].dtype
        if (
            dtype != made.dtype
            if packed
            else mx.issubdtype(made.dtype, mx.floating) != mx.issubdtype(dtype, mx.floating)
        ):
            kind = str(made.dtype).rpartition(".")[2] if packed or made.dtype == mx.int32 else "a float"
            wrong += [
                f"{_where(name, parameters.stored)} {parameters.stored[name].dtype}, expected {kind}"
                for name in layout.stored_names(path)
            ]
    if wrong:
        raise CheckpointError(
            f"{parameters.folder}: tensors of wrong type {len(wrong)}: {some_of(wrong)}.",
            "They are not quantised as config.json says: get the checkpoint again.",
        )


def _requantise(module: nn.Module, parameters: Parameters, chosen: Mapping[str, Mapping[str, int]]) -> None:
    """One layer after the other, so that one wide weight is there at a time; the largest first, when memory is free."""
    if not chosen:
        return
    weights = [path for path in parameters if layout.stored_names(path)[0] in chosen]
    layers = {path.removesuffix(".weight"): chosen[layout.stored_names(path)[0]] for path in weights}
    nn.quantize(module, class_predicate=lambda path, _: dict(layers.get(path, {})))
    for layer in sorted(layers, key=lambda layer: parameters[f"{layer}.weight"].nbytes, reverse=True):
        settings: Any = layers[layer]
        packed = mx.quantize(parameters.pop(f"{layer}.weight"), **settings)
        mx.eval(packed)
        mx.clear_cache()
        names = ("weight", "scales", "biases")
        parameters |= {f"{layer}.{name}": array for name, array in zip(names, packed, strict=True)}


def voice(parameters: Mapping[str, mx.array], name: str, config: ModelConfig) -> mx.array:
    """The stored latents (1, P, W) of a voice; InputError lists the names when there is none of this name."""
    if name not in layout.voices(parameters):
        raise InputError(f"There is no voice {name!r}.", f"Voices: {', '.join(layout.voices(parameters))}.")
    latents = parameters[layout.VOICE_PREFIX + name]
    expected = (1, config.tts.prompt_frames, config.tts.hidden_size)
    if tuple(latents.shape) != expected:
        raise CheckpointError(f"{layout.VOICE_PREFIX}{name} has shape {latents.shape}, expected {expected}.")
    return latents


def check_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig) -> None:
    """Raise CheckpointError unless the tokenizer in `folder` has as many tokens as the heads."""
    size = tokenizer.vocab_size
    if size != config.llm.vocab_size:
        raise CheckpointError(
            f"{folder}: tokenizer.json has {size:,} tokens, but the heads have {config.llm.vocab_size:,}.",
            "The tokenizer is another model's: get the checkpoint again, all files from one place.",
        )


def _read(file: Path) -> dict[str, mx.array]:
    try:
        return dict(mx.load(str(file)))  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


def _fits(name: str, weights: Mapping[str, mx.array], stored: Mapping[str, Stored], apart: Collection[str]) -> bool:
    """Whether a tensor can be assembled: its partners are there (`check` reports those absent) and of one width.

    Those of layers held in parts (`apart`) need none. Raises CheckpointError for partners of unlike width.
    """
    parts = layout.stored_names(layout.parameter_path(name, apart))
    if any(partner not in weights for partner in parts):
        return False
    if len(parts) > 1:
        rows = int(layout.is_stacked(name))  # the others are added whole
        if len({weights[partner].shape[rows:] for partner in parts}) > 1:
            listed = ", ".join(f"{_where(partner, stored)} {weights[partner].shape}" for partner in parts)
            raise CheckpointError(f"Tensors that run as one layer do not fit together: {listed}.")
    return True


def _where(name: str, stored: Mapping[str, Stored | None]) -> str:
    entry = stored.get(name)
    return f"{name} ({entry.file})" if entry else name


def _shape_fault(path: str, expected: tuple[int, ...], actual: Mapping[str, mx.array]) -> str:
    """What a parameter is made of, its shape in MLX's axis order, and the shape that the modules need."""
    names = layout.stored_names(path)
    stored: Mapping[str, Stored | None] = actual.stored if isinstance(actual, Parameters) else {}
    made_of = " + ".join(_where(name, stored) for name in names)
    return f"{made_of} is {tuple(actual[path].shape)}, expected {expected}"


def _steps(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    """Runs of arrays of at most STEP_BYTES together (or one larger one)."""
    step: list[mx.array] = []
    total = 0
    for array in arrays:
        if step and total + array.nbytes > STEP_BYTES:
            yield step
            step, total = [], 0
        step.append(array)
        total += array.nbytes
    if step:
        yield step
