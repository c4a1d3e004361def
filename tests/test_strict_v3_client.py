"""StrictV3Client against scripted servers: the barrier, turns, calls, typed text, what it refuses, its deadlines."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from mlx_voicechat.client import Deadlines, StrictV3Client, StrictV3Error
from mlx_voicechat.errors import InputError, ServerError
from tests.support.scripted_peers import Peer, scripted

Script = Callable[[Peer], Awaitable[object]]
CONCISE = {"function_output_model_output": {"mode": "client_authored_v1"}}
CREATED: dict[str, Any] = {
    "protocol": {"name": "voicechat.realtime", "version": 3},
    "capabilities": {"server_turn_detection": None, "input_turn_detection": "client_smart_turn_v1", **CONCISE},
    "session": {"id": "s"},
}
UPDATED: dict[str, Any] = {
    "session": {
        "id": "s",
        "protocol_version": 3,
        "capabilities": {"function_output_model_output": "client_authored_v1"},
    }
}
AUDIO = {"encoding": "pcm16", "sample_rate": 22_050, "channels": 1}
R = {"response_id": "r1", "turn_id": "t1"}
BRISK = Deadlines(2, 2, 0.6, 0.2, 0.6, 0.6, 1.5, 0.6)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


async def greet(peer: Peer) -> dict[str, Any]:
    await peer.send("session.created", **CREATED)
    update = await peer.receive("session.update")
    await peer.send("session.updated", **UPDATED)
    return update


async def acknowledge(peer: Peer, kind: str) -> dict[str, Any]:
    message = await peer.receive(f"input_audio_buffer.{kind}")
    done = {"turn_start": "turn_started", "commit": "committed"}[kind]
    ids = {"client_turn_id": message["client_turn_id"], "client_event_id": message["event_id"]}
    await peer.send(f"input_audio_buffer.{done}", turn_id=f"t{message['client_turn_id']}", **ids)
    return message


async def answer(peer: Peer, words: str = "It is sunny", **ids: str) -> None:
    ids = {**R, **ids}
    await peer.send("response.created", **ids)
    await speak(peer, words, **ids)


async def speak(peer: Peer, words: str, status: str = "completed", **ids: str) -> None:
    ids = {**R, **ids}
    for number, word in enumerate(words.split()):
        delta = f" {word}"[number == 0 :]
        await peer.send("response.output_text.delta", delta=delta, **ids)
        await peer.send("response.output_audio.delta", delta=base64.b64encode(bytes(4)).decode(), **AUDIO, **ids)
    await peer.send("response.output_text.done", text=words, empty=False, **ids)
    await peer.send("response.output_audio.done", empty=False, **ids)
    await peer.send("response.done", status=status, reason="model_or_turn_taking", **ids)


async def farewell(peer: Peer) -> None:
    await peer.receive("session.stop")
    await peer.send("session.closed", status="completed", reason="client_stop")


def serving(*scripts: Script) -> Any:
    async def whole(peer: Peer) -> None:
        await greet(peer)
        for script in scripts:
            await script(peer)
        await farewell(peer)

    return scripted(whole)


async def a_turn(peer: Peer) -> None:
    await acknowledge(peer, "turn_start")
    await acknowledge(peer, "commit")


async def take_a_turn(client: StrictV3Client) -> None:
    await client.start_turn()
    await client.append(bytes(640))
    await client.commit()


def test_the_barrier_and_the_end() -> None:
    async def work() -> None:
        tools = [{"name": "f", "description": "", "parameters": {}}]
        async with serving() as server:
            async with StrictV3Client(server.url, instructions="Be brief.", tools=tools) as client:
                assert client.capabilities["input_turn_detection"] == "client_smart_turn_v1"
                assert client.session["id"] == "s"
            peer = server.peers[0]
            assert client.ended
            with pytest.raises(StrictV3Error, match="over"):
                await client.append(bytes(2))
            await client.stop()
        assert parse_qs(urlsplit(peer.path).query) == {"protocol": ["strict-v3"]}
        assert [m["type"] for m in peer.heard] == ["session.update", "session.stop"]
        agreed = {"function_output_model_output": "client_authored_v1"}
        expected = {"protocol_version": 3, "instructions": "Be brief.", "tools": tools, "capabilities": agreed}
        assert peer.heard[0]["session"] == expected

    run(work())


def test_a_turn_and_its_answer() -> None:
    async def work() -> None:
        async with serving(a_turn, answer) as server:
            async with StrictV3Client(server.url) as client:
                assert await client.append(bytes(2))
                assert await client.start_turn() == 1
                with pytest.raises(InputError, match="open"):
                    await client.start_turn()
                began = time.monotonic()
                await client.stream_pcm(bytes(6400), chunk_ms=20)
                assert time.monotonic() - began >= 0.19
                await client.append(bytes(100_000))
                turn = await client.commit({"schema": 1})
                assert (turn.client_turn_id, turn.turn_id) == (1, "t1")
                response = await client.next_response()
                audio = b"".join([chunk async for chunk in response.audio()])
                assert (len(audio), response.text, response.status) == (12, "It is sunny", "completed")
                assert (response.response_id, response.turn_id) == ("r1", "t1")
                assert (await response.wait()).reason == "model_or_turn_taking"
                with pytest.raises(InputError, match="No turn"):
                    await client.commit()
                with pytest.raises(InputError, match="whole number"):
                    await client.append(b"\x00")
            heard = server.peers[0].heard
        sizes = [len(base64.b64decode(m["audio"])) for m in heard if m["type"] == "input_audio_buffer.append"]
        assert sizes == [2, *[640] * 10, 40_960, 40_960, 18_080]
        kinds = [m["type"].rpartition(".")[2] for m in heard]
        assert kinds == ["update", "append", "turn_start", *["append"] * 13, "commit", "stop"]
        assert heard[-2]["diagnostics"] == {"schema": 1}
        assert len({m["event_id"] for m in heard}) == len(heard)

    run(work())


def test_what_is_not_acknowledged_is_sent_again() -> None:
    async def lossy(peer: Peer) -> None:
        first = await peer.receive("input_audio_buffer.turn_start")
        second = await acknowledge(peer, "turn_start")
        assert second == first
        ids = {"client_turn_id": 1, "client_event_id": first["event_id"], "turn_id": "t1"}
        await peer.send("input_audio_buffer.turn_started", **ids)  # of the first, late
        await acknowledge(peer, "commit")

    async def work() -> None:
        async with serving(lossy, answer) as server, StrictV3Client(server.url, deadlines=BRISK) as client:
            await take_a_turn(client)
            await (await client.next_response()).wait()

    run(work())


def test_a_call_and_its_result() -> None:
    async def call(peer: Peer) -> None:
        await peer.send("response.created", **R)
        fields = {"call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
        await peer.send("response.function_call_arguments.done", **R, **fields)
        item = (await peer.receive("conversation.item.create"))["item"]
        expected = {"type": "function_call_output", "call_id": "call_1", "output": "{}", "model_output": "sunny"}
        assert item == expected
        await peer.send("conversation.item.function_call_output.applied", call_id="call_1")
        await speak(peer, "It is sunny in Paris.")

    async def work() -> None:
        async with serving(a_turn, call, lambda peer: acknowledge(peer, "turn_start")) as server:
            async with StrictV3Client(server.url) as client:
                await take_a_turn(client)
                asked = await client.next_call()
                assert (asked.name, asked.arguments, asked.response_id) == ("get_weather", {"city": "Paris"}, "r1")
                assert not await client.append(bytes(640))
                held = asyncio.create_task(client.start_turn())
                await asyncio.sleep(0.05)
                assert not held.done()
                await client.give(asked, "{}", "sunny")
                assert await held == 2
                assert (await (await client.next_response()).wait()).text == "It is sunny in Paris."
            kinds = [m["type"].rpartition(".")[2] for m in server.peers[0].heard]
        assert kinds == ["update", "turn_start", "append", "commit", "create", "turn_start", "stop"]

    run(work())


@pytest.mark.parametrize("how", ["refused", "failed"])
def test_a_result_that_is_not_taken(how: str) -> None:
    async def call(peer: Peer) -> None:
        await peer.send("response.created", **R)
        fields = {"call_id": "call_1", "name": "f", "arguments": "{}"}
        await peer.send("response.function_call_arguments.done", **R, **fields)
        sent = (await peer.receive("conversation.item.create"))["event_id"]
        if how == "failed":
            fields = {"call_id": "call_1", "reason": "function_call_output_timeout"}
            await peer.send("response.function_call.failed", **R, **fields)
        else:
            error = {"code": "invalid_function_call_output", "message": "Too long.", "fatal": False}
            await peer.send("error", error={**error, "client_event_id": sent})
            await peer.receive("conversation.item.create")
            await peer.send("conversation.item.function_call_output.applied", call_id="call_1")
        await speak(peer, "Sorry.")

    async def work() -> None:
        async with serving(a_turn, call) as server, StrictV3Client(server.url) as client:
            await take_a_turn(client)
            asked = await client.next_call()
            with pytest.raises(StrictV3Error) as refused:
                await client.give(asked, "x" * 99)
            codes = {"refused": "invalid_function_call_output", "failed": "function_call_ended"}
            assert refused.value.code == codes[how]
            if how == "refused":
                await client.give(asked, "short")
            assert (await (await client.next_response()).wait()).text == "Sorry."

    run(work())


def test_typed_text() -> None:
    async def job(peer: Peer) -> None:
        for disposition in ("completed", "replaced"):
            sent = await peer.receive("input_text.request")
            await peer.send("input_text.accepted", job_id=sent["job_id"])
            await peer.send("input_text.injection_started", job_id=sent["job_id"])
            await peer.send("input_text.injection_finished", job_id=sent["job_id"], disposition=disposition)
        sent = await peer.receive("input_text.request")
        await peer.send("input_text.rejected", job_id=sent["job_id"], reason="typed_input_unavailable")

    async def work() -> None:
        async with serving(job) as server, StrictV3Client(server.url) as client:
            typed = await client.request_text("Hello.")
            assert not await client.append(bytes(2))
            assert (await typed.wait()).disposition == "completed"
            assert (await (await client.request_text("Hello.")).wait()).disposition == "replaced"
            rejected = await (await client.request_text("Hello.")).wait()
            assert (rejected.state, rejected.reason) == ("rejected", "typed_input_unavailable")
            for text in ("", " ", "x" * 1001):
                with pytest.raises(InputError):
                    await client.request_text(text)

    run(work())


def test_typed_text_goes_before_a_turn_that_waits() -> None:
    async def both(peer: Peer) -> None:
        await peer.send("response.created", **R)
        await peer.send("response.function_call_arguments.done", call_id="c", name="f", arguments="{}", **R)
        await peer.receive("conversation.item.create")
        await peer.send("conversation.item.function_call_output.applied", call_id="c")
        await speak(peer, "Yes.")
        sent = await peer.receive("input_text.request")
        await peer.send("input_text.accepted", job_id=sent["job_id"])
        await asyncio.sleep(0.1)
        await peer.send("input_text.injection_started", job_id=sent["job_id"])
        await peer.send("input_text.injection_finished", job_id=sent["job_id"], disposition="completed")
        await acknowledge(peer, "turn_start")

    async def work() -> None:
        async with serving(a_turn, both) as server:
            async with StrictV3Client(server.url) as client:
                await take_a_turn(client)
                asked = await client.next_call()
                turn = asyncio.create_task(client.start_turn())
                text = asyncio.create_task(client.request_text("Hello."))
                await asyncio.sleep(0.05)
                await client.give(asked, "{}")
                await (await text).wait()
                await turn
            kinds = [m["type"].rpartition(".")[2] for m in server.peers[0].heard]
        assert kinds[-3:] == ["request", "turn_start", "stop"]

    run(work())


def test_a_start_that_is_refused_leaves_no_open_turn() -> None:
    async def refuse(peer: Peer) -> None:
        sent = (await peer.receive("input_audio_buffer.turn_start"))["event_id"]
        await peer.send("error", error={"code": "x", "message": "", "fatal": False, "client_event_id": sent})
        await acknowledge(peer, "turn_start")

    async def work() -> None:
        async with serving(refuse) as server, StrictV3Client(server.url) as client:
            with pytest.raises(StrictV3Error, match="says x"):
                await client.start_turn()
            assert await client.start_turn() == 2

    run(work())


def _without(fields: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    return {**fields, name: value}


@pytest.mark.parametrize(
    ("created", "updated", "why"),
    [
        (_without(CREATED, "protocol", {"name": "voicechat.realtime", "version": 2}), UPDATED, "it speaks"),
        (_without(CREATED, "capabilities", None), UPDATED, "no capabilities"),
        (_without(CREATED, "capabilities", {"input_turn_detection": "server_rnnt"}), UPDATED, "--turns server"),
        (CREATED, {"session": {"id": "s"}}, "does not confirm"),
        (CREATED, {"session": {"protocol_version": 3, "capabilities": {}}}, "function_output_model_output is None"),
    ],
)
def test_a_greeting_that_it_refuses(created: dict[str, Any], updated: dict[str, Any], why: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.send("session.created", **created)
        await peer.receive()
        await peer.send("session.updated", **updated)
        await peer.receive()

    async def work() -> None:
        async with scripted(script) as server:
            with pytest.raises(StrictV3Error, match=why):
                async with StrictV3Client(server.url):
                    pass

    run(work())


CALL = {"type": "response.function_call_arguments.done", "call_id": "c", "name": "f", "arguments": "{}", **R}
OPEN = {"type": "response.created", **R}


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([{"type": "input_audio_buffer.turn_started", "client_turn_id": 9, "client_event_id": "x"}], "not asked for"),
        ([{"type": "response.created", "turn_id": "t1"}], "without its ids"),
        ([OPEN, {**OPEN, "response_id": "r2"}], "while r1 is open"),
        (
            [OPEN, {"type": "response.output_audio.delta", **AUDIO, **R, "sample_rate": 24_000, "delta": ""}],
            "its audio",
        ),
        ([OPEN, {"type": "response.output_audio.delta", **AUDIO, **R, "delta": "!"}], "no base64"),
        ([OPEN, {"type": "response.output_audio.delta", **AUDIO, **R, "delta": 3}], "no base64"),
        ([OPEN, {**CALL, "call_id": 3}], "without call_id"),
        ([OPEN, {**CALL, "arguments": "[]"}], "no object"),
        ([OPEN, {**CALL, "arguments": "{"}], "no object"),
        ([OPEN, CALL, {**CALL, "call_id": "d"}], "while c is open"),
        ([OPEN, CALL, {"type": "conversation.item.function_call_output.applied", "call_id": "d"}], "not open"),
        ([{"type": "input_text.accepted", "job_id": "unknown"}], "unknown job"),
        ([{"type": "error", "error": "flat"}], "without its object"),
        ([{"type": "error", "error": {"code": "internal_error", "message": "Oh.", "fatal": True}}], "Oh"),
        ([{"type": "session.closed", "status": "failed", "reason": "session_position_limit"}], "position_limit"),
        (["[]"], "no JSON object"),
        (["{"], "no JSON object"),
        ([b"{}"], "binary frame"),
        ([], "without session.closed"),
    ],
)
def test_what_ends_it(events: list[Any], why: str) -> None:
    async def script(peer: Peer) -> None:
        await greet(peer)
        await peer.receive()
        for event in events:
            await peer.socket.send(json.dumps(event) if isinstance(event, dict) else event)
        if not events:
            await peer.cut()
        await peer.receive("never")

    async def work() -> None:
        async with scripted(script) as server, StrictV3Client(server.url) as client:
            waiting = asyncio.create_task(client.next_call()) if CALL not in events else None
            await client.append(bytes(2))
            told = client.events()
            with pytest.raises(ServerError, match=why):
                async for _ in told:
                    pass
            with pytest.raises(ServerError, match=why):
                await client.start_turn()
            if waiting is not None:
                with pytest.raises(ServerError, match=why):
                    await waiting

    run(work())


def test_events_of_another_response_and_unknown_ones_are_ignored() -> None:
    async def odd(peer: Peer) -> None:
        await peer.send("something.new", x=1)
        await peer.send("response.output_text.delta", response_id="other", delta="no")
        await peer.send("response.function_call_arguments.done", response_id="other")
        await peer.send("response.done", response_id="other", status="completed")

    async def work() -> None:
        async with serving(a_turn, odd, answer) as server, StrictV3Client(server.url) as client:
            await take_a_turn(client)
            assert (await (await client.next_response()).wait()).text == "It is sunny"

    run(work())


def test_the_responses_of_an_ended_conversation_end() -> None:
    async def script(peer: Peer) -> None:
        await greet(peer)
        await a_turn(peer)
        await peer.send("response.created", **R)
        await peer.receive("input_text.request")
        await peer.send("error", error={"code": "response_cancel_timeout", "message": "Late.", "fatal": True})

    async def work() -> None:
        async with scripted(script) as server, StrictV3Client(server.url) as client:
            await take_a_turn(client)
            response = await client.next_response()
            job = await client.request_text("Hello.")
            for wait in (response.wait(), job.wait(), anext(response.audio())):
                with pytest.raises(StrictV3Error, match="Late") as ended:
                    await wait
                assert ended.value.code == "response_cancel_timeout"

    run(work())


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ("created", "No session.created"),
        ("updated", "No session.updated"),
        ("acknowledged", "No input_audio_buffer.turn_started"),
        ("response", "No response.created"),
        ("applied", "applied within"),
        ("silent", "has sent nothing for"),
    ],
)
def test_deadlines(stage: str, why: str) -> None:
    async def script(peer: Peer) -> None:
        if stage != "created":
            await peer.send("session.created", **CREATED)
        if stage not in ("created", "updated"):
            await peer.receive("session.update")
            await peer.send("session.updated", **UPDATED)
        if stage in ("response", "applied"):
            await a_turn(peer)
        if stage == "applied":
            await peer.send("response.created", **R)
            await peer.socket.send(json.dumps(CALL))
        if stage == "silent":
            await peer.receive("never")
        while True:
            await peer.send("voicechat.metrics", frame=1)
            await asyncio.sleep(0.05)

    async def work() -> None:
        deadlines = replace(BRISK, created_s=0.3, updated_s=0.3, silent_s=0.4)

        async def converse(url: str) -> None:
            async with StrictV3Client(url, deadlines=deadlines) as client:
                await client.append(bytes(2))
                if stage in ("acknowledged", "response", "applied"):
                    await take_a_turn(client)
                if stage == "applied":
                    await client.give(await client.next_call(), "{}")
                await client.next_response()

        async with scripted(script) as server:
            with pytest.raises(StrictV3Error, match=why):
                await converse(server.url)

    run(work())
