"""NVIDIA's `config.json` and its base LLM's -> the runtime config that `load` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import MAX_SYMBOLS
from ..errors import CheckpointError
from ..text import Tokenizer
from . import hub, layout, quantization
from .config_file import MODEL_TYPE, RUNTIME_CONFIG_VERSION, read_json
from .shards import Stored, some_of

BASE_LLM = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
TOKENIZER_FOLDER = "tokenizer"  # of a local original, where the base LLM's files lie beside it
TEXT = "text_config"  # the base LLM's config where NVIDIA's own holds it too, as a runtime config does

# Keys of the base LLM's config; each may also be called like the second. Absent ones are left to `parse_config`.
TEXT_KEYS = {
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
            *("num_attention_heads", "num_key_value_heads", "attention_bias", "head_dim", "mamba_num_heads"),
            *("mamba_head_dim", "mamba_proj_bias", "conv_kernel", "mlp_bias", "use_bias", "use_conv_bias"),
            *("hybrid_override_pattern", "time_step_limit"),
        ),
        "",
    ),
    "ssm_state_size": "mamba_state_dim",
    "n_groups": "mamba_num_groups",
    "layer_norm_epsilon": "rms_norm_eps",
}
BACKBONE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "sliding_window"),
)
TTS_KEYS = (
    *("latent_size", "num_quantizers", "codebook_size", "num_delay_speech_tokens", "exponent"),
    *("disable_eos_prediction", "use_gated_fusion_for_text_audio", "use_subword_flag_emb", "use_bos_eos_emb"),
    "use_audio_prompt_frozen_projection",
)
CHARACTER_KEYS = BACKBONE_KEYS[:-1]
CODEC_KEYS = {
    "base_channels": "base_hidden_size",
    "channel_multipliers": "channel_mult",
    "downsample_rates": "rates",
    "blocks_per_stage": "num_blocks",
    "block_kernel_size": "kernel_size",
    "latent_dim": "latent_size",
    "n_fft": "n_fft",
    "hop_length": "hop_length",
    "num_quantizers": "num_quantizers",
    "codebook_size": "codebook_size",
}
SPECIAL_TOKENS = {"bos": "<s>", "eos": "</s>", "pad": "<SPECIAL_12>", "silence": "<SPECIAL_11>"}


def local_base(raw: Mapping[str, Any], folder: Path) -> Path | None:
    """Where an original's folder holds a tokenizer and the base LLM's config itself, None if it does not."""
    own = folder / TOKENIZER_FOLDER
    if (own / "tokenizer.json").is_file():
        return own
    return folder if raw.get(TEXT) and (folder / "tokenizer.json").is_file() else None


def base_folder(raw: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> Path:
    """`local_base`, else the base LLM's from the hub, fetched when the cache lacks it; raises HubError."""
    return local_base(raw, folder) or hub.fetch(BASE_LLM, None, hub.BASE_PATTERNS, say)


def translate(
    raw: Mapping[str, Any], folder: Path, base: Path, words: Tokenizer, stored: Mapping[str, Stored]
) -> dict[str, Any]:
    """The runtime config of the original in `folder`; `base`: its `base_folder`, with the tokenizer `words`.

    What it says of quantisation, and the public converter's block, are kept. Raises CheckpointError.
    """
    ids = {token: words.backend.token_to_id(token) for token in SPECIAL_TOKENS.values()}
    if absent := [token for token, number in ids.items() if number is None]:
        raise CheckpointError(f"{base}: the tokenizer has no {', '.join(absent)}.", "Name the base LLM's tokenizer.")
    characters = stored.get(layout.CHARACTERS)
    text = raw.get(TEXT) or read_json(base)
    text = text.get(TEXT, text)  # of a runtime config, when the tokenizer is another checkpoint's
    rows = characters.shape[0] if characters and characters.shape else 0
    known = {token: int(number) for token, number in ids.items() if number is not None}
    kept = {key: raw[key] for key in (*quantization.KEYS, quantization.CONVERSION) if key in raw}
    return runtime_config(raw, text, known, rows, f"{folder}/config.json") | kept


class _Reader:
    """Looks dotted keys up and remembers those that are absent, so that one error can list them all."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.missing: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        node: Any = self.raw
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return default if node is None else node

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            self.missing.append(key)
        return value

    def section(self, key: str) -> dict[str, Any]:
        """A mapping without what only NeMo's instantiation reads."""
        value = self.need(key)
        if not isinstance(value, Mapping):
            return {}
        return {name: entry for name, entry in value.items() if name != "_target_"}

    def check(self) -> None:
        if self.missing:
            raise CheckpointError(
                f"{self.where} lacks {some_of(sorted(set(self.missing)))}.",
                "The file is incomplete, or another model's: get it again.",
            )


def runtime_config(
    raw: Mapping[str, Any], base: Mapping[str, Any], ids: Mapping[str, int], characters: int, where: str = "config.json"
) -> dict[str, Any]:
    """The runtime config of NVIDIA's `raw`, with `base`, the base LLM's config.

    `ids` by token of SPECIAL_TOKENS; `characters`: rows of the character embedding, which no config states.
    Raises CheckpointError that names every absent key of `where`.
    """
    r = _Reader(raw, where)
    rnnt, stt, tts = "_rnnt_merge_info.", "model.stt.model.", "model.speech_generation.model."
    pieces = r.need(rnnt + "joint_config.vocabulary") or []
    text = {key: base.get(key, base.get(other)) for key, other in TEXT_KEYS.items()}
    config = {
        "mlx_runtime_config_version": RUNTIME_CONFIG_VERSION,
        "model_type": MODEL_TYPE,
        "architectures": ["NemotronVoiceChatForConditionalGeneration"],
        "text_config": {"model_type": base.get("model_type", "nemotron_h")}
        | {key: value for key, value in text.items() if value is not None},
        "audio_config": _audio(r, stt, rnnt),
        "tts_config": _tts(r, tts, characters),
        "codec_config": {"sample_rate": r.need("model.speech_generation.data.target_sample_rate")}
        | {key: r.need(f"{tts}codec_config.{name}") for key, name in CODEC_KEYS.items()},
        **{f"{name}_token_id": ids[token] for name, token in SPECIAL_TOKENS.items()},
        "rnnt_blank_id": len(pieces) if isinstance(pieces, list) else 0,
        "input_sample_rate": r.need("data.source_sample_rate"),
        "output_sample_rate": r.need("data.target_sample_rate"),
        "frame_duration": r.need("data.frame_length"),
        "function_channel_weight": r.need(stt + "duplex_function_channel_weight"),
        "text_channel_weight": r.get(stt + "duplex_text_channel_weight", 1.0),
        "user_channel_weight": r.get(stt + "duplex_user_channel_weight", 1.0),
        **{f"inference_{name}_boost": r.get(f"{stt}inference_{name}_boost", 0.0) for name in ("pad", "bos", "eos")},
        "speaker": r.need("model.inference_speaker_name"),
        "default_system_prompt": "",
        "rnnt_vocabulary": pieces,
    }
    r.check()
    return config


def _audio(r: _Reader, stt: str, rnnt: str) -> dict[str, Any]:
    encoder = r.section(stt + "perception.encoder")
    context = encoder.get("att_context_size")
    if isinstance(context, list) and context and not isinstance(context[0], list):
        encoder["att_context_size"] = [context]
    decoder = r.section(rnnt + "decoder_config.prednet")
    return {
        "preprocessor": r.section(stt + "perception.preprocessor"),
        "encoder": encoder,
        "decoder": decoder | {key: r.need(f"{rnnt}decoder_config.{key}") for key in ("vocab_size", "blank_as_pad")},
        "joint": r.section(rnnt + "joint_config.jointnet") | {"num_classes": r.need(rnnt + "joint_config.num_classes")},
        "output_dim": r.need(stt + "perception.output_dim"),
        "max_symbols": MAX_SYMBOLS,
    }


def _tts(r: _Reader, tts: str, characters: int) -> dict[str, Any]:
    own = tts + "tts_config."
    encoder = own + "cas_config.backbone_config.encoder."
    return {
        **{key: r.need(f"{own}backbone_config.{key}") for key in BACKBONE_KEYS},
        **{key: r.need(own + key) for key in TTS_KEYS},
        "character_encoder": {key: r.need(encoder + key) for key in CHARACTER_KEYS} | {"char_vocab_size": characters},
        "mog_head": r.section(own + "mog_head_config"),
        "guidance_scale": r.need(tts + "inference_guidance_scale"),
        "top_p": r.need(tts + "inference_top_p_or_k"),
        "noise_scale": r.need(tts + "inference_noise_scale"),
        "audio_prompt_duration": r.need("model.speech_generation.data.audio_prompt_duration"),
    }
