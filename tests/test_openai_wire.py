"""OpenAI's vocabulary over sockets: who is admitted, who is too slow, and what is as large as it may be."""

import base64
import json
import time
from collections.abc import Iterator

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.support.faults import RawClient
from tests.support.openai_caller import said, talking
from tests.support.server import RunningServer, running_server
from tests.support.turn_model import TurnModel

COMMIT, CREATE = {"type": "input_audio_buffer.commit"}, {"type": "response.create"}
MANUAL = {"type": "session.update", "session": {"turn_detection": None}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(TurnModel(tuple(f" word{n}" for n in range(400))), max_sessions=2) as server:
        yield server


def test_no_free_slot_is_said_at_the_upgrade() -> None:
    with (
        running_server(TurnModel(), max_sessions=2) as server,
        talking(server.ws_url),
        talking(server.ws_url, "duplex=1"),
    ):
        for query in ("model=any", "duplex=1", "protocol=openai"):
            with pytest.raises(InvalidStatus) as refused, connect(f"{server.ws_url}?{query}"):
                pass
            response = refused.value.response
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert json.loads(response.body or b"")["error"]["code"] == "server_busy"


def test_a_slot_is_free_again_that_nothing_was_opened_in() -> None:
    with running_server(TurnModel()) as server:
        for _ in range(4):
            with talking(server.ws_url):
                assert server.engine.active == 1
            deadline = time.monotonic() + 5
            while server.engine.active and time.monotonic() < deadline:
                time.sleep(0.01)
            assert server.engine.active == 0


def test_a_message_of_fifteen_megabytes() -> None:
    with running_server(TurnModel(), max_sessions=2) as server:
        with talking(server.ws_url) as talker:
            silence = base64.b64encode(bytes(11 * 2**20)).decode()
            talker.send(MANUAL, {"type": "input_audio_buffer.append", "audio": silence}, COMMIT)
            assert talker.until("input_audio_buffer.committed")["item_id"]
        with talking(server.ws_url) as talker:
            talker.socket.send(" " * (15 * 2**20 + 1))
            with pytest.raises(ConnectionClosed):
                talker.until("none")
            assert talker.socket.close_code == 1009


def test_a_client_that_never_reads(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_voicechat.server.connection.Connection.slow_seconds", 0.3)
    client = RawClient(server.ws_url + "?model=any").greeted()
    heavy = {"output": {"format": {"type": "pcm_f32le", "rate": 48_000}}}
    for message in (MANUAL, {"type": "session.update", "session": {"audio": heavy}}, said(0.5), COMMIT, CREATE):
        client.send(message)
    deadline = time.monotonic() + 40
    while server.engine.active and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.engine.active == 0
    events = []
    while isinstance(event := client.event(), dict):
        events.append(event)
    assert events[-1]["error"]["code"] == "slow_consumer"
    assert event == 1008
    client.socket.close()


def test_a_client_that_says_nothing() -> None:
    with running_server(TurnModel(), idle_seconds=0.4) as server:
        with talking(server.ws_url) as talker:
            assert talker.until("error")["error"]["code"] == "session_limit_reached"
            with pytest.raises(ConnectionClosed):
                talker.until("none")
        with talking(server.ws_url, "duplex=1") as talker:
            assert talker.until("session.expired")["reason"] == "idle_ttl_expired"
