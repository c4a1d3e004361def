"""What a connection does that no dialect sees: order, floods, and a server whose engine is gone."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.frames import Frame, Opcode

from tests.support.caller import calling, opened
from tests.support.fake_model import FakeModel
from tests.support.faults import RawClient, audio
from tests.support.server import RunningServer, running_server

APPEND = {"type": "input_audio_buffer.append", "audio": audio(2560)}
FLOOD_BYTES = 2**27
WAIT_SECONDS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(FakeModel(), max_sessions=2) as server:
        yield server


def test_a_client_that_does_not_wait_for_answers() -> None:
    model, all_read = FakeModel(), threading.Event()
    model.before = lambda index: all_read.wait(WAIT_SECONDS)
    with running_server(model, max_sessions=2) as server, calling(server.ws_url) as caller:
        for message in (
            {"type": "session.update"},
            APPEND,
            {"type": "input_audio_buffer.commit"},
            {**APPEND, "event_id": "late"},
            {"type": "session.ping"},
        ):
            caller.send(message)
        caller.until("session.pong")  # which overtakes what waits: every message was read
        all_read.set()
        assert caller.closed() == (1000, "")
        events = [event for event in caller.events if event["type"] != "session.pong"]
        assert [event["type"] for event in events] == [
            "session.created",
            "session.updated",
            "response.audio.delta",
            "response.audio.delta",
            "input_audio_buffer.committed",
            "error",
            "response.done",
        ]
        assert events[-2]["error"]["event_id"] == "late"
        assert events[-2]["error"]["code"] == "invalid_request"


def is_cut(client: RawClient, frame: Frame) -> bool:
    """Send one frame again and again, reading nothing: whether the server ends the connection."""
    piece = frame.serialize(mask=True) * 10_000
    try:
        for _ in range(FLOOD_BYTES // len(piece)):
            client.socket.sendall(piece)
    except OSError:
        return True
    finally:
        client.socket.close()
    return False


def test_pings_whose_answers_are_not_read(server: RunningServer) -> None:
    assert is_cut(RawClient(server.ws_url).greeted(), Frame(Opcode.PING, b"x" * 125))
    with opened(server.ws_url) as caller:
        caller.ping()


def test_a_message_of_countless_pieces(server: RunningServer) -> None:
    client = RawClient(server.ws_url).greeted()
    client.socket.sendall(Frame(Opcode.TEXT, b"{", fin=False).serialize(mask=True))
    assert is_cut(client, Frame(Opcode.CONT, b"", fin=False))


def test_a_client_may_take_its_time_to_read(server: RunningServer) -> None:
    """What waits in the kernel and the queue is less than what makes a slow reader."""
    client = RawClient(server.ws_url).greeted()
    client.send({"type": "session.update"})
    client.event()
    client.append(1280 * 40)
    client.send({"type": "input_audio_buffer.commit"})
    events: list[Any] = []
    while isinstance(event := client.event(), dict):
        events.append(event["type"])
    assert (events.count("response.audio.delta"), events[-1], event) == (40, "response.done", 1000)
    client.socket.close()


def test_an_engine_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(FakeModel()) as server, opened(server.ws_url) as caller:

        def fail() -> None:
            raise MemoryError("none left")

        monkeypatch.setattr(server.engine, "_due", fail)
        caller.send(APPEND)
        deadline = time.monotonic() + WAIT_SECONDS
        while server.engine.state != "failed":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: plain.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["status"] == "failed"
        with pytest.raises(MemoryError):
            server.engine.wait_ready(0)


def test_who_comes_back_at_once_finds_the_place_free() -> None:
    """The frame that runs when a client leaves is not its successor's "busy"."""
    model = FakeModel()
    model.before = lambda _: time.sleep(0.1)
    with running_server(model) as server:
        for _ in range(5):
            with opened(server.ws_url) as caller:
                caller.send({**APPEND, "audio": audio(12800)})
                caller.until("response.audio.delta")
        with opened(server.ws_url), calling(server.ws_url) as second:
            began = time.monotonic()
            assert second.receive()["error"]["code"] == "server_busy"
            assert time.monotonic() - began < 2
