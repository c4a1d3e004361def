"""Calibration: what is gathered is what the layers were given, in little memory, and who is stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import soundfile as sf
from support.checkpoints import GOLDEN, copy_of, rewrite
from threadpoolctl import threadpool_limits

from mlx_voicechat import load
from mlx_voicechat.cli.main import run
from mlx_voicechat.convert import calibration, listening, moments
from mlx_voicechat.convert.calibration import Calibration, Job, open_calibration, recordings
from mlx_voicechat.convert.listening import Listener, listener
from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.networks.duplex_lm import make_segment
from mlx_voicechat.tools import Tool
from mlx_voicechat.tools.prompt import prompt_with_tools
from mlx_voicechat.weights.checkpoint import open_folder, open_model

FOLDER = GOLDEN / "tiny-f32"
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _short_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "LONGEST_REPLY_SECONDS", 0.4)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices are too small for several threads, which wait for each other on a busy machine."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def model() -> Listener:
    return listener("tiny-f32", open_folder(FOLDER), lambda text: None)


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number in range(3):
        noise = np.random.default_rng(number).normal(0, 0.05, 8000 + 700 * number)
        sf.write(folder / f"{number}.wav", noise.astype(np.float32), 16000)
    (folder / "notes.txt").write_text("no recording")
    return folder


def job(where: Path, sounds: Path, prompts: tuple[str | None, ...] = (None, "Be brief.")) -> Job:
    return Job(where, open_folder(FOLDER), recordings([sounds], prompts))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_moments_are_those_of_whole_conversations(model: Listener, sounds: Path, tmp_path: Path) -> None:
    made = job(tmp_path / "calib", sounds).run(model)
    language = model.language
    names = {id(m): n for n, m in language.named_modules() if isinstance(m, nn.Linear)}
    given: dict[str, list[np.ndarray]] = {}

    def noted(layer: nn.Module, x: mx.array) -> mx.array:
        given.setdefault(names[id(layer)], []).append(np.array(x, np.float64))
        return layer(x)

    stack, positions = language.llm, 0
    for recording in job(tmp_path / "other", sounds).heard:
        with calibration.AudioReader(recording.path) as reader:
            x = model.heard(reader.read_all(), **recording.options)[None]
        positions += x.shape[1]
        before, blocks, segments = None, [], []
        for block in [*stack.layers, None]:
            if block is not None and not hasattr(block.mixer, "attend"):
                blocks.append(block)
                continue
            segments.append(make_segment(before, blocks, block, stack.norm_f, noted))
            before, blocks = block, []
        hidden, _ = stack._run(segments, x, language.init_state())
        given.setdefault("lm_head", []).append(np.array(hidden[0], np.float64))
    assert made.positions == positions
    for name, width in moments.keys(model.config.llm).items():
        rows = np.concatenate(given[name])
        found = made.moments(name, width)
        assert found.positions == len(rows)
        expected = rows.T @ rows
        np.testing.assert_allclose(found.matrix, expected, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_array_equal(found.matrix, found.matrix.T)
    width = model.config.llm.hidden_size
    queries = made.moments("llm.layers.3.mixer.q_proj", width)
    assert made.moments("llm.layers.3.mixer.v_proj", width) is queries


def test_it_hears_what_a_session_hears(model: Listener) -> None:
    """The inputs of a whole model's conversation, speech and all, prompt and tool calls included."""
    samples = np.random.default_rng(0).normal(0, 0.1, 12800).astype(np.float32)
    whole = load(FOLDER, compile=False)
    given: list[mx.array] = []
    step = whole.language.step

    def noted(fused: mx.array, state: Any) -> Any:
        given.append(fused)
        return step(fused, state)

    whole.language.step = noted  # type: ignore[method-assign]
    session = whole.session(system_prompt="Be brief.")
    session.push(np.concatenate([samples, np.zeros(5 * 1280, np.float32)]))
    found = model.heard(samples, system_prompt="Be brief.")
    np.testing.assert_array_equal(np.array(found), np.array(mx.concatenate(given, axis=1)[0]))


@pytest.fixture(scope="module")
def talking() -> Listener:
    return listener("tiny", open_model("tiny"), lambda text: None)


def spoken(name: str) -> np.ndarray:
    with calibration.AudioReader(EXAMPLES / name) as reader:
        return reader.read_all()


def test_a_reply_is_heard_to_its_end(talking: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "LONGEST_REPLY_SECONDS", 30.0)
    samples = spoken("question.wav")
    answered = load("tiny", lambda text: None).answer(samples, extra_seconds=6.0)
    inputs = talking.heard(samples)
    end = answered.text_ids.index(talking.config.eos_id)
    settled = round(listening.SETTLED_SECONDS / talking.config.frame_seconds)
    assert end + settled <= len(inputs) <= end + settled + 2


def test_tools_are_called_and_answered(talking: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "LONGEST_REPLY_SECONDS", 8.0)
    called: list[str] = []

    def get_time() -> str:
        called.append("get_time")
        return "ten past four"

    tool = Tool("get_time", "The time now.", callable=get_time)
    inputs = talking.heard(spoken("what_time_is_it.wav"), tools=(tool,), wait_for_tools=True)
    assert called == ["get_time"]
    assert len(inputs) > len(talking.tokenizer.encode(prompt_with_tools("", (tool,), "given"))) + 75


class Killed(BaseException):
    """As a signal would end it."""


@pytest.mark.parametrize("at", [2, 9, 25])
def test_stopped_anywhere_it_goes_on_to_the_same_bytes(
    model: Listener, sounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    job(tmp_path / "whole", sounds).run(model)
    save, written = moments.save, 0

    def killed(path: Path, *rest: Any) -> None:
        nonlocal written
        written += 1
        if written > at:
            raise Killed
        save(path, *rest)

    monkeypatch.setattr(moments, "save", killed)
    with pytest.raises(Killed):
        job(tmp_path / "calib", sounds).run(model)
    with pytest.raises(InputError, match="not finished"):
        open_calibration(tmp_path / "calib")
    monkeypatch.setattr(moments, "save", save)
    again = job(tmp_path / "calib", sounds)
    again.check()
    again.run(model)
    assert contents(tmp_path / "calib") == contents(tmp_path / "whole")


def test_what_is_there_is_not_made_again(model: Listener, sounds: Path, tmp_path: Path) -> None:
    made = job(tmp_path / "calib", sounds).run(model)
    before = contents(tmp_path / "calib")
    job(tmp_path / "calib", sounds).run(model)
    assert contents(tmp_path / "calib") == before
    assert open_calibration(tmp_path / "calib").positions == made.positions


@pytest.mark.parametrize("change", ["recording", "prompt", "fewer", "model"])
def test_another_calibration_is_not_gone_on_with(model: Listener, sounds: Path, tmp_path: Path, change: str) -> None:
    job(tmp_path / "calib", sounds).run(model)
    prompts: tuple[str | None, ...] = (None, "Be brief.")
    if change == "recording":
        sf.write(sounds / "1.wav", np.zeros(8000, np.float32), 16000)
    elif change == "prompt":
        prompts = (None,)
    elif change == "fewer":
        (sounds / "2.wav").unlink()
    else:
        facts = json.loads((tmp_path / "calib" / "calibration.json").read_text())
        (tmp_path / "calib" / "calibration.json").write_text(json.dumps({**facts, "fingerprint": "other"}))
    with pytest.raises(InputError, match="another model, or with other recordings"):
        job(tmp_path / "calib", sounds, prompts).run(model)


def test_disk_and_memory_are_as_announced(model: Listener, sounds: Path, tmp_path: Path) -> None:
    work = job(tmp_path / "calib", sounds)
    taken: list[int] = []
    save = moments.save

    def measured(path: Path, *rest: Any) -> None:
        save(path, *rest)
        taken.append(sum(len(data) for data in contents(tmp_path / "calib").values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "save", measured)
        patch.setattr(calibration, "LONGEST_REPLY_SECONDS", 0.4)
        work = job(tmp_path / "calib", sounds, (None,))
        work.run(model)
        announced = work.disk_bytes
    assert 0.5 * announced < max(taken) < announced + 400 * len(taken)  # headers
    disk, memory = work.describe()[1].split(";")
    assert "disk: at most" in disk
    assert "memory: about" in memory


def test_a_fingerprint_is_of_the_model_whatever_its_precision(tmp_path: Path) -> None:
    def printed(folder: Path) -> str:
        loaded = load(folder, compile=False)
        return moments.fingerprint(loaded.config.llm, moments.norms_of(loaded.language))

    assert printed(FOLDER) == printed(GOLDEN / "tiny-bf16") == printed(GOLDEN / "tiny-4bit")
    other = copy_of("tiny-f32", tmp_path)
    rewrite(other, lambda tensors: tensors.update({(n := "stt_model.llm.norm_f.weight"): tensors[n] * 1.1}))
    assert printed(other) != printed(FOLDER)


def spoil(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "moments" / "lm_head.safetensors"
        if name == "cut":
            path.write_bytes(path.read_bytes()[:40])
        elif name == "absent":
            path.unlink()
        elif name == "width":
            moments.save_moments(path, np.eye(8, dtype=np.float32, order="F"), {"positions": 1}, moments.Energy(1, 1))
        elif name == "json":
            (folder / "calibration.json").write_text("{")
        elif name == "version":
            (folder / "calibration.json").write_text('{"version": 99}')
        else:
            (folder / "calibration.json").unlink()

    return change


@pytest.mark.parametrize("fault", ["cut", "absent", "width", "json", "version", "none"])
def test_a_damaged_calibration_is_named(fault: str, tmp_path: Path) -> None:
    (tmp_path / "moments").mkdir()
    facts = {"version": 1, "fingerprint": "", "recordings": [], "positions": 3, "complete": True}
    (tmp_path / "calibration.json").write_text(json.dumps(facts))
    energy = moments.Energy(1.0, 1.0)
    moments.save_moments(tmp_path / "moments" / "lm_head.safetensors", np.eye(6, order="F"), {"positions": 3}, energy)
    found = Calibration(tmp_path, facts).moments("function_head", 6)
    assert found == (pytest.approx(np.eye(6)), 3, energy)
    spoil(fault)(tmp_path)
    with pytest.raises(InputError, match=r"cannot be read|no matrix of|no calibration|another version"):
        open_calibration(tmp_path).moments("lm_head", 6)


def test_inputs_that_were_removed_are_named(tmp_path: Path) -> None:
    facts = {"version": 1, "fingerprint": "", "recordings": [{"name": "a.wav"}], "positions": 3, "complete": True}
    (tmp_path / "calibration.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=r"inputs lacks 00000\.safetensors"):
        open_calibration(tmp_path)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(VoiceChatError, match="was not written"):
        moments.save(tmp_path / "absent" / "x.safetensors", {"x": mx.zeros((3,))}, {})


@pytest.mark.parametrize(
    ("places", "said"), [(["absent.wav"], "no such file"), (["."], "holds no recordings"), (["-"], "Name files, not -")]
)
def test_what_is_no_recording(
    places: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [part for place in places for part in ("--audio", place)]
    assert run(["calibrate", "-m", str(FOLDER), "-o", "calib", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_command(sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["", "Be brief."]))
    target = str(tmp_path / "calib")
    command = ["calibrate", "-m", str(FOLDER), "--audio", str(sounds), "-o", target]
    assert run([*command, "--prompts", str(prompts)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{target}\n"
    assert "3 recordings" in err
    assert "disk: at most" in err
    facts = json.loads((tmp_path / "calib" / "calibration.json").read_text())
    assert [each["system_prompt"] for each in facts["recordings"]] == [None, "Be brief.", None]
    assert run(command) == 2
    assert "other recordings" in capsys.readouterr().err
    assert run([*command, "--prompts", str(prompts), "-p", "x"]) == 2
    prompts.write_text("{}")
    assert run([*command, "--prompts", str(prompts)]) == 2
    assert "no list of texts" in capsys.readouterr().err
    (tmp_path / "calib2").mkdir()
    (tmp_path / "calib2" / "other").write_text("")
    assert run([*command[:-1], str(tmp_path / "calib2")]) == 2
    assert "other things" in capsys.readouterr().err
