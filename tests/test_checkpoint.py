"""Finding, verifying and loading checkpoints: what is whole loads, and each kind of fault has a message of its own."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import GOLDEN, copy_of, edit_json, rewrite, tensors_of

import mlx_voicechat
from mlx_voicechat.cli.info import describe
from mlx_voicechat.config import ModelConfig
from mlx_voicechat.errors import CheckpointError, InputError, VoiceChatError
from mlx_voicechat.gauges.bench import bench
from mlx_voicechat.networks.tree import Networks
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.weights import assets, checkpoint, hub, layout, shards
from mlx_voicechat.weights.config_file import parse_config, read_config
from mlx_voicechat.weights.shards import verify

SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path) -> tuple[Networks, checkpoint.Parameters, ModelConfig]:
    config = read_config(folder)
    parameters = replace(checkpoint.open_folder(folder), config=config).parameters()
    networks = Networks(config)
    checkpoint.build(networks, parameters, config)
    return networks, parameters, config


def refused(call: Callable[[], Any], *words: str, kind: type[VoiceChatError] = CheckpointError) -> VoiceChatError:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


# -- find ---------------------------------------------------------------------------------------------------------


def test_find_a_folder_and_the_packaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.find(tmp_path) == tmp_path
    assert checkpoint.find(str(tmp_path)) == tmp_path
    assert checkpoint.find("tiny") == assets.TINY
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert checkpoint.find(f"~/{tmp_path.name}") == tmp_path


def test_find_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []

    def locate(repository: str, say: Callable[[str], None]) -> Path:
        say(repository)
        return tmp_path

    monkeypatch.setattr(hub, "locate", locate)
    assert checkpoint.find("org/name", said.append) == tmp_path
    assert said == ["org/name"]


def test_notices_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.print_notice("Downloading")
    assert capsys.readouterr() == ("", "Downloading\n")


def test_what_is_no_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "voice.nemo").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(lambda: checkpoint.find(tmp_path / "voice.nemo"), "NeMo archive", "mlx-community/")
    refused(lambda: checkpoint.find(tmp_path / "model.safetensors"), "is a file", str(tmp_path))
    refused(lambda: checkpoint.find(tmp_path / "absent"), "no folder", "hub id", "tiny")
    refused(lambda: checkpoint.find("nonsense"), "no folder nonsense")
    for name in ("", "~nobody-of-this-name/x", "x" * 5000, "a\0b"):
        refused(lambda name=name: checkpoint.find(name), "no folder")  # type: ignore[misc]
    for thing in (None, 5, b"tiny"):
        kind = type(thing).__name__
        refused(lambda thing=thing: checkpoint.find(thing), f"model is {kind}", kind=InputError)  # type: ignore[misc]


# -- verify -------------------------------------------------------------------------------------------------------


def test_verify_lists_every_tensor_with_its_file() -> None:
    stored = verify(GOLDEN / "tiny-4bit")
    assert stored["stt_model.lm_head.scales"].shape == (384, 1)
    assert stored["stt_model.lm_head.weight"].dtype == "U32"
    assert {entry.file for entry in stored.values()} == {"model-00001-of-00002.safetensors", SHARD}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    folder = copy_of("tiny-4bit", tmp_path)
    rewrite(folder, lambda tensors: None)
    assert verify(folder).keys() == verify(GOLDEN / "tiny-4bit").keys()


def damage(folder: Path, how: str) -> None:
    shard = folder / SHARD
    data = shard.read_bytes()
    if how == "absent":
        shard.unlink()
    elif how == "cut off":
        shard.write_bytes(data[:-1])
    elif how == "cut off inside its header":
        shard.write_bytes(data[:500])
    elif how == "empty":
        shard.write_bytes(b"")
    elif how == "too long":
        shard.write_bytes(data + b"\0")
    elif how == "a web page":
        shard.write_bytes(b"<!doctype html><html><body>Sign in to the network</body></html>")
    elif how == "a header of noise":
        shard.write_bytes((10).to_bytes(8, "little") + b"{" * 30)
    elif how == "a pointer":
        shard.write_bytes(b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 1\n")
    elif how == "no index":
        (folder / INDEX).unlink()
        shard.unlink()
    elif how == "no weights":
        for file in [*folder.glob("*.safetensors"), folder / INDEX]:
            file.unlink()
    elif how == "a broken index":
        (folder / INDEX).write_text("{}")
    elif how == "an index that leaves the folder":
        edit_json(folder / INDEX, lambda index: index["weight_map"].update(x="../x.safetensors"))
    elif how == "a tensor elsewhere":
        edit_json(folder / INDEX, lambda index: index["weight_map"].update({"stt_model.extra": SHARD}))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("absent", ["lacks 1 of the 2 files", SHARD, "repeat"]),
        ("cut off", [SHARD, "is cut off", "repeat"]),
        ("cut off inside its header", ["inside its header"]),
        ("empty", ["is cut off after 0 bytes"]),
        ("too long", ["is damaged"]),
        ("a web page", ["is not a safetensors file"]),
        ("a header of noise", ["header cannot be read"]),
        ("a pointer", ["Git LFS pointer", "git lfs pull"]),
        ("no index", [f"no {INDEX}"]),
        ("no weights", ["has no weights"]),
        ("a broken index", ["is not a safetensors index"]),
        ("an index that leaves the folder", ["is not a safetensors index"]),
        ("a tensor elsewhere", ["1 tensors are not in the file", "stt_model.extra"]),
    ],
)
def test_a_broken_download(tmp_path: Path, how: str, words: list[str]) -> None:
    folder = copy_of("tiny-4bit", tmp_path)
    damage(folder, how)
    refused(lambda: verify(folder), *words)
    refused(lambda: checkpoint.open_folder(folder).parameters(), *words)


# -- load ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-f32", "tiny-bf16", "tiny-8bit", "tiny-4bit"])
def test_golden_checkpoints_load_in_computing_types(name: str) -> None:
    networks, _, config = load(GOLDEN / name)
    own = mx.float32 if name == "tiny-f32" else mx.bfloat16
    flat: Any = tree_flatten(networks.parameters())
    for path, array in flat:
        if not mx.issubdtype(array.dtype, mx.floating):
            assert array.dtype in (mx.int32, mx.uint32), path
        elif path.startswith(("stt_model.perception", "stt_model.rnnt", "tts_model")) or path.endswith("A_log"):
            assert array.dtype == mx.float32, path
        elif not path.endswith((".D", ".dt_bias")):
            assert array.dtype == own, path
    head = networks.stt_model.lm_head
    if config.quantization:
        assert (head.bits, head.group_size) == (4 if name == "tiny-4bit" else 8, 64)
    assert isinstance(head, nn.QuantizedLinear) == bool(config.quantization)


def test_the_packaged_model_loads() -> None:
    _, parameters, config = load(assets.TINY)
    assert config.demonstration
    assert checkpoint.voice(parameters, config.speaker, config).shape == (1, 12, 128)


def test_every_parameter_holds_what_its_tensors_hold() -> None:
    networks, _, _ = load(GOLDEN / "tiny-f32")
    stored = tensors_of(GOLDEN / "tiny-f32")
    flat: Any = tree_flatten(networks.parameters())
    for path, array in flat:
        parts = [layout.to_mlx_layout(name, stored[name]) for name in layout.stored_names(path)]
        whole = parts[0] + parts[1] if ".lstm." in path and path.endswith("bias") else mx.concatenate(
            [part.reshape(part.shape or (1,)) for part in parts]
        ).reshape(array.shape)  # fmt: skip
        offset = 1.0 if layout.OFFSET_NORM.search(path) else 0.0
        assert mx.array_equal(array, whole + offset), path


def test_weights_are_contiguous() -> None:
    networks, _, _ = load(GOLDEN / "tiny-f32")
    flat: Any = tree_flatten(networks.parameters())
    assert all(memoryview(array).c_contiguous for _, array in flat)


def test_unused_tensors_and_loading_itself_cost_no_memory(tmp_path: Path) -> None:
    folder = copy_of("tiny-bf16", tmp_path)
    unused = 64 * 2**20
    rewrite(folder, lambda t: t.update({"tts_model.tts_model.audio_prompt_projection_W": mx.zeros(unused, mx.uint8)}))
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    networks, _, _ = load(folder)
    flat: Any = tree_flatten(networks.parameters())
    assert mx.get_peak_memory() - before < 1.5 * sum(array.nbytes for _, array in flat)


def test_weights_are_evaluated_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STEP_BYTES", 100)
    arrays = [mx.zeros(size, mx.uint8) for size in (60, 40, 1, 500, 30, 30, 50)]
    sizes = [[array.size for array in step] for step in checkpoint._steps(arrays)]
    assert sizes == [[60, 40], [1], [500], [30, 30], [50]]


def test_wide_integers_become_int32(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    flags = "tts_model.tts_model.embed_subword.bos_eos_emb.special_flags"
    rewrite(folder, lambda tensors: tensors.update({flags: tensors[flags].astype(mx.int64)}))
    networks, _, _ = load(folder)
    loaded = networks.tts_model.tts_model.embed_subword.bos_eos_emb.special_flags
    assert loaded.dtype == mx.int32
    assert loaded.tolist() == tensors_of(GOLDEN / "tiny-f32")[flags].tolist()


def test_our_own_layout_is_read_without_transposing(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    rewrite(folder, lambda t: t.update({name: layout.to_mlx_layout(name, t[name]) for name in t}))
    edit_json(folder / "config.json", lambda raw: raw.update({checkpoint.FORMAT_KEY: checkpoint.FORMAT_VERSION}))
    ours, _, _ = load(folder)
    theirs, _, _ = load(GOLDEN / "tiny-f32")
    flat: Any = tree_flatten(theirs.parameters(), destination={})
    same: Any = tree_flatten(ours.parameters())
    for path, array in same:
        assert mx.array_equal(array, flat[path]), path


@pytest.mark.parametrize("version", [checkpoint.FORMAT_VERSION + 1, "one", -1])
def test_a_newer_format_is_refused(tmp_path: Path, version: Any) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    edit_json(folder / "config.json", lambda raw: raw.update({checkpoint.FORMAT_KEY: version}))
    refused(lambda: load(folder), checkpoint.FORMAT_KEY, repr(version), "Update")


def test_a_tokenizer_that_does_not_match_the_heads(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    (folder / "tokenizer.json").write_bytes((assets.TINY / "tokenizer.json").read_bytes())
    refused(lambda: load(folder), "tokenizer.json has 768 tokens", "384")
    (folder / "tokenizer.json").unlink()
    refused(lambda: load(folder), "no tokenizer.json")


def test_a_speaker_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    edit_json(folder / "config.json", lambda raw: raw.update(speaker="Nobody"))
    refused(lambda: load(folder), "speaker", "'Nobody'", "Aria")


def test_voices() -> None:
    config = read_config(GOLDEN / "tiny-f32")
    parameters = replace(checkpoint.open_folder(GOLDEN / "tiny-f32"), config=config).parameters()
    assert layout.voices(parameters) == ["Aria"]
    assert checkpoint.voice(parameters, "Aria", config).shape == (1, config.tts.prompt_frames, config.tts.hidden_size)
    refused(lambda: checkpoint.voice(parameters, "aria", config), "'aria'", "Voices: Aria", kind=InputError)
    longer = replace(config, tts=replace(config.tts, prompt_frames=13))
    refused(lambda: checkpoint.voice(parameters, "Aria", longer), "(1, 12, 64)", "(1, 13, 64)")


# -- check --------------------------------------------------------------------------------------------------------


QKV = "tts_model.tts_model.backbone.layers.1.self_attn.{}_proj.weight"
LSTM = "stt_model.rnnt_decoder.prediction.dec_rnn.lstm."


def test_names_of_stored_tensors() -> None:
    config = parse_config(json.loads((assets.CONFIGS / "random.json").read_text(encoding="utf-8")))
    shapes = layout.shapes(config)
    paths = layout.assemble({name: mx.zeros(shape) for name, shape in shapes.items()}, torch_layout=True)
    stored = [name for path in paths for name in layout.stored_names(path)]
    assert sorted(stored) == sorted(name for name in shapes if not layout.is_unused(name))
    assert layout.stored_names(f"{LSTM}layers.1.bias") == [f"{LSTM}bias_ih_l1", f"{LSTM}bias_hh_l1"]


@pytest.mark.parametrize(
    "absent",
    [
        ["stt_model.llm.layers.0.mixer.A_log"],
        [QKV.format("q")],
        [QKV.format("k"), QKV.format("v")],
        [f"{LSTM}bias_hh_l0"],
        [f"{LSTM}bias_ih_l1"],
        [f"{LSTM}weight_ih_l1"],
    ],
)
def test_missing_tensors_go_by_the_checkpoints_names_before_any_is_read(
    tmp_path: Path, absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arrays: Any) -> None:
        raise AssertionError("weights were read before they were checked")

    folder = copy_of("tiny-f32", tmp_path)
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in absent])
    monkeypatch.setattr(checkpoint.mx, "eval", fail)
    error = refused(lambda: load(folder), f"missing {len(absent)}: {', '.join(absent)}", str(folder))
    assert "unknown" not in str(error)


def test_many_faults_are_counted_and_the_first_named(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)

    def change(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if name.startswith("stt_model.llm.layers.0.")]:
            tensors[name.replace("layers.0", "layers.9")] = tensors.pop(name)
        tensors["stt_model.lm_head.weight"] = mx.zeros((384, 32))
        tensors["stt_model.llm.layers.3.mixer.q_proj.bias"] = mx.zeros((64,))

    rewrite(folder, change)
    error = refused(
        lambda: load(folder),
        "missing 9: stt_model.llm.layers.0.mixer.A_log, ",
        "unknown 10: stt_model.llm.layers.3.mixer.q_proj.bias (model.safetensors), ",
        "and 4 more",
        "and 5 more",
        "wrong shape 1: stt_model.lm_head.weight (model.safetensors) is (384, 32), expected (384, 64)",
    )
    assert error.message.count("stt_model") < 15


def test_a_shard_of_another_checkpoint_names_tensors_of_wrong_shape(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    edit_json(folder / "config.json", lambda raw: raw["tts_config"].update(intermediate_size=96))
    refused(
        lambda: load(folder),
        "wrong shape 14",
        "tts_model.tts_model.backbone.layers.0.mlp.gate_proj.weight (model-0000",
        " + tts_model.tts_model.backbone.layers.0.mlp.up_proj.weight (model-0000",
        "is (256, 64), expected (192, 64)",
    )


def test_check_takes_plain_dictionaries() -> None:
    arrays = {QKV.format("qkv"): mx.zeros((6, 2)), "other": mx.zeros(3)}
    checkpoint.check({path: tuple(array.shape) for path, array in arrays.items()}, arrays)
    refused(lambda: checkpoint.check({"other": (3,)}, arrays), f"unknown 3: {QKV.format('k')}")
    refused(lambda: checkpoint.check({"third": (3,)}, {}), "missing 1: third")


# -- quantisation -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = {"qkv_proj": nn.Linear(64, 96, bias=False)}
        self.conv = nn.Conv1d(64, 64, 3)


class Tree(nn.Module):
    """A stand-in with one fused layer, one plain layer and an embedding, under the checkpoint's prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.stt_model = {"embed_tokens": nn.Embedding(8, 64), "lm_head": nn.Linear(96, 8, bias=False)}
        self.tts_model = {"tts_model": {"backbone": Block()}}


ATTENTION = "tts_model.tts_model.backbone.self_attn."


def quantised(entries: dict[str, Any]) -> tuple[Tree, ModelConfig]:
    return Tree(), replace(read_config(GOLDEN / "tiny-f32"), quantization=entries)


def parts(**changes: Any) -> dict[str, Any]:
    return {f"{ATTENTION}{part}_proj": {"group_size": 32, "bits": 8} for part in "qkv"} | changes


def test_modules_are_quantised_as_named() -> None:
    tree, config = quantised(
        parts() | {"stt_model.embed_tokens": {"group_size": 64, "bits": 3}, "stt_model.lm_head": {"mode": "mxfp4"}}
    )
    checkpoint.quantise_modules(tree, config)
    fused = tree.tts_model["tts_model"]["backbone"].self_attn["qkv_proj"]
    assert (fused.bits, fused.group_size, fused.mode) == (8, 32, "affine")
    assert (tree.stt_model["embed_tokens"].bits, tree.stt_model["embed_tokens"].group_size) == (3, 64)
    head = tree.stt_model["lm_head"]
    assert isinstance(head, nn.QuantizedLinear)
    assert (head.mode, head.bits, head.scales.dtype) == ("mxfp4", 4, mx.uint8)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"stt_model.lm_head": {"group_size": 64, "bits": 4}}, ["stt_model.lm_head cannot be quantised"]),
        ({"stt_model.lm_head": {"group_size": 32, "bits": 7}}, ["stt_model.lm_head cannot be quantised"]),
        ({"stt_model.lm_head": {"mode": "nf4"}}, ["stt_model.lm_head cannot be quantised", "nf4"]),
        ({"stt_model.lm_head": {"group_size": "32", "bits": 4}}, ["stt_model.lm_head cannot be quantised"]),
        ({"tts_model.tts_model.backbone.conv": {"bits": 4}}, ["backbone.conv cannot be quantised"]),
        ({"stt_model.elsewhere": {"bits": 4}}, ["layers that this model lacks: stt_model.elsewhere"]),
    ],
)
def test_quantisation_that_cannot_be(entries: dict[str, Any], words: list[str]) -> None:
    tree, config = quantised(entries)
    refused(lambda: checkpoint.quantise_modules(tree, config), *words)


@pytest.mark.parametrize("mode", ["affine", "mxfp8"])
def test_a_quantised_speech_layer_has_nothing_left_to_cast(tmp_path: Path, mode: str) -> None:
    folder = copy_of("tiny-bf16", tmp_path)
    block = "tts_model.tts_model.backbone.layers.0.self_attn."
    entry: dict[str, Any] = {"group_size": 32, "bits": 8, "mode": mode}

    def change(tensors: dict[str, mx.array]) -> None:
        for part in "qkv":
            packed = mx.quantize(tensors[f"{block}{part}_proj.weight"], **entry)
            names = ("weight", "scales", "biases")
            tensors |= {f"{block}{part}_proj.{name}": array for name, array in zip(names, packed, strict=False)}

    plain = tensors_of(folder)
    rewrite(folder, change)
    layers = {f"{block}{part}_proj": entry for part in "qkv"}
    edit_json(folder / "config.json", lambda raw: raw.update(quantization={"bits": 8, **layers}))
    networks, _, _ = load(folder)
    layer = networks.tts_model.tts_model.backbone.layers[0].self_attn.qkv_proj
    assert isinstance(layer, nn.QuantizedLinear)
    assert layer.scales.dtype == (mx.float32 if mode == "affine" else mx.uint8)
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    exact = x @ mx.concatenate([plain[f"{block}{part}_proj.weight"] for part in "qkv"]).astype(mx.float32).T
    assert layer(x).dtype == mx.float32
    assert mx.allclose(layer(x), exact, rtol=0, atol=0.1)


def test_parts_of_one_layer_that_are_quantised_unlike(tmp_path: Path) -> None:
    """Each stays as it is stored, one of them not quantised at all; the layer computes what the parts do."""
    folder = copy_of("tiny-bf16", tmp_path)
    layers = {part: f"tts_model.tts_model.backbone.layers.0.self_attn.{part}_proj" for part in "qkv"}
    entries = {layers["q"]: {"group_size": 32, "bits": 4}, layers["v"]: {"group_size": 64, "bits": 8}}
    matrices: list[mx.array] = []

    def change(tensors: dict[str, mx.array]) -> None:
        for layer in layers.values():
            if (entry := entries.get(layer)) is None:
                matrices.append(tensors[f"{layer}.weight"].astype(mx.float32))
                continue
            packed = mx.quantize(tensors[f"{layer}.weight"], **entry)
            matrices.append(mx.dequantize(*(packed[0], *(a.astype(mx.float32) for a in packed[1:])), **entry))
            names = ("weight", "scales", "biases")
            tensors |= {f"{layer}.{name}": array for name, array in zip(names, packed, strict=True)}

    rewrite(folder, change)
    refused(lambda: load(folder), "does not say how 2 layers that have scales are quantised", layers["q"], layers["v"])
    edit_json(folder / "config.json", lambda raw: raw.update(quantization=entries))
    networks, _, _ = load(folder)
    layer = networks.tts_model.tts_model.backbone.layers[0].self_attn.qkv_proj
    assert [type(layer[f"{part}_proj"]).__name__ for part in "qkv"] == ["QuantizedLinear", "Linear", "QuantizedLinear"]
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    assert layer(x).dtype == mx.float32
    assert mx.allclose(layer(x), x @ mx.concatenate(matrices).T, rtol=1e-5, atol=1e-5)
    plain = networks.tts_model.tts_model.backbone.layers[1].self_attn.qkv_proj
    assert isinstance(plain, nn.Linear)


def test_parts_of_one_layer_must_be_of_one_width(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    gate, up = (f"tts_model.tts_model.backbone.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    rewrite(folder, lambda tensors: tensors.update({up: tensors[up][:, :32]}))
    refused(lambda: load(folder), "do not fit together", f"{gate} (model.safetensors) (128, 64)", "(128, 32)")


def test_lstm_biases_of_unlike_length(tmp_path: Path) -> None:
    folder = copy_of("tiny-f32", tmp_path)
    rewrite(folder, lambda tensors: tensors.update({f"{LSTM}bias_hh_l0": mx.zeros((96,))}))
    refused(lambda: load(folder), "do not fit together", f"{LSTM}bias_hh_l0 (model.safetensors) (96,)")


def test_bits_are_read_from_the_file(tmp_path: Path) -> None:
    folder = copy_of("tiny-4bit", tmp_path)
    edit_json(folder / "config.json", lambda raw: raw.pop("quantization_config"))
    edit_json(folder / "config.json", lambda raw: raw["quantization"]["stt_model.lm_head"].update(bits=8))
    refused(lambda: load(folder), "quantization of stt_model.lm_head", "'bits': 8", "4 bits in groups of 64")
    edit_json(folder / "config.json", lambda raw: raw["quantization"].update({"stt_model.lm_head": False}))
    refused(lambda: load(folder), "does not say how 1 layers that have scales are quantised", "stt_model.lm_head")


# -- opened once --------------------------------------------------------------------------------------------------


def opened_headers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the headers that are read from now on, by file name."""
    counts: Counter[str] = Counter()
    places = shards.places

    def counted(path: Path) -> Any:
        counts[path.name] += 1
        return places(path)

    monkeypatch.setattr(shards, "places", counted)
    return counts


@pytest.mark.parametrize("command", ["load", "info", "bench"])
def test_each_header_is_read_once(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GOLDEN / "tiny-4bit"
    files = shards.files(folder)
    counts = opened_headers(monkeypatch)
    if command == "load":
        mlx_voicechat.load(folder, compile=False)
    elif command == "info":
        describe(str(folder))
    else:
        bench(folder, 1, LoadOptions(compile=False), bandwidth_gbps=1.0)
    assert len(files) > 1
    assert counts == dict.fromkeys(files, 1)
