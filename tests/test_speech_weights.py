"""How speech weights are held: which layers 8 bits take, what stays as it is, bytes announced, memory while loading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import soundfile as sf
from mlx.utils import tree_flatten
from support.checkpoints import GOLDEN, copy_of, rewrite

import mlx_voicechat
from mlx_voicechat import AudioFrame
from mlx_voicechat.config import ModelConfig
from mlx_voicechat.errors import InputError
from mlx_voicechat.gauges import memory
from mlx_voicechat.networks.tree import Networks
from mlx_voicechat.weights import assets, checkpoint, layout
from mlx_voicechat.weights.config_file import parse_config, read_config
from mlx_voicechat.weights.precision import Requantisation, fits, plan, resident_bytes
from mlx_voicechat.weights.shards import Stored, verify

EXAMPLES = Path(__file__).parents[1] / "examples"
BLOCK = "tts_model.tts_model.backbone.layers.0."
ENCODER = "stt_model.perception.encoder."


def networks(folder: Path, requantise: Requantisation) -> dict[str, nn.Module]:
    """All modules of a loaded checkpoint by path."""
    config = read_config(folder)
    tree = Networks(config)
    checkpoint.build(tree, checkpoint.open_folder(folder).parameters(), config, requantise)
    return dict(tree.named_modules())


def names(module: str) -> list[str]:
    return layout.stored_names(f"{module}.weight")


def stored(shape: tuple[int, ...], dtype: str = "BF16") -> Stored:
    return Stored("model.safetensors", shape, dtype)


def settings(name: str, shape: tuple[int, ...], dtype: str = "BF16", choice: str | None = "q8") -> Any:
    return plan({name: stored(shape, dtype)}, choice, f32_fits=False).get(name)


# -- which layers -------------------------------------------------------------------------------------------------


def test_eight_bits_take_the_linear_layers_of_encoder_backbone_and_head() -> None:
    folder = GOLDEN / "tiny-bf16"
    chosen = plan(verify(folder), "q8")
    modules = networks(folder, chosen)
    packed = {path: layer for path, layer in modules.items() if isinstance(layer, nn.QuantizedLinear)}
    plain = {path for path, layer in modules.items() if isinstance(layer, nn.Linear)}
    assert sorted(name for path in packed for name in names(path)) == sorted(chosen)
    speech = ("stt_model.perception.", "tts_model.tts_model.")
    assert all(path.startswith((*speech, "tts_model.audio_codec.")) for path in packed)
    assert {path.split("layers.")[0] for path in plain if path.startswith(speech)} == {
        f"{ENCODER}pre_encode.conv.3",
        f"{ENCODER}pre_encode.conv.6",
        f"{ENCODER}pre_encode.out",  # no group size divides its inputs here
        "tts_model.tts_model.embed_subword.backbone.encoder.",
        "tts_model.tts_model.embed_subword.proj_embedding",
        "tts_model.tts_model.gated_fusion_audio_text.text_proj",
        *{f"tts_model.tts_model.{name}" for name in ("embed_code", "mog_head.proj_logs", "mog_head.proj_logits")},
        "tts_model.tts_model.mog_head.proj_else",  # these four are too small here
    }
    codec = {path for path in packed if path.startswith("tts_model.audio_codec.")}
    assert codec
    assert all(".pwconv" in path for path in codec)
    for layer in packed.values():
        assert (layer.bits, layer.mode, layer["scales"].dtype, layer["biases"].dtype) == (
            8,
            "affine",
            mx.float32,
            mx.float32,
        )


def test_the_released_model() -> None:
    """Groups of 64 throughout; what stays float32 of its large tensors is named here, and what the table is made of."""
    config = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
    shapes = layout.shapes(config)
    chosen = plan({name: stored(shape) for name, shape in shapes.items()}, "q8")
    assert {entry["group_size"] for entry in chosen.values()} == {64}
    left = {name for name, shape in shapes.items() if np.prod(shape) > 60_000 and name not in chosen}
    left = {name for name in left if name.startswith(("stt_model.perception.", "tts_model.tts_model."))}
    assert {name.removeprefix("tts_model.tts_model.") for name in left if "embed_subword" not in name} == {
        "rvq_embs",
        "mog_head.low_mat",
        "audio_prompt_projection_W",
        "gated_fusion_audio_text.text_proj.weight",
        f"{ENCODER}pre_encode.conv.3.weight",
        f"{ENCODER}pre_encode.conv.6.weight",
    }


def test_group_sizes_and_shapes() -> None:
    name = f"{BLOCK}mlp.down_proj.weight"
    assert settings(name, (64, 128)) == {"group_size": 64, "bits": 8}
    assert settings(name, (64, 96)) == {"group_size": 32, "bits": 8}
    assert settings(name, (640, 72)) is None
    assert settings(name, (31, 128)) is None  # small
    assert settings(name, (128,)) is None
    assert settings(f"{ENCODER}layers.0.conv.pointwise_conv1.weight", (128, 64, 1)) == {"group_size": 64, "bits": 8}
    assert settings(f"{ENCODER}layers.0.conv.depthwise_conv.weight", (1024, 1, 32)) is None
    assert settings(f"{ENCODER}layers.0.conv.depthwise_conv.weight", (1024, 32, 1)) is None
    assert settings("tts_model.audio_codec.decoder.layers.2.pwconv1.weight", (256, 64, 1)) is not None
    for other in (
        "tts_model.audio_codec.decoder.layers.9.weight",
        "tts_model.audio_codec.encoder.layers.2.pwconv1.weight",
        "stt_model.rnnt_joint.enc.weight",
        "stt_model.x.weight",
    ):
        assert settings(other, (64, 128)) is None


def test_parts_that_run_as_one_are_treated_as_one() -> None:
    parts = {f"{BLOCK}self_attn.{part}_proj.weight": stored((24, 64)) for part in "qkv"}  # small, but not together
    assert plan(parts, "q8").keys() == parts.keys()
    mixed = parts | {f"{BLOCK}self_attn.v_proj.weight": stored((24, 64), "F32")}
    assert plan(mixed, "q8").keys() == mixed.keys()
    assert plan(mixed, None, f32_fits=False) == {}
    assert plan(parts | {f"{BLOCK}self_attn.v_proj.weight": stored((24, 128))}, "q8") == {}


def test_what_decides() -> None:
    name = f"{BLOCK}mlp.down_proj.weight"
    for dtype, choice, expected in (
        ("BF16", None, True),
        ("F16", None, True),
        ("F32", None, False),
        ("F32", "q8", True),
        ("BF16", "f32", False),
        ("U32", "q8", False),  # quantised in the file
        ("U32", None, False),
    ):
        assert (settings(name, (64, 128), dtype, choice) is not None) == expected
    assert plan({name: stored((64, 128))}, None, f32_fits=True) == {}
    assert plan({name: stored((64, 128))}, "q8", f32_fits=True) != {}
    assert fits(6, 10)
    assert not fits(7, 10)


def test_an_unknown_word() -> None:
    for call in (lambda: plan({}, "q4"), lambda: mlx_voicechat.load("nowhere/at-all", speech_weights="q4")):  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"'q4'.*f32 or q8"):
            call()


@pytest.mark.parametrize(("gigabytes", "layer"), [(10**6, nn.Linear), (10**-6, nn.QuantizedLinear)])
def test_the_machine_decides(monkeypatch: pytest.MonkeyPatch, gigabytes: float, layer: type[nn.Module]) -> None:
    size = round(gigabytes * 1e9)
    monkeypatch.setattr(memory, "machine", lambda: memory.Machine(size, size))
    model = mlx_voicechat.load(GOLDEN / "tiny-bf16", compile=False)
    assert isinstance(model.tts.backbone.layers[0].mlp.down_proj, layer)
    stored_wide = mlx_voicechat.load(GOLDEN / "tiny-f32", compile=False)
    assert isinstance(stored_wide.tts.backbone.layers[0].mlp.down_proj, nn.Linear)


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-bf16", "tiny-f32", "tiny-4bit"])
@pytest.mark.parametrize("choice", ["f32", "q8"])
def test_announced_bytes_are_those_held(name: str, choice: str) -> None:
    folder = GOLDEN / name
    headers = verify(folder)
    chosen = plan(headers, choice)
    for path, module in networks(folder, chosen).items():
        if isinstance(module, nn.QuantizedLinear) and names(path)[0] in chosen:
            own = sum(module[part].nbytes for part in ("weight", "scales", "biases"))
            assert own == sum(resident_bytes(headers[part], chosen[part]) for part in names(path))
    tree = Networks(config := read_config(folder))
    checkpoint.build(tree, parameters := checkpoint.open_folder(folder).parameters(), config, chosen)
    flat: Any = tree_flatten(tree.parameters())
    voices = sum(parameters[layout.VOICE_PREFIX + v].nbytes for v in layout.voices(parameters))
    total = sum(array.nbytes for _, array in flat) + voices
    assert sum(memory.resident(path, headers[path], chosen) for path in headers) == total


@pytest.fixture
def wide(tmp_path: Path) -> tuple[Path, ModelConfig]:
    """A checkpoint whose speech weights are megabytes, so that memory can be told from noise."""
    folder = copy_of("tiny-bf16", tmp_path)
    wider = 64 * 128

    def change(tensors: dict[str, mx.array]) -> None:
        for layer in range(7):
            for part, shape in (("gate_proj", (wider, 64)), ("up_proj", (wider, 64)), ("down_proj", (64, wider))):
                name = f"{BLOCK.replace('.0.', f'.{layer}.')}mlp.{part}.weight"
                tensors[name] = mx.random.normal(shape, key=mx.random.key(layer)).astype(mx.bfloat16)

    rewrite(folder, change)
    config = read_config(folder)
    return folder, replace(config, tts=replace(config.tts, intermediate_size=wider))


def test_loading_takes_the_final_size_and_one_layer(
    wide: tuple[Path, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "STEP_BYTES", 2**20)
    folder, config = wide
    parameters = replace(checkpoint.open_folder(folder), config=config).parameters()
    tree = Networks(config)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    checkpoint.build(tree, parameters, config, plan(parameters.stored, "q8"))
    flat: Any = tree_flatten(tree.parameters())
    final = sum(array.nbytes for _, array in flat)
    largest = 2 * config.tts.intermediate_size * config.tts.hidden_size * 4
    assert mx.get_peak_memory() - before <= final + largest
    assert mx.get_active_memory() - before <= 1.05 * final


# -- values -------------------------------------------------------------------------------------------------------


def test_float32_is_the_stored_value_and_eight_bits_are_near_it() -> None:
    folder = GOLDEN / "tiny-bf16"
    exact, packed = (networks(folder, plan(verify(folder), choice)) for choice in ("f32", "q8"))
    parameters = checkpoint.open_folder(folder).parameters()
    for path, layer in packed.items():
        if isinstance(layer, nn.QuantizedLinear) and path.startswith(("stt_model.perception", "tts_model")):
            weight: Any = exact[path].weight
            assert mx.array_equal(weight, parameters[f"{path}.weight"]), path
            near = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
            spread = mx.max(weight, axis=1) - mx.min(weight, axis=1)
            assert mx.all(mx.abs(near - weight) <= spread[:, None] / 255 + 1e-6), path
    for path, layer in exact.items():  # all else is the same to the bit
        if not isinstance(packed[path], nn.QuantizedLinear):
            own: Any = {name: value for name, value in layer.items() if isinstance(value, mx.array)}
            assert all(mx.array_equal(value, packed[path][name]) for name, value in own.items()), path


def test_the_demonstration_talks_in_eight_bits() -> None:
    model = mlx_voicechat.load("tiny", compile=False, speech_weights="q8")
    audio = np.concatenate([sf.read(EXAMPLES / "hello.wav", dtype="float32")[0], np.zeros(64000, np.float32)])
    answer = model.answer(audio)
    assert (answer.transcript, answer.text) == ("Hello.", "Hello, how can I help you?")
    session = model.session()
    events = session.push(audio) + session.finish()
    streamed = np.concatenate([event.samples for event in events if isinstance(event, AudioFrame)])
    np.testing.assert_array_equal(streamed, answer.samples)
