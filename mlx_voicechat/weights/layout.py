"""The one table from a checkpoint's tensors to the modules' parameters: names, layouts, fusions, folded norms.

The mlx-community layout keeps NVIDIA's names and PyTorch's axis orders (spec: checkpoint.md). A module's attribute
names repeat the tensor names; everything that cannot is listed here, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import mlx.core as mx
import numpy as np

Array = TypeVar("Array", mx.array, np.ndarray)

# Tensors that no network reads at run time: codec variances, featurizer buffers, the speaker projection.
UNUSED = re.compile(r"(\._variance_list\.|preprocessor\.featurizer\.|audio_prompt_projection_W$|num_batches_tracked$)")
# Tensors that a conversation does not need but other uses do: assembled, never a fault when a module tree lacks them.
OPTIONAL = re.compile(r"^tts_model\.(audio_codec\.encoder\.|_control_codes$|audio_prompt_latents\.)")
# Norms whose stored weight is an offset from one (Gemma 3, T5-Gemma and the fusion norm of EAR-TTS).
OFFSET_NORM = re.compile(
    r"tts_model\.tts_model\."
    r"(backbone\.(.*layernorm|.*[qk]_norm|norm)|embed_subword\.backbone\.encoder\.(.*layernorm|norm)"
    r"|mog_head\.mlp_stack\.\d+(\.pre_norm|\.post_norm)?|gated_fusion_audio_text\.final_norm)\.weight$"
)
CODEC_TRANSPOSED = re.compile(r"audio_codec\.decoder\.layers\.(\d+)\.weight$")
RENAMES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\.dec_rnn\.lstm\.weight_ih_l(\d+)$"), r".dec_rnn.lstm.layers.\1.Wx"),
    (re.compile(r"\.dec_rnn\.lstm\.weight_hh_l(\d+)$"), r".dec_rnn.lstm.layers.\1.Wh"),
    (re.compile(r"\.dec_rnn\.lstm\.bias_ih_l(\d+)$"), r".dec_rnn.lstm.layers.\1.bias"),
    (re.compile(r"^tts_model\.audio_codec\.prvq\.mus_list\.(\d+)$"), r"tts_model.audio_codec.prvq.mus_list.\1"),
]
# Projections of one input that run as one matrix product, rows stacked in this order.
FUSIONS: list[tuple[re.Pattern[str], tuple[str, ...], str]] = [
    (re.compile(r"^tts_model\.tts_model\..*self_attn\."), ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (re.compile(r"^tts_model\.tts_model\..*mlp\."), ("gate_proj", "up_proj"), "gate_up_proj"),
    (re.compile(r"^stt_model\.perception\..*self_attn\."), ("linear_q", "linear_k", "linear_v"), "linear_qkv"),
]


def is_unused(name: str) -> bool:
    return UNUSED.search(name) is not None


def mixes_rows(name: str, shape: tuple[int, ...]) -> bool:
    """Whether re-laying a PyTorch tensor moves its first axis: a transposed convolution, which is no work by rows."""
    return CODEC_TRANSPOSED.search(name) is not None and len(shape) == 3 and shape[-1] > 1


def to_mlx_layout(name: str, tensor: Array) -> Array:
    """One PyTorch tensor in MLX's axis order: channels last in convolution kernels, pointwise ones as matrices.

    Of MLX or numpy; unless `mixes_rows`, a block of rows gives those rows.
    """
    if not name.endswith(".weight"):
        return tensor
    if mixes_rows(name, tensor.shape):
        return tensor.transpose(1, 2, 0)  # (in, out, k) -> (out, k, in)
    if tensor.ndim > 2 and all(size == 1 for size in tensor.shape[2:]):
        return tensor.reshape(tensor.shape[:2])  # pointwise: a matrix (out, in)
    if tensor.ndim == 4:
        return tensor.transpose(0, 2, 3, 1)
    if tensor.ndim == 3:
        return tensor.transpose(0, 2, 1)
    return tensor


def assemble(weights: Mapping[str, mx.array], torch_layout: bool) -> dict[str, mx.array]:
    """Checkpoint tensors -> parameters by module path. Lazy: nothing is evaluated.

    Raises KeyError with the name of an absent partner when only a part of a fused group is there.
    """
    out: dict[str, mx.array] = {}
    for name, tensor in weights.items():
        if is_unused(name):
            continue
        if torch_layout:
            tensor = to_mlx_layout(name, tensor)
        if OFFSET_NORM.search(name):
            tensor = tensor.astype(mx.float32) + 1.0
        out[_rename(name)] = tensor
    _add_lstm_biases(out)
    _fuse(out)
    return out


def _rename(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _add_lstm_biases(out: dict[str, mx.array]) -> None:
    """PyTorch keeps two bias vectors per LSTM layer; they only ever appear added."""
    second = re.compile(r"\.bias_hh_l(\d+)$")
    for name in [n for n in out if second.search(n)]:
        first = second.sub(r".layers.\1.bias", name)
        out[first] = out[first] + out.pop(name)


def _fuse(out: dict[str, mx.array]) -> None:
    for where, parts, fused in FUSIONS:
        for name in [n for n in out if where.search(n) and f".{parts[0]}." in n]:
            group = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            out[name.replace(f".{parts[0]}.", f".{fused}.")] = mx.concatenate([out.pop(n) for n in group], axis=0)


def sources(parameter: str) -> list[str]:
    """The checkpoint modules or tensors that a parameter path is made of, for error messages and quantised names."""
    for where, parts, fused in FUSIONS:
        if where.search(parameter) and f".{fused}" in parameter:
            return [parameter.replace(f".{fused}", f".{part}") for part in parts]
    return [parameter]
