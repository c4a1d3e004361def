"""Conversations in OpenAI's vocabulary, with a model of simple rules on a clock that jumps."""

import asyncio
import base64
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from mlx_voicechat.server import openai
from mlx_voicechat.server.typed_voice import TypedVoiceError
from tests.support.openai_caller import said
from tests.support.turn_model import TurnModel
from tests.support.virtual import Client, VirtualEngine, quick_detector, run

__all__ = ["quick_detector"]
pytestmark = pytest.mark.usefixtures("quick_detector")

MANUAL = {"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}}}
COMMIT, CREATE, CANCEL = (
    {"type": kind} for kind in ("input_audio_buffer.commit", "response.create", "response.cancel")
)
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
TOOLS = {"type": "session.update", "session": {"tools": [TOOL]}}
ANSWER = "One two three four five six."
LONG = tuple(f" word{n}" for n in range(40))
DELTA = "response.output_audio.delta"


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": session}


def turn(**turn_detection: Any) -> dict[str, Any]:
    return update(audio={"input": {"turn_detection": {"type": "server_vad", **turn_detection}}})


def typed(text: str, item_id: str = "typed") -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {
        "type": "conversation.item.create",
        "item": {"id": item_id, "type": "message", "role": "user", "content": content},
    }


def result(call_id: str, output: str = '{"weather": "sunny"}') -> dict[str, Any]:
    item = {"type": "function_call_output", "call_id": call_id, "output": output}
    return {"type": "conversation.item.create", "item": item}


class Voice:
    """A synthesiser: loud audio, a frame for each word."""

    def __init__(self, fails: bool = False) -> None:
        self.spoken: list[str] = []
        self.fails = fails

    async def speak(self, text: str) -> np.ndarray:
        self.spoken.append(text)
        if self.fails:
            raise TypedVoiceError("It has no voice.")
        return np.full(1280 * len(text.split()), 0.3, np.float32)


def scene(
    body: Callable[[Client, VirtualEngine], Coroutine[Any, Any, None]],
    model: TurnModel | None = None,
    voice: Any = None,
    beta: bool = False,
    seconds: float = 3600.0,
    **options: Any,
) -> Client:
    """Run a conversation to its end; its client."""
    clients: list[Client] = []

    async def main() -> None:
        engine = VirtualEngine(model or TurnModel())
        client = Client(engine, beta=beta, voice=voice, seconds=seconds, **options)
        clients.append(client)
        await body(client, engine)
        client.session.end()

    run(main)
    return clients[0]


def pcm(events: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(event["delta"]) for event in events)


def statuses(client: Client) -> list[str]:
    return [event["response"]["status"] for event in client.of("response.done")]


# Turns


def test_a_committed_question() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(MANUAL, said(0.5), COMMIT, CREATE)
        await client.until("rate_limits.updated")
        client.send(said(0.5), COMMIT, CREATE)
        await client.until("rate_limits.updated", len(client.events))

    client = scene(body)
    first, second = client.of("response.done")
    assert first["response"]["output"][0]["content"] == [{"type": "output_audio", "transcript": ANSWER}]
    assert second["response"]["status"] == "completed"
    assert len(pcm(client.of(DELTA))) // 2 == 2 * 9 * 1920
    assert client.of("conversation.item.input_audio_transcription.completed")[0]["transcript"].startswith("w1 w2")
    assert not client.of("input_audio_buffer.speech_started")
    assert first["response"]["usage"]["output_token_details"] == {"text_tokens": 6, "audio_tokens": 9}


def test_the_model_owns_the_turns() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(said(0.5))
        await client.until("response.done")

    client = scene(body)
    started, stopped = (
        client.of("input_audio_buffer.speech_started")[0],
        client.of("input_audio_buffer.speech_stopped")[0],
    )
    assert started["audio_start_ms"] == 0
    assert started["item_id"] == stopped["item_id"] == client.of("input_audio_buffer.committed")[0]["item_id"]
    assert statuses(client) == ["completed"]
    item = client.session.items.get(started["item_id"])
    assert item.text.startswith("w1 w2")


def test_silence_is_fed_in_real_time_and_speech_is_half_a_second_ahead() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(said(0.5))
        await client.until("response.done")
        await asyncio.sleep(1)
        frames = engine.model.sessions[0].frames
        await asyncio.sleep(10)
        assert abs(engine.model.sessions[0].frames - frames - 125) <= 1

    client = scene(body, TurnModel(LONG))
    times = [at for at, event in zip(client.times, client.events, strict=True) if event["type"] == DELTA]
    begun = times[0]
    for index, at in enumerate(times):
        assert at - begun >= index * 0.08 - 0.5 - 0.09
        assert at - begun <= index * 0.08 + 0.1


@pytest.mark.parametrize("audio", [said(1.0), said(60.0)])
def test_a_recording_at_once(audio: dict[str, Any]) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(audio)
        await client.until("response.done")
        assert client.loop.time() < 2.0

    assert statuses(scene(body)) == ["completed"]


def test_speech_into_the_answer_interrupts_it() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(said(0.5))
        await client.until(DELTA)
        await asyncio.sleep(0.4)
        for _ in range(8):
            client.send(said(0.1))
            await asyncio.sleep(0.1)
        await client.until("response.done")
        since = len(client.events)
        await client.until("response.done", since)

    client = scene(body, TurnModel(LONG))
    assert statuses(client) == ["cancelled", "completed"]
    assert client.of("response.done")[0]["response"]["status_details"] == {
        "type": "cancelled",
        "reason": "turn_detected",
    }
    kinds = [event["type"] for event in client.events]
    at = [n for n, kind in enumerate(kinds) if kind == "input_audio_buffer.speech_started"][1]
    assert kinds[at + 1] == "response.output_audio.done"
    assert client.of("response.done")[0]["response"]["output"][0]["status"] == "incomplete"


def test_speech_into_the_answer_without_interruption() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(turn(interrupt_response=False), said(0.5))
        await client.until(DELTA)
        client.send(said(0.3))
        await client.until("response.done")

    assert statuses(scene(body)) == ["completed"]


def test_create_response_false_leaves_the_turn_to_the_application() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(turn(create_response=False), said(0.5))
        await client.until("conversation.item.input_audio_transcription.completed")
        await asyncio.sleep(3)
        assert not client.of("response.created")
        client.send(CREATE)
        await client.until("response.done")

    assert statuses(scene(body)) == ["completed"]


@pytest.mark.parametrize("kind", ["server_vad", "semantic_vad"])
def test_a_response_that_is_asked_for_beside_the_models_own_is_one(kind: str) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(turn(type=kind), said(0.5), COMMIT, {**CREATE, "response": {"metadata": {"key": "mine"}}})
        await client.until("response.done")
        await asyncio.sleep(3)

    client = scene(body)
    assert statuses(client) == ["completed"]
    assert client.of("response.created")[0]["response"]["metadata"] == {"key": "mine"}


def test_a_greeting_in_which_nothing_was_said() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(CREATE)
        await client.until("response.done")
        await asyncio.sleep(2)

    client = scene(body)
    assert statuses(client) == ["completed"]
    assert not client.of("input_audio_buffer.committed")


def test_typed_text_is_spoken_to_the_model() -> None:
    voice = Voice()

    async def body(client: Client, engine: VirtualEngine) -> None:
        for session in (MANUAL, turn()):
            since = len(client.events)
            client.send(session, typed("What is it?", f"item{since}"), CREATE)
            await client.until("response.done", since)
            await asyncio.sleep(2)

    client = scene(body, voice=voice)
    assert statuses(client) == ["completed", "completed"]
    assert voice.spoken == ["What is it?"] * 2
    assert not client.of("conversation.item.input_audio_transcription.completed")


@pytest.mark.parametrize("voice", [None, Voice(fails=True)])
def test_typed_text_that_cannot_be_spoken(voice: Any) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(typed("Hello."), CREATE)
        await client.until("error" if voice else "response.done")
        if voice:
            client.send(CREATE)
            await client.until("response.done")

    client = scene(body, voice=voice)
    assert statuses(client) == ["completed"]
    assert [event["error"]["code"] for event in client.of("error")] == (["typed_voice_failed"] if voice else [])


def test_text_alone() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(output_modalities=["text"]), said(0.5))
        await client.until("response.done")

    client = scene(body)
    assert "".join(event["delta"] for event in client.of("response.output_text.delta")) == ANSWER
    assert client.of("response.output_text.done")[0]["text"] == ANSWER
    assert not client.of(DELTA)


def test_a_response_of_few_tokens() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(max_output_tokens=3), said(0.5))
        await client.until("response.done")

    client = scene(body)
    response = client.of("response.done")[0]["response"]
    assert (response["status"], response["status_details"]["reason"]) == ("incomplete", "max_output_tokens")


# Interruption by the client


@pytest.mark.parametrize("way", ["cancel", "clear", "truncate"])
def test_the_client_stops_the_answer(way: str) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(MANUAL, said(0.5), COMMIT, CREATE)
        item_id = (await client.until(DELTA))["item_id"]
        await asyncio.sleep(0.5)
        truncate = {
            "type": "conversation.item.truncate", "item_id": item_id, "content_index": 0, "audio_end_ms": 300
        }  # fmt: skip
        client.send({"cancel": CANCEL, "clear": {"type": "output_audio_buffer.clear"}, "truncate": truncate}[way])
        await client.until("response.done")
        client.send(truncate)
        assert (await client.until("conversation.item.truncated"))["audio_end_ms"] == 300
        client.send({"type": "conversation.item.retrieve", "item_id": item_id})
        item = (await client.until("conversation.item.retrieved"))["item"]
        assert item["content"][0]["transcript"] == "".join(LONG[:3])
        since = len(client.events)
        client.send(said(0.5), COMMIT, CREATE)
        await client.until("response.done", since)

    client = scene(body, TurnModel(LONG))
    assert statuses(client) == ["cancelled", "completed"]
    assert client.of("response.done")[0]["response"]["status_details"]["reason"] == "client_cancelled"
    if way == "clear":
        (cleared,) = client.of("output_audio_buffer.cleared")
        assert cleared["response_id"] == client.of("response.created")[0]["response"]["id"]


def test_cancelling_nothing() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(CANCEL, {"type": "output_audio_buffer.clear"})
        assert not client.of("error")
        client.send({**CANCEL, "response_id": "resp_none"})

    client = scene(body)
    assert client.of("error")[0]["error"]["code"] == "response_cancel_not_active"


def test_clearing_what_was_said() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(MANUAL, said(0.5), {"type": "input_audio_buffer.clear"}, COMMIT)
        await client.until("error")

    client = scene(body)
    assert client.of("input_audio_buffer.cleared")
    assert client.of("error")[0]["error"]["code"] == "input_audio_buffer_commit_empty"


# Tools


@pytest.mark.parametrize("session", [TOOLS, update(tools=[TOOL], turn_detection=None)])
@pytest.mark.parametrize("asks", [True, False])
def test_a_tool_cycle(session: dict[str, Any], asks: bool) -> None:
    manual = "turn_detection" in session["session"]

    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(session, said(0.5))
        if manual:
            client.send(COMMIT, CREATE)
        call = await client.until("response.function_call_arguments.done")
        await client.until("response.done")
        client.send(result(call["call_id"]))
        begun = client.loop.time()
        if asks:
            client.send({**CREATE, "response": {"metadata": {"a": "b"}}})
        await client.until(DELTA)
        assert client.loop.time() - begun < (0.5 if asks else 1.6)
        if asks:
            client.send(CREATE)  # a second one is no error and no second answer
        since = len(client.events)
        await client.until("response.done", since)
        await asyncio.sleep(3)

    client = scene(body)
    first, second = (event["response"] for event in client.of("response.done"))
    assert [item["type"] for item in first["output"]] == ["function_call"]
    assert [item["type"] for item in second["output"]] == ["message"]
    assert first["output"][0]["arguments"] == '{"city": "Paris"}'
    assert second["metadata"] == ({"a": "b"} if asks else None)
    assert statuses(client) == ["completed", "completed"]
    assert [event["error"]["code"] for event in client.of("error")] in (
        [],
        ["conversation_already_has_active_response"],
    )


def test_results_that_are_refused() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(TOOLS, said(0.5), result("call_unknown"))
        call = await client.until("response.function_call_arguments.done")
        client.send(result(call["call_id"], "x" * 20_000))
        await asyncio.sleep(0.1)
        client.send(result(call["call_id"], "x" * 1_000), CREATE)  # too many tokens: the engine says so
        await asyncio.sleep(0.1)
        client.send(result(call["call_id"]), CREATE)
        await asyncio.sleep(0.1)
        client.send(result(call["call_id"]))
        since = len(client.events)
        await client.until("rate_limits.updated", since)

    client = scene(body)
    errors = [event["error"] for event in client.of("error")]
    assert [error["code"] for error in errors] == ["invalid_function_call_output"] * 4
    assert statuses(client) == ["completed", "completed"]


@pytest.mark.parametrize("output", ['"{\\"weather\\": \\"sunny\\"}"', '{"weather": "sunny"}'])
def test_a_result_that_was_written_as_json_twice(output: str) -> None:
    given: list[str] = []

    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(TOOLS, said(0.5))
        call = await client.until("response.function_call_arguments.done")
        session = engine.model.sessions[0]
        take = session.give
        session.give = lambda call_id, text: (given.append(text), take(call_id, text))
        client.send(result(call["call_id"], output), CREATE)
        await client.until(DELTA)

    scene(body)
    assert given == ['{"weather": "sunny"}']


# Items


def test_items() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(typed("One.", "a"), typed("Two.", "b"), {**typed("Zero.", "c"), "previous_item_id": "root"})
        await asyncio.sleep(0.1)
        assert [item.id for item in client.session.items] == ["c", "a", "b"]
        client.send({"type": "conversation.item.retrieve", "item_id": "a"}, typed("One.", "a"))
        client.send({"type": "conversation.item.delete", "item_id": "a"})
        await asyncio.sleep(0.1)

    client = scene(body)
    assert client.of("conversation.item.retrieved")[0]["item"]["content"] == [{"type": "input_text", "text": "One."}]
    assert client.of("conversation.item.deleted")[0]["item_id"] == "a"
    assert [event["previous_item_id"] for event in client.of("conversation.item.added")[:3]] == [None, "a", None]


# Updates


def test_partial_updates_before_the_first_audio_open_once() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        for session in ({"instructions": "One."}, {"tools": [TOOL]}, {"tools": None, "voice": "marin", "new": [1]}):
            client.send(update(**session))
        await asyncio.sleep(1)
        assert len(engine.model.opened) == 1
        assert engine.model.opened[0]["system_prompt"] == "One."

    client = scene(body)
    first, _, third = (event["session"] for event in client.of("session.updated"))
    assert (first["instructions"], third["instructions"]) == ("One.", "One.")
    assert (third["tools"], third["audio"]["output"]["voice"], third["new"]) == ([], "marin", [1])


def test_other_instructions_before_anything_was_said_open_anew() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(instructions="One."))
        await asyncio.sleep(1)
        client.send(update(instructions="Two."))
        await asyncio.sleep(1)
        assert [options["system_prompt"] for options in engine.model.opened] == ["One.", "Two."]

    assert [event["session"]["instructions"] for event in scene(body).of("session.updated")] == ["One.", "Two."]


def test_other_instructions_in_a_conversation_carry_it_over() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(instructions="One."), said(0.5))
        await client.until(DELTA)
        client.send(update(instructions="Two."))
        await asyncio.sleep(0.1)
        assert len(client.of("session.updated")) == 1
        await client.until("response.done")
        await asyncio.sleep(0.1)
        assert len(client.of("session.updated")) == 2
        since = len(client.events)
        client.send(said(0.5))
        await client.until("response.done", since)
        prompt = engine.model.opened[1]["system_prompt"].splitlines()
        assert prompt[:3] == ["Two.", "", "Conversation so far:"]
        assert prompt[3].startswith("User: w1 w2")
        assert prompt[4:] == [f"Assistant: {ANSWER}"]

    assert statuses(scene(body)) == ["completed", "completed"]


def test_a_server_that_refuses_other_instructions_in_a_conversation() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(instructions="One."), update(instructions="Two.", tools=[TOOL]), said(0.5))
        await client.until("response.done")
        client.send(update(instructions="Three."), update(tools=[]), update(voice="marin", instructions="Two."))
        await asyncio.sleep(1)
        assert [options["system_prompt"] for options in engine.model.opened] == ["Two."]

    client = scene(body, TurnModel(calls=False), fixed_prompt=True)
    refused = [(error["error"]["code"], error["error"]["param"]) for error in client.of("error")]
    assert refused == [("unsupported_capability", f"session.{key}") for key in ("instructions", "tools")]
    assert [event["session"]["instructions"] for event in client.of("session.updated")] == ["One.", "Two.", "Two."]
    assert client.of("session.updated")[-1]["session"]["audio"]["output"]["voice"] == "marin"
    assert statuses(client) == ["completed"]


def test_a_turn_whose_transcript_does_not_settle_is_answered() -> None:
    """The document of another dialect makes it fatal; here the agent's turn is opened all the same."""

    async def body(client: Client, engine: VirtualEngine) -> None:
        engine.model.settles = False
        client.send(update(turn_detection=None), said(0.5), {"type": "input_audio_buffer.commit"})
        client.send({"type": "response.create"})
        await client.until("response.done")

    client = scene(body)
    assert statuses(client) == ["completed"]
    assert client.of("response.output_audio_transcript.done")[0]["transcript"] == ANSWER


@pytest.mark.parametrize("turn_detection", [{"type": "server_vad"}, None])
def test_other_instructions_in_the_middle_of_a_question(turn_detection: Any) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(instructions="One.", turn_detection=turn_detection))
        await asyncio.sleep(1)
        for piece in range(8):
            client.send(said(0.1))
            await asyncio.sleep(0.1)
            if piece == 5:
                client.send(update(instructions="Two."))
        if turn_detection is None:
            client.send(COMMIT, CREATE)
        await client.until("response.done")
        assert [options["system_prompt"] for options in engine.model.opened] == ["One.", "Two."]

    client = scene(body)
    (completed,) = client.of("conversation.item.input_audio_transcription.completed")
    assert completed["transcript"].split() == [f"w{n}" for n in range(1, 11)]
    assert statuses(client) == ["completed"]


def test_the_old_of_a_long_conversation_is_not_carried_over() -> None:
    from mlx_voicechat.server.opening import prompt_with

    lines = [f"User: {n} " + "word " * 98 for n in range(30)]
    prompt = prompt_with("Be brief.", lines, TurnModel().tokenizer)  # type: ignore[arg-type]
    assert prompt.splitlines()[0] == "Be brief."
    assert [line.split()[1] for line in prompt.splitlines()[3:]] == [str(n) for n in range(15, 30)]
    assert prompt_with("Be brief.", ["word " * 2000], TurnModel().tokenizer) == "Be brief."  # type: ignore[arg-type]


# Beta


def test_beta_names() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(
            update(modalities=["audio", "text"], voice="alloy", turn_detection=None, input_audio_format="pcm16")
        )
        client.send(said(0.5), COMMIT, CREATE)
        await client.until("response.done")

    client = scene(body, beta=True)
    session = client.of("session.updated")[0]["session"]
    assert (session["modalities"], session["voice"], session["turn_detection"]) == (["audio", "text"], "alloy", None)
    assert (session["input_audio_format"], session["max_response_output_tokens"]) == ("pcm16", "inf")
    assert "audio" not in session
    kinds = {event["type"] for event in client.events}
    assert {"response.audio.delta", "response.audio_transcript.delta", "conversation.item.created"} <= kinds
    assert not {"response.output_audio.delta", "conversation.item.added", "conversation.item.done"} & kinds
    assert client.of("response.done")[0]["response"]["output"][0]["content"] == [
        {"type": "audio", "transcript": ANSWER}
    ]


# Errors and ends


APPEND = "input_audio_buffer.append"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("no JSON", "invalid_json"),
        ("[1]", "invalid_event"),
        ({}, "invalid_event"),
        ({"type": ["x"]}, "invalid_event"),
        ({"type": "session.ping"}, "invalid_event"),
        ({"type": "session.update"}, "invalid_event"),
        (update(instructions=1), "invalid_event"),
        (update(instructions="x" * 40_000), "invalid_event"),
        (update(output_modalities=["smell"]), "invalid_event"),
        (update(max_output_tokens=0), "invalid_event"),
        (update(audio=1), "invalid_event"),
        (update(audio={"input": 1}), "invalid_event"),
        (turn(threshold=2), "invalid_event"),
        (turn(create_response="yes"), "invalid_event"),
        (turn(type="telepathy"), "invalid_event"),
        (update(turn_detection=3), "invalid_event"),
        (update(input_audio_format="mp3"), "unsupported_audio_format"),
        (update(audio={"output": {"format": {"type": "audio/pcm", "rate": 1}}}), "unsupported_audio_format"),
        (update(tools={}), "invalid_tools"),
        (update(tools=[{"name": "no spaces"}]), "invalid_tools"),
        (update(tools=[TOOL, TOOL]), "invalid_tools"),
        (update(tools=[{**TOOL, "name": f"t{n}"} for n in range(33)]), "invalid_tools"),
        ({"type": APPEND}, "invalid_audio"),
        ({"type": APPEND, "audio": "AAA"}, "invalid_audio"),
        ({"type": APPEND, "audio": "AA=="}, "invalid_audio"),
        (COMMIT, "input_audio_buffer_commit_empty"),
        ({"type": "conversation.item.create"}, "invalid_event"),
        ({"type": "conversation.item.create", "item": {"type": "message", "role": "user"}}, "invalid_event"),
        ({"type": "conversation.item.retrieve", "item_id": "none"}, "item_not_found"),
        ({"type": "conversation.item.retrieve"}, "invalid_event"),
        ({"type": "conversation.item.delete", "item_id": "none"}, "item_not_found"),
        ({"type": "conversation.item.truncate", "item_id": "none", "audio_end_ms": 1}, "item_not_found"),
        ({"type": "conversation.item.truncate", "item_id": "there", "audio_end_ms": 1}, "invalid_truncation"),
        ({"type": "conversation.item.truncate", "item_id": "there", "audio_end_ms": "1"}, "invalid_event"),
        ({"type": "response.create", "response": []}, "invalid_event"),
        ({"type": "response.create", "response": {"metadata": {"a": 1}}}, "invalid_event"),
        ({"type": "barge_in"}, "invalid_event"),
    ],
)
def test_errors_name_the_message(message: Any, code: str) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(typed("Here.", "there"))
        await asyncio.sleep(0.01)
        client.send({**message, "event_id": "mine"} if isinstance(message, dict) else message)
        await asyncio.sleep(0.01)

    (event,) = scene(body).of("error")
    error = event["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith((".", "?"))
    assert error["event_id"] == ("mine" if isinstance(message, dict) else None)


def test_a_response_within_a_response() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(MANUAL, said(0.5), COMMIT, CREATE, CREATE)
        await client.until(DELTA)
        client.send(CREATE)
        await client.until("response.done")

    client = scene(body)
    codes = [event["error"]["code"] for event in client.of("error")]
    assert codes == ["conversation_already_has_active_response"] * 2
    assert statuses(client) == ["completed"]


def test_a_model_that_fails() -> None:
    model = TurnModel(LONG)

    def fail(index: int) -> None:
        if index > 20:
            raise ZeroDivisionError

    model.before = fail

    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(said(0.5))
        await client.until("error")

    client = scene(body, model)
    error = client.of("error")[0]["error"]
    assert (error["code"], error["type"], client.closed) == ("internal_error", "server_error", 1011)
    assert statuses(client) == ["failed"]


def test_the_limit_of_a_session() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(said(0.5))
        await client.until("error", seconds=20)

    client = scene(body, seconds=5.0)
    assert (client.of("error")[0]["error"]["code"], client.closed) == ("session_limit_reached", 1000)
    assert client.loop.time() > 4


def test_an_event_of_the_engine_that_a_session_does_not_know() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        with pytest.raises(KeyError):
            client.session.deliver(object())
        with pytest.raises(KeyError):
            client.session.emit("response.thought")

    scene(body)


def test_results_are_waited_for_a_second() -> None:
    assert openai.RESULT_SECONDS == 1.0
