"""What `convert --verify` finds, and the command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import GOLDEN, edit_json

from mlx_voicechat.cli.main import run
from mlx_voicechat.convert import agreement, conversations, conversion, plans
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.convert.verify import verify_tensors
from mlx_voicechat.convert.writer import check_target
from mlx_voicechat.errors import InputError, VoiceChatError

SOURCE = str(GOLDEN / "tiny-f32")
WEIGHTS = "model-00001-of-00001.safetensors"


def job(source: Any, plan: str, tmp_path: Path) -> conversion.Job:
    if "=" in plan:
        (tmp_path / "own.toml").write_text(plan, encoding="utf-8")
        plan = str(tmp_path / "own.toml")
    return conversion.prepare(source, plans.find(plan))


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ("f32", "429 exact, 0 within rounding, 0 within"),
        ("4bit", "9 exact, 401 within rounding, 19 within"),
        ("mixed-5", "41 exact, 264 within rounding, 124 within"),
        ("mxfp8", "41 exact, 369 within rounding, 19 within"),
        ("mxfp4", "41 exact, 369 within rounding, 19 within"),
        ('"*_proj" = "keep"\n"*.lm_head" = "nvfp4"\n"*.function_head" = "2/32"', " 2 within the"),
    ],
)
def test_sound_conversions_pass(tmp_path: Path, plan: str, found: str) -> None:
    seen: list[tuple[int, int]] = []
    with open_source(SOURCE) as source:
        work = job(source, plan, tmp_path)
        conversion.run(work, check_target(tmp_path / "out"))
        line = verify_tensors(work, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert found in line
    assert seen == sorted(seen)


def damaged(folder: Path, name: str, change: Any) -> None:
    tensors: Any = mx.load(str(folder / WEIGHTS))
    tensors[name] = change(tensors[name])
    mx.eval(tensors)
    mx.save_safetensors(str(folder / WEIGHTS), tensors, metadata={"format": "mlx"})


@pytest.mark.parametrize("plan", ["f32", "4bit", "mxfp8"])
def test_what_is_not_the_source_goes_by_name(tmp_path: Path, plan: str) -> None:
    body, norm = "stt_model.llm.layers.1.mixer.up_proj.weight", "tts_model.tts_model.backbone.norm.weight"
    with open_source(SOURCE) as source:
        work = job(source, plan, tmp_path)
        conversion.run(work, check_target(tmp_path / "out"))
        damaged(tmp_path / "out", body, lambda array: array[::-1])
        damaged(tmp_path / "out", norm, lambda array: array * (1 + 1e-6 if plan == "f32" else 1.01))
        with pytest.raises(VoiceChatError, match="2 tensors are not what the source holds") as caught:
            verify_tensors(work, tmp_path / "out")
        assert body in str(caught.value)
        assert norm in str(caught.value)
        edit_json(tmp_path / "out" / "config.json", lambda raw: raw.update(function_channel_weight=3.0))
        with pytest.raises(VoiceChatError, match=r"config.json does not say what the source's says"):
            verify_tensors(work, tmp_path / "out")


def test_divergence_of_logits() -> None:
    logits = np.log(np.array([[0.5, 0.5], [0.25, 0.75]]))
    assert conversations.divergence(logits, logits + 3).tolist() == pytest.approx([0, 0])
    assert conversations.divergence(logits[:1], logits[1:])[0] == pytest.approx(0.5 * np.log(4 / 3))


def test_silence_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Path("out")
    assert "random" in agreement._silence(-90.0, -3.0, True, target)
    assert "not checked" in agreement._silence(-10.0, -3.0, False, target)
    assert "-88 dBFS" in agreement._silence(-90.0, -88.4, False, target)
    with pytest.raises(VoiceChatError, match="decode to -3 dBFS, and to -90 dBFS in the source"):
        agreement._silence(-90.0, -3.0, False, target)


def test_a_machine_that_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    with open_source(SOURCE) as source:
        wide, narrow = (agreement._needed_bytes(source, wide) for wide in (True, False))
        assert narrow < wide == sum(int(np.prod(t.shape)) * 4 for t in source.tensors.values())
        monkeypatch.setattr("mlx_voicechat.gauges.memory.machine", lambda: agreement.memory.Machine(narrow, narrow - 1))
        assert "not compared" in agreement.compare(source, tmp_path, np.zeros(0, np.float32), said.append)
        model = agreement.reference(source, wide=False)
        assert model.language.llm.dtype == mx.bfloat16
        assert agreement.reference(source, wide=True).language.llm.dtype == mx.float32


# -- the command --------------------------------------------------------------------------------------------------


def test_convert_and_verify(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "REPLY_SECONDS", 0.0)
    monkeypatch.setattr(agreement, "LONGEST_SECONDS", 0.8)
    out = tmp_path / "out"
    question = str(GOLDEN / "audio" / "question.wav")
    code = run(["convert", "-s", SOURCE, "-o", str(out), "--plan", "8bit", "--verify", "--audio", question])
    printed = capfd.readouterr()
    assert code == 0
    assert printed.out == f"{out}\n"
    for words in ("source: tiny-f32", "plan: 8bit", "needed", "free", "memory: at most", "tensors: 9 exact"):
        assert words in printed.err
    found = re.search(r"text token (\S+)%, same function token (\S+)%, same code (\S+)%; KL text (\S+),", printed.err)
    assert found
    assert all(50 < float(value) <= 100 for value in found.groups()[:3])
    assert 0 < float(found[4]) < 0.1


def test_the_source_agrees_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "REPLY_SECONDS", 0.4)
    with open_source(SOURCE) as source:
        conversion.run(job(source, "f32", tmp_path), check_target(tmp_path / "out"))
        report = agreement.compare(source, tmp_path / "out", agreement.recording(None)[:1280], lambda _: None)
    assert "same text token 100.0%, same function token 100.0%, same code 100.0%; KL text 0, function 0" in report


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "9bit"], "no plan '9bit'"),
        (["--audio", "a.wav"], "--audio is for --verify"),
        (["--verify", "--audio", "absent.wav"], "absent.wav"),
        (["--revision", "main"], "a folder has no revisions"),
    ],
)
def test_bad_use(tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run(["convert", "-s", SOURCE, "-o", str(tmp_path / "out"), *arguments]) == 2
    assert words in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_example_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "EXAMPLE", Path("examples", "absent.wav"))
    with pytest.raises(InputError, match="not installed"):
        agreement.recording(None)
