"""A converted checkpoint against its unquantised source, in a short conversation whose tokens the source decides."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.gauges import memory
from mlx_voicechat.sound.recordings import INPUT_RATE_HZ, read_all
from mlx_voicechat.voicechat import VoiceChat, load
from mlx_voicechat.weights import assets, checkpoint, layout, precision
from mlx_voicechat.weights.shards import Stored

from .conversations import Run, measures, run, silence_dbfs
from .source import Say, Source

EXAMPLE = Path("examples", "question.wav")
LONGEST_SECONDS = 10.0
REPLY_SECONDS = 2.0  # of silence after the recording, in which the model answers
SILENCE_DBFS = -45.0  # root mean square of what the codes of silence decode to, at most


def recording(path: Path | None) -> np.ndarray:
    """Samples (S,) at the model's rate of a file or of the example; AudioError, InputError."""
    if path is None:
        package = assets.FOLDER.parents[1]
        places = (package / EXAMPLE, package.parent / EXAMPLE)  # installed, and a working copy
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise InputError("The example recording is not installed.", "Name a recording with --audio.")
    return np.asarray(read_all(path))[: round(LONGEST_SECONDS * INPUT_RATE_HZ)]


def compare(source: Source, target: Path, samples: np.ndarray, say: Say) -> str:
    """Lines that say how far the two agree. VoiceChatError: silence that the source keeps silent is not any more.

    The models are in memory one after the other, the source's language model in bfloat16 where float32 does not fit.
    """
    needed = {wide: _needed_bytes(source, wide) for wide in (True, False)}
    available = memory.machine().available
    if needed[False] > available:
        return (
            f"conversation: not compared, the unquantised source takes {memory.gigabytes(needed[False])} of memory "
            f"and {memory.gigabytes(available)} are available"
        )
    wide = needed[True] <= available
    if not wide:
        say("the source's language model is held in bf16 for the comparison: f32 does not fit this machine.")
    silence = np.zeros(round(REPLY_SECONDS * source.config.input_rate_hz), np.float32)
    heard = np.concatenate([samples, silence])
    model = reference(source, wide)
    expected, before = run(model, heard), silence_dbfs(model)
    del model
    mx.clear_cache()
    model = load(target, say, compile=False)
    got = run(model, heard, expected.ids)
    quiet = _silence(before, silence_dbfs(model), source.config.synthetic, target)
    return f"{_agreement(expected, got, source)}\n{quiet}"


def reference(source: Source, wide: bool) -> VoiceChat:
    """The source as a model, dequantised; its language model in float32 if that is what it holds and `wide`."""
    arrays: dict[str, mx.array] = {}
    for name in source.tensors:
        blocks = [block.array for block in source.blocks(name)]
        whole = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)
        narrow = not wide and layout.network(name) == "language" and mx.issubdtype(whole.dtype, mx.floating)
        arrays[name] = whole.astype(mx.bfloat16) if narrow else whole
        mx.eval(arrays[name])
        del blocks, whole
    stored = stored_types(source)
    assembled = layout.assemble(arrays, torch_layout=False)
    del arrays
    float32_llm = wide and precision.llm_is_float32(stored)
    settled = {path: layout.cast(path, array, float32_llm) for path, array in assembled.items()}
    del assembled
    config = replace(source.config, quantization={})
    with tempfile.TemporaryDirectory() as folder:  # a text table that is made here is no other program's
        parameters = checkpoint.Parameters(settled, Path(folder), stored)
        return VoiceChat(source.name, config, source.tokenizer, parameters, lambda text: None)


def stored_types(source: Source) -> dict[str, Stored]:
    """The source's tensors as if they were stored unquantised."""
    return {name: Stored(source.name, tensor.shape, tensor.dtype) for name, tensor in source.tensors.items()}


def _needed_bytes(source: Source, wide: bool) -> int:
    total = 0
    wide = wide and precision.llm_is_float32(stored_types(source))
    for name, tensor in source.tensors.items():
        half = layout.network(name) == "language" and not wide
        total += math.prod(tensor.shape) * (2 if half else 4)
    return total


def _agreement(expected: Run, got: Run, source: Source) -> str:
    found = measures(expected, got, source.config.output_rate_hz)
    return (
        f"conversation of {found.frames * source.config.frame_seconds:.1f} s, tokens as the unquantised source "
        f"chooses them: same text token {found.same_text:.1%}, same function token {found.same_function:.1%}, "
        f"same code {found.same_code:.1%}; KL text {found.kl_text:.2g}, function {found.kl_function:.2g} nats"
    )


def _silence(before: float, after: float, synthetic: bool, target: Path) -> str:
    if synthetic:
        return "silence: not checked, the weights are random"
    if before > SILENCE_DBFS:
        return f"silence: not checked, in the source its codes decode to {before:.0f} dBFS, which is none"
    if after > SILENCE_DBFS:
        raise VoiceChatError(
            f"{target}: the codes of silence decode to {after:.0f} dBFS, and to {before:.0f} dBFS in the source.",
            "Do not use it: choose another plan.",
        )
    return f"silence: decodes to {after:.0f} dBFS"
