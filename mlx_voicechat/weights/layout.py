"""The one table between a checkpoint's tensors and the modules' parameters, read both ways; the only file with names.

The mlx-community layout keeps NVIDIA's names and PyTorch's axis orders (spec: checkpoint.md). A module's attribute
names repeat the tensor names, so shapes are asked of the module tree; everything that cannot repeat is listed here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..config import CODEC_CONTROL_CODES, ModelConfig
from ..networks.tree import Networks

Array = TypeVar("Array", mx.array, np.ndarray)
Shape = tuple[int, ...]

NETWORKS = ("perception", "rnnt", "language", "tts", "codec")
# Where each network's tensors stand, first match; the rest of a name is the network's own.
PREFIXES: list[tuple[str, re.Pattern[str]]] = [
    ("perception", re.compile(r"^stt_model\.perception\.")),
    ("rnnt", re.compile(r"^stt_model\.(?=rnnt_)")),
    ("language", re.compile(r"^stt_model\.")),
    ("codec", re.compile(r"^tts_model\.audio_codec\.")),
    ("tts", re.compile(r"^tts_model\.(tts_model\.)?")),
]
VOICE_PREFIX = "tts_model.audio_prompt_latents."
CODEBOOK = "tts_model.audio_codec.prvq.mus_list.{}"
CHARACTERS = "tts_model.tts_model.embed_subword.embed_tokens.weight"  # (characters, width)
TEXT_SIDE = re.compile(r"^tts_model\.tts_model\.(embed_subword|gated_fusion_audio_text)\.")  # makes the text table
SUBWORD = re.compile(r"^tts_model\.tts_model\.embed_subword\.")
QUERIES = re.compile(r"stt_model\.llm\.layers\.\d+\.mixer\.q_proj\.weight$")  # of the LLM's attentions
# Matrices of the LLM, which the published checkpoints quantise.
LANGUAGE_MATRIX = re.compile(
    r"^stt_model\.(embed_tokens|lm_head|function_head|llm\.layers\.\d+\.mixer\.\w+_proj)\.weight$"
)
# Linear layers of encoder, TTS backbone, code embedding, MoG head and the codec's blocks. Not: what the text table is
# made of (built once, exactly), convolutions, and the 1x1 ones between the strided ones (small, many rows).
SPEECH_MATRIX = re.compile(
    r"^(stt_model\.perception\.(?!encoder\.pre_encode\.conv\.|.*\.depthwise_conv\.)"
    r"|tts_model\.tts_model\.(backbone|mog_head|embed_code|gated_fusion_audio_text\.audio_proj)\."
    r"|tts_model\.audio_codec\.decoder\.layers\.\d+\.pwconv\d\.)(.*\.)?weight$"
)
# What computes in float32 (spec, precision): the speech networks whole, and the Mamba recurrence of the LLM.
FLOAT32 = re.compile(r"^(stt_model\.(perception|rnnt_decoder|rnnt_joint)|tts_model)\.|\.mixer\.(A_log|D|dt_bias)$")
# What the LLM's residual stream meets: one of these wider than bfloat16, and every product after it is float32.
STREAM = re.compile(r"^stt_model\.llm\.(norm_f|layers\.\d+\.(norm|mixer\.\w+_proj))\.")
STACK = re.compile(r"^stt_model\.llm\.")  # its blocks and the last norm
STREAM_AND_HEADS = re.compile(r"^stt_model\.(llm|lm_head|function_head)\.")  # widened with it; embedded rows are few
# What follows where LLM and encoder compute in bfloat16; of the LLM's mixers the recurrence stays float32.
NARROW = re.compile(
    r"^stt_model\.(perception|llm|lm_head|function_head|embed_tokens)\.(?!.*\.mixer\.(A_log|D|dt_bias)$)"
)
INTEGERS = ("_control_codes", ".codec_silence_tokens", ".pad_tensor", ".special_flags", ".is_continuation")
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
# Convolutions of kernel 1, matrices here, and how many axes of size 1 follow in PyTorch.
POINTWISE: list[tuple[re.Pattern[str], int]] = [
    (re.compile(r"\.pre_encode\.conv\.\d+\.weight$"), 2),
    (re.compile(r"(\.pointwise_conv\d|\.pwconv\d|\.audio_codec\.(encoder|decoder)\.layers\.\d+)\.weight$"), 1),
]


class Join(NamedTuple):
    """Stored names that are a parameter of another name: `where` they stand (`*`: anything), in this order.

    Several are one stack of rows, or a sum. `taker` is the layer beside them that takes the first one's rows.
    """

    where: str
    stored: tuple[str, ...]
    parameter: str
    added: bool = False
    taker: str = ""


LSTM = "stt_model.rnnt_decoder.prediction.dec_rnn.lstm."
JOINS = [
    Join("tts_model.tts_model.*self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj", taker="o_proj"),
    Join("tts_model.tts_model.*mlp.", ("gate_proj", "up_proj"), "gate_up_proj", taker="down_proj"),
    Join("stt_model.perception.*self_attn.", ("linear_q", "linear_k", "linear_v"), "linear_qkv", taker="linear_out"),
    Join(LSTM, ("weight_ih_l#",), "layers.#.Wx"),
    Join(LSTM, ("weight_hh_l#",), "layers.#.Wh"),
    Join(LSTM, ("bias_ih_l#", "bias_hh_l#"), "layers.#.bias", added=True),  # they only ever appear added
]


class Place(NamedTuple):
    """A name taken apart by one of JOINS: what stands before, the number for `#`, what stands after, and which part."""

    join: Join
    before: str
    number: str
    after: str
    part: int

    def name(self, template: str) -> str:
        return self.before + template.replace("#", self.number) + self.after


def _reader(where: str, template: str) -> re.Pattern[str]:
    before, name = re.escape(where).replace(r"\*", ".*"), re.escape(template).replace(r"\#", r"(?P<number>\d+)")
    return re.compile(rf"^(?P<before>{before}){name}(?P<after>(\..*)?)$")


STORED_READERS = [(join, i, _reader(join.where, part)) for join in JOINS for i, part in enumerate(join.stored)]
PARAMETER_READERS = [(join, 0, _reader(join.where, join.parameter)) for join in JOINS]


def _place(name: str, readers: Iterable[tuple[Join, int, re.Pattern[str]]]) -> Place | None:
    for join, part, reader in readers:
        if found := reader.match(name):
            return Place(join, found["before"], found.groupdict().get("number", ""), found["after"], part)
    return None


@lru_cache(maxsize=8192)  # of one checkpoint, asked for several times while it is opened
def _stored_place(name: str) -> Place | None:
    return _place(name, STORED_READERS)


def parameter_path(name: str, apart: Collection[str] = ()) -> str:
    """The parameter that a stored tensor, or one of its module's, goes into; `apart`: layers held in parts."""
    place = _stored_place(name)
    if place is None:
        return name
    layer, part = place.before + place.join.parameter, place.join.stored[place.part]
    return f"{layer}.{part}{place.after}" if layer in apart else place.name(place.join.parameter)


def stored_names(path: str) -> list[str]:
    """The stored tensors or modules that a parameter or module of the tree is made of, in stacking order."""
    place = _place(path, PARAMETER_READERS)
    if place is None:
        return [path]
    if place.after[1:].partition(".")[0] in place.join.stored:  # of a layer held in parts
        return [place.before + place.after[1:]]
    return [place.name(part) for part in place.join.stored]


def held_in_parts(quantization: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The layers of the tree whose stored parts are quantised unlike each other, which no stack of rows can be."""
    return {
        parameter_path(layer)
        for layer, entry in quantization.items()
        if is_stacked(layer) and any(quantization.get(part) != entry for part in fused_with(layer))
    }


def fused_with(name: str) -> list[str]:
    """The stored tensors that go into the same parameter as `name`, itself among them."""
    return stored_names(parameter_path(name))


def is_stacked(name: str) -> bool:
    """Whether a stored tensor is rows of a parameter that has others too."""
    place = _stored_place(name)
    return place is not None and len(place.join.stored) > 1 and not place.join.added


def is_added(name: str) -> bool:
    """Whether a stored tensor vanishes in another, to which it is added."""
    place = _stored_place(name)
    return place is not None and place.join.added and place.part > 0


def network(name: str) -> str | None:
    """Which of NETWORKS a tensor belongs to, None of no one; voices and the codes of silence are the TTS's."""
    return next((network for network, prefix in PREFIXES if prefix.match(name)), None)


def own_name(name: str) -> str:
    """A tensor's name within its network."""
    return next((name[found.end() :] for _, prefix in PREFIXES if (found := prefix.match(name))), name)


def voices(names: Iterable[str]) -> list[str]:
    """Names of the voices among tensors."""
    return sorted(name.removeprefix(VOICE_PREFIX) for name in names if name.startswith(VOICE_PREFIX))


def is_integer(name: str) -> bool:
    """Whether a tensor holds int32 codes, ids or flags."""
    return name.endswith(INTEGERS)


def is_widened(name: str, float32_llm: bool) -> bool:
    """Whether a floating-point tensor or parameter of this name becomes float32 when it is loaded."""
    return FLOAT32.search(name) is not None or (float32_llm and STREAM_AND_HEADS.match(name) is not None)


def is_narrowed(name: str) -> bool:
    """Whether one becomes bfloat16 when LLM and encoder compute in it."""
    return NARROW.match(name) is not None


def is_unused(name: str) -> bool:
    return UNUSED.search(name) is not None


def absent_networks(names: Iterable[str]) -> list[str]:
    """Those of NETWORKS of which a checkpoint with tensors of these names has nothing."""
    there = {network(name) for name in names}
    return [name for name in NETWORKS if name not in there]


# -- shapes ---------------------------------------------------------------------------------------------------------


def shapes(config: ModelConfig, voices: Sequence[str] | None = None, buffers: bool = False) -> dict[str, Shape]:
    """Every tensor of a checkpoint by name, as NVIDIA's file stores it (PyTorch axis orders).

    Asked of the module tree; of what no network reads what a checkpoint has all the same, and a latent for each of
    `voices` (default: the config's speaker). `buffers`: those of NeMo's featurizer too, which NVIDIA's file and the
    published ones carry unused.
    """
    tree = Networks(config, encoder=True)
    flat: Any = tree_flatten(tree.parameters(), destination={})
    own = {path: tuple(array.shape) for path, array in flat.items()}
    found = {name: shape for path in own for name, shape in stored_shapes(path, own)}
    tts = config.tts
    found["tts_model._control_codes"] = (CODEC_CONTROL_CODES,)
    found["tts_model.tts_model.audio_prompt_projection_W"] = (tts.hidden_size, tts.hidden_size)
    for quantizer in range(config.codec.num_quantizers):
        found[f"tts_model.audio_codec.prvq._variance_list.{quantizer}.variance"] = ()
    for voice in voices or (config.speaker,):
        found[VOICE_PREFIX + voice] = (1, tts.prompt_frames, tts.hidden_size)
    if buffers:
        found["stt_model.perception.preprocessor.featurizer.fb"] = (1, config.mel.features, config.mel.n_fft // 2 + 1)
        found["stt_model.perception.preprocessor.featurizer.window"] = (config.mel.window_samples,)
    return {name: to_torch_shape(name, shape) for name, shape in found.items()}


def stored_shapes(path: str, own: Mapping[str, Shape]) -> list[tuple[str, Shape]]:
    """What a parameter is stored as, in MLX's axis order; `own`: the shapes of all parameters of the tree."""
    names, place = stored_names(path), _place(path, PARAMETER_READERS)
    rows, *rest = own[path] or (0,)
    if place is None or place.join.added or len(names) == 1:
        return [(name, own[path]) for name in names]
    first = own[place.name(place.join.taker)][1]
    others = (rows - first) // (len(names) - 1)
    return [(name, (others if i else first, *rest)) for i, name in enumerate(names)]


def to_torch_shape(name: str, shape: Shape) -> Shape:
    """The inverse of `to_mlx_layout`, of shapes."""
    if not name.endswith(".weight"):
        return shape
    if len(shape) == 2:
        return shape + next(((1,) * ones for pattern, ones in POINTWISE if pattern.search(name)), ())
    if len(shape) == 3 and CODEC_TRANSPOSED.search(name):
        return (shape[2], shape[0], shape[1])  # (out, k, in) -> (in, out, k)
    return (shape[0], shape[-1], *shape[1:-1]) if len(shape) > 2 else shape


# -- arrays ---------------------------------------------------------------------------------------------------------


def mixes_rows(name: str, shape: Shape) -> bool:
    """Whether re-laying a PyTorch tensor moves its first axis: a transposed convolution, which is no work by rows."""
    return CODEC_TRANSPOSED.search(name) is not None and len(shape) == 3 and shape[-1] > 1


def matrix_shape(shape: Shape) -> Shape:
    """Of a linear layer as it is quantised: a PyTorch convolution of kernel 1 is a matrix."""
    return shape[:2] if all(size == 1 for size in shape[2:]) else shape


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


def assemble(weights: Mapping[str, mx.array], torch_layout: bool, apart: Collection[str] = ()) -> dict[str, mx.array]:
    """Checkpoint tensors -> parameters by module path; `apart`: layers held in parts. Lazy: nothing is evaluated.

    Raises KeyError with the name of an absent partner when only a part of a group is there.
    """
    laid: dict[str, mx.array] = {}
    for name, tensor in weights.items():
        if is_unused(name):
            continue
        if torch_layout:
            tensor = to_mlx_layout(name, tensor)
        laid[name] = tensor.astype(mx.float32) + 1.0 if OFFSET_NORM.search(name) else tensor
    out: dict[str, mx.array] = {}
    for path in dict.fromkeys(parameter_path(name, apart) for name in laid):
        parts = [laid[name] for name in stored_names(path)]
        if len(parts) > 1:
            place = _place(path, PARAMETER_READERS)
            added = place is not None and place.join.added
            out[path] = parts[0] + parts[1] if added else mx.concatenate(parts, axis=0)
        else:
            out[path] = parts[0]
    return out


def cast(path: str, array: mx.array, float32_llm: bool, narrow: bool = False) -> mx.array:
    """A tensor in the type it computes in and contiguous: no frame may cast or copy a weight. Widening is exact.

    `narrow`: LLM and encoder are rounded to bfloat16.
    """
    if array.dtype in (mx.int64, mx.uint64):
        array = array.astype(mx.int32)
    elif narrow and mx.issubdtype(array.dtype, mx.floating) and is_narrowed(path):
        array = array.astype(mx.bfloat16)
    elif array.dtype == mx.float64 or (mx.issubdtype(array.dtype, mx.floating) and is_widened(path, float32_llm)):
        array = array.astype(mx.float32)
    return mx.contiguous(array)
