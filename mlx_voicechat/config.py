"""The facts of a checkpoint: one frozen dataclass per network, read from `config.json`.

Facts have no default: `read_config` reports every missing or mistyped key at once. The few keys a checkpoint may lack
are read with `optional`. Constants that no config holds stand here once, each with its source.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from .errors import CheckpointError
from .weights import quantization
from .weights.shards import verify

MODEL_TYPE = "nemotron_voicechat"
RUNTIME_CONFIG_VERSION = 2

RMS_EPS = 1e-6  # Gemma 3 and T5-Gemma model cards: rms_norm_eps
GEMMA_QUERY_SCALE = 256**-0.5  # Gemma 3 and T5-Gemma: query_pre_attn_scalar 256, whatever the head size
GEMMA_SOFT_CAP = 50.0  # T5-Gemma: attn_logit_softcapping
ROPE_BASE_LOCAL = 1e4  # Gemma 3: rope_local_base_freq; T5-Gemma: rope_theta
ROPE_BASE_GLOBAL = 1e6  # Gemma 3: rope_theta of the global layers
GLOBAL_LAYER_PERIOD = 6  # Gemma 3: sliding_window_pattern
CODE_PASSES = 8  # NeMo DuplexEARTTS: inference iterations of the masked code generation
CODEC_MAGNITUDE_LIMIT = 100.0  # NeMo RVQVAEModel: spectral magnitude limit
CODEC_CONTROL_CODES = 3  # NeMo DuplexEARTTS: bos, eos and pad speech codes follow the codebook's own
ENCODER_NORM_EPS = 1e-5  # torch.nn.LayerNorm default, NeMo ConformerEncoder
CODEC_NORM_EPS = 1e-6  # NeMo RVQVAEModel: ConvNeXt LayerNorm
ENCODER_POSITION_BASE = 10000.0  # NeMo RelPositionalEncoding, after Dai et al. 2019 (Transformer-XL)
PREEMPHASIS = 0.97  # NeMo AudioToMelSpectrogramPreprocessor default
LOG_GUARD = 2.0**-24  # NeMo AudioToMelSpectrogramPreprocessor default
LLM_NORM_EPS = 1e-5  # Nemotron-H: layer_norm_epsilon
MAX_SYMBOLS = 10  # NeMo greedy RNNT decoding: symbols a frame

# Bounds that tell a broken file before anything is built from it.
MAX_SIZE = 2**24  # widths and ids: ids are read from the device as float32, exact up to here
MAX_COUNT = 1000  # layers and the like, each a Python object
MAX_NUMBER = 1e30  # of any kind; float32 holds it
MIN_FLOAT = 1e-6  # durations, which others are divided by

Q_PROJ = re.compile(r"stt_model\.llm\.layers\.\d+\.mixer\.q_proj\.weight$")

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]  # of a checkpoint's tensors by name


@dataclass(frozen=True)
class MelConfig:
    """Log-mel front end; lengths in samples at `sample_rate` Hz."""

    sample_rate: int
    features: int
    n_fft: int
    window_samples: int
    hop_samples: int
    preemphasis: float
    log_guard: float


@dataclass(frozen=True)
class EncoderConfig:
    """FastConformer encoder; D = `d_model`, `left_frames` = frames of left attention context."""

    features: int
    n_layers: int
    d_model: int
    n_heads: int
    ff_expansion_factor: int
    subsampling_factor: int
    subsampling_channels: int
    conv_kernel_size: int
    left_frames: int
    output_dim: int

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def subsampled_features(self) -> int:
        """Frequency bins left after the strided convolutions, each padded 2 before and 1 after."""
        bins = self.features
        for _ in range(int(math.log2(self.subsampling_factor))):
            bins = bins // 2 + 1
        return bins


@dataclass(frozen=True)
class RnntConfig:
    """RNNT prediction and joint network; `pieces` are SentencePiece pieces, the blank id follows the last."""

    encoder_hidden: int
    pred_hidden: int
    pred_layers: int
    joint_hidden: int
    blank_id: int
    max_symbols: int
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class LlmConfig:
    """Nemotron-H; H = `hidden_size`, V = `vocab_size`. `pattern`: M Mamba-2, * attention, - MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    conv_kernel: int
    n_groups: int
    norm_eps: float
    pattern: str
    attention_bias: bool
    mamba_proj_bias: bool
    mlp_bias: bool
    use_bias: bool
    use_conv_bias: bool
    time_step_limit: tuple[float, float] | None
    max_positions: int | None = None  # longest prompt; None: not stated

    @property
    def mamba_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the Mamba convolution: x, B and C."""
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size


@dataclass(frozen=True)
class CharacterEncoderConfig:
    """T5-Gemma encoder over the characters of a token."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    char_vocab_size: int


@dataclass(frozen=True)
class MogConfig:
    """Mixture-of-Gaussians head: C = `num_predictions` components of rank R = `low_rank`."""

    intermediate_size: int
    low_rank: int
    min_log_std: float
    num_layers: int
    num_predictions: int


@dataclass(frozen=True)
class TtsConfig:
    """EAR-TTS; W = `hidden_size`, Z = `latent_size`, Q = `num_quantizers`, K = `codebook_size`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    latent_size: int
    num_quantizers: int
    codebook_size: int
    exponent: float
    guidance_scale: float
    top_p: float
    noise_scale: float
    prompt_frames: int
    characters: CharacterEncoderConfig
    mog: MogConfig

    @property
    def mask_code(self) -> int:
        """The code that stands for "not yet known"; it adds nothing to an embedding."""
        return self.codebook_size

    @property
    def pass_counts(self) -> tuple[int, ...]:
        """Codebooks filled by each pass that fills any; they sum to Q (NeMo DuplexEARTTS schedule)."""
        passes, exponent = CODE_PASSES, self.exponent
        masked = [
            math.ceil((1 - (i / passes) ** exponent) ** (1 / exponent) * self.num_quantizers) for i in range(passes + 1)
        ]
        return tuple(a - b for a, b in pairwise(masked) if a > b)


@dataclass(frozen=True)
class CodecConfig:
    """Residual VQ codec; one code frame is `frame_samples` samples at `sample_rate` Hz."""

    sample_rate: int
    base_channels: int
    channel_multipliers: tuple[int, ...]
    downsample_rates: tuple[int, ...]
    blocks_per_stage: int
    block_kernel_size: int
    latent_dim: int
    n_fft: int
    hop_length: int
    num_quantizers: int
    codebook_size: int

    @property
    def frame_samples(self) -> int:
        return self.hop_length * math.prod(self.downsample_rates)

    @property
    def bins(self) -> int:
        return self.n_fft // 2 + 1


@dataclass(frozen=True)
class ModelConfig:
    """Everything `config.json` says. `quantization`: `{"group_size", "bits", "mode"}` of each quantised layer."""

    mel: MelConfig
    encoder: EncoderConfig
    rnnt: RnntConfig
    llm: LlmConfig
    tts: TtsConfig
    codec: CodecConfig
    bos_id: int
    eos_id: int
    pad_id: int
    silence_id: int
    input_rate_hz: int
    output_rate_hz: int
    frame_seconds: float
    function_weight: float
    text_weight: float
    user_weight: float
    pad_boost: float
    bos_boost: float
    eos_boost: float
    speaker: str
    default_system_prompt: str
    synthetic: bool
    demonstration: str
    quantization: Mapping[str, Mapping[str, Any]]

    @property
    def quiet_ids(self) -> frozenset[int]:
        """Tokens of both channels that are no text."""
        return frozenset((self.pad_id, self.silence_id, self.bos_id, self.eos_id))

    @property
    def frame_samples_in(self) -> int:
        return round(self.input_rate_hz * self.frame_seconds)

    @property
    def frame_samples_out(self) -> int:
        return self.codec.frame_samples

    @property
    def budget_ms(self) -> float:
        return self.frame_seconds * 1000


class _Reader:
    """Reads dotted keys of nested dictionaries and remembers every fault, so that one error can list them all."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def find(self, key: str) -> Any:
        node: Any = self.raw
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return node

    def need(self, key: str, kind: type[T], *aliases: str) -> T:
        for name in (key, *aliases):
            value = self.find(name)
            if value is not None:
                return self._typed(name, value, kind)
        self.missing.append(key)
        return self._empty(kind)

    def optional(self, key: str, default: T, *aliases: str) -> T:
        for name in (key, *aliases):
            value = self.find(name)
            if value is not None:
                return self._typed(name, value, type(default))
        return default

    def within(self, key: str, kind: type[T], low: float, high: float, *aliases: str) -> T:
        value: Any = self.need(key, kind, *aliases)
        if low <= value <= high:
            return value
        self.wrong.append(f"{key} is {value!r}, expected a number in {low}..{high}")
        return self._empty(kind)

    def size(self, key: str, *aliases: str) -> int:
        return self.within(key, int, 1, MAX_SIZE, *aliases)

    def count(self, key: str) -> int:
        return self.within(key, int, 1, MAX_COUNT)

    def letters(self, key: str) -> str:
        """A string, or the list of its letters."""
        value = self.find(key)
        if isinstance(value, list) and all(isinstance(letter, str) and len(letter) == 1 for letter in value):
            return "".join(value)
        return self.need(key, str)

    def sizes(self, key: str) -> tuple[int, ...]:
        values = self.need(key, list)
        if not all(type(value) is int and 1 <= value <= MAX_SIZE for value in values):
            self.wrong.append(f"{key} is {values!r}, expected whole numbers above 0")
            return ()
        return tuple(values)

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.need(key, list)
        if not all(isinstance(value, str) for value in values):
            self.wrong.append(f"{key} holds something that is no string")
            return ()
        return tuple(values)

    def require_true(self, key: str) -> None:
        if not self.need(key, bool) and key not in self.missing:
            self.wrong.append(f"{key} must be true: this program has no other path")

    @staticmethod
    def _empty(kind: type[T]) -> T:
        return kind(1) if kind in (int, float) else kind()  # type: ignore[call-arg]

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind in (int, float) and isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            self.wrong.append(f"{key} is not a finite number of usual size")
            return self._empty(kind)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.wrong.append(f"{key} is {value!r}, expected {kind.__name__}")
            return self._empty(kind)
        return value


def read_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`, and from its weights' headers what only they say.

    Raises CheckpointError that lists everything missing or at odds, and what `shards.verify` raises.
    """
    raw, where = read_json(folder), str(folder / "config.json")
    _check_kind(raw, where)
    return parse_config(raw, where, {name: entry.shape for name, entry in verify(folder).items()})


def check_config(folder: Path) -> None:
    """Raise CheckpointError for a `config.json` that no weights could go with; they need not be there yet."""
    raw = read_json(folder)
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("head_dim") is None:  # the weights say it: any will do
        raw["text_config"] = text | {"head_dim": 1}
    parse_config(raw, str(folder / "config.json"))


def read_json(folder: Path) -> dict[str, Any]:
    """`folder/config.json` as it stands; raises CheckpointError when it is absent, broken or no JSON object."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json.", "Name a checkpoint folder or a hub id.") from None
    except (OSError, ValueError, RecursionError) as error:
        remedy = f"If it is damaged, remove {os.path.realpath(path)} and get it again."
        raise CheckpointError(f"{path} cannot be read: {error}.", remedy) from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return raw


def parse_config(raw: Mapping[str, Any], where: str = "config.json", shapes: Shapes | None = None) -> ModelConfig:
    """Turn a runtime config into a ModelConfig; raises CheckpointError that names `where`.

    `shapes`: of the tensors that go with it; which layers are quantised follows from them, and what `raw` leaves out.
    """
    from .weights import inventory  # which is made of this module's types

    _check_kind(raw, where)
    reader = _Reader(raw)
    config = _model(reader, shapes or {})
    faults = reader.wrong + ([] if reader.missing or reader.wrong else _contradictions(config))
    if reader.missing:
        faults.insert(0, "missing: " + ", ".join(reader.missing))
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}.", "The file is incomplete or edited: get it again.")
    plain = {name.removesuffix(".weight"): shape for name, shape in inventory.tensors(config).items()}
    return replace(config, quantization=quantization.resolve(raw, shapes, plain, where))


def is_original(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of NVIDIA's original, which is to be converted."""
    return raw.get("model_type") is None and bool({"model", "data"} & raw.keys())


def _check_kind(raw: Mapping[str, Any], where: str) -> None:
    kind = raw.get("model_type")
    if is_original(raw):
        raise CheckpointError(
            f"{where} is NVIDIA's original layout, which does not load directly.",
            f"Convert it: `mlx-voicechat convert --source {Path(where).parent} --output FOLDER --plan 8bit`; "
            "or use for example mlx-community/NemotronLabs-VoiceChat-11B-4bit.",
        )
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{where} is not a VoiceChat checkpoint: model_type is {kind!r}, expected {MODEL_TYPE!r}.",
            "Use for example mlx-community/NemotronLabs-VoiceChat-11B-4bit.",
        )
    version = raw.get("mlx_runtime_config_version", RUNTIME_CONFIG_VERSION)
    if not isinstance(version, int) or version > RUNTIME_CONFIG_VERSION:
        raise CheckpointError(
            f"{where}: mlx_runtime_config_version is {version!r}, this program reads up to {RUNTIME_CONFIG_VERSION}.",
            "Update mlx-voicechat.",
        )


def _model(r: _Reader, shapes: Shapes) -> ModelConfig:
    frame_seconds = r.within("frame_duration", float, MIN_FLOAT, MAX_SIZE)
    output_rate_hz = r.size("output_sample_rate")
    return ModelConfig(
        mel=_mel(r),
        encoder=_encoder(r),
        rnnt=_rnnt(r),
        llm=_llm(r, shapes),
        tts=_tts(r, frame_seconds),
        codec=_codec(r),
        bos_id=r.within("bos_token_id", int, 0, MAX_SIZE),
        eos_id=r.within("eos_token_id", int, 0, MAX_SIZE),
        pad_id=r.within("pad_token_id", int, 0, MAX_SIZE),
        silence_id=r.within("silence_token_id", int, 0, MAX_SIZE),
        input_rate_hz=r.size("input_sample_rate"),
        output_rate_hz=output_rate_hz,
        frame_seconds=frame_seconds,
        function_weight=r.need("function_channel_weight", float),
        text_weight=r.optional("text_channel_weight", 1.0),
        user_weight=r.optional("user_channel_weight", 1.0),
        pad_boost=r.optional("inference_pad_boost", 0.0),
        bos_boost=r.optional("inference_bos_boost", 0.0),
        eos_boost=r.optional("inference_eos_boost", 0.0),
        speaker=r.need("speaker", str),
        default_system_prompt=r.optional("default_system_prompt", ""),
        synthetic=r.optional("synthetic", False),
        demonstration=r.optional("demonstration", ""),
        quantization={},
    )


def _mel(r: _Reader) -> MelConfig:
    p = "audio_config.preprocessor."
    rate = r.size(p + "sample_rate")
    return MelConfig(
        sample_rate=rate,
        features=r.size(p + "features"),
        n_fft=r.size(p + "n_fft"),
        window_samples=round(r.within(p + "window_size", float, MIN_FLOAT, MAX_SIZE) * rate),
        hop_samples=round(r.within(p + "window_stride", float, MIN_FLOAT, MAX_SIZE) * rate),
        preemphasis=r.optional(p + "preemph", PREEMPHASIS),
        log_guard=r.optional(p + "log_zero_guard_value", LOG_GUARD),
    )


def _encoder(r: _Reader) -> EncoderConfig:
    p = "audio_config.encoder."
    context: Any = r.need(p + "att_context_size", list)
    if context and isinstance(context[0], list):
        context = context[0]
    if p + "att_context_size" not in r.missing and (
        len(context) != 2 or not isinstance(context[0], int) or context[0] < 0 or context[1] != 0
    ):
        r.wrong.append(f"{p}att_context_size is {context!r}, expected [left, 0]: no look-ahead")
    return EncoderConfig(
        features=r.size(p + "feat_in"),
        n_layers=r.count(p + "n_layers"),
        d_model=r.size(p + "d_model"),
        n_heads=r.size(p + "n_heads"),
        ff_expansion_factor=r.size(p + "ff_expansion_factor"),
        subsampling_factor=r.size(p + "subsampling_factor"),
        subsampling_channels=r.size(p + "subsampling_conv_channels"),
        conv_kernel_size=r.size(p + "conv_kernel_size"),
        left_frames=context[0] if context and isinstance(context[0], int) else 0,
        output_dim=r.size("audio_config.output_dim", "text_config.hidden_size"),
    )


def _rnnt(r: _Reader) -> RnntConfig:
    a = "audio_config."
    pieces = r.strings("rnnt_vocabulary")
    return RnntConfig(
        encoder_hidden=r.size(a + "joint.encoder_hidden"),
        pred_hidden=r.size(a + "decoder.pred_hidden"),
        pred_layers=r.count(a + "decoder.pred_rnn_layers"),
        joint_hidden=r.size(a + "joint.joint_hidden"),
        blank_id=r.size("rnnt_blank_id") if r.find("rnnt_blank_id") is not None else len(pieces),
        max_symbols=r.count(a + "max_symbols") if r.find(a + "max_symbols") is not None else MAX_SYMBOLS,
        pieces=pieces,
    )


def _llm(r: _Reader, shapes: Shapes) -> LlmConfig:
    p = "text_config."
    return LlmConfig(
        vocab_size=r.size(p + "vocab_size"),
        hidden_size=r.size(p + "hidden_size"),
        intermediate_size=r.size(p + "intermediate_size"),
        num_hidden_layers=r.count(p + "num_hidden_layers"),
        num_attention_heads=r.size(p + "num_attention_heads"),
        num_key_value_heads=r.size(p + "num_key_value_heads"),
        head_dim=_head_dim(r, shapes),
        mamba_num_heads=r.size(p + "mamba_num_heads"),
        mamba_head_dim=r.size(p + "mamba_head_dim"),
        ssm_state_size=r.size(p + "ssm_state_size", p + "mamba_state_dim"),
        conv_kernel=r.size(p + "conv_kernel"),
        n_groups=r.size(p + "n_groups", p + "mamba_num_groups"),
        norm_eps=r.optional(p + "layer_norm_epsilon", LLM_NORM_EPS, p + "rms_norm_eps"),
        pattern=r.letters(p + "hybrid_override_pattern"),
        attention_bias=r.optional(p + "attention_bias", False),
        mamba_proj_bias=r.optional(p + "mamba_proj_bias", False),
        mlp_bias=r.optional(p + "mlp_bias", False),
        use_bias=r.optional(p + "use_bias", False),
        use_conv_bias=r.optional(p + "use_conv_bias", True),
        time_step_limit=_time_step_limit(r, p + "time_step_limit"),
        max_positions=max(0, r.optional(p + "max_position_embeddings", 0)) or None,
    )


def _head_dim(r: _Reader, shapes: Shapes) -> int:
    """As stated, else what the rows of an attention layer's q_proj say."""
    key, heads = "text_config.head_dim", r.optional("text_config.num_attention_heads", 0)
    rows = next((shape[0] for name, shape in shapes.items() if Q_PROJ.match(name) and shape), 0)
    if r.find(key) is not None or heads < 1 or rows < heads or rows % heads:
        return r.size(key)
    return rows // heads


def _time_step_limit(r: _Reader, key: str) -> tuple[float, float] | None:
    """`[low, high]`; None for bounds that bound nothing, as what lies between them is positive.

    No upper bound is written as Infinity, null, or as transformers writes it, {"__float__": "Infinity"}.
    """
    limit: list[Any] = r.optional(key, [])
    values = [end.get("__float__") if isinstance(end, dict) else end for end in limit]
    values = [bound if end in (None, "Infinity") else end for end, bound in zip(values, (0.0, math.inf), strict=False)]
    numbers = [float(end) for end in values if type(end) is float or (type(end) is int and abs(end) <= MAX_NUMBER)]
    if limit and (len(limit) != 2 or len(numbers) != 2 or not numbers[0] <= numbers[1] or numbers[0] == math.inf):
        r.wrong.append(f"{key} is {limit!r}, expected two numbers, the lower one first")
        return None
    low, high = numbers or (0.0, math.inf)
    return None if low <= 0 and high == math.inf else (low, high)


def _tts(r: _Reader, frame_seconds: float) -> TtsConfig:
    p = "tts_config."
    for flag in (
        "disable_eos_prediction",
        "use_gated_fusion_for_text_audio",
        "use_subword_flag_emb",
        "use_bos_eos_emb",
        "use_audio_prompt_frozen_projection",
    ):
        r.require_true(p + flag)
    c, m = p + "character_encoder.", p + "mog_head."
    return TtsConfig(
        hidden_size=r.size(p + "hidden_size"),
        intermediate_size=r.size(p + "intermediate_size"),
        num_hidden_layers=r.count(p + "num_hidden_layers"),
        num_attention_heads=r.size(p + "num_attention_heads"),
        num_key_value_heads=r.size(p + "num_key_value_heads"),
        head_dim=r.size(p + "head_dim"),
        sliding_window=r.size(p + "sliding_window"),
        latent_size=r.size(p + "latent_size"),
        num_quantizers=r.count(p + "num_quantizers"),
        codebook_size=r.size(p + "codebook_size"),
        exponent=r.within(p + "exponent", float, MIN_FLOAT, MAX_SIZE),
        guidance_scale=r.within(p + "guidance_scale", float, 0, MAX_SIZE),
        top_p=r.within(p + "top_p", float, MIN_FLOAT, 1),
        noise_scale=r.within(p + "noise_scale", float, 0, MAX_SIZE),
        prompt_frames=math.floor(
            r.within(p + "audio_prompt_duration", float, MIN_FLOAT, MAX_SIZE) / frame_seconds + 1e-9
        ),
        characters=CharacterEncoderConfig(
            hidden_size=r.size(c + "hidden_size"),
            intermediate_size=r.size(c + "intermediate_size"),
            num_hidden_layers=r.count(c + "num_hidden_layers"),
            num_attention_heads=r.size(c + "num_attention_heads"),
            num_key_value_heads=r.size(c + "num_key_value_heads"),
            head_dim=r.size(c + "head_dim"),
            char_vocab_size=r.size(c + "char_vocab_size"),
        ),
        mog=MogConfig(
            intermediate_size=r.size(m + "intermediate_size"),
            low_rank=r.size(m + "low_rank"),
            min_log_std=r.need(m + "min_log_std", float),
            num_layers=r.count(m + "num_layers"),
            num_predictions=r.size(m + "num_predictions"),
        ),
    )


def _codec(r: _Reader) -> CodecConfig:
    p = "codec_config."
    return CodecConfig(
        sample_rate=r.size(p + "sample_rate"),
        base_channels=r.size(p + "base_channels"),
        channel_multipliers=r.sizes(p + "channel_multipliers"),
        downsample_rates=r.sizes(p + "downsample_rates"),
        blocks_per_stage=r.count(p + "blocks_per_stage"),
        block_kernel_size=r.size(p + "block_kernel_size"),
        latent_dim=r.size(p + "latent_dim"),
        n_fft=r.size(p + "n_fft"),
        hop_length=r.size(p + "hop_length"),
        num_quantizers=r.count(p + "num_quantizers"),
        codebook_size=r.size(p + "codebook_size"),
    )


def _contradictions(c: ModelConfig) -> list[str]:
    """What two places of the config say differently."""
    pairs = [
        ("audio output_dim", c.encoder.output_dim, "text_config.hidden_size", c.llm.hidden_size),
        ("rnnt_blank_id", c.rnnt.blank_id, "number of rnnt_vocabulary pieces", len(c.rnnt.pieces)),
        ("tts num_quantizers", c.tts.num_quantizers, "codec num_quantizers", c.codec.num_quantizers),
        ("tts codebook_size", c.tts.codebook_size, "codec codebook_size", c.codec.codebook_size),
        ("tts latent_size", c.tts.latent_size, "codec latent_dim", c.codec.latent_dim),
        ("length of hybrid_override_pattern", len(c.llm.pattern), "num_hidden_layers", c.llm.num_hidden_layers),
        ("joint encoder_hidden", c.rnnt.encoder_hidden, "encoder d_model", c.encoder.d_model),
        ("preprocessor features", c.mel.features, "encoder feat_in", c.encoder.features),
        ("preprocessor sample_rate", c.mel.sample_rate, "input_sample_rate", c.input_rate_hz),
        ("codec sample_rate", c.codec.sample_rate, "output_sample_rate", c.output_rate_hz),
        ("codec frame samples", c.codec.frame_samples, "output frame", round(c.output_rate_hz * c.frame_seconds)),
        ("subsampling x hop", c.encoder.subsampling_factor * c.mel.hop_samples, "input frame", c.frame_samples_in),
        ("codec stages", len(c.codec.channel_multipliers), "downsample_rates", len(c.codec.downsample_rates)),
    ]
    faults = [f"{a} is {x} but {b} is {y}" for a, x, b, y in pairs if x != y]
    multiples = [
        ("encoder.d_model", c.encoder.d_model, "n_heads", c.encoder.n_heads),
        (
            "text_config.num_attention_heads",
            c.llm.num_attention_heads,
            "num_key_value_heads",
            c.llm.num_key_value_heads,
        ),
        ("text_config.mamba_num_heads", c.llm.mamba_num_heads, "n_groups", c.llm.n_groups),
        ("tts_config.num_attention_heads", c.tts.num_attention_heads, "num_key_value_heads", c.tts.num_key_value_heads),
    ]
    faults += [f"{a} is {x}, no multiple of {b}, {y}" for a, x, b, y in multiples if x % y]
    for name in ("bos", "eos", "pad", "silence"):
        token = getattr(c, f"{name}_id")
        if token >= c.llm.vocab_size:
            faults.append(f"{name}_token_id is {token} but text_config.vocab_size is {c.llm.vocab_size}")
    if not 1 <= c.mel.window_samples <= c.mel.n_fft:
        faults.append(f"preprocessor n_fft is {c.mel.n_fft} but window_size is {c.mel.window_samples} samples")
    if c.encoder.subsampling_factor & (c.encoder.subsampling_factor - 1):
        faults.append(f"subsampling_factor is {c.encoder.subsampling_factor}, no power of two")
    if set(c.llm.pattern) - set("M*-"):
        faults.append(f"hybrid_override_pattern has unknown blocks: {sorted(set(c.llm.pattern) - set('M*-'))}")
    return faults
