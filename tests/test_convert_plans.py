"""Plans: the first rule that matches decides, and what cannot be is refused by name."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from support.checkpoints import GOLDEN

from mlx_voicechat.cli.convert import PLANS
from mlx_voicechat.convert import plans
from mlx_voicechat.convert.plans import Facts, Quantised
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.errors import InputError

UP = "stt_model.llm.layers.1.mixer.up_proj.weight"


@pytest.fixture(scope="module")
def facts() -> dict[str, Facts]:
    with open_source(str(GOLDEN / "tiny-f32")) as source:
        return {name: tensor.facts for name, tensor in source.tensors.items()}


def plan_file(where: Path, text: str) -> plans.Plan:
    path = where / "own.toml"
    path.write_text(text, encoding="utf-8")
    return plans.find(str(path))


def test_the_help_names_every_plan() -> None:
    assert PLANS.split(", ") == list(plans.NAMED)


def test_the_first_rule_that_matches_decides(facts: dict[str, Facts], tmp_path: Path) -> None:
    plan = plan_file(
        tmp_path,
        """
        "stt_model.llm.layers.1.*_proj" = "8/32"
        "stt_model.llm.*_proj" = "5/64/affine"
        "stt_model.lm_head" = "mxfp4"
        "*.A_log" = "f32"
        "stt_model.rnnt_*" = "f32"
        "tts_model.audio_codec.*" = "keep"
        """,
    )
    chosen = plan.settings(facts)
    assert chosen[UP] == Quantised(8, 32)
    assert chosen["stt_model.llm.layers.3.mixer.q_proj.weight"] == Quantised(5, 64)
    assert chosen["stt_model.lm_head.weight"] == Quantised(4, 32, "mxfp4")
    assert chosen["stt_model.llm.layers.0.mixer.A_log"] == "f32"
    assert chosen["stt_model.rnnt_joint.enc.weight"] == "f32"
    assert chosen["stt_model.function_head.weight"] == "bf16"
    assert chosen["tts_model.codec_silence_tokens"] == "keep"
    assert chosen["tts_model.tts_model.rvq_embs"] == "keep"
    assert chosen.keys() == facts.keys()


def test_a_file_that_begins_with_a_mark_of_byte_order(facts: dict[str, Facts], tmp_path: Path) -> None:
    plan = plan_file(tmp_path, '\ufeff"stt_model.lm_head" = "8/64"')
    assert plan.settings(facts)["stt_model.lm_head.weight"] == Quantised(8, 64)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*.norm", "stt_model.llm.layers.0.norm.weight"),
        ("*.A_log", "stt_model.llm.layers.0.mixer.A_log"),
        ("*.dt_bias", "stt_model.llm.layers.0.mixer.dt_bias"),
        ("*.mixer.D", "stt_model.llm.layers.0.mixer.D"),
        ("*.conv1d", "stt_model.llm.layers.0.mixer.conv1d.weight"),
        ("*.lstm.*", "stt_model.rnnt_decoder.prediction.dec_rnn.lstm.weight_hh_l0"),
        ("*.mus_list.*", "tts_model.audio_codec.prvq.mus_list.0"),
        ("*.rvq_embs", "tts_model.tts_model.rvq_embs"),
        ("*.audio_prompt_latents.*", "tts_model.audio_prompt_latents.Aria"),
        ("*.codec_silence_tokens", "tts_model.codec_silence_tokens"),
        ("*.is_continuation", "tts_model.tts_model.embed_subword.subword_flag_emb.is_continuation"),
        ("*.low_mat", "tts_model.tts_model.mog_head.low_mat"),
        ("*.embed_subword.proj_embedding", "tts_model.tts_model.embed_subword.proj_embedding.weight"),
        ("stt_model.llm.*", "stt_model.llm.layers.0.mixer.A_log"),
    ],
)
@pytest.mark.parametrize("setting", ["8/64/affine", "mxfp4"])
def test_what_must_stay_wide_is_refused_by_name(
    facts: dict[str, Facts], tmp_path: Path, pattern: str, name: str, setting: str
) -> None:
    with pytest.raises(InputError, match="would narrow what must stay wide") as caught:
        plan_file(tmp_path, f'"{pattern}" = "{setting}"').settings(facts)
    assert name in str(caught.value)
    assert pattern in str(caught.value)


@pytest.mark.parametrize("name", ["stt_model.llm.layers.0.mixer.A_log", "tts_model.tts_model.rvq_embs"])
def test_some_are_not_even_halved(facts: dict[str, Facts], tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="would narrow") as caught:
        plan_file(tmp_path, '"*" = "bf16"').settings({name: facts[name]})
    assert name in str(caught.value)
    assert plan_file(tmp_path, f'"{name}" = "keep"\n"*.lm_head" = "8/64"').settings(facts)[name] == "keep"


def test_a_group_that_does_not_divide(facts: dict[str, Facts], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not divide") as caught:
        plan_file(tmp_path, f'"{UP}" = "4/128"').settings(facts)
    assert f"{UP} (64 inputs)" in str(caught.value)
    odd = {UP: Facts((112, 80), False)}
    with pytest.raises(InputError, match=r"Plan 4bit: .*does not divide: .*up_proj.weight \(80 inputs\)"):
        plans.find("4bit").settings(odd)


def test_parts_of_one_layer_are_stored_alike(facts: dict[str, Facts], tmp_path: Path) -> None:
    layer = "tts_model.tts_model.backbone.layers.0.self_attn"
    with pytest.raises(InputError, match="run as one layer") as caught:
        plan_file(tmp_path, f'"{layer}.q_proj" = "8/64"').settings(facts)
    assert all(f"{layer}.{part}_proj.weight" in str(caught.value) for part in "qkv")
    plan_file(tmp_path, f'"{layer}.[qkv]_proj" = "8/64"').settings(facts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"*.lm_head" = "7/64/affine"', "not understood"),
        ('"*.lm_head" = "8/48/affine"', "not understood"),
        ('"*.lm_head" = "8/64/mxfp8"', "not understood"),
        ('"*.lm_head" = "int8"', "not understood"),
        ('"*.lm_head" = 8', "is no rule"),
        ('stt_model.lm_head = "8/64"', "is no rule"),
        ('"*.lm_head" "8/64"', "is not TOML"),
        ("", "has no rules"),
        ('"*.lm_haed" = "8/64"', "decides for no tensor"),
        ('"*.lm_head" = "8/64"\n"*.lm_hea?" = "4/64"', "decides for no tensor"),
    ],
)
def test_files_that_are_no_plans(facts: dict[str, Facts], tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan_file(tmp_path, text).settings(facts)


def test_names_that_are_no_plans(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no plan '3bit'") as caught:
        plans.find("3bit")
    assert all(name in caught.value.remedy for name in plans.NAMED)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        plans.find(str(tmp_path / "absent.toml"))


def test_an_mlx_without_a_mode(facts: dict[str, Facts], monkeypatch: pytest.MonkeyPatch) -> None:
    def older(*_: object, mode: str = "affine", **__: object) -> None:
        raise TypeError(f"unexpected keyword {mode}")

    monkeypatch.setattr(mx, "quantize", older)
    with pytest.raises(InputError, match="cannot quantise as 4/32/mxfp4") as caught:
        plans.find("mxfp4").settings(facts)
    assert "Update MLX" in caught.value.remedy
    plans.find("bf16").settings(facts)
