"""Every tensor of a converted checkpoint against its source: exact where it was copied, else within a bound."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_voicechat.errors import VoiceChatError
from mlx_voicechat.weights.checkpoint import CONVERSION_KEY
from mlx_voicechat.weights.shards import some_of

from . import gptq, rounding
from .calibration import Calibration
from .conversion import ROUNDED_KEY, Job, OutputTensor, Progress, as_bytes
from .plans import Quantised
from .rounding import Layer, rows_of
from .source import BLOCK_BYTES, Source, open_source, stored_bytes

BFLOAT16 = 2.0**-8  # half a unit in the last place, of the value
AFFINE_STEPS = 1.1  # MLX moves the scale so that zero is exact: the far end may lie a step outside
# Of the largest value of a group: where powers of two scale, it is up to twice the widest number below it.
FIXED_BOUNDS = {"mxfp4": 1 / 4, "mxfp8": 1 / 8, "nvfp4": 1 / 4}


def verify_tensors(job: Job, target: Path, progress: Progress = lambda done, total: None) -> str:
    """One line that says what was compared; VoiceChatError names the tensors that are not what they should be."""
    exact = rounded = quantised = done = 0
    wrong: list[str] = []
    with open_source(str(target)) as result:
        if replace(result.config, quantization={}) != replace(job.source.config, quantization={}):
            raise VoiceChatError(f"{target}: config.json does not say what the source's says.", "Convert it again.")
        layers = {layer.tensor.name: layer for layer in job.layers}
        for output in job.outputs:
            name = output.tensor.name
            if result.tensors[name].shape != output.tensor.shape:
                wrong.append(name)
            elif name in layers and job.calibration is not None:
                if not _as_rounded(job.source, result, layers[name], job.calibration):
                    wrong.append(name)
            elif not _same(job.source, result, output):
                wrong.append(name)
            if output.copied or output.entries[0].dtype == output.tensor.dtype:
                exact += 1
            elif isinstance(output.setting, Quantised):
                quantised += 1
            else:
                rounded += 1
            done += sum(entry.bytes for entry in output.entries)
            progress(done, job.bytes)
    if wrong:
        raise VoiceChatError(
            f"{target}: {len(wrong)} tensors are not what the source holds: {some_of(wrong)}.",
            "Do not use it: remove it and convert again.",
        )
    return f"tensors: {exact} exact, {rounded} within rounding, {quantised} within the quantiser's bound"


def _same(source: Source, result: Source, output: OutputTensor) -> bool:
    name, written = output.tensor.name, result.tensors[output.tensor.name]
    if written.quantised is not None and output.copied:
        parts = output.tensor.parts
        return all(_equal(source, result, name, part) for part in parts)
    if written.quantised is None and output.tensor.quantised is None and written.dtype == output.tensor.dtype:
        return _equal(source, result, name, "")
    rows = _rows(source, output)
    blocks = zip(source.blocks(name, rows), result.blocks(name, rows), strict=True)
    if written.quantised is None:
        return all(_within(a.array, b.array, _rounding(a.array)) for a, b in blocks)
    scales = result.stored(name, "scales", rows)
    biases = result.stored(name, "biases", rows) if "biases" in written.parts else None
    for (a, b), scale in zip(blocks, scales, strict=True):
        bias = None if biases is None else next(biases).array
        if not _within(a.array, b.array, _bound(a.array, scale.array, bias, written.quantised)):
            return False
    return True


def _as_rounded(source: Source, result: Source, layer: Layer, calibration: Calibration) -> bool:
    """Whether a calibrated layer is what was rounded, and stands for its weight on the calibration's inputs.

    That is, loses less than all of its outputs: it makes up for other layers' losses, and single weights may move far.
    """
    name = layer.tensor.name
    stored = result.tensors[name].parts
    whole = (mx.concatenate([rows.array for rows in result.stored(name, part)]) for part in stored)
    if rounding.digest(whole) != result.raw[CONVERSION_KEY].get(ROUNDED_KEY, {}).get(name):
        return False
    moment = calibration.moments(layer.module, layer.tensor.shape[1]).matrix
    lost = given = 0.0
    for weight, written in zip(rows_of(source, layer), rows_of(result, layer), strict=True):
        lost += gptq.loss(weight - written, moment)
        given += gptq.loss(weight, moment)
    return lost < given


def _rows(source: Source, output: OutputTensor) -> int:
    shape = output.tensor.shape
    if not shape or source.read_whole(output.tensor):
        return max(1, shape[0] if shape else 1)
    return max(1, BLOCK_BYTES // (4 * max(1, math.prod(shape[1:]))))


def _equal(source: Source, result: Source, name: str, part: str) -> bool:
    rows = _rows_of_part(source, name, part)
    pairs = zip(source.stored(name, part, rows), result.stored(name, part, rows), strict=True)
    return all(bool(mx.array_equal(as_bytes(a.array), as_bytes(b.array))) for a, b in pairs)


def _rows_of_part(source: Source, name: str, part: str) -> int:
    tensor = source.tensors[name]
    stored = tensor.parts[part]
    count = stored.shape[0] if stored.shape else 1
    if source.read_whole(tensor):
        return max(1, tensor.shape[0], count)
    return max(1, BLOCK_BYTES * max(1, count) // max(1, stored_bytes(stored)))


def _rounding(array: mx.array) -> mx.array:
    return mx.abs(array.astype(mx.float32)) * BFLOAT16


def _bound(weights: mx.array, scales: mx.array, biases: mx.array | None, settings: Quantised) -> mx.array:
    """Largest error of each weight (rows, inputs): the quantiser's, and the rounding of weight, scale and bias."""
    size = mx.abs(weights.astype(mx.float32)).reshape(len(weights), -1, settings.group_size)
    if biases is None:
        bound = mx.max(size, axis=-1, keepdims=True) * FIXED_BOUNDS[settings.mode] + size * BFLOAT16
        return bound.reshape(weights.shape)
    step = mx.abs(scales.astype(mx.float32))[..., None]
    bias = mx.abs(biases.astype(mx.float32))[..., None]
    bound = AFFINE_STEPS * step + 2 * BFLOAT16 * (step * (2**settings.bits - 1) + bias + size)
    return bound.reshape(weights.shape)


def _within(value: mx.array, result: mx.array, bound: mx.array) -> bool:
    """Values that are no numbers must be the same ones."""
    value, result = value.astype(mx.float32), result.astype(mx.float32)
    close = (mx.abs(value - result) <= bound) | (value == result) | (mx.isnan(value) & mx.isnan(result))
    return bool(mx.all(close))
