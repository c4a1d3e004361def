"""Reading `config.json`: every fact is there or is reported, and two places may not contradict each other."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import GOLDEN

from mlx_voicechat.config import CODE_PASSES, ModelConfig
from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.weights import assets
from mlx_voicechat.weights.config_file import parse_config, read_config

CONFIGS = [
    *sorted(assets.CONFIGS.glob("*.json")),
    assets.TINY / "config.json",
    *(GOLDEN / name / "config.json" for name in ("tiny-f32", "tiny-bf16", "tiny-8bit", "tiny-4bit")),
]


def golden() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((GOLDEN / "tiny-f32" / "config.json").read_text(encoding="utf-8"))
    return raw


def changed(key: str, value: Any) -> dict[str, Any]:
    """The golden config with one dotted key set, or removed when `value` is None."""
    raw = golden()
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        node = node[parent]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return raw


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_runtime_config_reads(path: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    config = parse_config(raw)
    assert (config.frame_samples_in, config.frame_samples_out) == (1280, 1764)
    assert config.budget_ms == pytest.approx(80)
    assert sum(config.tts.pass_counts) == config.tts.num_quantizers
    assert config.encoder.subsampled_features == 17
    assert config.encoder.left_frames == raw["audio_config"]["encoder"]["att_context_size"][0][0]


def test_derived_sizes() -> None:
    config = read_config(GOLDEN / "tiny-f32")
    assert config.tts.pass_counts == (1, 1, 3, 4, 22)
    assert len(config.tts.pass_counts) < CODE_PASSES
    assert config.tts.mask_code == config.tts.codebook_size
    assert config.tts.prompt_frames == 12
    assert config.llm.conv_dim == config.llm.mamba_inner + 2 * config.llm.n_groups * config.llm.ssm_state_size
    assert config.mel.window_samples == 400
    assert config.encoder.head_dim * config.encoder.n_heads == config.encoder.d_model
    assert config.codec.bins == 9


def test_the_released_models_voice_prompt_is_37_frames() -> None:
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    assert config.tts.prompt_frames == 37  # 3.0 s of 80 ms, rounded down


def leaves(raw: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in raw.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


# What a config may lack (the specification's key map), and what this program does not read.
OPTIONAL = {
    "default_system_prompt",
    *("audio_config.max_symbols", "audio_config.output_dim", "rnnt_blank_id"),
    "mlx_runtime_config_version",
    "audio_config.preprocessor.preemph",
    "audio_config.preprocessor.log_zero_guard_value",
    *(f"text_config.{key}" for key in ("attention_bias", "mamba_proj_bias", "mlp_bias", "layer_norm_epsilon")),
    *(f"text_config.{key}" for key in ("use_bias", "use_conv_bias", "max_position_embeddings")),
}
UNREAD = {
    "architectures",
    "text_config.model_type",
    *(f"audio_config.preprocessor.{key}" for key in ("window", "dither", "normalize", "pad_to", "pad_value")),
    *(f"audio_config.encoder.{key}" for key in ("causal_downsampling", "conv_context_size", "conv_norm_type")),
    *(f"audio_config.encoder.{key}" for key in ("self_attention_model", "att_context_style", "pos_emb_max_len")),
    *(f"audio_config.encoder.{key}" for key in ("use_bias", "xscaling")),
    *("audio_config.decoder.vocab_size", "audio_config.decoder.blank_as_pad"),
    *("audio_config.joint.activation", "audio_config.joint.pred_hidden", "audio_config.joint.num_classes"),
    "tts_config.num_delay_speech_tokens",
}


@pytest.mark.parametrize("key", sorted(set(leaves(golden())) - {"model_type"}))
def test_a_missing_fact_is_an_error_that_names_it(key: str) -> None:
    if key in OPTIONAL | UNREAD:
        assert isinstance(parse_config(changed(key, None)), ModelConfig)
        return
    with pytest.raises(CheckpointError) as caught:
        parse_config(changed(key, None), "somewhere/config.json")
    assert key in caught.value.message
    assert "somewhere/config.json" in caught.value.message


def test_one_error_lists_everything_missing() -> None:
    raw = golden()
    del raw["text_config"]["hidden_size"], raw["codec_config"], raw["speaker"]
    with pytest.raises(CheckpointError) as caught:
        parse_config(raw)
    for key in ("text_config.hidden_size", "codec_config.hop_length", "codec_config.latent_dim", "speaker"):
        assert key in caught.value.message


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("text_config.hidden_size", "64", "expected int"),
        ("text_config.hidden_size", True, "expected int"),
        ("text_config.hidden_size", 2.5, "expected int"),
        ("speaker", 3, "expected str"),
        ("rnnt_vocabulary", "abc", "expected list"),
        ("tts_config.use_subword_flag_emb", False, "must be true"),
        ("tts_config.disable_eos_prediction", False, "must be true"),
        ("tts_config.use_gated_fusion_for_text_audio", False, "must be true"),
        ("tts_config.use_bos_eos_emb", False, "must be true"),
        ("tts_config.use_audio_prompt_frozen_projection", False, "must be true"),
        ("audio_config.encoder.att_context_size", [[70, 13]], "no look-ahead"),
        ("audio_config.encoder.att_context_size", [], "no look-ahead"),
        ("audio_config.encoder.att_context_size", [-1, 0], "no look-ahead"),
        ("text_config.num_attention_heads", 0, "1..16777216"),
        ("text_config.hidden_size", -64, "1..16777216"),
        ("text_config.hidden_size", 10**400, "usual size"),
        ("tts_config.num_hidden_layers", 10**6, "1..1000"),
        ("frame_duration", 0, "1e-06.."),
        ("frame_duration", 1e-320, "1e-06.."),
        ("tts_config.guidance_scale", float("nan"), "finite"),
        ("tts_config.mog_head.min_log_std", float("inf"), "finite"),
        ("tts_config.top_p", 0, "..1"),
        ("tts_config.top_p", 1.5, "..1"),
        ("codec_config.downsample_rates", [7, 0], "above 0"),
        ("codec_config.channel_multipliers", ["x", 1], "above 0"),
        ("rnnt_vocabulary", [1], "no string"),
        ("text_config.time_step_limit", [1, "x"], "two numbers"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, word: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_config(changed(key, value))
    assert key in caught.value.message
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("audio_config.output_dim", 65),
        ("rnnt_blank_id", 63),
        ("tts_config.num_quantizers", 30),
        ("tts_config.codebook_size", 63),
        ("tts_config.latent_size", 31),
        ("text_config.num_hidden_layers", 6),
        ("text_config.hybrid_override_pattern", "M-M*-M?"),
        ("audio_config.joint.encoder_hidden", 60),
        ("audio_config.preprocessor.features", 80),
        ("audio_config.preprocessor.sample_rate", 8000),
        ("codec_config.sample_rate", 24000),
        ("codec_config.hop_length", 5),
        ("codec_config.downsample_rates", [7, 7]),
        ("frame_duration", 0.16),
        ("audio_config.encoder.subsampling_factor", 4),
        ("audio_config.encoder.n_heads", 7),
        ("text_config.num_key_value_heads", 3),
        ("audio_config.preprocessor.n_fft", 7),
        ("bos_token_id", 384),
        ("silence_token_id", 10**6),
    ],
)
def test_contradictions_are_reported(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError):
        parse_config(changed(key, value))


def test_both_forms_of_the_attention_context() -> None:
    assert parse_config(changed("audio_config.encoder.att_context_size", [20, 0])).encoder.left_frames == 20


def test_the_longest_prompt_may_be_unstated() -> None:
    assert parse_config(golden()).llm.max_positions == 4096
    assert parse_config(changed("text_config.max_position_embeddings", None)).llm.max_positions is None


def test_other_names_of_a_key() -> None:
    raw = golden()
    text = raw["text_config"]
    text["mamba_state_dim"] = text.pop("ssm_state_size")
    text["mamba_num_groups"] = text.pop("n_groups")
    text["rms_norm_eps"] = text.pop("layer_norm_epsilon")
    assert parse_config(raw).llm == read_config(GOLDEN / "tiny-f32").llm


def test_a_time_step_limit() -> None:
    assert read_config(GOLDEN / "tiny-f32").llm.time_step_limit is None
    assert parse_config(changed("text_config.time_step_limit", [0.01, 100])).llm.time_step_limit == (0.01, 100.0)


def test_quantisation_is_kept_per_module() -> None:
    quantization = read_config(GOLDEN / "tiny-4bit").quantization
    assert quantization["stt_model.lm_head"] == {"group_size": 64, "bits": 4}
    assert "bits" not in quantization
    assert read_config(GOLDEN / "tiny-f32").quantization == {}


def test_what_a_checkpoint_says_about_itself() -> None:
    assert read_config(assets.TINY).demonstration
    assert not read_config(GOLDEN / "tiny-f32").demonstration
    assert not read_config(GOLDEN / "tiny-f32").synthetic
    assert parse_config(changed("synthetic", True)).synthetic


def test_files_that_are_no_runtime_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config"):
        read_config(tmp_path)
    for text, word in (
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "cannot be read"),
        ('{"model_type": "llama"}', "not a VoiceChat"),
    ):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=word):
            read_config(tmp_path)


def test_nvidias_own_config_points_to_one_that_loads() -> None:
    with pytest.raises(CheckpointError, match="NVIDIA's original layout") as caught:
        read_config(GOLDEN / "tiny-nvidia")
    assert "mlx-community/" in caught.value.remedy


@pytest.mark.parametrize("version", [3, "2", None])
def test_config_versions(version: Any) -> None:
    raw = copy.deepcopy(golden())
    raw["mlx_runtime_config_version"] = version
    with pytest.raises(CheckpointError, match="mlx_runtime_config_version") as caught:
        parse_config(raw)
    assert "Update" in caught.value.remedy
