"""DuplexClient against scripted servers: the handshake, saying, hearing, errors, the end; and what it imports."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import subprocess
import sys
import time
import wave
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from mlx_voicechat.client import (
    AudioFormat,
    DuplexClient,
    DuplexConnectionError,
    DuplexProtocolError,
    DuplexSessionClosedError,
    EventCollector,
    SessionConfig,
    acknowledge_collected_playback,
    audio_data_url,
    create_duplex_session_config,
    read_pcm16_wav,
)
from mlx_voicechat.client import feed as feeds
from mlx_voicechat.client.duplex_events import AudioDelta, DuplexEvent, ErrorEvent, typed
from mlx_voicechat.errors import AudioError, InputError, ServerError
from tests.support.scripted_peers import Peer, scripted

SESSION = {"id": "duplex-1", "capabilities": {"supports_session_resume": True}, "audio": {}}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


async def greet(peer: Peer) -> dict[str, Any]:
    update = await peer.receive("session.update")
    await peer.say("session.created", session=SESSION, resume_token="rt_1", attachment_generation=1)
    await peer.say("session.updated", session={**SESSION, "instructions": "x"})
    return update


async def farewell(peer: Peer) -> None:
    await peer.receive("session.close")
    await peer.say("session.closed", session_id="duplex-1", reason="client_close")


def serving(script: Callable[[Peer], Awaitable[object]] | None = None) -> Any:
    async def whole(peer: Peer) -> None:
        await greet(peer)
        if script is not None:
            await script(peer)
        await farewell(peer)

    return scripted(whole)


async def answer(peer: Peer, rid: str = "resp_1", chunks: int = 3, words: str = "It is sunny") -> None:
    """One whole response of `chunks` x 100 ms at 24 kHz."""
    await peer.say("response.created", response_id=rid, response={"id": rid, "status": "in_progress"})
    for number, word in zip(range(chunks), words.split(" "), strict=True):
        ids = {"response_id": rid, "item_id": f"item_{rid}"}
        delta = base64.b64encode(bytes([number]) * 4800).decode()
        await peer.say("response.output_audio.delta", delta=delta, sample_rate_hz=24_000, **ids)
        await peer.say("response.output_audio_transcript.delta", delta=f" {word}"[number == 0 :], **ids)
    await peer.say("response.done", response_id=rid, response={"id": rid, "status": "completed"})


def test_the_handshake_and_the_end() -> None:
    async def work() -> None:
        async with serving() as server:
            config = SessionConfig(instructions="Be brief.", tools=[{"type": "function", "name": "f"}])
            async with DuplexClient(server.url, model="any/model", config=config) as client:
                assert (client.session_id, client.resume_token) == ("duplex-1", "rt_1")
                assert client.session_info["capabilities"]["supports_session_resume"]
                await asyncio.sleep(0.05)
                assert client.session_info["instructions"] == "x"
            peer = server.peers[0]
        query = parse_qs(urlsplit(peer.path).query)
        assert query == {"duplex": ["1"], "autostart": ["0"], "model": ["any/model"]}
        session = peer.heard[0]["session"]
        assert session["instructions"] == "Be brief."
        assert session["model"] == "any/model"
        assert session["tools"] == [{"type": "function", "name": "f"}]
        assert session["turn_detection"] is None
        assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 16_000}
        assert "temperature" not in session
        with pytest.raises(DuplexSessionClosedError):
            await client.append_audio(bytes(2))

    run(work())


def test_the_preset_and_what_overrides_it() -> None:
    session = create_duplex_session_config(temperature=0.5, auto_response=False, extra_body={"a": 1}).as_json()
    assert session["input_audio_format"] == "pcm_f32le"
    assert session["audio"]["output"]["format"] == {"type": "audio/pcm", "rate": 22_050}
    assert session["playback_commit_policy"] == "ack_only"
    assert (session["temperature"], session["extra_body"]) == (0.5, {"a": 1, "auto_response": False})
    phone = SessionConfig(input_audio=AudioFormat("g711_ulaw", 8_000))
    assert phone.as_json()["audio"]["input"]["format"] == {"type": "audio/pcmu"}
    assert (phone.input_audio.byte_count(20), phone.input_audio.milliseconds(160)) == (160, 20)
    with pytest.raises(InputError, match="pcm16"):
        AudioFormat("opus")


def test_audio_goes_in_pieces_in_real_time() -> None:
    audio = bytes(range(256)) * 25  # 200 ms

    async def work() -> None:
        async with serving() as server:
            async with DuplexClient(server.url) as client:
                began = time.monotonic()
                assert await client.stream_pcm(audio, chunk_ms=50) == 4
                assert 0.19 <= time.monotonic() - began < 1
                assert await client.stream_pcm(audio[:100], realtime=False, is_speech=True) == 1
                sent = await client.commit(create_response=False)
                await client.clear_input()
                await client.cancel_response("resp_1")
                await client.ack_playback(120.7, response_id="resp_1")
                await client.ack_playback(100, item_id="item_1", committed_ms=80, truncate=True)
            heard = [m for m in server.peers[0].heard if "client_event_seq" in m]
        appends, rest = heard[:5], heard[5:]
        assert b"".join(base64.b64decode(m["audio"]) for m in appends) == audio + audio[:100]
        assert [m.get("is_speech") for m in appends] == [None] * 4 + [True]
        assert {(m["format"], m["sample_rate_hz"]) for m in appends} == {("pcm16", 16_000)}
        assert [m["client_event_seq"] for m in heard] == list(range(1, 11))
        assert (rest[0]["event_id"], rest[0]["response_create"], rest[0]["final"]) == (sent, False, True)
        assert [m["type"] for m in rest[1:]] == ["input_audio_buffer.clear", "response.cancel"] + ["playback.ack"] * 2
        assert rest[2]["response_id"] == "resp_1"
        assert (rest[3]["played_ms"], rest[3]["committed_ms"], "truncate" in rest[3]) == (120, 120, False)
        assert (rest[4]["item_id"], rest[4]["committed_ms"], rest[4]["truncate"]) == ("item_1", 80, True)

    run(work())


def test_responses_one_by_one() -> None:
    async def script(peer: Peer) -> None:
        await answer(peer)
        await peer.say("response.listen", response={"status": "listening"})
        await answer(peer, "resp_2", 2, "and warm")

    async def work() -> None:
        async with serving(script) as server, DuplexClient(server.url) as client:
            async for response in client.responses():
                chunks = [chunk async for chunk in response.audio()]
                break
            assert [chunk[0] for chunk in chunks] == [0, 1, 2]
            assert (response.response_id, response.decision, response.played_ms) == ("resp_1", "speak", 300)
            await response.wait(5)
            assert (response.transcript, response.finished, response.status) == ("It is sunny", True, "completed")
            assert response.done_event is not None
            assert response.created_event is not None
            rest = []
            async for response in client.responses():
                await response.wait(5)
                rest.append((response.decision, response.response_id, response.transcript))
                if len(rest) == 2:
                    break
            assert rest == [("listen", None, ""), ("speak", "resp_2", "and warm")]

    run(work())


def test_events_and_waiting() -> None:

    async def work() -> None:
        more = asyncio.Event()

        async def script(peer: Peer) -> None:
            await more.wait()
            await peer.say("conversation.item.added", item={"id": "item_9", "type": "message"})
            await peer.say("error", error={"type": "x", "code": "invalid_event", "message": "No.", "event_id": "evt_7"})
            await peer.say("something.new", text="t")

        async with serving(script) as server, DuplexClient(server.url) as client:
            events = client.events()
            added = client.wait_for("conversation.item.added", timeout_s=5)
            wrong = client.wait_for("something.new", timeout_s=5)
            errors = client.wait_for("error", "something.new", timeout_s=5)
            more.set()
            assert (await added).item_id == "item_9"
            with pytest.raises(DuplexProtocolError, match=r"No\.") as refused:
                await wrong
            assert (refused.value.code, refused.value.event_id) == ("invalid_event", "evt_7")
            error = await errors
            assert isinstance(error, ErrorEvent)
            assert (error.code, error.message, error.related_event_id) == ("invalid_event", "No.", "evt_7")
            with pytest.raises(TimeoutError, match=r"No never within 0\.05 s"):
                await client.wait_for("never", timeout_s=0.05)
            seen = []
            async for event in events:
                seen.append(event)
                if event.type == "something.new":
                    break
            assert (event.text, event.server_event_seq) == ("t", 5)
            assert [one.type for one in seen][-3:] == ["conversation.item.added", "error", "something.new"]

    run(work())


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "session.closed", "reason": "shutdown"}, "shutdown"),
        ({"type": "session.expired", "reason": "idle_ttl_expired"}, "idle_ttl_expired"),
        ({"type": "session.replaced"}, "replaced"),
    ],
)
def test_a_session_that_ends_by_itself(event: dict[str, Any], reason: str) -> None:
    async def work() -> None:
        more = asyncio.Event()

        async def script(peer: Peer) -> None:
            await greet(peer)
            await peer.say("response.created", response_id="resp_1", response={"id": "resp_1"})
            await more.wait()
            await peer.socket.send(json.dumps({**event, "server_event_seq": 4}))

        async with scripted(script) as server, DuplexClient(server.url) as client:
            response = await anext(aiter(client.responses()))
            waits = [client.wait_for("x"), response.wait(), anext(aiter(client.responses()))]
            more.set()
            for wait in waits:
                with pytest.raises(DuplexSessionClosedError) as ended:
                    await wait
                assert ended.value.reason == reason
            with pytest.raises(DuplexSessionClosedError):
                await client.commit()

    run(work())


def test_waiting_at_our_own_end() -> None:
    async def work() -> None:
        async with serving() as server:
            async with DuplexClient(server.url) as client:
                wait = client.wait_for("never")
                events = client.events()
            with pytest.raises(DuplexSessionClosedError, match="never"):
                await wait
            assert [event.type async for event in events][-1:] == ["session.closed"]
            assert [response async for response in client.responses()] == []

    run(work())


def test_heartbeats_and_acknowledgements() -> None:
    async def script(peer: Peer) -> None:
        await greet(peer)
        while (await peer.receive("session.heartbeat", "session.close"))["type"] == "session.heartbeat":
            await peer.say("session.heartbeat_ack", session_id="duplex-1")
        await peer.say("session.closed", reason="client_close")

    async def work() -> None:
        async with scripted(script) as server:
            async with DuplexClient(server.url, heartbeat_interval_s=0.1):
                await asyncio.sleep(0.55)
            heard = server.peers[0].heard
        assert sum(m["type"] == "session.heartbeat" for m in heard) >= 3
        acks = [m["server_event_seq"] for m in heard if m["type"] == "session.event_ack"]
        assert acks == sorted(set(acks))
        assert acks[-1] >= 4

    run(work())


@pytest.mark.parametrize(
    ("refusal", "kind", "code"),
    [
        ((503, '{"error": {"code": "server_busy", "message": "Full."}}'), DuplexConnectionError, "server_busy"),
        ((401, ""), DuplexConnectionError, "unauthorized"),
        ((400, '{"error": {"code": "unknown_protocol", "message": "?"}}'), DuplexConnectionError, "server_error"),
    ],
)
def test_a_server_that_refuses_the_connection(refusal: tuple[int, str], kind: type[ServerError], code: str) -> None:
    async def work() -> None:
        async with scripted(greet, refusal) as server:
            with pytest.raises(kind) as refused:
                async with DuplexClient(server.url):
                    pass
            assert refused.value.code == code

    run(work())


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"type": "rate_limit_error", "code": "resource_exhausted", "message": "limit=4"}},
        {"error": "flat", "code": "resource_exhausted"},
    ],
)
def test_a_server_that_refuses_the_session(error: dict[str, Any]) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.receive()
        await peer.send("error", **error)

    async def work() -> None:
        async with scripted(refuse) as server:
            with pytest.raises(DuplexProtocolError, match="busy") as refused:
                async with DuplexClient(server.url):
                    pass
            assert refused.value.code == "resource_exhausted"

    run(work())


def test_a_server_that_says_nothing_or_nonsense() -> None:
    async def silent(peer: Peer) -> None:
        await peer.receive("never")

    async def babble(peer: Peer) -> None:
        await peer.receive()
        await peer.socket.send("[1, 2")

    async def work() -> None:
        async with scripted(silent) as server:
            with pytest.raises(DuplexConnectionError, match=r"No session within 0\.2 s"):
                async with DuplexClient(server.url, handshake_timeout_s=0.2):
                    pass
        async with scripted(babble) as server:
            with pytest.raises(DuplexProtocolError, match="no JSON object"):
                async with DuplexClient(server.url):
                    pass

    run(work())
    with pytest.raises(InputError, match="url"):
        DuplexClient("ftp://nowhere")


def test_a_reader_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MOST_EVENTS", 10)

    async def script(peer: Peer) -> None:
        for number in range(50):
            await peer.say("tick", text=str(number))

    async def work() -> None:
        async with serving(script) as server, DuplexClient(server.url) as client:
            lazy = client.events()
            async for event in client.events():
                if event.text == "49":
                    break
            with pytest.raises(ServerError, match="were not read"):
                await anext(lazy)

    run(work())


def test_a_dropped_iterator_is_forgotten() -> None:
    feed: feeds.Feed[int] = feeds.Feed()
    kept, dropped = feed.subscribe(), feed.subscribe()
    del dropped
    gc.collect()
    assert len(list(feed._readers)) == 1
    feed.publish(1)
    feed.end(None)
    assert asyncio.run(anext(kept)) == 1


def test_the_collector() -> None:
    async def work() -> None:
        async with serving(lambda peer: answer(peer)) as server:
            async with DuplexClient(server.url) as client:
                collector = EventCollector()
                task = asyncio.create_task(collector.consume(client))
                await asyncio.sleep(0)
                async for response in client.responses():
                    await response.wait(5)
                    break
                await acknowledge_collected_playback(client, collector)
            await task
            ack = next(m for m in server.peers[0].heard if m["type"] == "playback.ack")
        assert (ack["response_id"], ack["played_ms"]) == ("resp_1", 300)
        assert collector.count("response.output_audio.delta") == 3
        assert len(collector.audio_bytes("resp_1")) == len(collector.audio_bytes()) == 3 * 4800
        assert (collector.audio_bytes("other"), collector.errors()) == (b"", [])
        assert collector.first_received_at("response.done") is not None
        assert collector.first_received_at("nothing") is None

    run(work())


def test_a_timing_summary() -> None:
    collector = EventCollector()
    audio = base64.b64encode(bytes(4800)).decode()
    stage = {"stage_metrics": {"ttft_ms": 5, "other": 1}}
    for at, raw in (
        (1.0, {"type": "response.output_audio_transcript.delta", "delta": "old"}),
        (2.2, {"type": "response.output_audio_transcript.delta", "delta": ""}),
        (2.3, {"type": "response.output_audio_transcript.delta", "delta": "It"}),
        (2.4, {"type": "response.output_audio.delta", "delta": audio, "sample_rate_hz": 24_000, "metadata": stage}),
        (2.5, {"type": "response.output_audio.delta", "delta": audio, "sample_rate_hz": 24_000}),
        (2.8, {"type": "response.output_audio.delta", "delta": audio, "sample_rate_hz": 24_000}),
    ):
        collector.add(type(typed(raw))(raw, at))
    summary = collector.timing_summary(after_s=1.5, input_committed_at_s=2.0)
    expected = {"first_text_ms": 300, "first_audio_ms": 400, "audio_chunks": 3, "audio_duration_ms": 300}
    expected |= {"audio_generation_ms": 400, "audio_gap_p50_ms": 300, "audio_gap_max_ms": 300, "ttft_ms": 5}
    assert {name: round(value, 6) for name, value in summary.items()} == expected
    nothing = EventCollector().timing_summary()
    assert (nothing["first_text_ms"], nothing["audio_chunks"], nothing["audio_gap_max_ms"]) == (None, 0, None)


def test_events_of_odd_shapes_do_no_harm() -> None:
    for raw in ({}, {"type": 7}, {"type": "response.output_audio.delta", "delta": "!"}, {"type": "error", "error": 3}):
        event = typed(raw)
        assert (event.audio, event.response_id, event.item_id, event.session_id) == (b"", None, None, None)
    assert isinstance(typed({"type": "response.output_audio.delta"}), AudioDelta)
    assert type(typed({"type": "unheard.of"})) is DuplexEvent


def test_recordings(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(b"\x01\x02" * 10)
    assert read_pcm16_wav(path) == b"\x01\x02" * 10
    with pytest.raises(AudioError, match="24000 Hz"):
        read_pcm16_wav(path, 24_000)
    with pytest.raises(AudioError, match=r"gone\.wav"):
        read_pcm16_wav(tmp_path / "gone.wav")
    assert base64.b64decode(audio_data_url(path).partition(",")[2]) == path.read_bytes()


def test_it_needs_neither_mlx_nor_numpy() -> None:
    program = "import sys, mlx_voicechat.client; print(sorted({'mlx', 'numpy', 'soxr', 'librosa'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
