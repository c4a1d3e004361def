"""Real ranks over loopback: what they give is what one process gives, and none stays behind when another is gone."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from mlx.utils import tree_flatten

import mlx_voicechat
from mlx_voicechat.errors import InputError
from mlx_voicechat.machines import loading, watch
from mlx_voicechat.machines.loading import held_bytes
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.weights import checkpoint
from tests.support.caller import append, opened
from tests.support.checkpoints import GOLDEN
from tests.support.ranks import PROGRAM, WAIT_SECONDS, launched, ranks
from tests.test_slices import write_four

FOLDER = GOLDEN / "tiny-f32"
HELLO = Path(__file__).parents[1] / "examples" / "hello.wav"
SOON = 20  # seconds, on a machine that others use too; an orderly end takes about two


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen frames of somebody who speaks."""
    samples, rate = sf.read(HELLO, dtype="float32")
    path = tmp_path_factory.mktemp("recording") / "hello.wav"
    sf.write(path, samples[: 16 * 1280], rate)
    return path


def generate(recording: Path, *more: str) -> list[str]:
    return ["generate", "-m", str(FOLDER), "--audio", str(recording), "--extra-decoding-seconds", "0", "--json", *more]


def test_two_ranks_of_mlx_launch_answer_as_one_process(recording: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.wav", tmp_path / "two.wav"
    command = [sys.executable, "-c", PROGRAM, *generate(recording, "--output-audio", str(one))]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    done = launched(2, generate(recording, "--output-audio", str(two)))
    assert alone.returncode == done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr, done.stderr  # which is what it says of a rank's exit code
    assert json.loads(done.stdout) == json.loads(alone.stdout)
    assert two.read_bytes() == one.read_bytes()


def answered(recording: Path, folder: Path, count: int, *more: str) -> list[str]:
    """What ranks that share the language model print: on stdout rank 0, on stderr each."""
    with ranks(count, generate(recording, "--shard-llm", *more), folder) as processes:
        assert [process.wait(4 * WAIT_SECONDS) for process in processes] == [0] * count
    return [(folder / name).read_text() for name in ("rank-0.out", *(f"rank-{n}.err" for n in range(count)))]


def check_shared(recording: Path, folder: Path, count: int, model: Path) -> None:
    """Ids and codes as of one process, samples within 1e-4; each rank holds its part of the blocks, rank 0 the rest."""
    alone, events, sound = mlx_voicechat.load(model), folder / "events.jsonl", folder / "sound.wav"
    samples, rate = sf.read(recording, dtype="float32")
    more = ("-m", str(model), "--events", str(events), "--output-audio", str(sound))
    printed, *said = answered(recording, folder, count, *more)
    whole = alone.answer(samples, rate)
    assert json.loads(printed)["text"] == whole.text
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for kind, ids in ("text_delta", whole.text_ids), ("function_delta", whole.function_ids):
        told = {line["frame_index"]: line["token_id"] for line in lines if line["event"] == kind}
        assert told
        assert told == {frame: ids[frame] for frame in told}
    assert [line["codes"] for line in lines if line["event"] == "audio_frame"] == whole.codes.tolist()
    np.testing.assert_allclose(sf.read(sound, dtype="float32")[0], whole.samples, rtol=0, atol=1e-4)
    held = [int(re.findall(r"holds ([\d,]+) bytes", one)[0].replace(",", "")) for one in said]
    blocks = sum(array.nbytes for _, array in tree_flatten(alone.language.llm.parameters()))
    assert max(held[1:]) < 1.2 * blocks / count
    assert held[0] < held_bytes(alone) - (count - 1) * blocks / count / 1.2


def test_two_ranks_share_the_language_model(recording: Path, tmp_path: Path) -> None:
    check_shared(recording, tmp_path, 2, FOLDER)


@pytest.mark.slow
def test_four_ranks_share_the_language_model(recording: Path, tmp_path: Path) -> None:
    check_shared(recording, tmp_path, 4, write_four(tmp_path / "four"))


def served(folder: Path) -> str:
    """The address that rank 0 has announced."""
    found: list[str] = []
    until(lambda: found.extend(re.findall(r"ready: (ws://\S+)", (folder / "rank-0.err").read_text())) or found)
    return found[0]


def test_a_rank_that_dies_ends_sessions_with_an_error_and_the_program(tmp_path: Path) -> None:
    with ranks(2, ["serve", "-m", str(FOLDER), "--port", "0"], tmp_path) as (first, second):
        with opened(served(tmp_path)) as caller:
            for _ in range(3):
                caller.send(append(np.zeros(1280, np.int16)))
            caller.frames(2)
            second.kill()
            caller.send(append(np.zeros(1280, np.int16)))
            last = caller.until("error")[-1]
            assert "another machine" in last["error"]["message"].lower()
        assert first.wait(SOON) == 1
    assert "machine of this model" in (tmp_path / "rank-0.err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "more"), [(0, []), (1, []), (1, ["--shard-llm"])])
def test_a_rank_that_dies_while_nobody_talks_ends_the_other(tmp_path: Path, killed: int, more: list[str]) -> None:
    with ranks(2, ["serve", "-m", str(FOLDER), "--port", "0", *more], tmp_path) as processes:
        served(tmp_path)
        processes[killed].kill()
        assert processes[1 - killed].wait(SOON) == 1


def test_a_run_that_ends_by_a_signal_ends_the_other_rank_in_order(tmp_path: Path) -> None:
    with ranks(2, ["serve", "-m", str(FOLDER), "--port", "0"], tmp_path) as (first, second):
        served(tmp_path)
        first.terminate()
        assert first.wait(SOON) == 128 + signal.SIGTERM
        assert second.wait(SOON) == 0


def test_three_machines_are_not_two_halves() -> None:
    ranks: Any = SimpleNamespace(rank=0, count=3)
    with pytest.raises(InputError, match=r"3 machines are not two halves.*--shard-llm"):
        loading.load_first("tiny-f32", checkpoint.open_folder(FOLDER), LoadOptions(), print, ranks)


# The watch


def test_a_connection_that_ends_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    told: list[str] = []
    looking = watch.Watch([ours], told.append)
    theirs.close()
    until(lambda: told)
    looking.end()
    ours.close()
    assert "broken" in told[0]


def test_an_answer_that_does_not_come_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.1)
    told: list[str] = []
    looking = watch.Watch([], told.append)
    time.sleep(0.6)
    assert not told  # nobody waits
    with looking.waiting():
        until(lambda: told)
    looking.end()
    assert "not answered" in told[0]
