"""Find, verify, read and check a checkpoint, and load it into a tree of modules.

`find` -> `config.read_config` -> `load_parameters` -> `build` is the whole way; nothing is read from disk but headers
before `build` has checked every name and shape. The rules are those of the specification's checkpoint page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import assets
from ..config import ModelConfig, read_json
from ..errors import CheckpointError, InputError
from ..text import Tokenizer
from . import hub, layout
from .hub import print_notice
from .shards import Stored, some_of, verify

DEMONSTRATION = "tiny"  # the model name that stands for the packaged checkpoint
FORMAT_KEY = "mlx_voicechat_format"  # in config.json: MLX tensor layouts, written by `convert`
FORMAT_VERSION = 1
CONVERSION_KEY = "mlx_voicechat_conversion"  # in config.json: where a converted checkpoint comes from, and how
VOICE_PREFIX = "tts_model.audio_prompt_latents."
STEP_BYTES = 256 * 2**20  # weights evaluated at once, so that what they are made from is freed early

# What computes in float32 (spec, precision): the speech networks whole, and the Mamba recurrence of the LLM.
FLOAT32 = re.compile(r"^(stt_model\.(perception|rnnt_decoder|rnnt_joint)|tts_model)\.|\.mixer\.(A_log|D|dt_bias)$")
# What the LLM's residual stream meets: one of these wider than bfloat16, and every product after it is float32.
STREAM = re.compile(r"^stt_model\.llm\.(norm_f|layers\.\d+\.(norm|mixer\.\w+_proj))\.")
STREAM_AND_HEADS = re.compile(r"^stt_model\.(llm|lm_head|function_head)\.")  # widened with it; embedded rows are few
WIDER = ("F32", "F16", "F64")  # as safetensors names them; float16 and bfloat16 meet as float32
# Parameter paths that are not the stored names: the inverse of layout.RENAMES and of the added LSTM biases.
STORED_NAMES: list[tuple[re.Pattern[str], tuple[str, ...]]] = [
    (re.compile(r"\.lstm\.layers\.(\d+)\.Wx$"), (r".lstm.weight_ih_l\1",)),
    (re.compile(r"\.lstm\.layers\.(\d+)\.Wh$"), (r".lstm.weight_hh_l\1",)),
    (re.compile(r"\.lstm\.layers\.(\d+)\.bias$"), (r".lstm.bias_ih_l\1", r".lstm.bias_hh_l\1")),
]


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


def load_parameters(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None = None) -> Parameters:
    """Parameters by module path in MLX layouts and computing types; lazy, so that unused tensors are never read.

    `tokenizer` is the folder's, for a caller that has read it already.
    Raises CheckpointError: files absent or broken, a newer format, a tokenizer or a speaker at odds with the config.
    """
    stored = verify(folder)
    torch_layout = stored_format(folder) == 0
    check_tokenizer(tokenizer or Tokenizer(folder), folder, config)
    weights: dict[str, mx.array] = {}
    for file in sorted({entry.file for entry in stored.values()}):
        weights |= _read(folder / file)
    whole = {name: array for name, array in weights.items() if _fits(name, weights, stored, config)}
    assembled = layout.assemble(whole, torch_layout)
    wide = llm_is_float32(stored)
    parameters = Parameters({path: settle(path, array, wide) for path, array in assembled.items()}, folder, stored)
    if config.speaker not in (voices := voice_names(parameters)):
        raise CheckpointError(
            f"{folder}: the speaker of config.json, {config.speaker!r}, has no {VOICE_PREFIX}* of its own.",
            f"Voices in this checkpoint: {', '.join(voices) or 'none'}.",
        )
    return parameters


def stored_format(folder: Path) -> int:
    """0 for PyTorch tensor layouts (mlx-community), else our format's version; a newer one raises CheckpointError."""
    version = read_json(folder).get(FORMAT_KEY, 0)
    if not isinstance(version, int) or not 0 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: {FORMAT_KEY} is {version!r}, this program reads up to {FORMAT_VERSION}.",
            "Update mlx-voicechat.",
        )
    return version


def llm_is_float32(stored: Mapping[str, Stored]) -> bool:
    """Whether the LLM computes in float32 rather than bfloat16: by what is stored, scales and biases among it.

    The published 4-bit and 8-bit checkpoints have float32 scales beside bfloat16 norms (spec: checkpoint.md).
    """
    return any(entry.dtype in WIDER and STREAM.match(name) for name, entry in stored.items())


def is_widened(name: str, float32_llm: bool) -> bool:
    """Whether a floating-point tensor or parameter of this name becomes float32 when it is loaded."""
    return FLOAT32.search(name) is not None or (float32_llm and STREAM_AND_HEADS.match(name) is not None)


def settle(path: str, array: mx.array, float32_llm: bool) -> mx.array:
    """A tensor in the type it computes in and contiguous: no frame may cast or copy a weight. Widening is exact."""
    if array.dtype in (mx.int64, mx.uint64):
        array = array.astype(mx.int32)
    elif array.dtype == mx.float64 or (mx.issubdtype(array.dtype, mx.floating) and is_widened(path, float32_llm)):
        array = array.astype(mx.float32)
    return mx.contiguous(array)


def tensor_names(path: str) -> list[str]:
    """The checkpoint's names of what a parameter is made of, in stacking order."""
    for pattern, replacements in STORED_NAMES:
        if pattern.search(path):
            return [pattern.sub(replacement, path) for replacement in replacements]
    return layout.sources(path)


def check(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, mx.array]) -> None:
    """Compare parameters with what the modules need; raises CheckpointError that lists all faults. Reads no data.

    Any tensor that is neither needed, nor in layout.UNUSED, nor in layout.OPTIONAL is a fault.
    """
    stored = actual.stored if isinstance(actual, Parameters) else {n: None for p in actual for n in tensor_names(p)}
    needed = {name for path in expected for name in tensor_names(path)}
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


def quantise_modules(module: nn.Module, config: ModelConfig) -> None:
    """Replace the layers that `config.quantization` names by quantised ones of the same bits, group size and mode.

    Raises CheckpointError: a name that is no such layer, parts of one fused layer with unlike settings, settings that
    MLX does not have or a group size that does not divide the inputs.
    """
    unused = set(config.quantization)

    def settings(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        parts = layout.sources(path)
        unused.difference_update(parts)
        entry = _common_settings(parts, config)
        if entry is None:
            return False
        chosen = {key: value for key, value in entry.items() if key in ("group_size", "bits", "mode")}
        try:
            layer.to_quantized(**chosen)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{' + '.join(parts)} cannot be quantised as {chosen}: {error}") from None
        return chosen

    nn.quantize(module, class_predicate=settings)
    if unused:
        raise CheckpointError(f"`quantization` names layers that this model lacks: {some_of(sorted(unused))}.")


def build(
    module: nn.Module,
    parameters: Parameters,
    config: ModelConfig,
    requantise: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> None:
    """Quantise `module` as the config says, check, load and evaluate its weights; peak memory stays near their size.

    `requantise` (`speech_weights.plan`): weights to quantise as well, by stored name; replaces them in `parameters`.
    """
    quantise_modules(module, config)
    check(_shapes(module), parameters)
    _requantise(module, parameters, requantise)
    expected = sorted(_shapes(module))
    module.load_weights([(path, parameters[path]) for path in expected], strict=True)
    for step in _steps([parameters[path] for path in expected]):
        mx.eval(step)
        mx.clear_cache()


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    flat: Any = tree_flatten(module.parameters(), destination={})
    return {path: tuple(array.shape) for path, array in flat.items()}


def _requantise(module: nn.Module, parameters: Parameters, chosen: Mapping[str, Mapping[str, int]]) -> None:
    """One layer after the other, so that one wide weight is there at a time; the largest first, when memory is free."""
    weights = [path for path in parameters if tensor_names(path)[0] in chosen]
    layers = {path.removesuffix(".weight"): chosen[tensor_names(path)[0]] for path in weights}
    nn.quantize(module, class_predicate=lambda path, _: dict(layers.get(path, {})))
    for layer in sorted(layers, key=lambda layer: parameters[f"{layer}.weight"].nbytes, reverse=True):
        settings: Any = layers[layer]
        packed = mx.quantize(parameters.pop(f"{layer}.weight"), **settings)
        mx.eval(packed)
        mx.clear_cache()
        names = ("weight", "scales", "biases")
        parameters |= {f"{layer}.{name}": array for name, array in zip(names, packed, strict=True)}


def voice_names(parameters: Mapping[str, mx.array]) -> list[str]:
    """Names of the voices that a checkpoint holds."""
    return sorted(path.removeprefix(VOICE_PREFIX) for path in parameters if path.startswith(VOICE_PREFIX))


def voice(parameters: Mapping[str, mx.array], name: str, config: ModelConfig) -> mx.array:
    """The stored latents (1, P, W) of a voice; InputError lists the names when there is none of this name."""
    if name not in voice_names(parameters):
        raise InputError(f"There is no voice {name!r}.", f"Voices: {', '.join(voice_names(parameters))}.")
    latents = parameters[VOICE_PREFIX + name]
    expected = (1, config.tts.prompt_frames, config.tts.hidden_size)
    if tuple(latents.shape) != expected:
        raise CheckpointError(f"{VOICE_PREFIX}{name} has shape {latents.shape}, expected {expected}.")
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


def _common_settings(layers: list[str], config: ModelConfig) -> Mapping[str, Any] | None:
    """How the layers that run as one are quantised; CheckpointError names them when they are not so alike."""
    entries = [config.quantization.get(layer) for layer in layers]
    if any(entry != entries[0] for entry in entries):
        listed = "; ".join(f"{layer}: {entry or 'none'}" for layer, entry in zip(layers, entries, strict=True))
        raise CheckpointError(f"Quantisation must be the same in parts that run as one layer: {listed}.")
    return entries[0]


def partners(name: str) -> list[str]:
    """The tensors that go into the same parameter as `name`, itself among them."""
    for where, parts, _ in layout.FUSIONS:
        for part in parts:
            if where.search(name) and f".{part}." in name:
                return [name.replace(f".{part}.", f".{other}.") for other in parts]
    if ".lstm.bias_" in name:
        return [re.sub(r"bias_[ih]h_l", f"bias_{side}_l", name) for side in ("ih", "hh")]
    return [name]


def _fits(name: str, weights: Mapping[str, mx.array], stored: Mapping[str, Stored], config: ModelConfig) -> bool:
    """Whether a tensor can be assembled: its partners are there (`check` reports those absent) and of one width.

    Raises CheckpointError for partners of unlike width or quantisation.
    """
    parts = partners(name)
    if any(partner not in weights for partner in parts):
        return False
    if len(parts) > 1:
        _common_settings([partner.rpartition(".")[0] for partner in parts], config)
        rows = 0 if ".lstm." in name else 1  # biases are added, rows stacked
        if len({weights[partner].shape[rows:] for partner in parts}) > 1:
            listed = ", ".join(f"{_where(partner, stored)} {weights[partner].shape}" for partner in parts)
            raise CheckpointError(f"Tensors that run as one layer do not fit together: {listed}.")
    return True


def _where(name: str, stored: Mapping[str, Stored | None]) -> str:
    entry = stored.get(name)
    return f"{name} ({entry.file})" if entry else name


def _shape_fault(path: str, expected: tuple[int, ...], actual: Mapping[str, mx.array]) -> str:
    """What a parameter is made of, its shape in MLX's axis order, and the shape that the modules need."""
    names = tensor_names(path)
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
