"""Random checkpoints: every tensor of the released model by name and shape, the same bytes for the same seed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import GOLDEN, tensors_of

import mlx_voicechat
from mlx_voicechat.cli import published
from mlx_voicechat.config import ModelConfig
from mlx_voicechat.errors import InputError
from mlx_voicechat.networks.tree import Networks
from mlx_voicechat.text import Tokenizer, character_table
from mlx_voicechat.weights import assets, checkpoint, layout, synthetic
from mlx_voicechat.weights.config_file import parse_config, read_config
from mlx_voicechat.weights.shards import verify


def raw_config(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((assets.CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return raw


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_random("random", tmp_path_factory.mktemp("synthetic") / "small")


def build(folder: Path) -> tuple[Networks, checkpoint.Parameters, ModelConfig]:
    config = read_config(folder)
    parameters = checkpoint.open_folder(folder).parameters()
    networks = Networks(config)
    checkpoint.build(networks, parameters, config)
    return networks, parameters, config


# -- names and shapes ---------------------------------------------------------------------------------------------


def test_the_full_config_gives_the_released_models_names_and_shapes() -> None:
    released = {}
    for line in (GOLDEN / "keys-11b.tsv").read_text(encoding="utf-8").splitlines():
        name, shape, kind = line.split("\t")
        released[name] = (() if shape == "scalar" else tuple(map(int, shape.split("x"))), kind)
    ours = {
        name: (shape, "int32" if layout.is_integer(name) else "float32")
        for name, shape in layout.shapes(parse_config(raw_config("full"))).items()
    }
    assert ours == released


@pytest.mark.parametrize("folder", [GOLDEN / "tiny-f32", assets.TINY], ids=["golden", "talking"])
def test_other_checkpoints_have_the_names_and_shapes_of_their_configs(folder: Path) -> None:
    assert layout.shapes(read_config(folder)) == {name: entry.shape for name, entry in verify(folder).items()}


def test_biases_follow_the_configs_flags() -> None:
    raw = raw_config("random")
    raw["text_config"] |= {"use_bias": True, "attention_bias": True, "mlp_bias": True, "use_conv_bias": False}
    shapes = layout.shapes(parse_config(raw))
    assert shapes["stt_model.llm.layers.0.mixer.in_proj.bias"] == (426,)
    assert shapes["stt_model.llm.layers.1.mixer.up_proj.bias"] == (112,)
    assert shapes["stt_model.llm.layers.3.mixer.k_proj.bias"] == (28,)
    assert "stt_model.llm.layers.0.mixer.conv1d.bias" not in shapes


def test_all_widths_of_the_small_kind_are_distinct(small: Path) -> None:
    c = read_config(small)
    widths = [c.mel.features, c.encoder.d_model, c.encoder.d_model * c.encoder.ff_expansion_factor]
    widths += [c.encoder.subsampling_channels, c.encoder.head_dim, c.encoder.n_heads, c.encoder.left_frames]
    widths += [c.rnnt.pred_hidden, c.rnnt.joint_hidden, c.rnnt.blank_id, c.rnnt.blank_id + 1]
    llm = c.llm
    widths += [llm.vocab_size, llm.hidden_size, llm.intermediate_size, llm.head_dim, llm.mamba_inner, llm.conv_dim]
    widths += [llm.num_attention_heads * llm.head_dim, llm.num_key_value_heads * llm.head_dim, llm.ssm_state_size]
    widths += [c.tts.hidden_size, c.tts.intermediate_size, c.tts.num_attention_heads * c.tts.head_dim, c.tts.head_dim]
    widths += [c.tts.num_key_value_heads * c.tts.head_dim, c.tts.latent_size, c.tts.codebook_size, c.tts.sliding_window]
    characters, mog = c.tts.characters, c.tts.mog
    widths += [
        characters.hidden_size,
        characters.intermediate_size,
        characters.num_attention_heads * characters.head_dim,
    ]
    widths += [mog.intermediate_size, mog.num_predictions, mog.low_rank, c.tts.num_quantizers]
    widths += [c.codec.base_channels * multiplier for multiplier in c.codec.channel_multipliers]
    doubles = sorted({width for width in widths if widths.count(width) > 1})
    assert not doubles


# -- files --------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    again = synthetic.write_random("random", tmp_path / "again", seed=0)
    assert {file.name for file in again.iterdir()} == {file.name for file in small.iterdir()}
    assert all(file.read_bytes() == (small / file.name).read_bytes() for file in again.iterdir())
    other = synthetic.write_random("random", tmp_path / "other", seed=1)
    shard = "model-00001-of-00002.safetensors"
    assert (other / shard).read_bytes() != (small / shard).read_bytes()
    assert (other / "config.json").read_bytes() == (small / "config.json").read_bytes()


def test_a_small_one_loads_whole(small: Path) -> None:
    networks, parameters, config = build(small)
    assert config.synthetic
    assert layout.voices(parameters) == ["Aria", "Sofia"]
    for voice in ("Aria", "Sofia"):
        latents = checkpoint.voice(parameters, voice, config)
        assert latents.shape == (1, config.tts.prompt_frames, config.tts.hidden_size)
    assert networks.stt_model.lm_head.weight.dtype == mx.float32
    assert len(list(small.glob("model-*-of-00002.safetensors"))) == 2


def test_a_deep_one_has_the_released_models_layers(tmp_path: Path) -> None:
    networks, _, config = build(synthetic.write_random("deep", tmp_path / "deep"))
    full = parse_config(raw_config("full"))
    assert config.llm.pattern == full.llm.pattern
    assert (config.encoder.n_layers, config.tts.num_hidden_layers) == (24, 28)
    assert (config.tts.codebook_size, config.tts.sliding_window) == (full.tts.codebook_size, full.tts.sliding_window)
    assert len(networks.stt_model.perception.encoder.layers) == 24


def test_a_quantised_one_has_the_published_checkpoints_form(tmp_path: Path) -> None:
    raw = json.loads((GOLDEN / "tiny-f32" / "config.json").read_text(encoding="utf-8"))
    folder = synthetic.write(raw, tmp_path / "four", bits=4)
    published = GOLDEN / "tiny-4bit"
    form = {name: (entry.shape, entry.dtype) for name, entry in verify(folder).items()}
    expected = {
        name: (entry.shape, "F32" if name.endswith((".scales", ".biases")) else entry.dtype)
        for name, entry in verify(published).items()
    }
    featurizer = "stt_model.perception.preprocessor.featurizer."
    expected |= {f"{featurizer}fb": ((1, 128, 257), "BF16"), f"{featurizer}window": ((400,), "BF16")}
    assert form == expected
    assert json.loads((folder / "config.json").read_text())["quantization"] == {"group_size": 64, "bits": 4}
    assert read_config(folder).quantization == read_config(published).quantization
    networks, _, _ = build(folder)
    layer = networks.stt_model.llm.layers[0].mixer.in_proj
    plain = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits).astype(mx.float32)
    values = np.array(plain)
    assert abs(values.mean()) < 0.01
    assert values.std() == pytest.approx(64**-0.5, rel=0.15)


def test_the_full_kind_is_as_large_as_the_published_one() -> None:
    config = parse_config(raw_config("full"))
    tokens = synthetic.vocabulary(config.llm.vocab_size)
    shapes = layout.shapes(config, buffers=True).items()
    plan = [part for name, shape in shapes for part in synthetic._plan(name, shape, config, tokens, 0, 4)]
    headers = published.headers(config, 4)
    assert len(headers) == 1632 + 2 * 123
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in plan} == {
        name: (entry.shape, entry.dtype) for name, entry in headers.items()
    }
    assert sum(tensor.bytes for tensor in plan) == 9_165_584_246
    largest = max(plan, key=lambda tensor: tensor.bytes)
    assert largest.draw().nbytes <= 4 * synthetic.BLOCK < largest.bytes


def test_large_tensors_repeat_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "BLOCK", 7)
    config = parse_config(raw_config("random"))
    (tensor,) = synthetic._plan("stt_model.lm_head.weight", (5, 4), config, [], 0, None)
    chunks = [bytes(chunk) for chunk in synthetic._encoded(tensor)]
    assert [len(chunk) for chunk in chunks] == [28, 28, 24]
    assert chunks[0] == chunks[1]
    rows = np.frombuffer(b"".join(chunks), np.float32).reshape(5, 4)
    assert len(np.unique(rows, axis=0)) == 5  # no row repeats another: ties between logits are not a model's


def test_bfloat16_is_rounded_as_mlx_rounds_it() -> None:
    values = np.concatenate([np.random.default_rng(0).standard_normal(1000), [1 + 2**-8, 1 + 3 * 2**-8, 0, -0.0]])
    values = values.astype(np.float32)
    tensor = synthetic._Planned("x", "BF16", values.shape, lambda: values)
    ours = np.frombuffer(b"".join(bytes(chunk) for chunk in synthetic._encoded(tensor)), np.uint16)
    assert np.array_equal(ours, np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16)))


# -- tokenizer, flags and scales ----------------------------------------------------------------------------------


def test_the_tokenizer_fits_heads_and_characters(small: Path) -> None:
    config, tokenizer = read_config(small), Tokenizer(small)
    assert tokenizer.vocab_size == config.llm.vocab_size
    ids = (config.bos_id, config.eos_id, config.pad_id, config.silence_id)
    assert [tokenizer.id_to_token(token) for token in ids] == ["<s>", "</s>", "<SPECIAL_12>", "<SPECIAL_11>"]
    assert max(map(max, filter(None, character_table(tokenizer)))) < config.tts.characters.char_vocab_size
    text = "Héllo, 你好 <TOOLCALL>[]"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("</TOOL_RESPONSE>") == [17]
    assert sum(len(token) == 1 for token in tokenizer.pieces) + 1 == config.tts.characters.char_vocab_size


@pytest.mark.parametrize("folder", [GOLDEN / "tiny-f32", assets.TINY], ids=["golden", "talking"])
def test_flags_follow_the_rules_of_trained_checkpoints(folder: Path) -> None:
    config, tokens = read_config(folder), Tokenizer(folder).pieces
    stored = tensors_of(folder)
    names = [name for name in stored if layout.is_integer(name) and not name.endswith("codec_silence_tokens")]
    assert len(names) == 5
    for name in names:
        ours = synthetic._integers(name, config, tokens, np.random.default_rng(0))
        assert ours.reshape(stored[name].shape).tolist() == stored[name].tolist(), name


def test_values_are_sensible(small: Path) -> None:
    config = read_config(small)
    stored = {name: np.array(tensor) for name, tensor in tensors_of(small).items()}
    silence = stored["tts_model.codec_silence_tokens"]
    assert 0 <= silence.min() <= silence.max() < config.tts.codebook_size
    assert np.array_equal(stored["tts_model.tts_model.rvq_embs"][3], stored["tts_model.audio_codec.prvq.mus_list.3"])
    rates = np.exp(stored["stt_model.llm.layers.0.mixer.A_log"])
    assert 1 <= rates.min() < rates.max() <= 16.001
    steps = np.logaddexp(stored["stt_model.llm.layers.0.mixer.dt_bias"], 0.0)
    assert 0.9e-3 < steps.min() < steps.max() < 0.11
    for name, tensor in stored.items():
        assert np.isfinite(tensor).all(), name
        assert layout.is_integer(name) or np.abs(tensor).max() < 10, name
        if name.endswith("layernorm.weight"):
            assert abs(tensor.mean()) < 0.1, name
        elif "norm" in name and name.endswith(".weight") and not name.startswith("tts_model.tts_model"):
            assert abs(tensor.mean() - 1) < 0.2, name


def test_signals_keep_their_size_through_the_networks(small: Path) -> None:
    model = mlx_voicechat.load(small)
    noise = np.random.default_rng(0).normal(0, 0.1, 6 * 1280).astype(np.float32)
    answer = model.answer(noise)
    rms = math.sqrt(np.square(answer.samples[2 * 1764 :]).mean())
    assert 0.01 < rms < 0.7
    assert len({tuple(row) for row in answer.codes.tolist()}) > 3
    assert len(set(answer.text_ids)) > 2


def test_every_parameter_of_the_small_kind_is_in_use(small: Path) -> None:
    networks, parameters, _ = build(small)
    used: Any = tree_flatten(networks.parameters(), destination={})
    spare = [path for path in parameters if path not in used]
    assert all(".audio_codec.encoder." in p or "_control_codes" in p or "audio_prompt_latents" in p for p in spare)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        synthetic.write_random("random", tmp_path)
    with pytest.raises(InputError, match="exists already"):
        synthetic.write_random("random", tmp_path / "kept")
    with pytest.raises(InputError, match="no folder"):
        synthetic.write_random("random", tmp_path / "absent" / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no kind 'huge'") as caught:
        synthetic.write_random("huge", tmp_path / "out")  # type: ignore[arg-type]
    assert "full-4bit" in caught.value.remedy
    with pytest.raises(InputError, match="seed is -1"):
        synthetic.write_random("random", tmp_path / "out", seed=-1)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**9})())
    with pytest.raises(InputError, match=r"needs 9\.2 GB, the disk has 1\.0 GB"):
        synthetic.write_random("full-4bit", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_half_written_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(synthetic, "_write_shards", fail)
    with pytest.raises(OSError, match="disk full"):
        synthetic.write_random("random", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert synthetic.write_random("random", out) == out
    assert read_config(out).synthetic
