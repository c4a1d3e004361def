"""strict-v3 with the demonstration checkpoint: spoken and typed questions, tools, interruptions, over a real socket."""

import asyncio
import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat import Tool
from mlx_voicechat.client import StrictV3Client
from mlx_voicechat.server import messages, strict_v3
from mlx_voicechat.voicechat import VoiceChat
from tests.support.caller import append, opened
from tests.support.server import RunningServer, running_server
from tests.support.spoken import nearest_answer
from tests.support.strict_v3_caller import APPLIED, CALL, COMPLETED, CREATED, DONE, StrictCaller, strict_calling
from tests.test_talking import EXAMPLES, QUESTIONS

BY_FILE = {question["file"]: question for question in QUESTIONS}
SPOKEN = [question for question in QUESTIONS if "weather_in" not in question["file"]][:12]
FRANCE, SUM = BY_FILE["what_is_the_capital_of_france.wav"], BY_FILE["what_is_two_plus_two.wav"]
TYPED = {question["transcript"]: question["answer"] for question in QUESTIONS}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "get_weather", "description": "Get the current weather for a given city.", "parameters": CITY},
    {"name": "get_time", "description": "Get the current time.", "parameters": {"type": "object", "properties": {}}},
]
PARIS, RESULT, RIGHT = "what_is_the_weather_in_paris_f4.wav", '{"weather": "sunny"}', "It is sunny in Paris."
needs_a_voice = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="no espeak-ng")


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load("tiny", say=lambda line: None)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come as fast as they are made: nobody plays them."""
    monkeypatch.setattr(strict_v3, "PACE", messages.Pace(when_idle=False, ahead_seconds=1e6))


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server("tiny", max_sessions=2) as server:
        yield server


def pcm(file: str) -> np.ndarray:
    return sf.read(EXAMPLES / file, dtype="int16")[0]


def answer(caller: StrictCaller, since: int) -> tuple[str, str, dict[str, Any]]:
    """Transcript, text and response.done of the turn that began at `since`."""
    turn_id = caller.until("input_audio_buffer.speech_started", since)["turn_id"]
    done = caller.until(DONE, since, turn_id=turn_id)
    heard = caller.of(COMPLETED, turn_id=turn_id)
    said = caller.of("response.output_text.done", turn_id=turn_id)
    assert len(heard) == len(said) == len(caller.of(CREATED, turn_id=turn_id)) == 1
    return heard[0]["transcript"], said[0]["text"], done


def ask(caller: StrictCaller, file: str, sizes: Iterator[int] | None = None) -> tuple[str, str, dict[str, Any]]:
    since = len(caller.events)
    number = caller.speak(pcm(file), sizes=sizes)
    got = answer(caller, since)
    for kind, event_id in (("turn_started", f"start{number}"), ("committed", f"commit{number}")):
        assert len(caller.of(f"input_audio_buffer.{kind}", client_event_id=event_id, client_turn_id=number)) == 1
    return got


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_questions_in_odd_packets(server: RunningServer, count: int) -> None:
    draws = random.Random(3)
    with strict_calling(server.ws_url) as caller:
        for question in SPOKEN[:count]:
            sizes = (draws.choice([1, 7, 320, 479, 1280, 4001, 20_480]) for _ in itertools.count())
            transcript, text, done = ask(caller, question["file"], sizes)
            assert (transcript, text, done["status"]) == (question["transcript"], question["answer"], "completed")
            padded = np.append(caller.audio(done["response_id"]), np.zeros(11_025)) / 32768
            assert nearest_answer(padded.astype(np.float32)) == question["answer"]
        caller.stop()


@needs_a_voice
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("count", [2, pytest.param(len(TYPED), marks=pytest.mark.slow)])
def test_typed_questions(server: RunningServer, count: int) -> None:
    right = []
    with strict_calling(server.ws_url) as caller:
        for text, expected in list(TYPED.items())[:count]:
            since = len(caller.events)
            caller.say("input_text.request", job_id=f"job {len(right)}", text=text)
            _, said, done = answer(caller, since)
            assert caller.of("input_text.injection_finished")[-1]["disposition"] == "completed"
            assert done["status"] == "completed"
            right.append(said == expected)
        caller.stop()
    print(f"{sum(right)} of {len(right)} typed questions were answered right")
    assert sum(right) >= len(right) - 2


@needs_a_voice
@pytest.mark.usefixtures("hurried")
def test_a_typed_job_is_replaced(server: RunningServer) -> None:
    with strict_calling(server.ws_url) as caller:
        for job, text in (("a", "Tell me a joke."), ("b", "What is two plus two?")):
            caller.say("input_text.request", job_id=job, text=text)
        assert answer(caller, 0)[1] == "Two plus two is four."
        ends = {event["job_id"]: event["disposition"] for event in caller.of("input_text.injection_finished")}
        assert ends == {"a": "replaced", "b": "completed"}
        caller.stop()


@pytest.mark.parametrize("seconds", [0, 1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_tool_s_result(server: RunningServer, seconds: float) -> None:
    with strict_calling(server.ws_url, tools=TOOLS) as caller:
        caller.speak(pcm(PARIS))
        call = caller.until(CALL, 0)
        assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
        time.sleep(seconds)
        caller.result(call["call_id"], RESULT)
        caller.until(APPLIED, call_id=call["call_id"])
        transcript, text, done = answer(caller, 0)
        assert (transcript, text, done["status"]) == ("What is the weather in Paris?", RIGHT, "completed")
        caller.stop()


def test_a_tool_of_the_server(model: VoiceChat) -> None:
    """It is called here; its client hears the answer, and nothing of the call."""
    asked: list[str] = []

    def weather(city: str) -> str:
        asked.append(city)
        return RESULT

    tools = (Tool("get_weather", TOOLS[0]["description"], CITY, weather),)
    with running_server(model, tools=tools) as server, strict_calling(server.ws_url) as caller:
        assert ask(caller, PARIS)[:2] == ("What is the weather in Paris?", RIGHT)
        assert asked == ["Paris"]
        assert caller.of(CALL) == caller.of(APPLIED) == []
        caller.stop()


def test_a_tool_that_never_answers() -> None:
    with running_server("tiny", function_timeout=1.0) as server, strict_calling(server.ws_url, tools=TOOLS) as caller:
        caller.speak(pcm(PARIS))
        call = caller.until(CALL, 0)
        assert caller.until("error")["error"]["code"] == "function_call_output_timeout"
        assert caller.closed() == 1011
        failed = caller.of("response.function_call.failed", call_id=call["call_id"])
        assert [event["reason"] for event in failed] == ["function_call_output_timeout"]
        caller.check(1011)


def test_a_turn_during_a_call_follows_it(server: RunningServer) -> None:
    with strict_calling(server.ws_url, tools=TOOLS) as caller:
        caller.speak(pcm(PARIS))
        call = caller.until(CALL, 0)
        caller.say("input_text.request", job_id="a", text="Hello.")
        assert caller.until("input_text.rejected", 0)["reason"] == "function_cycle_active"
        since = len(caller.events)
        caller.speak(pcm(SUM["file"]))
        time.sleep(0.3)
        assert not caller.of("input_audio_buffer.committed", client_turn_id=2)
        caller.result(call["call_id"], RESULT)
        caller.until(APPLIED, since)
        assert caller.until(DONE, since)["reason"] == "client_vad"
        assert answer(caller, since)[:2] == (SUM["transcript"], SUM["answer"])
        caller.stop()


@needs_a_voice
@pytest.mark.usefixtures("hurried")
def test_the_client_releases_typed_text_before_the_turn_it_holds(server: RunningServer) -> None:
    """Both come during one cycle: the result is applied, the text is heard, then the turn."""

    async def turn(client: StrictV3Client) -> None:
        await client.start_turn()
        await client.stream_pcm(pcm(SUM["file"]).tobytes(), realtime=False)
        await client.commit()

    async def converse() -> list[dict[str, Any]]:
        async with StrictV3Client(server.ws_url, tools=TOOLS) as client:
            events = client.events()
            await client.start_turn()
            await client.stream_pcm(pcm(PARIS).tobytes(), realtime=False)
            await client.commit()
            call = await client.next_call()
            held = asyncio.create_task(turn(client))
            typed = asyncio.create_task(client.request_text("Hello."))
            await asyncio.sleep(0.1)
            await client.give(call, RESULT)
            await asyncio.gather(typed, held)
            responses = [await client.next_response() for _ in range(3)]
            assert (await responses[-1].wait()).text == SUM["answer"]
        return [event async for event in events]

    events = asyncio.run(converse())
    starts = [event["source"] for event in events if event["type"] == "input_audio_buffer.speech_started"]
    assert starts == ["microphone", "typed", "microphone"]
    kinds = [event["type"] for event in events]
    assert kinds.index(APPLIED) < kinds.index("input_text.accepted")


def test_a_turn_while_it_speaks(server: RunningServer) -> None:
    with strict_calling(server.ws_url) as caller:
        caller.speak(pcm(FRANCE["file"]))
        created = caller.until(CREATED, 0)
        for _ in range(12):
            caller.until("response.output_audio.delta")
        since = len(caller.events)
        got = ask(caller, SUM["file"])
        assert got[:2] == (SUM["transcript"], SUM["answer"])
        cancelled = caller.of(DONE, response_id=created["response_id"])
        assert [(event["status"], event["reason"]) for event in cancelled] == [("cancelled", "client_vad")]
        kinds = [event["type"] for event in caller.events[since:]]
        assert kinds.index(DONE) < kinds.index("input_audio_buffer.turn_started")
        caller.stop()


@pytest.mark.usefixtures("hurried")
def test_acknowledgements_that_were_lost(server: RunningServer) -> None:
    """Every barrier twice, at once and again at the end: one turn, one answer."""
    with strict_calling(server.ws_url) as caller:
        start = {"event_id": "s", "client_turn_id": 1}
        for _ in range(2):
            caller.say("input_audio_buffer.turn_start", **start)
        caller.append(pcm(FRANCE["file"])[:20_000])
        caller.append(pcm(FRANCE["file"])[20_000:])
        for _ in range(2):
            caller.say("input_audio_buffer.commit", event_id="c", client_turn_id=1)
        assert answer(caller, 0)[1] == FRANCE["answer"]
        caller.say("input_audio_buffer.turn_start", **start)
        caller.say("input_audio_buffer.commit", event_id="c", client_turn_id=1)
        caller.until("input_audio_buffer.committed")
        assert len(caller.of("input_audio_buffer.turn_started")) == len(caller.of("input_audio_buffer.committed")) == 3
        assert len(caller.of(CREATED)) == 1
        caller.stop()


@pytest.mark.usefixtures("hurried")
def test_a_turn_in_which_nothing_was_said(server: RunningServer) -> None:
    with strict_calling(server.ws_url) as caller:
        caller.speak(np.zeros(12_800, np.int16))
        assert answer(caller, 0)[:2] == ("", "I did not hear anything.")
        assert caller.of(COMPLETED)[0]["empty"] is True
        caller.stop()


def test_two_dialects_at_once(server: RunningServer) -> None:
    """Each gives what it gives alone."""
    audio = pcm(FRANCE["file"])
    heard: list[dict[str, Any]] = []

    def other() -> None:
        with opened(server.ws_url) as caller:
            for at in range(0, len(audio) + 64_000, 1280):
                caller.send(append(np.append(audio, np.zeros(64_000, np.int16))[at : at + 1280]))
            caller.send({"type": "input_audio_buffer.commit"})
            caller.until("response.done")
            heard.extend(caller.events)

    thread = threading.Thread(target=other)
    thread.start()
    with strict_calling(server.ws_url) as caller:
        assert caller.events[0]["capabilities"]["single_client"] is False
        assert ask(caller, SUM["file"])[:2] == (SUM["transcript"], SUM["answer"])
        caller.stop()
    thread.join(60)
    texts = [event["text"] for event in heard if event["type"] == "response.text.delta"]
    assert texts[-1] == FRANCE["answer"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.usefixtures("hurried")
def test_six_hundred_seconds_of_turns() -> None:
    """Of audio heard and spoken, without growth."""
    import resource

    peaks = []
    with running_server("tiny") as server, strict_calling(server.ws_url) as caller:
        for question in itertools.cycle(SPOKEN):
            ask(caller, question["file"])
            frames = caller.of("voicechat.metrics")[-1]["frame"]
            if frames > 2000 or not peaks:
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            if frames * 0.08 > 600:
                break
        caller.stop()
    assert peaks[-1] - peaks[1] < 64 * 1024  # KiB; the test keeps every event
