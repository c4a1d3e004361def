"""One conversion: plan, announce, check the disk, stream every tensor into a new folder, put it in place."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_voicechat.config import ModelConfig
from mlx_voicechat.errors import CheckpointError, InputError
from mlx_voicechat.networks.ear_tts import EarTts
from mlx_voicechat.networks.linear import product_of_many_rows
from mlx_voicechat.networks.tree import Networks
from mlx_voicechat.text import character_table
from mlx_voicechat.weights import checkpoint, layout, quantization, text_table
from mlx_voicechat.weights.checkpoint import CONVERSION_KEY
from mlx_voicechat.weights.config_file import parse_config
from mlx_voicechat.weights.hub import BASE_PATTERNS, gigabytes

from . import card, feeding, rounding, writer
from .calibration import Calibration
from .plans import Plan, Quantised, Setting
from .rounding import Rounding
from .source import BLOCK_BYTES, Rows, Say, Source, Tensor, stored_bytes
from .writer import Entry

LAYOUT_NAMES = {"nvidia": "NVIDIA's original", "mlx-community": "mlx-community layout", "ours": "mlx-voicechat format"}
PUBLIC_CONVERSION_KEY = "mlx_conversion"  # of the public converter: says how its output was quantised
ROUNDED_KEY = "rounded_layers"  # of what a conversion says of itself: digests of what was rounded with a calibration
WORKING_COPIES = 10  # of a block: read, re-laid, in MLX, rounded, packed, and what MLX keeps for reuse
TOKENIZER_FILES = [name for name in BASE_PATTERNS if name != "config.json"]

Progress = Callable[[int, int], Any]  # bytes written, of how many


class OutputTensor(NamedTuple):
    """A tensor, how it is stored, and the entries that it becomes."""

    tensor: Tensor
    setting: Setting
    entries: tuple[Entry, ...]

    @property
    def copied(self) -> bool:
        """Whether packed integers go over as they are."""
        return self.tensor.quantised is not None and self.setting in ("keep", self.tensor.quantised)


@dataclass(frozen=True)
class Job:
    """What is to be written, before anything is; `layers` are rounded with the calibration."""

    source: Source
    plan: Plan
    outputs: list[OutputTensor]
    shards: list[list[Entry]]
    calibration: Calibration | None = None
    layers: tuple[rounding.Layer, ...] = ()

    @property
    def bytes(self) -> int:
        """Expected size of the checkpoint: tensors and text table."""
        config = self.source.config
        table = config.llm.vocab_size * config.tts.hidden_size * 4
        return sum(entry.bytes for shard in self.shards for entry in shard) + table

    @property
    def peak_bytes(self) -> int:
        """Most memory beyond the program's own: blocks of rows, the few tensors read whole, or the text table twice."""
        mixed = [math.prod(t.shape) * 4 for t in self.source.tensors.values() if self.source.read_whole(t)]
        tts = self.source.config
        table = 2 * tts.llm.vocab_size * tts.tts.hidden_size * 4
        characters = [math.prod(t.shape) * 4 for n, t in self.source.tensors.items() if layout.SUBWORD.match(n)]
        return max(WORKING_COPIES * max([BLOCK_BYTES, *mixed]), table + sum(characters), *self._layers_bytes)

    @property
    def disk_bytes(self) -> int:
        """Most that the disk must hold: the checkpoint, and until it is whole the layers that are rounded first."""
        streams = feeding.disk_bytes(self.calibration) if self.calibration is not None else 0
        return self.bytes + rounding.layers_bytes(self.layers) + streams

    @property
    def _layers_bytes(self) -> list[int]:
        """Of rounding each layer, and of gathering what it is given: both models' block beside the sums."""
        blocks = 3 * 4 * max(feeding.block_weights(self.source))
        return [max(layer.memory_bytes, layer.sums_bytes + blocks) for layer in self.layers]

    def quantisation(self) -> dict[str, Any]:
        """For config.json: each quantised layer's settings, those of most layers on top; empty when there are none."""
        layers = {}
        for output in self.outputs:
            settings = output.tensor.quantised if output.copied else output.setting
            if isinstance(settings, Quantised):
                layers[output.tensor.name.removesuffix(".weight")] = settings.entry()
        if not layers:
            return {}
        entries = list(layers.values())
        return max(entries, key=entries.count) | layers

    def describe(self, target: Path) -> list[str]:
        """What a user should know before the work."""
        source, count = self.source, len(self.source.tensors)
        size = sum(stored_bytes(part) for tensor in source.tensors.values() for part in tensor.parts.values())
        rules = "; ".join(f"{text}: {setting}" for text, setting in self.plan.described().items())
        rules = self.plan.summary or rules
        lines = [
            f"source: {source.name}, {LAYOUT_NAMES[source.layout]}, {count:,} tensors, {gigabytes(size)}",
            f"plan: {self.plan.name} ({rules})",
            f"output: {target}, about {gigabytes(self.bytes)} in {len(self.shards)} weight files",
            f"disk: {gigabytes(self.disk_bytes)} needed, {gigabytes(shutil.disk_usage(target.parent).free)} free; "
            f"memory: at most about {gigabytes(self.peak_bytes)}",
        ]
        if self.calibration is not None:
            minutes = rounding.seconds(rounding.operations(self.source, self.layers, self.calibration)) / 60
            lines.append(
                f"calibration: {self.calibration.folder}, {self.calibration.positions:,} positions; "
                f"{len(self.layers)} layers to round, about {max(1, round(minutes))} min"
            )
        return lines


def prepare(source: Source, plan: Plan, calibration: Calibration | None = None) -> Job:
    """Decide how every tensor is stored; raises InputError for a plan or a calibration that does not fit the model."""
    if plan.calibrated and calibration is None:
        raise InputError(
            f"Plan {plan.name} needs a calibration.", "Make one with `mlx-voicechat calibrate`; name it: --calibration."
        )
    settings = plan.settings({name: tensor.facts for name, tensor in source.tensors.items()})
    outputs = [_output(tensor, settings[name]) for name, tensor in source.tensors.items()]
    layers: tuple[rounding.Layer, ...] = ()
    if calibration is not None:
        rounding.check(source, calibration)
        layers = tuple(rounding.calibrated(source, settings))
        if not layers:
            raise InputError(f"Plan {plan.name} quantises no layer that was calibrated.", "Choose another plan.")
    return Job(source, plan, outputs, writer.shards([output.entries for output in outputs]), calibration, layers)


def _output(tensor: Tensor, setting: Setting) -> OutputTensor:
    module = tensor.name.removesuffix(".weight")
    if tensor.quantised is not None and setting in ("keep", tensor.quantised):
        entries = [Entry(f"{module}.{part}", stored.dtype, stored.shape) for part, stored in tensor.parts.items()]
    elif isinstance(setting, Quantised):
        rows, inputs = tensor.shape
        widths = {"weight": inputs * setting.bits // 32}
        entries = [
            Entry(f"{module}.{part}", dtype, (rows, widths.get(part, inputs // setting.group_size)))
            for part, dtype in setting.types
        ]
    else:
        entries = [Entry(tensor.name, float_type(tensor, setting), tensor.shape)]
    return OutputTensor(tensor, setting, tuple(entries))


def float_type(tensor: Tensor, setting: Setting) -> str:
    """The safetensors type of a tensor that is not quantised."""
    if tensor.facts.integer:
        return tensor.dtype
    if setting == "keep":
        return "F32" if tensor.dtype == "F64" else tensor.dtype
    return "F32" if setting == "f32" else "BF16"


def run(
    job: Job,
    target: Path,
    progress: Progress = lambda done, total: None,
    say: Say = lambda text: None,
    rounded: Progress = lambda done, total: None,
) -> None:
    """Write the checkpoint; `say` gets a line before what takes time without progress, `rounded` operations done.

    Raises InputError (no space) and VoiceChatError (the disk); then nothing is left but finished layers, for next time.
    """
    free = shutil.disk_usage(target.parent).free
    if job.disk_bytes > free:
        raise InputError(
            f"{target} needs {gigabytes(job.disk_bytes)}, the disk has {gigabytes(free)}.", "Free some space."
        )
    source = job.source
    raw = configuration(job)
    config = parse_config(raw)
    with ExitStack() as stack:
        finished = None
        if job.calibration is not None:
            layers = target.with_name(rounding.FOLDER.format(target.name))
            stack.enter_context(writer.alone(layers, target))
            finished = Rounding(job.source, job.calibration, job.layers, layers)
            finished.run(rounded)
            raw[CONVERSION_KEY][ROUNDED_KEY] = finished.digests()
        with writer.folder(target) as folder:
            writer.write_json(folder / "config.json", raw)
            for name in TOKENIZER_FILES:
                if (source.tokenizer_folder / name).is_file():
                    writer.write_file(folder / name, (source.tokenizer_folder / name).read_bytes())
            writer.write_file(folder / "README.md", card.model_card(source, job.plan, raw[CONVERSION_KEY]).encode())
            _write_shards(job, folder, progress, finished)
            _write_text_table(folder, config, source, say)
        if finished is not None:
            shutil.rmtree(finished.folder, ignore_errors=True)


def configuration(job: Job) -> dict[str, Any]:
    """The `config.json` of the output."""
    source = job.source
    facts: dict[str, Any] = {
        "program": f"mlx-voicechat {metadata.version('mlx-voicechat')}",
        "plan": job.plan.name,
        "rules": job.plan.described(),
        "source": source.name,
        "source_layout": source.layout,
        "source_revision": source.revision,
        "tokenizer": source.tokenizer_name,
        "tokenizer_revision": source.tokenizer_revision,
    }
    if earlier := [source.raw[key] for key in (CONVERSION_KEY, PUBLIC_CONVERSION_KEY) if key in source.raw]:
        facts["source_conversion"] = earlier[0]
    if job.calibration is not None:
        count = len(job.calibration.facts["recordings"])
        facts["calibration"] = {"recordings": count, "positions": job.calibration.positions, "method": "GPTQ"}
    raw = {key: value for key, value in source.raw.items() if key not in (*quantization.KEYS, PUBLIC_CONVERSION_KEY)}
    raw["text_config"] = source.raw["text_config"] | {"head_dim": source.config.llm.head_dim}
    raw[checkpoint.FORMAT_KEY] = checkpoint.FORMAT_VERSION
    raw[CONVERSION_KEY] = facts
    quantisation = job.quantisation()
    return raw | ({"quantization": quantisation} if quantisation else {})


# -- weights --------------------------------------------------------------------------------------------------------


def _write_shards(job: Job, folder: Path, progress: Progress, finished: Rounding | None) -> None:
    total = sum(entry.bytes for shard in job.shards for entry in shard)
    outputs = iter(job.outputs)
    done = 0
    progress(0, total)
    for number, shard in enumerate(job.shards, 1):
        beginning, starts = writer.header(shard, {"format": "mlx"})
        with writer.File(folder / writer.shard_name(number, len(job.shards))) as file:
            file.write(beginning)
            left = len(shard)
            while left:
                output = next(outputs)
                for entry, block in encoded(job.source, output, finished):
                    data = _bytes(block.array)
                    file.write(data, starts[entry.name] + block.row * _row_bytes(entry))
                    done += len(data)
                    progress(done, total)
                mx.clear_cache()
                left -= len(output.entries)
    writer.write_index(folder, job.shards)


def encoded(source: Source, output: OutputTensor, finished: Rounding | None = None) -> Iterator[tuple[Entry, Rows]]:
    """Blocks of rows of each entry, in the type it is stored in; layers that are `finished` as they are."""
    name, setting = output.tensor.name, output.setting
    if finished is not None and name in finished.names:
        for entry, array in zip(output.entries, finished.parts(name), strict=True):
            yield entry, Rows(0, array)
    elif output.copied:
        for entry, part in zip(output.entries, output.tensor.parts, strict=True):
            for block in source.stored(name, part):
                yield entry, block
    elif isinstance(setting, Quantised):
        for block in _sound(source, name):
            packed = mx.quantize(block.array.astype(mx.bfloat16), **setting.arguments())
            for entry, array in zip(output.entries, packed, strict=True):
                yield entry, Rows(block.row, array)
    else:
        (entry,) = output.entries
        dtype = MLX_TYPES.get(entry.dtype)
        for block in _sound(source, name):
            yield entry, block if dtype is None else Rows(block.row, block.array.astype(dtype))


def _sound(source: Source, name: str) -> Iterator[Rows]:
    """A tensor's blocks; raises CheckpointError at NaN or infinity, which no plan could keep apart from damage."""
    for block in source.blocks(name):
        if mx.issubdtype(block.array.dtype, mx.floating) and not mx.isfinite(block.array).all().item():
            raise CheckpointError(
                f"{source.folder}: {name} holds NaN or infinity.", "The file is damaged: get it again."
            )
        yield block


MLX_TYPES = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}


def _row_bytes(entry: Entry) -> int:
    return entry.bytes // entry.shape[0] if entry.shape and entry.shape[0] else 0


def as_bytes(array: mx.array) -> mx.array:
    """What a tensor is in its file: uint8 (n,)."""
    return mx.contiguous(array).reshape(-1).view(mx.uint8)


def _bytes(array: mx.array) -> memoryview:
    data: Any = as_bytes(array)
    return memoryview(data)


# -- the text table -------------------------------------------------------------------------------------------------


def _write_text_table(folder: Path, config: ModelConfig, source: Source, say: Say) -> None:
    """The table that `load` would make of what was just written; that of the source where it is the same."""
    tts = text_side(folder)
    characters = character_table(source.tokenizer)
    fingerprint, shape = text_table.fingerprint_of(tts, config.tts.characters, characters)
    table = text_table.read(source.folder / text_table.OWN_FILE, fingerprint, shape)
    if table is None:
        say(f"text table: {shape[0]:,} tokens, {gigabytes(4 * shape[0] * shape[1])}")
        table = tts.text_rows(characters, product_of_many_rows())
    entry = Entry(text_table.TENSOR, "F32", shape)
    beginning, starts = writer.header([entry], text_table.facts(fingerprint))
    with writer.File(folder / text_table.OWN_FILE) as file:
        file.write(beginning)
        file.write(_bytes(table), starts[entry.name])


def text_side(folder: Path) -> EarTts:
    """The TTS of the checkpoint in `folder`, of which only the parts that the text table is made of have weights."""
    opened = checkpoint.open_folder(folder)
    networks = Networks(opened.config)
    checkpoint.quantise_modules(networks, opened.config)
    parameters = opened.parameters().items()
    networks.load_weights([item for item in parameters if layout.TEXT_SIDE.match(item[0])], strict=False)
    return networks.tts_model.tts_model
