"""A converted checkpoint against its unquantised source, in a short conversation whose tokens the source decides."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_voicechat import assets
from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.frame import Frame
from mlx_voicechat.gauges import memory
from mlx_voicechat.sound.recordings import INPUT_RATE_HZ, read_all
from mlx_voicechat.voicechat import VoiceChat, load
from mlx_voicechat.weights import checkpoint, layout, precision
from mlx_voicechat.weights.shards import Stored

from .source import Say, Source

EXAMPLE = Path("examples", "question.wav")
LONGEST_SECONDS = 10.0
REPLY_SECONDS = 2.0  # of silence after the recording, in which the model answers
SILENT_SECONDS = 1.0
SILENCE_DBFS = -45.0  # root mean square of what the codes of silence decode to, at most


class Run(NamedTuple):
    """What a model gave for n frames: ids (n, 2) of text and function, their logits (n, 2, V), codes (n, Q)."""

    ids: np.ndarray
    logits: np.ndarray
    codes: np.ndarray
    silence_dbfs: float


def recording(path: Path | None) -> np.ndarray:
    """Samples (S,) at the model's rate of a file or of the example; AudioError, InputError."""
    if path is None:
        package = assets.FOLDER.parent
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
    expected = run(reference(source, wide), heard)
    mx.clear_cache()
    got = run(load(target, say, compile=False), heard, expected.ids)
    quiet = _silence(expected.silence_dbfs, got.silence_dbfs, source.config.synthetic, target)
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


def run(model: VoiceChat, samples: np.ndarray, ids: np.ndarray | None = None) -> Run:
    """One conversation; `ids` (n, 2) replace the model's choices after the logits are noted."""
    frames: list[Frame] = []
    logits: list[np.ndarray] = []
    choose = model.language.choose

    def noted(hidden: mx.array) -> tuple[mx.array, mx.array]:
        both = mx.stack(list(model.language.logits(hidden[:, -1]))).squeeze(1).astype(mx.float32)
        logits.append(np.array(both))
        return choose(hidden)

    session = model.session(seed=0)
    session.observe(frames.append)
    model.language.choose = noted  # type: ignore[method-assign]
    size = model.config.frame_samples_in
    for index, start in enumerate(range(0, len(samples) - size + 1, size)):
        if ids is not None:
            session.force(text=int(ids[index, 0]), function=int(ids[index, 1]))
        session.push(samples[start : start + size])
    return Run(
        np.array([(frame.text_id, frame.function_id) for frame in frames]),
        np.stack(logits),
        np.array([frame.codes for frame in frames]),
        silence_dbfs(model),
    )


def silence_dbfs(model: VoiceChat) -> float:
    """Level of what the codes of silence decode to."""
    frames = round(SILENT_SECONDS / model.config.frame_seconds)
    codes = mx.broadcast_to(model.speech.codec_silence_tokens, (1, frames, model.config.codec.num_quantizers))
    power = float(mx.mean(mx.square(model.codec.whole(codes))))
    return 10 * math.log10(max(power, 1e-20))


def divergence(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence in nats of softmax(got) from softmax(expected), logits (..., V) -> (...)."""
    first, second = (_log_softmax(logits.astype(np.float64)) for logits in (expected, got))
    return np.sum(np.exp(first) * (first - second), axis=-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _agreement(expected: Run, got: Run, source: Source) -> str:
    same = (expected.logits.argmax(-1) == got.logits.argmax(-1)).mean(axis=0)
    apart = divergence(expected.logits, got.logits).mean(axis=0)
    codes = (expected.codes == got.codes).mean()
    seconds = len(expected.ids) * source.config.frame_seconds
    return (
        f"conversation of {seconds:.1f} s, tokens as the unquantised source chooses them: "
        f"same text token {same[0]:.1%}, same function token {same[1]:.1%}, same code {codes:.1%}; "
        f"KL text {apart[0]:.2g}, function {apart[1]:.2g} nats"
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
