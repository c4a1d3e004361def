"""The limits of /v1/realtime, set small: what is said, with which code it closes, and that nobody else notices."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

import mlx_voicechat
from mlx_voicechat.voicechat import VoiceChat
from tests.support.caller import FRAME_SAMPLES, Caller, append, calling, greeted, opened
from tests.support.checkpoints import GOLDEN
from tests.support.server import running_server

SPEECH = (3000 * np.sin(np.arange(60 * 16000) * 0.07)).astype(np.int16)
COMMIT = {"type": "input_audio_buffer.commit"}
Hook = Callable[[Callable[[], object]], None]


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load(GOLDEN / "tiny-f32")


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client does is an error in the log."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.fixture
def before_frames(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> Hook:
    """Have something done ahead of every frame, on the engine's thread."""

    def hook(call: Callable[[], object]) -> None:
        frame = VoiceChat.frame

        def hooked(*arguments: Any) -> Any:
            call()
            return frame(model, *arguments)

        monkeypatch.setattr(model, "frame", hooked)

    return hook


class Gate:
    """Once shut, it lets as many frames run as it is told."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._tickets = threading.Semaphore(0)
        self.let = self._tickets.release
        self.shut = self._free.clear
        self.open = self._free.set

    def wait(self) -> None:
        while not self._free.is_set() and not self._tickets.acquire(timeout=0.01):
            pass


@pytest.fixture
def gate(before_frames: Hook) -> Iterator[Gate]:
    gate = Gate()
    before_frames(gate.wait)
    yield gate
    gate.open()


def said(frames: float) -> dict[str, Any]:
    return append(SPEECH[: round(frames * FRAME_SAMPLES)])


def finish(caller: Caller) -> int:
    """Commit; how many frames there were, all of them counted."""
    caller.send(COMMIT)
    done = caller.until("response.done")[-1]
    assert caller.closed() == (1000, "")
    indices = [event["frame_index"] for event in caller.events if event["type"] == "response.audio.delta"]
    assert indices == list(range(done["frame_index"]))
    return len(indices)


def last_error(caller: Caller, code: str) -> str:
    """Its message: the last event of the connection is this error."""
    error = caller.events[-1]
    assert error["type"] == "error"
    assert error["error"]["code"] == code
    return str(error["error"]["message"])


def small_socket(url: str, option: int) -> socket.socket:
    """A connection whose buffer (SO_RCVBUF, SO_SNDBUF) holds a second of sound, not megabytes."""
    parts = urlsplit(url)
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, option, 2**15)
    place.connect((parts.hostname, parts.port))
    return place


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def eventually_opened(url: str) -> int:
    """How many tries it took until a session could be had."""
    for tries in range(1, 1000):
        with calling(url) as caller:
            event = caller.receive()
            if event["type"] == "session.created":
                caller.open()
                caller.send({"type": "session.cancel"})  # so that it is free again
                assert caller.closed() == (1000, "")
                return tries
            assert event["error"]["code"] == "server_busy"
        time.sleep(0.01)
    raise AssertionError("the slot is not freed")


# Sessions


def test_one_session_at_a_time(model: VoiceChat) -> None:
    with running_server(model) as server, greeted(server.ws_url) as late, opened(server.ws_url) as first:
        with calling(server.ws_url) as second:
            assert second.closed()[0] == 1013
            assert len(second.events) == 1
            assert last_error(second, "server_busy")
        late.send({"type": "session.update", "event_id": "mine"})
        assert late.closed()[0] == 1013
        assert last_error(late, "server_busy")
        first.send(said(2))
        assert finish(first) == 2
        with opened(server.ws_url) as third:
            third.send(said(1.5))
            assert finish(third) == 2


@pytest.mark.parametrize("moment", ["before the update", "opening", "open", "in a frame", "in the flush", "politely"])
def test_a_client_that_vanishes_frees_its_slot(model: VoiceChat, before_frames: Hook, moment: str) -> None:
    count = []
    before_frames(lambda: (count.append(1), time.sleep(0.02)))
    with running_server(model) as server:
        with greeted(server.ws_url) as caller:
            if moment != "before the update":
                caller.send({"type": "session.update", "session": {"system_prompt": "Be kind. " * 20, "seed": 5}})
            if moment not in ("before the update", "opening"):
                assert caller.receive()["type"] == "session.updated"
            if moment in ("in a frame", "in the flush"):
                caller.send(said(100))
                caller.frames(1)
            if moment == "in the flush":
                caller.send(COMMIT)
            if moment != "politely":
                caller.socket.socket.shutdown(socket.SHUT_RDWR)
        eventually_opened(server.ws_url)
        assert len(count) < 100
        with opened(server.ws_url) as caller:
            caller.send(said(3))
            assert finish(caller) == 3


def test_a_model_that_fails_ends_one_session(model: VoiceChat, before_frames: Hook) -> None:
    failing = threading.Event()

    def fail() -> None:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("out of memory at 0x1234")

    before_frames(fail)
    with (
        running_server(model, max_sessions=2) as server,
        opened(server.ws_url) as broken,
        opened(server.ws_url) as other,
    ):
        for caller in (broken, other):
            caller.send(said(2))
            caller.frames(2)
        failing.set()
        broken.send({**said(2), "event_id": "fatal"})
        error = broken.until("error")[-1]["error"]
        assert (error["code"], error["event_id"]) == ("inference_error", "fatal")
        broken.ping()
        assert broken.refusal(said(1))[0] == "inference_error"
        assert broken.refusal(COMMIT)[0] == "inference_error"
        with opened(server.ws_url) as third:  # its slot is free
            third.send(said(1))
            assert finish(third) == 1
        broken.send({"type": "session.cancel"})
        assert broken.receive() == {"type": "response.cancelled", "frame_index": 2}
        assert broken.closed() == (1000, "")
        other.send(said(3))
        assert finish(other) == 5


# Time


def test_idle(model: VoiceChat) -> None:
    with running_server(model, idle_seconds=0.6) as server:
        with opened(server.ws_url) as caller:
            for _ in range(6):  # twice as long
                caller.ping()
                time.sleep(0.2)
            for _ in range(8):  # pings of the WebSocket do not count
                if not caller.socket.protocol.close_rcvd:
                    caller.socket.ping()
                    time.sleep(0.2)
            assert caller.closed()[0] == 1008
            assert "0.6" in last_error(caller, "invalid_request")
        with opened(server.ws_url) as caller:  # the slot is free
            caller.send(said(1))
            assert finish(caller) == 1


def test_who_waits_for_the_server_is_not_idle(model: VoiceChat, before_frames: Hook) -> None:
    before_frames(lambda: time.sleep(0.25))
    with running_server(model, idle_seconds=0.5) as server, opened(server.ws_url) as caller:
        caller.send(said(5))
        caller.send(COMMIT)
        assert caller.until("response.done")[-1]["frame_index"] == 5


def test_setup(model: VoiceChat) -> None:
    with running_server(model, setup_seconds=0.6) as server, greeted(server.ws_url) as caller:
        for _ in range(2):
            caller.ping()
            time.sleep(0.2)
        assert caller.closed()[0] == 1008
        assert "0.6" in last_error(caller, "invalid_request")


def test_the_limit_in_the_request_is_clamped(model: VoiceChat) -> None:
    with running_server(model, max_audio_seconds=0.3) as server:
        for wanted, frames in (600, 3), (1e300, 3), (None, 3), (0.1, 1):
            with opened(server.ws_url, max_streaming_seconds=wanted) as caller:
                caller.send(said(10))
                assert caller.until("error")[-1]["error"]["code"] == "inference_error"
                assert ("0.3" if frames == 3 else "0.1") in last_error(caller, "inference_error")
                assert finish(caller) == frames


# Sizes


def test_message_size(model: VoiceChat) -> None:
    ping = '{"type": "session.ping", "padding": "%s"}'
    with running_server(model) as server:
        with greeted(server.ws_url) as caller:
            caller.send(ping % ("x" * (2**20 - len(ping) + 2)))
            assert caller.receive() == {"type": "session.pong"}
            caller.send(ping % ("x" * (2**20 - len(ping) + 3)))
            assert caller.closed()[0] == 1009
        with greeted(server.ws_url) as caller:
            with suppress(ConnectionClosed):  # it does not wait for the end
                caller.socket.send(["x" * 1000] * 2000)  # fragments of one message
            assert caller.closed()[0] == 1009
        with opened(server.ws_url) as caller:  # the slot is free again
            with suppress(ConnectionClosed):
                caller.send("y" * 2_000_000)
            assert caller.closed()[0] == 1009
        eventually_opened(server.ws_url)


def test_small_message_size(model: VoiceChat) -> None:
    with running_server(model, max_message_bytes=4000) as server, opened(server.ws_url) as caller:
        caller.send(said(1))
        caller.frames(1)
        assert caller.refusal("x" * 4000)[0] == "invalid_request"
        caller.send(said(2))
        assert caller.closed()[0] == 1009


def test_text_that_is_not_utf_8(model: VoiceChat) -> None:
    with running_server(model) as server:
        with opened(server.ws_url) as caller:
            caller.socket.send(b'{"type": "session.ping\xff"}', text=True)
            assert caller.closed()[0] == 1007
        eventually_opened(server.ws_url)


# Pace


def test_events_leave_before_the_next_slice_runs(model: VoiceChat, gate: Gate) -> None:
    with running_server(model) as server, opened(server.ws_url) as caller:
        gate.shut()
        caller.send(said(5))
        for index in range(5):
            gate.let()
            assert caller.frames(1)[-1]["frame_index"] == index
        caller.ping()


def test_cancel_and_interrupt_do_not_wait_for_the_backlog(model: VoiceChat, gate: Gate) -> None:
    with running_server(model) as server, opened(server.ws_url) as caller:
        gate.shut()
        caller.send(said(50))
        gate.let(2)
        caller.frames(2)
        caller.send({"type": "response.interrupt"})
        caller.ping()
        gate.let(2)
        assert caller.until("response.interrupted")[-1]["frame_index"] in (2, 3)
        caller.send({"type": "session.cancel"})
        gate.let(2)
        assert caller.until("response.cancelled")[-1]["frame_index"] <= 6
        assert caller.closed() == (1000, "")


def test_lag_is_told(model: VoiceChat, before_frames: Hook) -> None:
    before_frames(lambda: time.sleep(0.06))
    with running_server(model, max_sessions=2) as server, opened(server.ws_url) as caller:
        with opened(server.ws_url) as other:
            caller.send(said(30))
            other.send(said(1))
            assert finish(other) == 1
            assert other.lags == []
        assert finish(caller) == 30
        times, seconds = zip(*caller.lags, strict=True)
        assert all(0.5 <= each <= 2.4 for each in seconds)
        assert list(seconds) == sorted(seconds, reverse=True)
        assert 2 <= len(seconds) <= 2 + times[-1] - times[0]


def test_a_client_that_does_not_read(model: VoiceChat) -> None:
    with running_server(model, max_sessions=2) as server:
        with calling(server.ws_url, sock=small_socket(server.ws_url, socket.SO_RCVBUF), max_queue=1) as slow:
            slow.receive()
            slow.open()

            def send_much() -> None:
                with suppress(ConnectionClosed):
                    for _ in range(20):
                        slow.send(said(5))

            sender = threading.Thread(target=send_much, daemon=True)
            sender.start()
            with opened(server.ws_url) as other:  # which does not notice
                for count in range(20):
                    other.send(said(1))
                    assert other.frames(1)[-1]["frame_index"] == count
            wait_until(lambda: server.engine.active == 0)
            assert slow.closed()[0] == 1008
            assert last_error(slow, "slow_consumer")
            frames = [event for event in slow.events if event["type"] == "response.audio.delta"]
            assert len(frames) < 100
            sender.join(10)
        eventually_opened(server.ws_url)


def test_a_client_that_sends_all_at_once(model: VoiceChat, gate: Gate) -> None:
    with running_server(model) as server:
        with calling(server.ws_url, sock=small_socket(server.ws_url, socket.SO_SNDBUF)) as fast:
            fast.receive()
            fast.open()
            gate.shut()
            sent = []

            def send() -> None:
                with suppress(ConnectionClosed):
                    for _ in range(100):
                        fast.send(append(SPEECH[: 2 * 16000]))
                        sent.append(2.0)

            sender = threading.Thread(target=send, daemon=True)
            sender.start()
            still = 0
            while still < 10:
                count = len(sent)
                time.sleep(0.1)
                still = still + 1 if len(sent) == count else 0
            assert sum(sent) < 40
            assert server.engine._waiting_seconds() <= 12
            gate.open()
            fast.frames(10)
            fast.socket.socket.shutdown(socket.SHUT_RDWR)
            sender.join(10)
        eventually_opened(server.ws_url)


# The end of the server


@pytest.mark.parametrize("busy", [False, True])
def test_the_server_ends(model: VoiceChat, before_frames: Hook, busy: bool) -> None:
    before_frames(lambda: time.sleep(0.02))
    with (
        running_server(model, max_sessions=2) as server,
        greeted(server.ws_url) as waiting,
        opened(server.ws_url) as caller,
    ):
        if busy:
            caller.send(said(200))
            caller.frames(2)
        server.server.should_exit = True
        assert caller.closed()[0] == 1001
        assert waiting.closed()[0] == 1001
        assert len(caller.events) < 200
