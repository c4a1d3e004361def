"""Random checkpoints of any size, in the mlx-community layout: for tests, benchmarks and trying things out.

Every tensor has a generator of its own, seeded by the checkpoint's seed and its name, and is written in blocks: the
same seed gives the same bytes, and memory stays flat whatever the size.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ..config import ModelConfig
from ..errors import InputError
from ..text import WORD_STARTS, byte_alphabet
from . import assets, layout
from .config_file import parse_config
from .shards import INDEX_FILE

Kind = Literal["random", "deep", "full-4bit"]
VOICES = ("Aria", "Sofia")  # of the small `random` kind, so that there is a choice
GROUP_SIZE = 64  # of quantised weights, as in the published checkpoints
SHARD_BYTES = 5 * 10**9
BLOCK = 1_048_573  # values drawn at most; larger tensors repeat them. A prime, so that rows do not repeat each other
CODEBOOK_SCALE, CODEBOOK_DECAY = 0.6, 0.88  # each residual codebook is smaller than the one before it
# Id order of the released tokenizer's first tokens: control, roles, tools (the tool marks 20 to 22 are numbered only).
SPECIALS = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
    *("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_13>"),
    *("<TOOLCALL>", "</TOOLCALL>", "<TOOL_RESPONSE>", "</TOOL_RESPONSE>", "<AVAILABLE_TOOLS>", "</AVAILABLE_TOOLS>"),
    *("<SPECIAL_20>", "<SPECIAL_21>", "<SPECIAL_22>"),
]

# Mean and deviation of a tensor by name, first match; everything else has deviation gain * fan_in ** -0.5.
RULES: list[tuple[re.Pattern[str], float, float]] = [
    (layout.OFFSET_NORM, 0.0, 0.1),
    (re.compile(r"norm[^.]*\.weight$"), 1.0, 0.1),
    (re.compile(r"\.bias(_[ih]h_l\d+)?$"), 0.0, 0.1),
    (re.compile(r"\.mixer\.D$"), 1.0, 0.1),
    (re.compile(r"(?<!embed_subword)\.(embed_tokens|prediction\.embed)\."), 0.0, 0.5),
    (re.compile(r"\.pos_bias_[uv]$"), 0.0, 0.25),
    (re.compile(r"(\.gate|\.(cont|special)_emb\.weight|\.null_emb)$"), 0.0, 0.3),
    (re.compile(r"(\.bos_emb$|audio_prompt_latents\.)"), 0.0, 1.0),
    (re.compile(r"\.residual_scale$"), 0.6, 0.0),
    (re.compile(r"\.variance$"), 0.5, 0.0),
]
GAINS: list[tuple[re.Pattern[str], float]] = [
    (re.compile(r"(\.rnnt_joint\.pred\.weight|\.lstm\.weight_ih_l\d+)$"), 2.5),  # a symbol changes what comes next
]
SPECTRUM_GAIN = 0.3  # of the codec's last layer: speech that does not clip
BLANK_BIAS = 0.7  # of the largest of n unit normals: most frames bring no symbol


class _Planned(NamedTuple):
    """A tensor to write: its safetensors type and shape, and what draws its values, `BLOCK` at most."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    draw: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * {"BF16": 2}.get(self.dtype, 4)


def write_random(kind: Kind, out: Path, seed: int = 0) -> Path:
    """Write a random checkpoint into the new folder `out`, and return it.

    `random`: small, all widths distinct. `deep`: the released model's layer counts at width 64. `full-4bit`: the
    released model's sizes, about 9 GB. Raises InputError: an unknown kind, a bad seed, a folder in use, a full disk.
    """
    if kind not in get_args(Kind):
        raise InputError(f"There is no kind {kind!r}.", f"Kinds: {', '.join(get_args(Kind))}.")
    name, _, bits = kind.partition("-")
    raw = json.loads((assets.CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return write(raw, out, seed, bits=int(bits[0]) if bits else None, voices=VOICES if kind == "random" else None)


def write(
    raw: dict[str, Any], out: Path, seed: int = 0, *, bits: int | None = None, voices: Sequence[str] | None = None
) -> Path:
    """Write a random checkpoint of the runtime config `raw`: float32, or bfloat16 with an LLM quantised to `bits`.

    A quantised one has the published checkpoints' form: one setting for all layers, float32 scales, NeMo's buffers too.
    """
    if seed < 0:
        raise InputError(f"The seed is {seed}, it must be 0 or more.")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"{out} exists already and is not an empty folder.", "Name a new folder.")
    if not out.parent.is_dir():
        raise InputError(f"There is no folder {out.parent}.", "Make it first.")
    config = parse_config(raw)
    tokens = vocabulary(config.llm.vocab_size)
    plan: list[_Planned] = []
    for name, shape in sorted(layout.shapes(config, voices, buffers=bits is not None).items()):
        plan += _plan(name, shape, config, tokens, seed, bits)
    needed, free = sum(tensor.bytes for tensor in plan), shutil.disk_usage(out.parent).free
    if needed > free:
        raise InputError(f"{out} needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB.", "Free some space.")
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        partial.chmod(0o755)
        _write_json(partial / "config.json", _config(raw, bits))
        _write_tokenizer(partial, tokens)
        _write_shards(partial, plan)
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def vocabulary(size: int) -> list[str]:
    """Tokens by id: special ones, the letters of byte-level BPE, then words that no text encodes to."""
    letters = sorted(byte_alphabet())
    words = (f"Ġw{index}" if index % 2 else f"w{index}" for index in range(size))
    return [*SPECIALS, *letters, *words][:size]


def _config(raw: dict[str, Any], bits: int | None) -> dict[str, Any]:
    quantization = {"quantization": {"group_size": GROUP_SIZE, "bits": bits}} if bits else {}
    return raw | {"synthetic": True} | quantization


def _plan(
    name: str, shape: tuple[int, ...], config: ModelConfig, tokens: list[str], seed: int, bits: int | None
) -> Iterator[_Planned]:
    def rng(tensor: str) -> np.random.Generator:
        return np.random.default_rng([seed, zlib.crc32(tensor.encode())])

    if layout.is_integer(name):
        yield _Planned(name, "I32", shape, lambda: _integers(name, config, tokens, rng(name)))
    elif bits and layout.LANGUAGE_MATRIX.search(name):
        yield from _plan_quantised(name.removesuffix(".weight"), shape, bits, rng)
    else:
        narrow = bits and not name.endswith(".A_log")
        yield _Planned(name, "BF16" if narrow else "F32", shape, lambda: _floats(name, shape, config, rng))


def _plan_quantised(
    layer: str, shape: tuple[int, ...], bits: int, rng: Callable[[str], np.random.Generator]
) -> Iterator[_Planned]:
    """Affine weights `scale * q + bias` of uniform q, of the deviation that the plain weights would have."""
    rows, inputs = shape
    groups = (rows, inputs // GROUP_SIZE)
    steps = 2**bits - 1
    scale = _deviation(f"{layer}.weight", shape)[1] * math.sqrt(12) / steps
    words = (rows, inputs * bits // 32)

    def draw_words() -> np.ndarray:
        return rng(layer).integers(0, 2**32, min(math.prod(words), BLOCK), np.uint32)

    def draw_scales(factor: float) -> np.ndarray:
        jitter = rng(f"{layer}.scales").uniform(0.8, 1.2, min(math.prod(groups), BLOCK))
        return (factor * jitter).astype(np.float32)

    yield _Planned(f"{layer}.weight", "U32", words, draw_words)
    yield _Planned(f"{layer}.scales", "F32", groups, lambda: draw_scales(scale))
    yield _Planned(f"{layer}.biases", "F32", groups, lambda: draw_scales(-scale * steps / 2))


def _integers(name: str, config: ModelConfig, tokens: list[str], rng: np.random.Generator) -> np.ndarray:
    """Codes, ids and flags that agree with the tokenizer and the config."""
    codes, size = config.tts.codebook_size, config.llm.vocab_size
    if name.endswith("._control_codes"):
        values: Any = [codes + 2, codes + 1, codes]
    elif name.endswith(".codec_silence_tokens"):
        values = rng.integers(0, codes, config.tts.num_quantizers)
    elif name.endswith(".is_continuation"):
        values = [int(not token.startswith(WORD_STARTS)) for token in tokens] + [0]
    elif name.endswith(".special_flags"):
        values = [{config.bos_id: 1, config.eos_id: 2}.get(token, 0) for token in range(size)]
    else:  # pad_tensor: the last flag of each of the two tables
        values = [size - 1 if ".bos_eos_emb." in name else size]
    return np.asarray(values, np.int32)


def _deviation(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a tensor's values, so that signals keep their size from layer to layer."""
    for pattern, mean, deviation in RULES:
        if pattern.search(name):
            return mean, deviation
    gain = next((gain for pattern, gain in GAINS if pattern.search(name)), 1.0)
    if layout.CODEC_TRANSPOSED.search(name):
        return 0.0, shape[0] ** -0.5 if shape[-1] > 1 else SPECTRUM_GAIN * shape[1] ** -0.5
    return 0.0, gain * math.prod(shape[1:]) ** -0.5


def _floats(
    name: str, shape: tuple[int, ...], config: ModelConfig, rng: Callable[[str], np.random.Generator]
) -> np.ndarray:
    count = min(math.prod(shape), BLOCK)
    if name.endswith(".A_log"):
        values = np.log(rng(name).uniform(1, 16, count))  # Mamba-2 initialisation
    elif name.endswith(".dt_bias"):
        steps = np.exp(rng(name).uniform(math.log(1e-3), math.log(0.1), count))
        values = steps + np.log(-np.expm1(-steps))  # inverse of softplus
    elif name.endswith(".rvq_embs"):  # the codec's own codebooks, as in the released model
        books = [layout.CODEBOOK.format(q) for q in range(shape[0])]
        return np.concatenate([_floats(book, shape[1:], config, rng) for book in books])
    elif ".prvq.mus_list." in name:
        scale = CODEBOOK_SCALE * CODEBOOK_DECAY ** int(name.rsplit(".", 1)[1])
        values = rng(name).standard_normal(count, np.float32) * scale
    else:
        mean, deviation = _deviation(name, shape)
        values = mean + deviation * rng(name).standard_normal(count, np.float32)
    if name.endswith("joint_net.2.bias"):
        values[config.rnnt.blank_id] = BLANK_BIAS * math.sqrt(2 * math.log(count))
    return values.astype(np.float32)


def _encoded(tensor: _Planned) -> Iterator[memoryview]:
    """The bytes of a tensor, its drawn values repeated until it is full."""
    values = tensor.draw()
    if tensor.dtype == "BF16":  # round to nearest, ties to even
        bits = values.view(np.uint32)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    block = memoryview(values.tobytes())
    left = tensor.bytes
    while left:
        yield block[:left]
        left -= min(left, len(block))


def _write_shards(folder: Path, plan: list[_Planned]) -> None:
    """At least two files of about the same size, and their index."""
    total = sum(tensor.bytes for tensor in plan)
    shards: list[list[_Planned]] = [[] for _ in range(max(2, math.ceil(total / SHARD_BYTES)))]
    start = 0
    for tensor in plan:
        shards[start * len(shards) // total].append(tensor)
        start += tensor.bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_safetensors(path: Path, shard: list[_Planned]) -> None:
    """One file, tensor by tensor: a header of known length, then the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in shard:
        start, end = end, end + tensor.bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            for block in _encoded(tensor):
                stream.write(block)


def _write_tokenizer(folder: Path, tokens: list[str]) -> None:
    """Byte-level BPE without merges, in the files of the released checkpoint."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(SPECIALS)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    _write_json(folder / "special_tokens_map.json", names)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
