"""`info`: what a checkpoint is and will take, from its config and headers alone."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_voicechat.cli.info import describe
from mlx_voicechat.cli.main import run
from mlx_voicechat.gauges import chips, memory
from mlx_voicechat.gauges.memory import Machine
from mlx_voicechat.weights.config_file import read_config
from mlx_voicechat.weights.shards import verify
from tests.support.checkpoints import GOLDEN, copy_of, edit_json, rewrite

NETWORKS = {"perception", "rnnt", "language", "tts", "codec", "text_table", "other"}


@pytest.fixture(autouse=True)
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights is an error here."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("info loads weights")

    monkeypatch.setattr(chips, "bandwidth", lambda: chips.Bandwidth(100.0, ""))

    monkeypatch.setattr(mx, "load", fail)
    monkeypatch.setattr(mx, "eval", fail)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    folder = GOLDEN / "tiny-4bit"
    assert run(["info", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == str(folder)
    assert facts["format"] == "mlx-community"
    assert facts["quantization"] == "4 bits, groups of 64, affine: 19 layers"
    assert facts["types"]["U32"] == 19
    assert (facts["voices"], facts["speaker"], facts["default_system_prompt"]) == (["Aria"], "Aria", "")
    assert facts["sizes"]["language"] == {
        "layers": 7,
        "mamba_layers": 3,
        "attention_layers": 1,
        "width": 64,
        "vocabulary": 384,
    }
    assert facts["resident_bytes"].keys() == NETWORKS
    assert sum(facts["resident_bytes"].values()) == facts["loaded_bytes"]
    assert facts["loaded_bytes"] < facts["announced_bytes"]["60"] < facts["announced_bytes"]["600"]
    assert facts["machine"]["memory_bytes"] >= facts["machine"]["available_bytes"] > 0
    assert facts["fits"] is True
    assert facts["stored_bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_networks_by_precision() -> None:
    """Parameters are counted whole, however they are packed: the same in every precision."""
    found = {name: describe(str(GOLDEN / f"tiny-{name}"))["networks"] for name in ("f32", "bf16", "8bit", "4bit")}
    counts = {
        name: {network: sum(part["parameters"] for part in parts.values()) for network, parts in networks.items()}
        for name, networks in found.items()
    }
    assert counts["f32"] == counts["bf16"] == counts["8bit"] == counts["4bit"]
    assert found["f32"]["perception"] == {"f32": {"parameters": 223_680, "bytes": 4 * 223_680}}
    packed = found["4bit"]["language"]["4-bit"]
    assert packed == {"parameters": 235_008, "bytes": 235_008 // 2 + 235_008 // 64 * 4}
    assert found["8bit"]["language"]["8-bit"]["bytes"] == 235_008 + 235_008 // 64 * 4
    headers = sum(
        8 + int.from_bytes(f.read_bytes()[:8], "little") for f in (GOLDEN / "tiny-4bit").glob("*.safetensors")
    )
    stored = sum(part["bytes"] for parts in found["4bit"].values() for part in parts.values())
    assert stored == describe(str(GOLDEN / "tiny-4bit"))["stored_bytes"] - headers


def test_longest_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits is what `announce` says of that length, and one frame more does not."""
    config, stored = read_config(GOLDEN / "tiny-f32"), verify(GOLDEN / "tiny-f32")
    available = memory.announce(config, stored, 5000).total
    monkeypatch.setattr(memory, "machine", lambda: Machine(10**11, available))
    longest = describe(str(GOLDEN / "tiny-f32"))["longest"]
    frames = round(longest["memory_seconds"] / config.frame_seconds)
    assert frames >= 5000
    assert (
        memory.announce(config, stored, frames).total <= available < memory.announce(config, stored, frames + 1).total
    )
    assert longest["positions_seconds"] == config.llm.max_positions * 0.08
    assert longest["window_seconds"] == pytest.approx(config.tts.sliding_window * 0.08)


def test_our_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of("tiny-8bit", tmp_path)
    told = {"plan": "mixed-5", "source": "org/name", "source_revision": "c" * 40}
    edit_json(folder / "config.json", lambda c: c.update(mlx_voicechat_format=1, mlx_voicechat_conversion=told))
    assert run(["info", str(folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["format"].startswith("mlx-voicechat 1, 2 files")
    assert lines["plan"] == "mixed-5"
    assert lines["converted"] == f"from        org/name, revision {'c' * 40}"

    edit_json(folder / "config.json", lambda config: config.update(mlx_voicechat_format=99))
    assert run(["info", str(folder)]) == 2
    assert "mlx_voicechat_format is 99" in capsys.readouterr().err


def test_nvidias_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of("tiny-nvidia", tmp_path)
    single = folder / "model.safetensors"
    header = {"stt_model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    header["tts_model.audio_prompt_latents.Aria"] = {"dtype": "F32", "shape": [1], "data_offsets": [24, 28]}
    text = json.dumps(header).encode()
    single.write_bytes(len(text).to_bytes(8, "little") + text + bytes(28))
    assert run(["info", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["format"], facts["tensors"], facts["voices"]) == ("NVIDIA's original", 2, ["Aria"])
    assert facts["networks"]["language"] == {"f32": {"parameters": 6, "bytes": 24}}
    assert facts["fits"] is False
    assert f"mlx-voicechat convert --source {folder}" in err
    assert run(["info", str(folder)]) == 0
    assert "NVIDIA's original, 1 file, 0.0 MB" in capsys.readouterr().out


def test_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of("tiny-4bit", tmp_path)
    assert run(["info", str(folder), "--hash", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["hashes"] == {
        file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "as_fetched": None}
        for file in folder.iterdir()
    }
    assert err == ""  # no progress bar in a pipe


def test_what_it_tells_is_what_loading_is_checked_against() -> None:
    told = memory.announce(read_config(GOLDEN / "tiny-f32"), verify(GOLDEN / "tiny-f32"), 750)
    facts = describe(str(GOLDEN / "tiny-f32"))
    assert facts["announced_bytes"]["60"] == told.total
    assert facts["resident_bytes"]["tts"] == told.weights["tts"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("Aria (default)", "memorised", "attention layers 2", "text table", "available", "memory, 600 s"):
        assert word in out


def test_speech_weights(capsys: pytest.CaptureFixture[str]) -> None:
    whole, packed = describe("tiny", "f32"), describe("tiny", "q8")
    assert (whole["speech_weights"], packed["speech_weights"]) == ("f32", "q8")
    assert packed["resident_bytes"]["tts"] < whole["resident_bytes"]["tts"]
    assert run(["info", "tiny", "--speech-weights", "q7"]) == 2
    assert "q7" in capsys.readouterr().err


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory, "machine", lambda: Machine(10**9, 10**6))
    assert run(["info", "tiny", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert err.startswith("note: This model needs about")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt, and a head in 8 bits; made before reading weights is an error."""
    folder = copy_of("tiny-4bit", tmp_path_factory.mktemp("mixed"))

    def change(config: dict[str, Any]) -> None:
        config["default_system_prompt"] = "Be brief."
        config["quantization"]["stt_model.lm_head"] = {"group_size": 32, "bits": 8}
        del config["quantization_config"]

    def requantise(tensors: dict[str, mx.array]) -> None:
        head = [tensors.pop(f"stt_model.lm_head.{part}") for part in ("weight", "scales", "biases")]
        packed = mx.quantize(mx.dequantize(*head, group_size=64, bits=4), group_size=32, bits=8)
        parts = zip(("weight", "scales", "biases"), packed, strict=True)
        tensors |= {f"stt_model.lm_head.{part}": array for part, array in parts}

    rewrite(folder, requantise)
    edit_json(folder / "config.json", change)
    return folder


def test_a_prompt_and_mixed_bits(mixed: Path) -> None:
    facts = describe(str(mixed))
    assert facts["default_system_prompt"] == "Be brief."
    assert facts["quantization"] == "4 bits, groups of 64, affine: 18 layers; 8 bits, groups of 32, affine: 1 layers"


def test_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert run(["info", "nobody/no-such-model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nobody/no-such-model is not on this machine" in err


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_broken_folder(missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of("tiny-4bit", tmp_path)
    (folder / missing).unlink()
    assert run(["info", str(folder)]) == 2
    assert missing.split("-0")[0] in capsys.readouterr().err


def test_no_such_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err
