"""Conversion: every layout becomes ours with the same values, in the precision that the plan says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import GOLDEN, copy_of, edit_json, rewrite
from support.originals import BUFFERS, golden_original, nvidia_config, random_original

import mlx_voicechat
from mlx_voicechat.convert import conversion, plans
from mlx_voicechat.convert.source import Stored, open_source, tensors
from mlx_voicechat.convert.writer import check_target
from mlx_voicechat.errors import CheckpointError, HubError, InputError
from mlx_voicechat.frame import Frame
from mlx_voicechat.networks.ear_tts import EarTts
from mlx_voicechat.voicechat import VoiceChat
from mlx_voicechat.weights import assets, checkpoint, hub, layout, text_table
from mlx_voicechat.weights.config_file import parse_config, read_config
from mlx_voicechat.weights.shards import places, verify

BASE_CONFIG = GOLDEN / "tiny-nvidia" / "tokenizer" / "config.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_original(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def f32(original: Path) -> Path:
    return converted(original, original.parent / "f32", "f32")


def converted(source: Path, out: Path, plan: str, **options: Any) -> Path:
    with open_source(str(source), **options) as opened:
        conversion.run(conversion.prepare(opened, plans.find(plan)), check_target(out))
    return out


def weights(folder: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= dict(mx.load(str(file)))  # type: ignore[arg-type]
    return found


def relaid(folder: Path) -> dict[str, mx.array]:
    """The tensors of a golden checkpoint that are of use, in MLX's axis order."""
    stored = weights(folder)
    return {n: layout.to_mlx_layout(n, array) for n, array in stored.items() if not layout.is_unused(n)}


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape), name
        assert mx.array_equal(array, other[name]), name


# -- what comes out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["f32", "bf16", "8bit", "4bit"])
def test_the_original_becomes_what_is_published(original: Path, tmp_path: Path, plan: str) -> None:
    out = converted(original, tmp_path / "out", plan)
    same(weights(out), relaid(GOLDEN / f"tiny-{plan}"))
    ours, theirs = read_config(out), read_config(GOLDEN / f"tiny-{plan}")
    assert ours == theirs


@pytest.mark.parametrize("source", ["tiny-f32", "tiny-4bit"])
def test_mlx_community_becomes_ours_and_stays_as_it_is(tmp_path: Path, source: str) -> None:
    plan = source.removeprefix("tiny-")
    first = converted(GOLDEN / source, tmp_path / "first", plan)
    same(weights(first), relaid(GOLDEN / source))
    second = converted(first, tmp_path / "second", plan)
    same(weights(second), weights(first))
    assert (second / "text-table.safetensors").read_bytes() == (first / "text-table.safetensors").read_bytes()
    assert "source_conversion" in json.loads((second / "config.json").read_text())[conversion.CONVERSION_KEY]


@pytest.mark.parametrize("case", ["plain", "prompted"])
def test_golden_values_hold(f32: Path, case: str) -> None:
    story = json.loads((GOLDEN / "expected" / "streams.json").read_text(encoding="utf-8"))[case]
    arrays = dict(np.load(GOLDEN / "expected" / f"stream_{case}.npz"))
    passes = len(read_config(f32).tts.pass_counts)

    def noise(step: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(step * passes, (step + 1) * passes)
        return arrays["uniform"][rows], arrays["normal"][rows]

    session = mlx_voicechat.load(f32, compile=False).session(system_prompt=story["system_prompt"], noise=noise)
    frames: list[Frame] = []
    session.observe(frames.append)
    session.push(np.load(GOLDEN / "expected" / "perception.npz")["audio"])
    session.finish()
    first = story["prompt_positions"]
    assert [frame.text_id for frame in frames] == arrays["text_ids"][first:].tolist()
    assert [frame.function_id for frame in frames] == arrays["function_ids"][first:].tolist()
    np.testing.assert_array_equal([frame.codes for frame in frames], arrays["codes"])
    np.testing.assert_allclose([frame.samples for frame in frames], arrays["samples"], rtol=0, atol=1e-4)


def test_the_folder_is_complete(f32: Path) -> None:
    names = {path.name for path in f32.iterdir()}
    assert names == {
        *("config.json", "README.md", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("model-00001-of-00001.safetensors", "model.safetensors.index.json", "text-table.safetensors"),
    }
    assert all(any(Path(name).match(pattern) for pattern in hub.PATTERNS) for name in names - {"README.md"})
    raw = json.loads((f32 / "config.json").read_text(encoding="utf-8"))
    assert raw[checkpoint.FORMAT_KEY] == checkpoint.FORMAT_VERSION
    facts = raw[conversion.CONVERSION_KEY]
    assert (facts["plan"], facts["source"], facts["source_revision"]) == ("f32", "tiny-nvidia", None)
    card = (f32 / "README.md").read_text(encoding="utf-8")
    assert "nvidia/NVIDIA-NemotronLabs-VoiceChat-11B" in card
    assert "Licence" in card
    assert "Apache" not in card
    assert str(f32.parent) not in card + json.dumps(raw)


def test_loading_transposes_nothing_and_takes_the_table(f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("transposed, or built again")

    monkeypatch.setattr(layout, "to_mlx_layout", fail)
    monkeypatch.setattr(EarTts, "text_rows", fail)
    model = mlx_voicechat.load(f32, fail, compile=False)
    kept: Any = mx.load(str(f32 / text_table.OWN_FILE))
    assert mx.array_equal(model.tts._text_rows, kept["text_rows"])


def test_a_table_of_other_weights_is_passed_over(f32: Path, tmp_path: Path) -> None:
    whole = copy_folder(f32, tmp_path / "other")
    table: Any = mx.load(str(whole / text_table.OWN_FILE))
    wrong = {"text_rows": table["text_rows"] + 1}
    mx.save_safetensors(str(whole / text_table.OWN_FILE), wrong, metadata=text_table.facts("0" * 64))
    model = mlx_voicechat.load(whole, lambda _: None, compile=False)
    assert mx.allclose(model.tts._text_rows, table["text_rows"], rtol=0, atol=1e-5)


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("plan", ["mixed-5", "mixed-4", "mxfp8", "mxfp4"])
def test_other_plans_load_and_run(original: Path, tmp_path: Path, plan: str) -> None:
    out = converted(original, tmp_path / "out", plan)
    config = read_config(out)
    body, head = (config.quantization[f"stt_model.{n}"] for n in ("llm.layers.0.mixer.in_proj", "lm_head"))
    assert (body["bits"], head["bits"]) == {"mixed-5": (5, 8), "mixed-4": (4, 8), "mxfp8": (8, 8), "mxfp4": (4, 4)}[
        plan
    ]
    speech = {name for name in config.quantization if name.startswith(("stt_model.perception.", "tts_model."))}
    assert bool(speech) == (plan == "mixed-5")
    stored = verify(out)
    assert stored["tts_model.tts_model.rvq_embs"].dtype == "F32"
    assert stored["tts_model.tts_model.mog_head.low_mat"].dtype == "BF16"
    model = mlx_voicechat.load(out, compile=False)
    session = model.session(seed=1)
    events = session.push(np.zeros(6400, np.float32))
    assert len([event for event in events if isinstance(event, mlx_voicechat.AudioFrame)]) == 5
    for layer in (model.tts.backbone.layers[0].self_attn.qkv_proj, model.tts.mog_head.proj_mus):
        assert ("scales" in layer) == (plan == "mixed-5")
        if plan == "mixed-5":
            assert layer.scales.dtype == mx.float32


def test_quantised_sources_are_dequantised_where_the_plan_differs(tmp_path: Path) -> None:
    out = converted(GOLDEN / "tiny-8bit", tmp_path / "out", "mixed-4")
    source, result = weights(GOLDEN / "tiny-8bit"), weights(out)
    head, body = "stt_model.lm_head", "stt_model.llm.layers.1.mixer.up_proj"
    assert all(mx.array_equal(source[f"{head}.{part}"], result[f"{head}.{part}"]) for part in ("weight", "scales"))
    scales, biases = (source[f"{body}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    wide = mx.dequantize(source[f"{body}.weight"], scales, biases, 64, 8)  # exact: bfloat16 ones would round
    expected = mx.quantize(wide.astype(mx.bfloat16), 64, 4)
    parts = [result[f"{body}.{part}"] for part in ("weight", "scales", "biases")]
    assert all(mx.array_equal(a, b) for a, b in zip(expected, parts, strict=True))
    plain = weights(converted(GOLDEN / "tiny-8bit", tmp_path / "plain", "f32"))
    assert mx.array_equal(plain[f"{body}.weight"], wide)


def test_distinct_widths(tmp_path: Path) -> None:
    raw = json.loads((assets.CONFIGS / "random.json").read_text(encoding="utf-8"))
    source = random_original(raw, tmp_path / "original")
    with open_source(str(source)) as opened:
        assert replace(opened.config, synthetic=True) == parse_config(raw | {"synthetic": True})
    out = converted(source, tmp_path / "out", "bf16")
    model = mlx_voicechat.load(out, compile=False)
    assert len(model.answer(np.zeros(2560, np.float32)).codes) == 2


def test_large_tensors_are_read_in_blocks(original: Path, f32: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mlx_voicechat.convert.source.BLOCK_BYTES", 1000)
    same(weights(converted(original, tmp_path / "out", "f32")), weights(f32))
    same(weights(converted(original, tmp_path / "4", "4bit")), relaid(GOLDEN / "tiny-4bit"))


def test_shards_of_bounded_size(original: Path, f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_voicechat.convert.writer.SHARD_BYTES", 10**6)
    out = converted(original, tmp_path / "out", "f32")
    sizes = [path.stat().st_size for path in out.glob("model-*-of-00006.safetensors")]
    assert len(sizes) == 6
    assert max(sizes) < 1.1e6
    same(weights(out), weights(f32))
    assert len(verify(out)) == len(verify(f32))


# -- the original's config and names ------------------------------------------------------------------------------


def test_every_tensor_of_the_released_model_is_known() -> None:
    raw = json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8"))
    stored = {name: Stored("model.safetensors", shape, "F32", 0) for name, shape in BUFFERS.items()}
    for line in (GOLDEN / "keys-11b.tsv").read_text(encoding="utf-8").splitlines():
        name, shape, dtype = line.split("\t")
        sizes = () if shape == "scalar" else tuple(map(int, shape.split("x")))
        stored[name] = Stored("model.safetensors", sizes, {"float32": "F32", "int32": "I32"}[dtype], 0)
    assert len(stored) == 1630 + len(BUFFERS)
    found = tensors(stored, parse_config(raw), "nvidia", Path("original"))
    assert stored.keys() - found.keys() == {name for name in stored if layout.is_unused(name)}
    for plan in plans.NAMED.values():
        settings = plan.settings({name: tensor.facts for name, tensor in found.items()})
        quantised = sum(isinstance(setting, plans.Quantised) for setting in settings.values())
        assert (quantised > 100) == (plan.name not in ("f32", "bf16"))
    narrow = plans.NAMED["mixed-5"].settings({name: tensor.facts for name, tensor in found.items()})
    wide = [n for n, s in narrow.items() if not isinstance(s, plans.Quantised) and np.prod(found[n].shape) > 4e6]
    known = ("tts_model.audio_codec.", "tts_model.tts_model.embed_subword.")
    assert {name for name in wide if not name.startswith(known)} == {
        f"tts_model.tts_model.{name}" for name in ("rvq_embs", "mog_head.low_mat")
    }


def test_nvidias_config_is_translated() -> None:
    expected = json.loads((GOLDEN / "tiny-f32" / "config.json").read_text(encoding="utf-8"))
    assert nvidia_config(expected)["model"]["speech_generation"] == _without(
        json.loads((GOLDEN / "tiny-nvidia" / "config.json").read_text())["model"]["speech_generation"]
    )


def _without(speech: dict[str, Any]) -> dict[str, Any]:
    """Without the keys of NVIDIA's that nothing reads."""
    tts, codec = speech["model"]["tts_config"], speech["model"]["codec_config"]
    for section, names in (
        (tts, ("context_hidden_size", "random_target_masking", "backbone_type")),
        (tts["cas_config"], ("backbone_type",)),
        (tts["cas_config"]["backbone_config"], ("is_encoder_decoder",)),
        (codec, ("groups", "wav_to_token_ratio")),
    ):
        for name in names:
            del section[name]
    return speech


def broken(original: Path, tmp_path: Path) -> Path:
    target = tmp_path / "original"
    target.mkdir()
    (target / "tokenizer").mkdir()
    for path in original.rglob("*"):
        if path.is_file():
            (target / path.relative_to(original)).write_bytes(path.read_bytes())
    return target


def test_absent_keys_go_by_name(original: Path, tmp_path: Path) -> None:
    folder = broken(original, tmp_path)

    def change(raw: Any) -> None:
        del raw["model"]["stt"]["model"]["duplex_function_channel_weight"]
        del raw["_rnnt_merge_info"]["joint_config"]["vocabulary"]
        raw["model"]["stt"]["model"]["inference_pad_boost"] = 1.5

    edit_json(folder / "config.json", change)
    with pytest.raises(
        CheckpointError, match=r"lacks _rnnt_merge_info.joint_config.vocabulary, model.stt.model.duplex"
    ):
        open_source(str(folder))


def test_boosts_and_older_names_of_the_base_config(original: Path, tmp_path: Path) -> None:
    folder = broken(original, tmp_path)
    edit_json(folder / "config.json", lambda raw: raw["model"]["stt"]["model"].update(inference_eos_boost=0.5))

    def older(base: Any) -> None:
        base["mamba_num_groups"] = base.pop("n_groups")
        base["mamba_state_dim"] = base.pop("ssm_state_size")
        base["rms_norm_eps"] = base.pop("layer_norm_epsilon")

    edit_json(folder / "tokenizer" / "config.json", older)
    with open_source(str(folder)) as opened:
        assert opened.config == replace(read_config(GOLDEN / "tiny-f32"), eos_boost=0.5)


def test_tensors_that_do_not_belong(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)

    def change(stored: dict[str, mx.array]) -> None:
        stored["stt_model.extra"] = stored.pop("stt_model.function_head.weight")
        stored["stt_model.lm_head.weight"] = mx.zeros((3, 4))

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        open_source(str(folder))
    for words in ("missing 1: stt_model.function_head", "unknown 1: stt_model.extra", "lm_head.weight is (3, 4)"):
        assert words in str(caught.value)


@pytest.mark.parametrize("plan", ["bf16", "4bit"])
def test_a_damaged_weight_is_refused_by_name(tmp_path: Path, plan: str) -> None:
    folder = copy_of("tiny-f32", tmp_path)

    def damage(stored: dict[str, mx.array]) -> None:
        weight = stored["stt_model.lm_head.weight"]
        stored["stt_model.lm_head.weight"] = mx.where(mx.arange(weight.shape[1]) == 5, mx.nan, weight)

    rewrite(folder, damage)
    with pytest.raises(CheckpointError, match="weight holds NaN or infinity"):
        converted(folder, tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cannot_be_fetched_is_asked_for_by_its_option(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="--tokenizer FOLDER") as caught:
        open_source(str(original), tokenizer="nobody/tokenizer-of-nobody")
    assert "--model" not in str(caught.value)


def test_sources_and_tokenizers_that_are_none(original: Path, tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: open_source(str(tmp_path)), "no config.json"),
        (lambda: open_source("nowhere"), "no folder nowhere"),
        (lambda: open_source(str(original), tokenizer="nowhere"), "no folder nowhere"),
        (lambda: open_source(str(original), tokenizer=str(assets.TINY)), "text_config.hidden_size is 144"),
        (lambda: open_source(str(GOLDEN / "tiny-f32"), tokenizer=str(assets.TINY)), "768 tokens"),
        (lambda: open_source(str(original), revision="main"), "a folder has no revisions"),
        (lambda: open_source(str(GOLDEN / "tiny-f32"), tokenizer_revision="main"), "needs --tokenizer"),
    ]
    for call, words in cases:
        with pytest.raises((CheckpointError, InputError), match=words):
            call()


def test_hub_sources_know_their_revision(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []
    commit = "0123456789abcdef0123456789abcdef01234567"

    def fetch(repository: str, revision: str | None = None, patterns: Any = (), say: Any = None) -> Path:
        asked.append((repository, revision, list(patterns)))
        folder = tmp_path / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
        if not folder.exists():
            folder.mkdir(parents=True)
            for path in (original if "VoiceChat" in repository else original / "tokenizer").glob("*.*"):
                (folder / path.name).symlink_to(path)
        return folder

    monkeypatch.setattr(hub, "fetch", fetch)
    with open_source("nvidia/VoiceChat", revision="main", tokenizer="nvidia/base", tokenizer_revision="v1") as opened:
        facts = conversion.configuration(conversion.prepare(opened, plans.find("bf16")))[conversion.CONVERSION_KEY]
    assert asked[0] == ("nvidia/VoiceChat", "main", ["config.json"])
    assert asked[1][2] == hub.ORIGINAL_PATTERNS
    assert asked[2] == ("nvidia/base", "v1", hub.BASE_PATTERNS)
    assert (facts["source"], facts["tokenizer"]) == ("nvidia/VoiceChat", "nvidia/base")
    assert (facts["source_revision"], facts["tokenizer_revision"]) == (commit, commit)


# -- loading ------------------------------------------------------------------------------------------------------


def test_load_says_to_convert_an_original(original: Path) -> None:
    with pytest.raises(CheckpointError, match="mlx-voicechat convert --source") as caught:
        mlx_voicechat.load(original)
    assert str(original) in str(caught.value)


def test_a_newer_format_is_refused_by_name(f32: Path, tmp_path: Path) -> None:
    folder = copy_folder(f32, tmp_path / "newer")
    edit_json(folder / "config.json", lambda raw: raw.update({checkpoint.FORMAT_KEY: 2}))
    for call in (lambda: mlx_voicechat.load(folder), lambda: open_source(str(folder))):
        with pytest.raises(CheckpointError, match=f"{checkpoint.FORMAT_KEY} is 2"):
            call()


def test_every_layout_is_placed_where_it_says(f32: Path) -> None:
    file = f32 / "model-00001-of-00001.safetensors"
    assert max(start for _, _, start in places(file).values()) < file.stat().st_size
    assert isinstance(mlx_voicechat.load(f32, compile=False), VoiceChat)
