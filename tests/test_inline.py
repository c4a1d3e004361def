"""The client and the server together: over sockets that are cut, and in one process without any."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from mlx_voicechat.client import (
    DuplexClient,
    DuplexProtocolError,
    DuplexSessionClosedError,
    EventCollector,
    ReconnectPolicy,
    SessionConfig,
    StrictV3Client,
)
from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.server.inline import UNREAD_MESSAGES, InlineDuplexClient
from tests.support.server import RunningServer, running_server
from tests.support.turn_model import ANSWER, TurnModel

WORDS = "".join(ANSWER)
QUICK = ReconnectPolicy(first_delay_s=0.01, most_delay_s=0.05, attempts=20)
OF_ONE_RUN = ("event_id", "session_id", "server_event_seq", "response_id", "item_id", "previous_item_id", "id")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(TurnModel(), max_sessions=4) as server:
        yield server


def question(frames: int = 6) -> bytes:
    """Loud frames, which are words to the model, and half a second of silence."""
    loud = np.full(frames * 1280, 8000, "<i2")
    return loud.tobytes() + bytes(2 * 8000)


def plain(value: Any) -> Any:
    """An event without what differs from run to run: ids, numbers, audio."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in OF_ONE_RUN}
    return [plain(one) for one in value] if isinstance(value, list) else value


async def converse(client: DuplexClient, questions: int = 2) -> tuple[list[dict[str, Any]], EventCollector]:
    """So many questions, and the events of the answers, in order."""
    collector = EventCollector()
    task = asyncio.create_task(collector.consume(client))
    await asyncio.sleep(0)
    for _ in range(questions):
        await client.stream_pcm(question(), chunk_ms=30, realtime=False)
        async for response in client.responses():
            if response.decision == "listen":
                continue
            await response.wait(20)
            break
        assert response.transcript == WORDS
    await client.close()
    await task
    kept = [event for event in collector.events if event["type"].startswith(("response.", "conversation."))]
    return [plain(event) for event in kept], collector


def told(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What was said, by event, audio aside."""
    return [(e["type"], str(e.get("delta", e.get("transcript", "")))) for e in events if "audio.delta" not in e["type"]]


def test_the_same_events_come_without_a_socket(server: RunningServer) -> None:
    async def work() -> None:
        async with DuplexClient(server.ws_url) as far:
            over_the_wire, far_events = await converse(far)
        async with InlineDuplexClient(TurnModel()) as near:
            assert str(near.session_id).startswith("duplex-")
            inline, near_events = await converse(near)
        assert told(inline) == told(over_the_wire)
        assert near_events.audio_bytes() == far_events.audio_bytes()
        assert (near_events.errors(), far_events.errors()) == ([], [])
        assert near_events.count("session.closed") == 1

    run(work())


def test_an_inline_session_refuses_and_ends_as_any(server: RunningServer) -> None:
    async def work() -> None:
        async with InlineDuplexClient(TurnModel, config=SessionConfig(instructions="Be brief.")) as client:
            waits = client.wait_for("never", timeout_s=10)
            await client.send({"type": "no.such.event", "event_id": "evt_mine"})
            with pytest.raises(DuplexProtocolError) as refused:
                await waits
            assert refused.value.event_id == "evt_mine"
            client.abort()
        with pytest.raises(DuplexSessionClosedError):
            await client.commit()

    run(work())


def test_an_inline_session_whose_model_does_not_load() -> None:
    async def work() -> None:
        async with InlineDuplexClient("no/such/folder/anywhere"):
            pass

    with pytest.raises(CheckpointError, match="no/such/folder/anywhere"):
        run(work())


def test_an_inline_client_that_does_not_read_counts_as_slow() -> None:
    async def work() -> None:
        async with InlineDuplexClient(TurnModel) as client:
            transport: Any = client._link._transport
            reader = client._link._tasks[0]
            reader.cancel()
            await asyncio.sleep(0)
            for _ in range(UNREAD_MESSAGES + 5):
                await client.send({"type": "input_audio_buffer.clear"})
            await asyncio.sleep(0.3)
            assert transport.blocked
            assert len(transport._to_client) <= UNREAD_MESSAGES + 1
            client.abort()

    run(work())
    gc.collect()


def test_a_session_cut_a_hundred_times_is_as_one_that_was_not(server: RunningServer) -> None:
    chance = random.Random(3)

    def numbers(collector: EventCollector) -> list[int]:
        return [e["server_event_seq"] for e in collector.events if "server_event_seq" in e]

    async def cutting(client: DuplexClient, collector: EventCollector) -> None:
        while True:
            await asyncio.sleep(chance.uniform(0, 0.03))
            transport: Any = client._link._transport
            if transport is not None and client._link._attached.is_set():
                transport.transport.abort()
                heard = len(numbers(collector))  # a busy machine gets time for a message before the next cut
                while len(numbers(collector)) == heard:
                    await asyncio.sleep(0.001)

    async def work() -> None:
        async with DuplexClient(server.ws_url) as whole:
            expected, uncut = await converse(whole)
        resumed = 0
        while resumed < 100:
            async with DuplexClient(server.ws_url, reconnect=QUICK) as client:
                collector = EventCollector()
                cutter = asyncio.create_task(cutting(client, collector))
                events = asyncio.create_task(collector.consume(client))
                await asyncio.sleep(0)
                for _ in range(2):
                    await client.stream_pcm(question(), chunk_ms=30, realtime=False)
                    async for response in client.responses():
                        if response.decision != "listen":
                            await response.wait(20)
                            assert response.transcript == WORDS
                            break
                cutter.cancel()
                await asyncio.gather(cutter, return_exceptions=True)
            await events
            assert numbers(collector) == sorted(set(numbers(collector)))
            kept = [e for e in collector.events if e["type"].startswith(("response.", "conversation."))]
            assert told([plain(e) for e in kept]) == told(expected)
            assert collector.audio_bytes() == uncut.audio_bytes()
            resumed += collector.count("connection.resumed")

    run(work())


def test_strict_v3_of_the_client_and_of_the_server() -> None:
    pytest.importorskip("mlx_voicechat.server.strict_v3")

    async def work(url: str) -> None:
        tool = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
        async with StrictV3Client(url, tools=[tool]) as client:
            await client.start_turn()
            await client.stream_pcm(question(), realtime=False)
            turn = await client.commit()
            response = await client.next_response()
            assert response.turn_id == turn.turn_id
            await client.give(await asyncio.wait_for(client.next_call(), 20), "sunny")
            assert (await response.wait()).text == WORDS

    with running_server(TurnModel()) as server:
        run(work(server.ws_url))


def test_a_message_that_comes_again_is_not_taken_again(server: RunningServer) -> None:
    async def work() -> None:
        async with DuplexClient(server.ws_url) as client:
            events = client.events()
            transport: Any = client._link._transport
            for number in (1, 2, 1, 2):
                await transport.send(json.dumps({"type": "no.such.event", "client_event_seq": number}))
            await transport.send(json.dumps({"type": "session.heartbeat"}))
            told = []
            async for event in events:
                told.append(event.type)
                if event.type == "session.heartbeat_ack":
                    break
            assert told.count("error") == 2
            assert event.raw["last_client_event_seq"] == 2

    run(work())
