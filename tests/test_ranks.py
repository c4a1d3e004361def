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
from typing import Any

import numpy as np
import pytest

from mlx_voicechat.machines import watch
from tests.support.caller import append, opened
from tests.support.checkpoints import GOLDEN
from tests.support.ranks import PROGRAM, WAIT_SECONDS, launched, ranks

FOLDER = GOLDEN / "tiny-f32"
HELLO = Path(__file__).parents[1] / "examples" / "hello.wav"
SOON = 20  # seconds, on a machine that others use too; an orderly end takes about two


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def generate(*more: str) -> list[str]:
    return ["generate", "-m", str(FOLDER), "--audio", str(HELLO), "--extra-decoding-seconds", "0", "--json", *more]


def test_two_ranks_of_mlx_launch_answer_as_one_process(tmp_path: Path) -> None:
    one, two = tmp_path / "one.wav", tmp_path / "two.wav"
    command = [sys.executable, "-c", PROGRAM, *generate("--output-audio", str(one))]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    done = launched(2, generate("--output-audio", str(two)))
    assert alone.returncode == done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr, done.stderr  # which is what it says of a rank's exit code
    assert json.loads(done.stdout) == json.loads(alone.stdout)
    assert two.read_bytes() == one.read_bytes()


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
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_while_nobody_talks_ends_the_other(tmp_path: Path, killed: int) -> None:
    with ranks(2, ["serve", "-m", str(FOLDER), "--port", "0"], tmp_path) as processes:
        served(tmp_path)
        processes[killed].kill()
        assert processes[1 - killed].wait(SOON) == 1


def test_a_run_that_ends_by_a_signal_ends_the_other_rank_in_order(tmp_path: Path) -> None:
    with ranks(2, ["serve", "-m", str(FOLDER), "--port", "0"], tmp_path) as (first, second):
        served(tmp_path)
        first.terminate()
        assert first.wait(SOON) == 128 + signal.SIGTERM
        assert second.wait(SOON) == 0


def test_what_does_not_run_on_several_machines_says_so(tmp_path: Path) -> None:
    with ranks(3, generate(), tmp_path) as processes:
        assert [process.wait(WAIT_SECONDS) for process in processes] == [2, 2, 2]
    assert "3 machines" in (tmp_path / "rank-0.err").read_text()


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
