"""Clients that vanish or send what is no message: small forms of benchmarks/server_faults.py, and it itself."""

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_voicechat
from tests.support.caller import calling
from tests.support.checkpoints import GOLDEN
from tests.support.faults import MOMENTS, Fuzzer, RawClient, audio, vanish, verdict
from tests.support.server import RunningServer, running_server

FILES = Path("/dev/fd")
WAIT_SECONDS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    model = mlx_voicechat.load(GOLDEN / "tiny-f32")
    with running_server(model, max_sessions=2, setup_seconds=1e6) as server:
        yield server


def settle(server: RunningServer, tasks: int) -> None:
    """Wait until no slot is taken and the server has no more tasks than it began with."""
    deadline = time.monotonic() + WAIT_SECONDS
    while server.engine.active or count_tasks(server) > tasks:
        assert time.monotonic() < deadline, "a slot or a task is left"
        time.sleep(0.01)


def count_tasks(server: RunningServer) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), server.loop).result(WAIT_SECONDS)


@pytest.mark.parametrize("moment", MOMENTS)
def test_who_vanishes_leaves_nothing(server: RunningServer, moment: str) -> None:
    tasks, threads, files = count_tasks(server), threading.active_count(), len(os.listdir(FILES))
    for number in range(3):
        vanish(server.ws_url, moment, random.Random(number))
        settle(server, tasks)
    assert threading.active_count() == threads
    deadline = time.monotonic() + WAIT_SECONDS
    while len(os.listdir(FILES)) > files:  # the last one may not be accepted yet
        assert time.monotonic() < deadline, "a descriptor is left"
        time.sleep(0.01)


@pytest.mark.parametrize("reset", [False, True])
def test_who_vanishes_behind_what_is_not_read(server: RunningServer, reset: bool) -> None:
    """The server has stopped reading, and speech it cannot send stops its frames: the end is seen nevertheless."""
    tasks = count_tasks(server)
    client = RawClient(server.ws_url).greeted()
    client.send({"type": "session.update", "session": {"system_prompt": "Be concise. " * 400}})
    for _ in range(12):
        client.append(16000)
    client.vanish(reset)
    settle(server, tasks)


def test_random_and_mutated_messages(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    fuzzer = Fuzzer(server.ws_url, 1)
    fuzzer.run(150)
    assert fuzzer.wrong == []
    assert fuzzer.malformed > 75
    assert not [record for record in caplog.records if record.exc_info]
    with calling(server.ws_url) as caller:
        caller.until("session.created")
        caller.open()
        caller.send({"type": "input_audio_buffer.append", "audio": audio(1280)})
        caller.frames(1)


def test_the_judge_of_the_messages() -> None:
    """What the fuzzer holds against a server is right about plain cases."""
    append = '{"type":"input_audio_buffer.append","audio":"%s"}'
    for raw, configured, expected in (
        ('{"type":"session.ping"}', False, None),
        ('{"type":"session.update"}', False, "opens"),
        ('{"type":"session.update","session":{"seed":true}}', False, "session_initialization_failed"),
        ('{"type":"session.update"}', True, "invalid_request"),
        (append % "AAA=", False, "invalid_request"),
        (append % "AAA=", True, None),
        (append % "AAB=", True, "inference_error"),
        (append % "AA==", True, "inference_error"),
        (append % "AAA=\\n", True, "inference_error"),
        ('{"type":"session.cancel"}', True, "ends"),
        ("[" * 5000, True, "invalid_request"),
        (b"{}", True, "invalid_request"),
    ):
        assert verdict(raw, configured) == expected
