"""`config.json`: a runtime config read into a ModelConfig, with every fault in one error.

Facts have no default: every missing or mistyped key is listed at once. The few keys a checkpoint may lack are read
with `optional` (spec: config-map.md).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import (
    LLM_NORM_EPS,
    LOG_GUARD,
    MAX_SYMBOLS,
    PREEMPHASIS,
    CharacterEncoderConfig,
    CodecConfig,
    EncoderConfig,
    LlmConfig,
    MelConfig,
    ModelConfig,
    MogConfig,
    RnntConfig,
    TtsConfig,
)
from ..errors import CheckpointError
from . import quantization
from .config_reader import MAX_NUMBER, MAX_SIZE, MIN_FLOAT, Reader
from .shards import verify

MODEL_TYPE = "nemotron_voicechat"
# What stands in each part of a runtime config, and of NVIDIA's `model`: one that lacks some is of half a model.
SECTIONS = {
    "audio_config": "the speech encoder and the transcriber",
    "text_config": "the language model",
    "tts_config": "the speech generator (TTS)",
    "codec_config": "the audio codec",
}
ORIGINAL_SECTIONS = {
    "stt": "the speech encoder and the language model",
    "speech_generation": "the speech generator (TTS) and its codec",
}
HALF = "Get a whole checkpoint, for example mlx-community/NemotronLabs-VoiceChat-11B-4bit."
RUNTIME_CONFIG_VERSION = 2
QUERIES = re.compile(r"\.llm\.layers\.\d+\.mixer\.q_proj\.weight$")


Shapes = Mapping[str, tuple[int, ...]]  # of a checkpoint's tensors by name


def read_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`, and from its weights' headers what only they say.

    Raises CheckpointError that lists everything missing or at odds, and what `shards.verify` raises.
    """
    raw, where = read_json(folder), str(folder / "config.json")
    check_kind(raw, where)
    return parse_config(raw, where, {name: entry.shape for name, entry in verify(folder).items()})


def check_config(folder: Path) -> None:
    """Raise CheckpointError for a `config.json` that no weights could go with; they need not be there yet."""
    raw = read_json(folder)
    check_kind(raw, str(folder / "config.json"))
    check_parts(raw, str(folder / "config.json"))
    if is_original(raw):
        return  # the rest is the base LLM's to say
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
    check_kind(raw, where)
    reader = Reader(raw)
    config = _model(reader, shapes or {})
    faults = reader.wrong + ([] if reader.missing or reader.wrong else _contradictions(config))
    if reader.missing:
        faults.insert(0, "missing: " + ", ".join(reader.missing))
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}.", "The file is incomplete or edited: get it again.")
    return replace(config, quantization=quantization.resolve(raw, shapes, _plain_shapes(config, shapes or {}), where))


def _plain_shapes(config: ModelConfig, shapes: Shapes) -> Shapes:
    """Those of the model's layers, by module; none where nothing is quantised."""
    if not any(name.endswith(".scales") for name in shapes):
        return {}
    from . import layout  # MLX, which a look at a config does not need

    plain = layout.shapes(config)
    return {name.removesuffix(".weight"): layout.matrix_shape(shape) for name, shape in plain.items()}


def is_original(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is NVIDIA's own: NeMo's, with the parts of this model."""
    model = raw.get("model")
    parts = model.keys() & ORIGINAL_SECTIONS if isinstance(model, Mapping) else ()
    return raw.get("model_type") is None and bool(parts or "_rnnt_merge_info" in raw)


def absent_parts(raw: Mapping[str, Any]) -> list[str]:
    """What a config.json says nothing of, for a message; none for one that says nothing of anything."""
    sections = ORIGINAL_SECTIONS if is_original(raw) else SECTIONS
    parts: Any = raw.get("model") if is_original(raw) else raw
    absent = [text for name, text in sections.items() if not isinstance(parts, Mapping) or parts.get(name) is None]
    return absent if len(absent) < len(sections) else []


def check_parts(raw: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a config.json of half a model."""
    if absent := absent_parts(raw):
        raise CheckpointError(f"{where} is of half a model: it says nothing of {', nor of '.join(absent)}.", HALF)


def check_kind(raw: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError unless this program loads what has this config, by its kind and version.

    NVIDIA's own config loads where it says how the weights are quantised; the original, float32 throughout, does not.
    """
    kind = raw.get("model_type")
    original = is_original(raw)
    if original and quantization.is_stated(raw):
        return
    if original:
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


def _model(r: Reader, shapes: Shapes) -> ModelConfig:
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


def _mel(r: Reader) -> MelConfig:
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


def _encoder(r: Reader) -> EncoderConfig:
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


def _rnnt(r: Reader) -> RnntConfig:
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


def _llm(r: Reader, shapes: Shapes) -> LlmConfig:
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


def _head_dim(r: Reader, shapes: Shapes) -> int:
    """As stated, else what the rows of an attention layer's q_proj say."""
    key, heads = "text_config.head_dim", r.optional("text_config.num_attention_heads", 0)
    rows = next((shape[0] for name, shape in shapes.items() if QUERIES.search(name) and shape), 0)
    if r.find(key) is not None or heads < 1 or rows < heads or rows % heads:
        return r.size(key)
    return rows // heads


def _time_step_limit(r: Reader, key: str) -> tuple[float, float] | None:
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


def _tts(r: Reader, frame_seconds: float) -> TtsConfig:
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


def _codec(r: Reader) -> CodecConfig:
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
