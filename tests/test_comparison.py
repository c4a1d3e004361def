"""Two checkpoints in the same conversations: one with itself is equal, others are as far apart as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from support.checkpoints import GOLDEN, copy_of, edit_json

from mlx_voicechat.cli.main import run
from mlx_voicechat.convert import comparison, conversations
from mlx_voicechat.convert.conversations import log_mel_distance, word_edits
from mlx_voicechat.errors import InputError
from mlx_voicechat.weights.checkpoint import open_folder

FOLDER = GOLDEN / "tiny-f32"


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number in range(2):
        noise = np.random.default_rng(number).normal(0, 0.05, 6400 + 1280 * number)
        sf.write(folder / f"{number}.wav", noise.astype(np.float32), 16000)
    return folder


def compared(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run(["compare", *arguments, "--json", "--bandwidth", "100", "--extra-decoding-seconds", "0.24"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_checkpoint_with_itself(sounds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(str(FOLDER), str(FOLDER), "--audio", str(sounds), capsys=capsys)
    total = found["total"]
    assert total == {
        "frames": 17,
        **dict.fromkeys(("same_text", "same_function", "same_code", "own_same_text", "own_same_function"), 1.0),
        **dict.fromkeys(("kl_text", "kl_function", "log_mel", "transcript_word_errors", "reply_word_errors"), 0.0),
        "all_equal": 2,
    }
    first, second = found["checkpoints"]  # type: ignore[misc]
    assert first == second
    assert first["floor_ms"] == pytest.approx(first["moved"] / 100e6)


def test_a_checkpoint_with_its_quantised_form(sounds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(sounds / "1.wav")
    found = compared(str(FOLDER), str(GOLDEN / "tiny-4bit"), "--audio", one, "-p", "Be brief.", capsys=capsys)
    (recording,) = found["recordings"]  # type: ignore[misc]
    assert 0 < recording["told"]["kl_text"] < 1
    assert recording["told"]["log_mel"] > 0
    first, second = found["checkpoints"]  # type: ignore[misc]
    assert second["bytes"] < first["bytes"]
    assert second["moved"] < first["moved"]
    assert run(["compare", str(FOLDER), str(GOLDEN / "tiny-4bit"), "--audio", one, "--bandwidth", "9"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("1.wav")
    assert "a frame moves" in out.splitlines()[-1]


def test_what_is_measured() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 2, 5)).astype(np.float32)
    samples = rng.normal(size=4000).astype(np.float32)
    codes = np.zeros((4, 3), int)
    first = conversations.Run(logits.argmax(-1), logits, codes, samples, "", "")
    other = logits.copy()
    other[0, 0] = -other[0, 0]
    found = conversations.measures(first, first._replace(logits=other, codes=codes + np.eye(3, dtype=int)[0]), 22050)
    assert found.same_text == 0.75
    assert found.same_function == 1.0
    assert found.same_code == pytest.approx(2 / 3)
    assert found.kl_text > 0 == found.kl_function == found.log_mel
    assert log_mel_distance(samples, 2 * samples, 22050) == pytest.approx(np.log(2), rel=1e-3)


def test_the_first_difference_and_words() -> None:
    ids = np.zeros((5, 2), int)
    first = conversations.Run(ids, ids, ids, ids, "what time is it", "it is ten")
    changed = ids.copy()
    changed[3, 1] = 7
    own = comparison._own(first, first._replace(ids=changed, text="it is half past ten", transcript="what is it"))
    assert own == (1.0, 0.8, 3, 1, 4, 2, 3)


@pytest.mark.parametrize(
    ("expected", "got", "edits"),
    [("", "", 0), ("a b", "", 2), ("", "a", 1), ("a b c", "a x c", 1), ("a b c", "b c d", 2), ("a", "a", 0)],
)
def test_words(expected: str, got: str, edits: int) -> None:
    assert word_edits(expected, got) == (edits, len(expected.split()))


@pytest.mark.parametrize("unlike", ["sizes", "rate", "tokenizer"])
def test_unlike_models_are_refused(unlike: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy_of("tiny-f32", tmp_path)
    if unlike == "sizes":
        other = Path(__file__).parents[1] / "mlx_voicechat" / "weights" / "assets" / "tiny"
    elif unlike == "rate":
        edit_json(other / "config.json", lambda raw: raw.update(function_channel_weight=3.0))
    else:
        edit_json(other / "tokenizer.json", rename_a_token)
    with pytest.raises(InputError, match="are of two models: they differ in"):
        comparison.check(open_folder(FOLDER), open_folder(other))
    sf.write(tmp_path / "a.wav", np.zeros(1280, np.float32), 16000)
    assert run(["compare", str(FOLDER), str(other), "--audio", str(tmp_path / "a.wav")]) == 2
    assert "two models" in capsys.readouterr().err


def rename_a_token(raw: dict[str, dict[str, dict[str, int]]]) -> None:
    words = raw["model"]["vocab"]
    word = next(word for word in words if word.isalpha() and not any(word in str(m) for m in raw["model"]["merges"]))
    words[f"{word}{word}{word}zz"] = words.pop(word)


def test_no_room_for_temporary_files(
    sounds: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = comparison.shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(comparison.shutil, "disk_usage", lambda place: usage)
    assert run(["compare", str(FOLDER), str(FOLDER), "--audio", str(sounds)]) == 2
    assert "Set TMPDIR" in capsys.readouterr().err
