"""strict-v3 over a real socket: a model that takes turns by simple rules, behind the real engine."""

import random
import resource
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mlx_voicechat import Tool
from mlx_voicechat.server import messages, strict_v3
from tests.support.server import RunningServer, running_server
from tests.support.strict_v3 import WEATHER
from tests.support.strict_v3_caller import APPLIED, CALL, COMPLETED, CREATED, DONE, StrictCaller, strict_calling
from tests.support.turn_model import TurnModel

LOUD = np.tile(np.array([8000, -8000], np.int16), 640)
SPEECH = np.tile(LOUD, 3)


@pytest.fixture
def model() -> TurnModel:
    return TurnModel()


@pytest.fixture
def server(model: TurnModel) -> Iterator[RunningServer]:
    with running_server(model, function_timeout=1.0) as server:
        yield server


def answered(caller: StrictCaller, samples: np.ndarray = SPEECH) -> dict:
    """Speak and wait for the end of the answer; its response.done."""
    since = len(caller.events)
    caller.speak(samples)
    turn_id = caller.until("input_audio_buffer.committed", since)["turn_id"]
    return caller.until(DONE, since, turn_id=turn_id)


@pytest.mark.parametrize(
    ("path", "protocol"),
    [
        ("?protocol=strict-v3", "mlxcel"),
        ("?protocol=voicechat.realtime.v3", "mlxcel"),
        ("/v3", "openai"),
        ("", "strict-v3"),
        ("?model=any", None),
    ],
)
def test_where_it_is_reached(path: str, protocol: str | None) -> None:
    if protocol is None:  # an OpenAI client stays one, whatever the server's own protocol
        with running_server(TurnModel(), protocol="strict-v3") as server, connect(server.ws_url + path) as socket:
            assert "protocol" not in socket.recv(5)
        return
    with running_server(TurnModel(), protocol=protocol) as server, connect(server.ws_url + path) as socket:
        caller = StrictCaller(socket)
        assert caller.receive()["protocol"] == {"name": "voicechat.realtime", "version": 3}


def test_an_unknown_protocol(server: RunningServer) -> None:
    with pytest.raises(InvalidStatus, match="400"), connect(f"{server.ws_url}?protocol=strict-v4"):
        pass


def test_turns(server: RunningServer) -> None:
    with strict_calling(server.ws_url) as caller:
        for _ in range(3):
            assert answered(caller)["status"] == "completed"
        assert [event["transcript"] for event in caller.of(COMPLETED)] == ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9"]
        assert {event["text"] for event in caller.of("response.output_text.done")} == {"One two three four five six."}
        caller.stop()


def test_the_session_is_what_the_client_asks_for(server: RunningServer, model: TurnModel) -> None:
    with strict_calling(server.ws_url, tools=[WEATHER], instructions="Be brief.") as caller:
        caller.say("session.update", session={"instructions": None, "tools": []})
        assert caller.until("session.updated")["session"]["instructions"] == "Default."
        caller.stop()
    opened = [(options["system_prompt"], len(options["tools"]), options["turns"]) for options in model.opened]
    assert opened == [("Be brief.", 1, "application"), ("Default.", 0, "application")]
    assert {options["max_seconds"] for options in model.opened} == {960.0}


def test_the_server_s_options_are_defaults() -> None:
    model = TurnModel()
    options = {"instructions": "Ours.", "max_audio_seconds": 8.0, "function_timeout": 2.5, "max_sessions": 2}
    with running_server(model, **options) as server, strict_calling(server.ws_url) as caller:
        assert caller.events[1]["session"]["instructions"] == "Ours."
        capabilities = caller.events[0]["capabilities"]
        assert (capabilities["max_session_model_frames"], capabilities["single_client"]) == (100, False)
        assert capabilities["function_call_timeout_seconds"] == 2.5
        assert model.opened[0]["max_seconds"] == 8.0


def test_the_model_hears_zeros_in_real_time_while_it_speaks_and_stands_still_then(
    server: RunningServer, model: TurnModel
) -> None:
    with strict_calling(server.ws_url) as caller:
        caller.speak(SPEECH)
        caller.until(CREATED)
        begun, at = time.monotonic(), model.sessions[-1].frames
        caller.until(DONE)
        frames = model.sessions[-1].frames - at
        assert time.monotonic() - begun > frames * 0.08 - 0.2
        for _ in range(10):
            caller.append(LOUD)
        before = model.sessions[-1].frames
        time.sleep(0.5)
        assert model.sessions[-1].frames == before
        caller.stop()


def test_a_call(server: RunningServer) -> None:
    with strict_calling(server.ws_url, tools=[WEATHER]) as caller:
        caller.speak(SPEECH)
        call = caller.until(CALL, 0)
        time.sleep(0.3)
        caller.result(call["call_id"], "sunny")
        caller.until(APPLIED, call_id=call["call_id"])
        assert caller.until(DONE)["status"] == "completed"
        caller.stop()


def test_the_server_s_own_tools() -> None:
    tools = (Tool("get_weather", "Weather.", callable=lambda city: "sunny"),)
    model = TurnModel()
    with running_server(model, tools=tools) as server, strict_calling(server.ws_url) as caller:
        assert [tool["name"] for tool in caller.events[1]["session"]["tools"]] == ["get_weather"]
        assert model.opened[0]["tools"] == list(tools)
        caller.say("session.update", session={"tools": []})
        assert caller.until("session.updated")["session"]["tools"] == []
        caller.stop()
    assert model.opened[1]["tools"] == []


def test_a_result_that_is_too_long_for_the_model(server: RunningServer) -> None:
    with strict_calling(server.ws_url, tools=[WEATHER]) as caller:
        caller.speak(SPEECH)
        call = caller.until(CALL, 0)
        caller.result(call["call_id"], "x" * 600)
        error = caller.until("error")["error"]
        assert (error["code"], error["client_event_id"]) == ("invalid_function_call_output", "result")
        caller.result(call["call_id"], "sunny")
        caller.until(DONE)
        caller.stop()


def test_a_call_without_a_result(server: RunningServer) -> None:
    with strict_calling(server.ws_url, tools=[WEATHER]) as caller:
        caller.speak(SPEECH)
        caller.until("error")
        assert caller.closed() == 1011
        assert caller.kinds[-2:] == [
            "response.function_call.failed:function_call_output_timeout",
            "error:function_call_output_timeout",
        ]
        caller.check(1011)


def test_input_during_a_call(server: RunningServer) -> None:
    with strict_calling(server.ws_url, tools=[WEATHER]) as caller:
        caller.speak(SPEECH)
        call = caller.until(CALL, 0)
        caller.speak(SPEECH)
        caller.result(call["call_id"], "sunny")
        caller.until(DONE, status="cancelled", reason="client_vad")
        second = caller.until(CALL)
        caller.result(second["call_id"], "sunny")
        caller.until(DONE, status="completed")
        caller.stop()


def test_a_turn_during_the_answer(server: RunningServer) -> None:
    with strict_calling(server.ws_url) as caller:
        caller.speak(SPEECH)
        caller.until("response.output_text.delta")
        caller.speak(SPEECH)
        done = caller.until(DONE)
        assert (done["status"], done["reason"]) == ("cancelled", "client_vad")
        assert caller.until(DONE)["status"] == "completed"
        caller.stop()


def test_one_client_at_a_time(server: RunningServer) -> None:
    with strict_calling(server.ws_url, configured=False), connect(f"{server.ws_url}?protocol=strict-v3") as socket:
        second = StrictCaller(socket)
        event = second.receive()
        assert event["error"]["code"] == "server_busy"
        assert event["error"]["fatal"] is True
        assert second.closed() == 1013
    with strict_calling(server.ws_url) as caller:
        answered(caller)
        caller.stop()


def test_a_model_that_fails(server: RunningServer, model: TurnModel) -> None:
    def fail(index: int) -> None:
        raise ValueError("broken")

    with strict_calling(server.ws_url) as caller:
        model.before = fail
        caller.speak(SPEECH)
        caller.until("session.closed")
        assert caller.closed() == 1011
        assert caller.kinds[-2:] == ["error:internal_error", "session.closed:failed"]
        caller.check(1011)
    model.before = lambda index: None
    with strict_calling(server.ws_url) as caller:
        answered(caller)
        caller.stop()


def test_the_last_frame() -> None:
    with running_server(TurnModel(), max_audio_seconds=2.0) as server, strict_calling(server.ws_url) as caller:
        caller.say("input_audio_buffer.turn_start", event_id="a", client_turn_id=1)
        for _ in range(10):
            caller.append(SPEECH)
        caller.until("session.closed")
        assert caller.closed() == 1000
        assert caller.kinds[-4:] == [
            "input_audio_buffer.speech_stopped",
            COMPLETED,
            "error:session_position_limit",
            "session.closed:failed",
        ]
        assert len(caller.of("voicechat.metrics")) == 25
        caller.check(1000)


@pytest.mark.parametrize(("configured", "reason"), [(False, "setup_timeout"), (True, "idle_timeout")])
def test_a_silent_client(configured: bool, reason: str) -> None:
    with running_server(TurnModel(), setup_seconds=0.3, idle_seconds=0.3) as server:
        with strict_calling(server.ws_url, configured) as caller:
            assert caller.until("session.closed")["reason"] == reason
            assert caller.closed() == 1008
            caller.check(1008)
        deadline = time.monotonic() + 1
        while server.engine.active and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.engine.active == 0


def test_turns_that_the_model_finds() -> None:
    with running_server(TurnModel(), turns="server") as server, strict_calling(server.ws_url) as caller:
        assert caller.events[0]["capabilities"]["server_turn_detection"] == "rnnt"
        for _ in range(2):
            since = len(caller.events)
            caller.append(SPEECH)
            for _ in range(4):
                caller.append(np.zeros(1280, np.int16))
            assert caller.until(DONE, since)["status"] == "completed"
        kinds = [kind for kind in caller.kinds if "delta" not in kind]
        turn = ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", COMPLETED, CREATED]
        answer = ["response.output_text.done", "response.output_audio.done"]
        assert kinds[2:9] == [*turn, *answer, "response.done:completed:model_or_turn_taking"]
        caller.stop()


TONE = """
import struct, sys, wave
sys.stdin.read()
with wave.open(sys.stdout.buffer, "wb") as file:
    file.setnchannels(1); file.setsampwidth(2); file.setframerate(16000)
    file.writeframes(struct.pack("<hh", 8000, -8000) * 3840)
"""


def test_typed_text(tmp_path: Path) -> None:
    script = tmp_path / "tone.py"
    script.write_text(TONE)
    voice = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"
    with running_server(TurnModel(), typed_voice=voice) as server, strict_calling(server.ws_url) as caller:
        caller.say("input_text.request", job_id="a", text="Hello there.")
        assert caller.until("input_text.injection_finished", 0)["disposition"] == "completed"
        caller.until(DONE, 0, status="completed")
        heard = caller.of(COMPLETED)[0]
        assert (heard["source"], heard["job_id"], heard["transcript"]) == ("typed", "a", "w1 w2 w3 w4 w5 w6")
        caller.stop()


def test_typed_text_between_turns_that_the_model_finds(tmp_path: Path) -> None:
    script = tmp_path / "tone.py"
    script.write_text(TONE)
    voice = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"
    options = {"typed_voice": voice, "turns": "server"}
    with running_server(TurnModel(), **options) as server, strict_calling(server.ws_url) as caller:
        caller.append(SPEECH)
        caller.until(COMPLETED.replace("completed", "delta"), 0)
        caller.say("input_text.request", job_id="early", text="Hello there.")
        assert caller.until("input_text.rejected", 0)["reason"] == "input_turn_active"
        caller.append(np.zeros(5120, np.int16))
        caller.until(DONE, 0)
        since = len(caller.events)
        caller.say("input_text.request", job_id="a", text="Hello there.")
        assert caller.until("input_text.injection_finished", since)["disposition"] == "completed"
        caller.until(DONE, since, status="completed")
        assert [event["source"] for event in caller.of(COMPLETED)] == ["microphone", "typed"]
        caller.stop()


def test_typed_text_that_cannot_be_spoken(tmp_path: Path) -> None:
    voice = f"{shlex.quote(sys.executable)} -c pass"
    with running_server(TurnModel(), typed_voice=voice) as server, strict_calling(server.ws_url) as caller:
        caller.say("input_text.request", event_id="t", job_id="a", text="Hello there.")
        assert caller.until("input_text.injection_finished", 0)["disposition"] == "error"
        error = caller.until("error", 0)["error"]
        assert (error["code"], error["fatal"], error["client_event_id"]) == ("typed_input_failed", False, "t")
        answered(caller)
        caller.stop()


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_clients_that_vanish(server: RunningServer, count: int) -> None:
    """At random places; the place is free within a second, and the next client is served."""
    draws = random.Random(count)
    for _ in range(count):
        with strict_calling(server.ws_url, draws.random() > 0.1, tools=[WEATHER]) as caller:
            if draws.random() > 0.2:
                caller.speak(SPEECH[: draws.randint(1, len(SPEECH))])
            time.sleep(draws.random() * 0.3)
            caller.socket.socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 1
        while server.engine.active and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.engine.active == 0
    with strict_calling(server.ws_url) as caller:
        answered(caller)
        caller.stop()


ENDLESS = tuple(f" word{number}" for number in range(400))


def test_a_client_that_lags_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_v3, "PACE", messages.Pace(when_idle=False, ahead_seconds=1e6))
    with running_server(TurnModel(ENDLESS)) as server, strict_calling(server.ws_url) as caller:
        caller.speak(SPEECH)
        caller.until(CREATED, 0)
        time.sleep(4)  # longer than others have
        assert server.engine.active == 1
        assert caller.until(DONE)["status"] == "completed"
        caller.stop()


def test_a_client_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_v3, "PACE", messages.Pace(when_idle=False, ahead_seconds=1e6))
    monkeypatch.setattr(strict_v3.StrictV3Connection, "slow_seconds", 0.5)
    with running_server(TurnModel(ENDLESS)) as server, strict_calling(server.ws_url) as caller:
        caller.speak(SPEECH)
        caller.until(CREATED, 0)
        deadline = time.monotonic() + 5
        while server.engine.active and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.engine.active == 0
        assert caller.until("session.closed")["reason"] == "slow_consumer"
        assert caller.closed() == 1008


@pytest.mark.slow
def test_six_hundred_seconds_of_dense_turns_without_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_v3, "PACE", messages.Pace(when_idle=False, ahead_seconds=1e6))
    peaks: list[int] = []
    frames = 0
    with running_server(TurnModel()) as server, strict_calling(server.ws_url) as caller:
        while frames * 0.08 < 600:
            assert answered(caller)["status"] == "completed"
            frames = caller.of("voicechat.metrics")[-1]["frame"]
            caller.events.clear()  # what the test itself would keep
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    kilobytes = peaks[-1] - peaks[len(peaks) // 4]
    print(f"{len(peaks)} turns, {kilobytes} KiB more after the first quarter")
    assert kilobytes < 4 * 1024


def nonsense(draws: random.Random, caller: StrictCaller) -> None:
    """Some message, legal or not where it comes."""
    number = draws.randint(0, 3)
    say = {
        "turn_start": lambda: caller.say("input_audio_buffer.turn_start", event_id="a", client_turn_id=number),
        "commit": lambda: caller.say("input_audio_buffer.commit", event_id="b", client_turn_id=number),
        "append": lambda: caller.append(SPEECH[: draws.randint(1, 8000)]),
        "text": lambda: caller.say("input_text.request", job_id=str(number), text="Hi."),
        "result": lambda: caller.result(f"call_{number}", "x"),
        "update": lambda: caller.say("session.update", session={"protocol_version": 3, "tools": [WEATHER]}),
        "wrong": lambda: caller.socket.send(draws.choice(["", "[]", "{}", b"0", '{"type": "response.create"}'])),
    }
    draws.choice(list(say.values()))()


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_random_messages_and_a_normal_session_afterwards(server: RunningServer, count: int) -> None:
    draws = random.Random(count)
    for _ in range(count):
        with strict_calling(server.ws_url, draws.random() > 0.2, tools=[WEATHER]) as caller:
            with suppress(ConnectionClosed):
                for _ in range(draws.randint(1, 30)):
                    nonsense(draws, caller)
                caller.say("session.stop")
            caller.check(caller.closed())
    with strict_calling(server.ws_url) as caller:
        answered(caller)
        caller.stop()
