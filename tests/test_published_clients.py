"""Published client libraries, as they are, on a real `serve -m tiny`; and the examples of examples/clients.

Run with `pytest -m clients`; a library that is not installed is skipped with a word. The Node client is installed by
`npm install --no-package-lock --prefix tests/clients`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import soxr
from websockets.sync.client import connect

from mlx_voicechat.client import AudioFormat, DuplexClient, ResponseHandle, SessionConfig
from mlx_voicechat.server.wire_audio import decoded, encoded
from tests.support.server import ServerProcess, serve_process
from tests.support.spoken import nearest_answer

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "clients"
NODE = ROOT / "tests" / "clients"
SECONDS = 60  # for one conversation
RATE_HZ = 24_000
FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris."
FOUR, SUNNY = "Two plus two is four.", "It is sunny in Paris."
RECORDINGS = {"france": "question", "sum": "what_is_two_plus_two", "weather": "what_is_the_weather_in_paris_f4"}
VAD = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve_process("-m", "tiny", "--max-sessions", "4") as server:
        yield server


@cache
def recording(name: str, rate_hz: int = RATE_HZ) -> np.ndarray:
    """One of RECORDINGS as float32 samples (S,)."""
    samples, rate = sf.read(ROOT / "examples" / f"{RECORDINGS[name]}.wav", dtype="float32")
    return soxr.resample(samples, rate, rate_hz)


def pcm(name: str, rate_hz: int = RATE_HZ) -> bytes:
    return encoded(recording(name, rate_hz), "audio/pcm")


def spoken(audio: bytes, rate_hz: int = RATE_HZ) -> str:
    """The answer that PCM16 is nearest to, heard."""
    return nearest_answer(soxr.resample(decoded(audio, "audio/pcm"), rate_hz, 22_050))


# -- python `openai` -------------------------------------------------------------------------------------------------


class OpenAI:
    """One connection of the library `openai`, and all that came over it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.events: list[Any] = []
        self.audio: dict[str, bytes] = {}

    def until(self, kind: str) -> Any:
        """The next event of this type. An error event is a failure."""
        while True:
            event = self.connection.recv()
            self.events.append(event)
            assert event.type != "error", event.error
            if event.type == "response.output_audio.delta":
                so_far = self.audio.get(event.response_id, b"")
                self.audio[event.response_id] = so_far + base64.b64decode(event.delta)
            if event.type == kind:
                return event

    def configure(self, **session: Any) -> Any:
        self.connection.session.update(session={"type": "realtime", **session})
        return self.until("session.updated").session

    def say(self, name: str) -> None:
        self.connection.input_audio_buffer.append(audio=base64.b64encode(pcm(name)).decode())

    def words(self, response_id: str) -> str:
        kind = "response.output_audio_transcript.delta"
        return "".join(e.delta for e in self.events if e.type == kind and e.response_id == response_id)

    def names(self, prefix: str) -> list[str]:
        """The types of this kind that came, each once, in order."""
        return list(dict.fromkeys(event.type for event in self.events if event.type.startswith(prefix)))

    def answer(self, status: str = "completed") -> str:
        """The next response's words, which are what its audio says."""
        response = self.until("response.done").response
        assert response.status == status, response.status_details
        words = self.words(response.id)
        if status == "completed":
            assert spoken(self.audio[response.id]) == words
        return words


@pytest.fixture
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    library = pytest.importorskip("openai", reason="the package openai[realtime] is not installed")
    client = library.OpenAI(api_key="none", websocket_base_url=f"{server.ws_url.removesuffix('/realtime')}")
    with client, client.realtime.connect(model="any") as connection:
        talk = OpenAI(connection)
        talk.until("session.created")
        yield talk


def turn_detection(value: Any) -> dict[str, Any]:
    return {"input": {"turn_detection": value}}


def test_openai_updates_keep_what_they_do_not_name(openai: OpenAI) -> None:
    first = openai.configure(instructions="Be brief.", tools=[WEATHER])
    assert (first.instructions, [tool.name for tool in first.tools]) == ("Be brief.", ["get_weather"])
    second = openai.configure(audio=turn_detection(None))
    assert (second.instructions, len(second.tools), second.audio.input.turn_detection) == ("Be brief.", 1, None)
    third = openai.configure(tools=[], audio=turn_detection(VAD))
    assert (third.tools, third.audio.input.turn_detection.silence_duration_ms) == ([], 500)
    assert (third.audio.input.format.rate, third.audio.output.format.rate) == (RATE_HZ, RATE_HZ)


def test_openai_server_vad(openai: OpenAI) -> None:
    openai.configure(instructions="Be brief.", audio=turn_detection(VAD))
    openai.say("france")
    assert openai.answer() == PARIS
    heard = [e for e in openai.events if e.type == "conversation.item.input_audio_transcription.completed"]
    assert [event.transcript for event in heard] == [FRANCE]
    buffer = ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed"]
    assert openai.names("input_audio_buffer.") == buffer
    ids = {event.item_id for event in openai.events if event.type in buffer}
    assert ids == {heard[0].item_id}
    answer = [name for name in openai.names("response.") if not name.endswith(".delta")]
    assert answer == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]


def test_openai_commit_and_response_create(openai: OpenAI) -> None:
    openai.configure(audio=turn_detection(None))
    for name, answer in (("france", PARIS), ("sum", FOUR)):
        openai.say(name)
        openai.connection.input_audio_buffer.commit()
        openai.connection.response.create()
        assert openai.answer() == answer
    assert "input_audio_buffer.speech_started" not in openai.names("input_audio_buffer.")


def test_openai_tool(openai: OpenAI) -> None:
    openai.configure(tools=[WEATHER], audio=turn_detection(VAD))
    openai.say("weather")
    call = openai.until("response.function_call_arguments.done")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert openai.until("response.done").response.output[0].type == "function_call"
    item = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'}
    openai.connection.conversation.item.create(item=item)
    openai.connection.response.create()
    assert openai.answer() == SUNNY


def test_openai_interruption(openai: OpenAI) -> None:
    openai.configure(audio=turn_detection(VAD))
    openai.say("france")
    first = openai.until("response.output_audio.delta")
    while len(openai.audio[first.response_id]) < 0.4 * 2 * RATE_HZ:
        openai.until("response.output_audio.delta")
    openai.say("sum")
    openai.until("input_audio_buffer.speech_started")
    openai.connection.conversation.item.truncate(item_id=first.item_id, content_index=0, audio_end_ms=300)
    assert PARIS.startswith(openai.answer("cancelled"))  # the words come before their sound, all of them perhaps
    length = len(openai.audio[first.response_id])
    assert length < 2 * 2 * RATE_HZ  # of 2.4 s
    assert openai.answer() == FOUR
    assert len(openai.audio[first.response_id]) == length, "audio after response.done"
    assert [e.audio_end_ms for e in openai.events if e.type == "conversation.item.truncated"] == [300]


# -- DuplexClient ----------------------------------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, SECONDS))


async def responses(client: DuplexClient) -> ResponseHandle:
    """The next response that is one."""
    async for response in client.responses():
        if response.decision == "speak":
            return response
    raise AssertionError("the session ended")


async def drained(client: DuplexClient, response: ResponseHandle) -> bytes:
    """Its audio, played as it comes."""
    audio = b""
    async for chunk in response.audio():
        audio += chunk
        await client.ack_playback(response.played_ms, response_id=response.response_id)
    return audio


def test_duplex_client_answers_calls_and_is_interrupted(server: ServerProcess) -> None:
    config = SessionConfig(instructions="Be brief.", turn_detection=VAD, tools=[WEATHER])

    async def work() -> None:
        async with DuplexClient(server.ws_url, config=config) as client:
            called = asyncio.create_task(client.wait_for("response.function_call_arguments.done"))
            await client.stream_pcm(pcm("weather", 16_000))
            call = (await called).raw
            assert json.loads(call["arguments"]) == {"city": "Paris"}
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"weather": "sunny"}'}
            await (await responses(client)).wait()  # that of the call
            await client.send({"type": "conversation.item.create", "item": output})
            response = await responses(client)
            audio = await drained(client, response)
            assert (response.transcript, response.status, spoken(audio)) == (SUNNY, "completed", SUNNY)

            await client.stream_pcm(pcm("france", 16_000))
            first = await responses(client)
            async for _ in first.audio():
                if first.played_ms > 400:
                    break
            await client.stream_pcm(pcm("sum", 16_000))
            await first.wait()
            assert (first.status, PARIS.startswith(first.transcript)) == ("cancelled", True), first.transcript
            second = await responses(client)
            audio = await drained(client, second)
            assert (second.transcript, spoken(audio)) == (FOUR, FOUR)

    run(work())


def test_duplex_client_in_mu_law(server: ServerProcess) -> None:
    phone = AudioFormat("g711_ulaw", 8_000)
    config = SessionConfig(input_audio=phone, output_audio=phone)

    async def work() -> None:
        async with DuplexClient(server.ws_url, config=config) as client:
            await client.stream_pcm(encoded(recording("france", 8_000), "audio/pcmu"), chunk_ms=20)
            await client.commit()
            response = await responses(client)
            audio = await drained(client, response)
            assert response.transcript == PARIS
            assert spoken(encoded(decoded(audio, "audio/pcmu"), "audio/pcm"), 8_000) == PARIS

    run(work())


# -- npm @openai/agents-realtime -------------------------------------------------------------------------------------


def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("no Node")
    if not (NODE / "node_modules" / "@openai" / "agents-realtime").exists():
        pytest.skip("@openai/agents-realtime is not installed: npm install --no-package-lock --prefix tests/clients")
    return found


def agents(server: ServerProcess, folder: Path, *names: str) -> dict[str, Any]:
    """What the script saw of a conversation."""
    files = [folder / f"{name}.pcm" for name in names]
    for name, file in zip(names, files, strict=True):
        file.write_bytes(pcm(name))
    done = finished(node(), NODE / "agents.mjs", server.ws_url, *files)
    seen: dict[str, Any] = json.loads(done)
    assert seen["errors"] == []
    return seen


def finished(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """What a program printed that ended well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_agents_realtime_of_npm_calls_a_tool(server: ServerProcess, tmp_path: Path) -> None:
    seen = agents(server, tmp_path, "weather")
    assert (seen["calls"], seen["answers"], seen["statuses"]) == (["Paris"], [SUNNY], ["completed", "completed"])
    assert seen["history"] == ["user", "function_call", "assistant"]
    assert seen["audio"][0] > 1


def test_agents_realtime_of_npm_interrupts(server: ServerProcess, tmp_path: Path) -> None:
    seen = agents(server, tmp_path, "france", "sum")
    assert (seen["heard"][0], seen["statuses"]) == (FRANCE, ["cancelled", "completed"])
    assert (seen["answers"][-1], seen["interrupted"], len(seen["truncated"])) == (FOUR, 1, 1)


# -- examples/clients ------------------------------------------------------------------------------------------------

PYTHON = {  # the distribution it needs, the end of its address, what it prints
    "openai_python": ("openai", "/v1", PARIS),
    "openai_agents_python": ("openai-agents", "/v1/realtime", f"get_weather('Paris')\n{SUNNY}"),
    "pipecat_bot": ("pipecat-ai", "/v1/realtime", PARIS),
    "livekit_agent": ("livekit-plugins-openai", "/v1/realtime", f"user: {FRANCE}\nassistant: {PARIS}"),
    "duplex_client": ("mlx-voicechat", "", PARIS),
    "strict_v3_client": ("mlx-voicechat", "", PARIS),
}


@pytest.mark.parametrize("name", PYTHON)
def test_examples_in_python(name: str, server: ServerProcess) -> None:
    needed, path, expected = PYTHON[name]
    try:
        version(needed)
    except PackageNotFoundError:
        pytest.skip(f"the package {needed} is not installed")
    address = server.ws_url.removesuffix("/v1/realtime") + path
    assert finished(sys.executable, EXAMPLES / f"{name}.py", address).startswith(expected)


def test_the_example_for_node(server: ServerProcess, tmp_path: Path) -> None:
    program = node()
    for name in ("agents_realtime.mjs", "question_24khz.wav"):
        shutil.copy(EXAMPLES / name, tmp_path)
    (tmp_path / "node_modules").symlink_to((NODE / "node_modules").resolve())
    assert finished(program, tmp_path / "agents_realtime.mjs", server.ws_url) == f"{PARIS}\n"


@pytest.fixture
def bridge(server: ServerProcess) -> Iterator[str]:
    """The telephone bridge's address."""
    command = [sys.executable, str(EXAMPLES / "twilio_bridge.py"), server.ws_url, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


def test_a_call_over_the_telephone_bridge(bridge: str) -> None:
    def media(audio: bytes) -> str:
        return json.dumps({"event": "media", "media": {"payload": base64.b64encode(audio).decode()}})

    line = encoded(recording("france", 8_000), "audio/pcmu") + b"\xff" * 8_000 * 8
    answer, cleared, sent, begun = b"", 0, 0, time.monotonic()
    with connect(bridge) as phone:
        phone.send(json.dumps({"event": "connected", "protocol": "Call"}))
        phone.send(json.dumps({"event": "start", "start": {"streamSid": "MZ1"}}))
        for at in range(0, len(line), 160):
            phone.send(media(line[at : at + 160]))
            sent += 1
            while (wait := begun + sent * 0.02 - time.monotonic()) > 0:
                try:
                    event = json.loads(phone.recv(wait))
                except TimeoutError:
                    break
                assert event["streamSid"] == "MZ1"
                cleared += event["event"] == "clear"
                answer += base64.b64decode(event["media"]["payload"]) if event["event"] == "media" else b""
        phone.send(json.dumps({"event": "stop"}))
    assert cleared == 1
    assert spoken(encoded(decoded(answer, "audio/pcmu"), "audio/pcm"), 8_000) == PARIS
