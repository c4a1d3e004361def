"""The table from checkpoint tensors to module parameters."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_voicechat.weights import assets, layout
from mlx_voicechat.weights.config_file import parse_config
from mlx_voicechat.weights.shards import verify

CONFIG = parse_config(json.loads((assets.CONFIGS / "random.json").read_text(encoding="utf-8")))
TTS = "tts_model.tts_model."
ENCODER = "stt_model.perception.encoder."


def numbered(*shape: int) -> mx.array:
    """An array whose every entry tells where it was."""
    return mx.arange(int(np.prod(shape)), dtype=mx.float32).reshape(shape)


@pytest.mark.parametrize(
    ("name", "before", "axes"),
    [
        (f"{ENCODER}pre_encode.conv.0.weight", (5, 1, 3, 2), (0, 2, 3, 1)),
        (f"{ENCODER}layers.0.conv.depthwise_conv.weight", (5, 1, 9), (0, 2, 1)),
        ("stt_model.llm.layers.0.mixer.conv1d.weight", (6, 1, 4), (0, 2, 1)),
        ("tts_model.audio_codec.encoder.layers.4.weight", (5, 3, 7), (0, 2, 1)),
        ("tts_model.audio_codec.decoder.layers.4.weight", (5, 3, 7), (1, 2, 0)),  # transposed: (in, out, k)
        ("tts_model.audio_codec.decoder.layers.1.dwconv.weight", (5, 1, 7), (0, 2, 1)),
    ],
)
def test_convolutions_become_channels_last(name: str, before: tuple[int, ...], axes: tuple[int, ...]) -> None:
    tensor = numbered(*before)
    assert mx.array_equal(layout.to_mlx_layout(name, tensor), tensor.transpose(*axes))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{ENCODER}pre_encode.conv.3.weight", (4, 4, 1, 1)),
        (f"{ENCODER}layers.0.conv.pointwise_conv1.weight", (6, 3, 1)),
        ("tts_model.audio_codec.decoder.layers.12.weight", (18, 5, 1)),
        ("tts_model.audio_codec.encoder.layers.1.pwconv1.weight", (12, 3, 1)),
    ],
)
def test_pointwise_convolutions_become_matrices(name: str, shape: tuple[int, ...]) -> None:
    tensor = numbered(*shape)
    assert mx.array_equal(layout.to_mlx_layout(name, tensor), tensor.reshape(shape[:2]))


def test_other_tensors_keep_their_axes() -> None:
    for name, shape in ((f"{TTS}rvq_embs", (2, 3, 4)), (f"{TTS}mog_head.low_mat", (2, 3, 4)), (f"{TTS}bos_emb", (3,))):
        assert layout.to_mlx_layout(name, numbered(*shape)).shape == shape


def test_offset_norms_are_folded_in_float32_and_no_other_norm() -> None:
    small = mx.array([2**-9], mx.bfloat16)  # one plus this is no bfloat16
    folded = {
        f"{TTS}backbone.layers.0.input_layernorm.weight",
        f"{TTS}backbone.layers.0.self_attn.q_norm.weight",
        f"{TTS}backbone.norm.weight",
        f"{TTS}embed_subword.backbone.encoder.layers.0.post_self_attn_layernorm.weight",
        f"{TTS}embed_subword.backbone.encoder.norm.weight",
        f"{TTS}mog_head.mlp_stack.0.pre_norm.weight",
        f"{TTS}mog_head.mlp_stack.3.weight",
        f"{TTS}gated_fusion_audio_text.final_norm.weight",
    }
    plain = {
        "stt_model.llm.norm_f.weight",
        "stt_model.llm.layers.0.norm.weight",
        "stt_model.llm.layers.0.mixer.norm.weight",
        f"{ENCODER}layers.0.norm_out.weight",
        f"{ENCODER}layers.0.conv.batch_norm.weight",
        "tts_model.audio_codec.encoder.layers.1.norm.weight",
    }
    out = layout.assemble(dict.fromkeys(folded | plain, small), torch_layout=True)
    assert {name for name in out if out[name].item() == 1 + 2**-9} == folded
    assert {name for name in out if out[name].item() == 2**-9} == plain


def test_every_offset_norm_of_a_checkpoint_is_known() -> None:
    names = [name for name in layout.shapes(CONFIG) if name.startswith(TTS) and name.endswith("norm.weight")]
    assert names
    assert all(layout.OFFSET_NORM.search(name) for name in names)


def test_fusions_stack_rows_in_order() -> None:
    attention = f"{TTS}backbone.layers.0.self_attn."
    weights = {f"{attention}{part}_proj.weight": mx.full((2, 3), value) for value, part in enumerate("qkv")}
    weights |= {f"{attention}{part}_proj.scales": mx.full((2, 1), value) for value, part in enumerate("qkv")}
    out = layout.assemble(weights, torch_layout=True)
    assert out.keys() == {f"{attention}qkv_proj.weight", f"{attention}qkv_proj.scales"}
    assert out[f"{attention}qkv_proj.weight"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_the_llms_attention_is_not_fused() -> None:
    name = "stt_model.llm.layers.3.mixer.q_proj.weight"
    assert list(layout.assemble({name: mx.zeros((2, 2))}, torch_layout=True)) == [name]


def test_a_torn_group_raises_the_absent_name() -> None:
    name = f"{ENCODER}layers.0.self_attn.linear_q.weight"
    with pytest.raises(KeyError, match="linear_k"):
        layout.assemble({name: mx.zeros((2, 2))}, torch_layout=True)


def test_lstm_names_and_added_biases() -> None:
    prefix = "stt_model.rnnt_decoder.prediction.dec_rnn.lstm."
    weights = {
        f"{prefix}weight_ih_l1": mx.zeros((8, 2)),
        f"{prefix}weight_hh_l1": mx.ones((8, 2)),
        f"{prefix}bias_ih_l1": mx.full((8,), 2.0),
        f"{prefix}bias_hh_l1": mx.full((8,), 3.0),
    }
    out = layout.assemble(weights, torch_layout=True)
    assert out.keys() == {f"{prefix}layers.1.{part}" for part in ("Wx", "Wh", "bias")}
    assert out[f"{prefix}layers.1.bias"].tolist() == [5.0] * 8


def test_what_no_network_reads_is_left_out() -> None:
    names = [
        "tts_model.audio_codec.prvq._variance_list.3.variance",
        f"{TTS}audio_prompt_projection_W",
        "stt_model.perception.preprocessor.featurizer.fb",
        "stt_model.perception.preprocessor.featurizer.window",
    ]
    assert all(layout.is_unused(name) for name in names)
    assert layout.assemble(dict.fromkeys(names, mx.zeros(())), torch_layout=True) == {}


def test_our_own_layout_is_not_transposed_but_fused() -> None:
    weights = {"stt_model.llm.layers.0.mixer.conv1d.weight": mx.zeros((6, 4, 1))}
    weights |= {f"{TTS}backbone.layers.0.mlp.{part}_proj.weight": mx.zeros((4, 2)) for part in ("gate", "up")}
    out = layout.assemble(weights, torch_layout=False)
    assert out["stt_model.llm.layers.0.mixer.conv1d.weight"].shape == (6, 4, 1)
    assert out[f"{TTS}backbone.layers.0.mlp.gate_up_proj.weight"].shape == (8, 2)


def test_no_parameter_name_would_be_ignored_by_a_module() -> None:
    stored = verify(assets.TINY)
    out = layout.assemble({name: mx.zeros(entry.shape) for name, entry in stored.items()}, torch_layout=True)
    ignored = [path for path in out if any(part.startswith("_") for part in path.split("."))]
    assert all(layout.OPTIONAL.search(path) for path in ignored)


def test_a_conversation_needs_neither_the_codecs_encoder_nor_the_control_codes() -> None:
    assert layout.OPTIONAL.search("tts_model.audio_codec.encoder.layers.0.weight")
    assert layout.OPTIONAL.search("tts_model._control_codes")
    assert layout.OPTIONAL.search("tts_model.audio_prompt_latents.Aria")
    assert not layout.OPTIONAL.search("tts_model.audio_codec.decoder.layers.0.weight")
    assert not layout.OPTIONAL.search("tts_model.codec_silence_tokens")


def test_sources_name_the_parts_of_a_fused_layer() -> None:
    mlp = f"{TTS}mog_head.mlp_stack.0.mlp."
    assert layout.stored_names(f"{mlp}gate_up_proj.weight") == [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"]
    block = f"{ENCODER}layers.2.self_attn."
    assert layout.stored_names(f"{block}linear_qkv") == [f"{block}linear_{part}" for part in "qkv"]
    assert layout.stored_names("stt_model.lm_head") == ["stt_model.lm_head"]
