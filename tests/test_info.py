"""`info`: what a checkpoint is and will take, from its config and headers alone."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_voicechat import memory
from mlx_voicechat.cli.info import describe
from mlx_voicechat.cli.main import run
from mlx_voicechat.config import read_config
from mlx_voicechat.memory import Machine
from mlx_voicechat.shards import verify
from tests.support.checkpoints import GOLDEN, copy_of, edit_json

NETWORKS = {"perception", "rnnt", "language", "tts", "codec", "text_table", "other"}


@pytest.fixture(autouse=True)
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights is an error here."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("info loads weights")

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


def test_what_it_tells_is_what_loading_is_checked_against() -> None:
    told = memory.announce(read_config(GOLDEN / "tiny-f32"), verify(GOLDEN / "tiny-f32"), 750)
    facts = describe(str(GOLDEN / "tiny-f32"))
    assert facts["announced_bytes"]["60"] == told.total
    assert facts["resident_bytes"]["tts"] == told.weights["tts"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("Aria (default)", "memorised", "attention layers 1", "text table", "available", "memory, 600 s"):
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


def test_a_prompt_and_mixed_bits(tmp_path: Path) -> None:
    folder = copy_of("tiny-4bit", tmp_path)

    def change(config: dict[str, Any]) -> None:
        config["default_system_prompt"] = "Be brief."
        config["quantization"]["stt_model.lm_head"] = {"group_size": 32, "bits": 8}

    edit_json(folder / "config.json", change)
    facts = describe(str(folder))
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
