"""Duplex sessions: the vendor's events, and a life beyond the socket; a model of simple rules on a clock that jumps."""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mlx_voicechat.server import journal
from mlx_voicechat.server.duplex import DuplexSession
from mlx_voicechat.server.journal import JournalLost
from tests.support.openai_caller import Talker, said, talking
from tests.support.server import RunningServer, running_server
from tests.support.turn_model import TurnModel
from tests.support.virtual import Client, VirtualEngine, quick_detector, run

__all__ = ["quick_detector"]
pytestmark = pytest.mark.usefixtures("quick_detector")

LONG = tuple(f" word{n}" for n in range(40))
DELTA = "response.output_audio.delta"
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": session}


def scene(body: Callable[[Client, VirtualEngine], Coroutine[Any, Any, None]], model: TurnModel | None = None) -> Client:
    """Run a conversation to its end; its client."""
    clients: list[Client] = []

    async def main() -> None:
        engine = VirtualEngine(model or TurnModel())
        client = Client(engine, duplex=True)
        clients.append(client)
        await body(client, engine)
        client.session.end()

    run(main)
    return clients[0]


def spoken(rate_hz: int = 16_000, seconds: float = 0.5, **fields: Any) -> dict[str, Any]:
    return {**said(seconds, rate_hz=rate_hz), **fields}


# Events


def test_an_answer_with_what_the_vendor_adds() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(modalities=["audio", "text"], turn_detection=None), spoken())
        await client.until("rate_limits.updated")

    client = scene(body)
    created = client.events[0]
    assert created["resume_token"].startswith("rt_")
    assert created["attachment_generation"] == 1
    session = created["session"]
    assert session["id"].startswith("duplex-")
    assert session["audio"]["input"] == {
        "format": {"type": "audio/pcm", "rate": 16_000},
        "transcription": None, "noise_reduction": None, "turn_detection": None, "sample_rate_hz": 16_000,
    }  # fmt: skip
    can = session["capabilities"]
    assert (can["implementation_level"], can["chunk_period_ms"]) == ("model_native_duplex", 80)
    assert can["supports_session_resume"] is can["supports_barge_in"] is can["supports_audio_truncate"] is True
    assert session["playback"] == {"generated_ms": 0, "sent_ms": 0, "played_ms": 0, "committed_ms": 0}
    response = client.of("response.created")[0]
    assert response["response_id"] == response["response"]["id"]
    assert response["response"]["metadata"] is None
    kinds = [event["type"] for event in client.events]
    assert kinds.index("response.speak") < kinds.index(DELTA)
    assert kinds.count("response.speak") == 1
    delta = client.of(DELTA)[-1]
    assert (delta["format"], delta["sample_rate_hz"]) == ("pcm16", 24_000)
    assert delta["metadata"]["audio_duration_ms"] == 720
    assert delta["metadata"]["playback"]["generated_ms"] == 720
    assert client.of("response.done")[0]["duplex_event"]["committed"] is True
    committed = client.of("input_audio_buffer.committed")[0]["event"]
    assert (committed["type"], committed["turn_id"], committed["epoch"]) == ("input.committed", 1, 0)
    assert [event["server_event_seq"] for event in client.events] == list(range(1, len(client.events) + 1))
    assert not client.of("input_audio_buffer.speech_started")


@pytest.mark.parametrize("sent", ["pcm_f32le", "g711_ulaw"])
def test_formats_of_the_session_and_of_one_append(sent: str) -> None:
    loud = np.full(8000, 0.3, np.float32)
    floats = base64.b64encode(loud.tobytes()).decode()
    mulaw = base64.b64encode(bytes([0x90]) * 4000).decode()

    async def body(client: Client, engine: VirtualEngine) -> None:
        config = {"sample_rate_hz": 16_000, "audio": {"output": {"sample_rate_hz": 22_050}}}
        if sent == "pcm_f32le":
            client.send(update(input_audio_format=sent, **config), {**spoken(), "audio": floats})
        else:
            client.send(update(**config), {**spoken(), "audio": mulaw, "format": sent, "sample_rate_hz": 8_000})
        await client.until("response.done")

    client = scene(body)
    data = b"".join(base64.b64decode(event["delta"]) for event in client.of(DELTA))
    assert len(data) // 2 == 9 * 1764
    assert client.of(DELTA)[0]["sample_rate_hz"] == 22_050
    transcript = client.of("conversation.item.input_audio_transcription.completed")[0]["transcript"]
    assert len(transcript.split()) in (6, 7)


def test_a_commit_and_a_silent_one() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(spoken(), {"type": "input_audio_buffer.commit", "final": True})
        await client.until("response.done")
        client.send(
            {**said(0.5, loud=False, rate_hz=16_000)}, {"type": "input.commit", "final": True, "is_speech": False}
        )
        await asyncio.sleep(1)

    client = scene(body)
    assert len(client.of("response.created")) == 1
    (listen,) = client.of("response.listen")
    assert listen["response"]["metadata"]["reason"] == "silence_commit"
    assert len(client.of("input_audio_buffer.committed")) == 1


def test_speech_that_is_not_answered_is_told() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        engine.model.willing = False
        client.send(update(turn_detection={"type": "server_vad"}))
        client.send(said(0.02, rate_hz=16_000), spoken(is_speech=True))
        await asyncio.sleep(10)

    client = scene(body)
    assert client.of("session.updated")[0]["session"]["overlap_policy"] == "barge_in_on_speech"
    (listen,) = client.of("response.listen")
    assert (listen["response"]["status"], listen["response"]["metadata"]["reason"]) == ("listening", "model_listen")
    assert client.of("response.created") == []
    assert len(client.of("input_audio_buffer.committed")) == 1


def test_an_item_that_is_deleted_while_it_is_spoken() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(spoken())
        delta = await client.until(DELTA)
        client.send({"type": "conversation.item.delete", "item_id": delta["item_id"]})
        await client.until("response.done")

    client = scene(body)
    assert client.of("response.done")[0]["response"]["status"] == "completed"
    assert len(client.of("conversation.item.deleted")) == 1
    assert client.of("response.output_audio_transcript.done")[0]["transcript"] == "One two three four five six."


def test_the_clients_word_for_speech() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(spoken(is_speech=True), {**said(0.2, loud=False, rate_hz=16_000), "is_speech": False})
        await client.until("response.done")

    client = scene(body)
    assert client.of("input_audio_buffer.speech_started")[0]["audio_start_ms"] == 500
    assert client.of("input_audio_buffer.speech_stopped")[0]["audio_end_ms"] == 700


def test_tools_in_the_extra_body_and_no_request_for_a_response() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(extra_body={"realtime_tools": [TOOL], "auto_response": True}), spoken())
        call = await client.until("response.function_call_arguments.done")
        await client.until("response.done")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        client.send({"type": "conversation.item.create", "item": output})
        since = len(client.events)
        await client.until("response.done", since)

    client = scene(body)
    assert [event["response"]["status"] for event in client.of("response.done")] == ["completed", "completed"]


def test_heartbeat_acknowledgement_and_closing() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send({"type": "session.heartbeat"}, spoken())
        await client.until(DELTA)
        session = client.session
        assert isinstance(session, DuplexSession)
        kept = len(session.journal)
        client.send({"type": "session.event_ack", "server_event_seq": 5})
        assert len(session.journal) == kept - 5
        client.send({"type": "close"})

    client = scene(body)
    assert client.of("session.heartbeat_ack")[0]["session_id"] == client.session.id
    assert [event["type"] for event in client.events[-3:]] == ["response.done", "rate_limits.updated", "session.closed"]
    assert (client.events[-1]["reason"], client.closed) == ("client_close", 1000)


def test_the_ledger_of_playback() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(playback_commit_policy="ack_only"), spoken())
        response = (await client.until("response.done"))["response"]
        ack = {"type": "playback.ack", "response_id": response["id"], "played_ms": 240, "committed_ms": 240}
        client.send(ack, {**ack, "played_ms": 10**6, "committed_ms": None, "response_id": None})
        assert client.session.items.history()[-1] == ("assistant", "One two three four five six.")
        client.send({**ack, "truncate": True, "item_id": response["output"][0]["id"]})

    client = scene(body)
    first, second, third = (event["event"] for event in client.of("playback.acknowledged"))
    assert first["playback"] == {"generated_ms": 720, "sent_ms": 720, "played_ms": 240, "committed_ms": 240}
    assert (first["history_committed"], second["history_committed"]) == (False, True)
    assert (second["played_ms"], third["truncate"]) == (720, True)


def test_instructions_carry_over_what_was_heard() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(playback_commit_policy="ack_only"), spoken())
        response = (await client.until("response.done"))["response"]
        client.send({"type": "playback.ack", "response_id": response["id"], "played_ms": 170})
        client.send(update(instructions="Two."))
        await asyncio.sleep(0.1)
        assert engine.model.opened[1]["system_prompt"].splitlines()[-1] == "Assistant: One two"

    scene(body)


# Overlap and interruption


@pytest.mark.parametrize(
    ("policy", "seconds", "expected"),
    [
        ("listen_only", 0.4, ["drop short_ack"]),
        ("listen_only", 1.6, ["listen overlap_speech", "listen long_overlap_speech"]),
        ("barge_in_on_speech", 1.6, ["listen overlap_speech", "barge_in long_overlap_speech"]),
    ],
)
def test_overlap(policy: str, seconds: float, expected: list[str]) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(overlap_policy=policy), spoken())
        await client.until(DELTA)
        for _ in range(round(seconds / 0.1)):
            client.send(spoken(seconds=0.1))
            await asyncio.sleep(0.1)
        client.send(said(0.1, loud=False, rate_hz=16_000))
        await client.until("response.done")

    client = scene(body, TurnModel(LONG))
    decisions = client.of("overlap.decision")
    assert [f"{event['action']} {event['reason']}" for event in decisions] == expected
    assert {event["policy"] for event in decisions} == {policy}
    status = client.of("response.done")[0]["response"]["status"]
    assert status == ("cancelled" if "barge_in" in expected[-1] else "completed")


def test_overlap_where_the_detector_runs() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(update(turn_detection={"type": "server_vad"}), spoken())
        await client.until(DELTA)
        client.send(spoken(seconds=0.3))
        await client.until("response.done")

    client = scene(body, TurnModel(LONG))
    assert client.of("overlap.decision")[0]["reason"] == "server_vad_utterance_active"
    assert client.of("response.done")[0]["response"]["status_details"]["reason"] == "turn_detected"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "barge_in"},
        {"type": "signal_turn", "event": "barge_in", "payload": {}},
        {"type": "response.cancel"},
        {"type": "output_audio_buffer.clear"},
    ],
)
def test_interruptions_advance_the_epoch(message: dict[str, Any]) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send(spoken())
        await client.until(DELTA)
        client.send(message)
        await client.until("response.done")
        client.send(spoken())
        since = len(client.events)
        assert (await client.until(DELTA, since))["metadata"]["epoch"] == 1
        client.send({"type": "input.cancel"})

    client = scene(body, TurnModel(LONG))
    assert client.of("response.done")[0]["response"]["status"] == "cancelled"
    assert bool(client.of("turn.event")) == (message["type"] in ("barge_in", "signal_turn"))
    assert client.of("input_audio_buffer.cleared")
    assert client.session.epoch == 2


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "input.text.append", "text": "Hi."}, "native_text_append_unsupported"),
        ({"type": "push_text", "text": "Hi."}, "native_text_append_unsupported"),
        ({"type": "turn.signal", "event": "end_of_turn"}, "unsupported_capability"),
        ({"type": "turn.signal"}, "invalid_event"),
        ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_empty"),
        (update(turn_detection={"type": "server_vad", "interrupt_response": False}), "unsupported_turn_detection"),
        (update(overlap_policy="shout"), "invalid_event"),
        (update(idle_timeout_s="long"), "invalid_event"),
        (update(sample_rate_hz=1), "unsupported_audio_format"),
        (update(extra_body=3), "invalid_event"),
        (update(extra_body={"realtime_tools": 3}), "invalid_tools"),
        ({"type": "playback.ack", "item_id": "none", "played_ms": 1}, "item_not_found"),
        ({"type": "session.event_ack"}, "invalid_event"),
        ({"type": "session.resume"}, "invalid_session_resume"),
        (spoken(is_speech="yes"), "invalid_event"),
        (spoken(format="mp3"), "unsupported_audio_format"),
        ({"type": "input_audio_buffer.append", "audio": "!"}, "invalid_audio"),
        ({"type": "no.such.event"}, "invalid_event"),
    ],
)
def test_errors(message: dict[str, Any], code: str) -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        client.send({**message, "event_id": "mine"})
        await asyncio.sleep(0.01)

    error = scene(body).of("error")[0]["error"]
    assert (error["code"], error["type"], error["event_id"]) == (code, "invalid_request_error", "mine")


def test_a_call_that_fails() -> None:
    from mlx_voicechat.events import FailureReason, FunctionFailed

    async def body(client: Client, engine: VirtualEngine) -> None:
        client.session.deliver(FunctionFailed(3, "", FailureReason.MALFORMED, "{"))

    event = scene(body).of("duplex.function_call.done")[0]["event"]
    assert (event["call_id"], event["arguments"], event["reason"]) == (None, "{", "malformed")


# Resume


def joined(events: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What a conversation comes to, whatever its ids are."""
    sound = b"".join(base64.b64decode(event["delta"]) for event in events if event["type"] == DELTA)
    texts = [event["transcript"] for event in events if "transcript" in event]
    kinds = [event["type"] for event in events if not event["type"].startswith("session.")]
    return sound, texts, kinds


def cut_conversation(cuts: list[float], tools: bool = False) -> list[dict[str, Any]]:
    """A conversation whose socket drops at these moments, for 0.7 s each; all its events in order."""

    async def main() -> list[dict[str, Any]]:
        engine = VirtualEngine(TurnModel())
        client = Client(engine, duplex=True)
        session = client.session
        assert isinstance(session, DuplexSession)
        client.send(update(extra_body={"realtime_tools": [TOOL] if tools else []}))
        begun, dropped = client.loop.time(), 0.0
        waiting = list(cuts)
        sent = False
        for tick in range(700):
            while client.loop.time() - begun - dropped < tick * 0.01:
                await asyncio.sleep(max(tick * 0.01 - (client.loop.time() - begun - dropped), 1e-4))
            if waiting and tick * 0.01 >= waiting[0]:
                waiting.pop(0)
                last = client.events[-1]["server_event_seq"]
                session.detach()
                await asyncio.sleep(0.7)
                dropped += 0.7
                session.attach(client.take_resumed, client.close, last)
            if tick % 10 == 0 and tick < 60:
                client.send(spoken(seconds=0.1))
            elif tick % 10 == 0:
                client.send(said(0.1, loud=False, rate_hz=16_000))
            calls = client.of("response.function_call_arguments.done")
            if calls and not sent and client.of("response.done"):
                sent = True
                output = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "sunny"}
                client.send({"type": "conversation.item.create", "item": output}, {"type": "response.create"})
        session.end()
        return client.events

    events: list[dict[str, Any]] = run(main)
    return events


@pytest.mark.parametrize("tools", [False, True])
def test_a_conversation_that_is_cut_a_hundred_times(tools: bool) -> None:
    whole = joined(cut_conversation([], tools))
    assert whole[2].count("response.done") == 1 + tools
    draw = np.random.default_rng(3)
    for _ in range(50):
        cuts = sorted(draw.uniform(0.05, 3.5, size=draw.integers(1, 4)).tolist())
        assert joined(cut_conversation(cuts, tools)) == whole, cuts


def test_the_model_stands_still_meanwhile() -> None:
    async def body(client: Client, engine: VirtualEngine) -> None:
        session = client.session
        assert isinstance(session, DuplexSession)
        client.send(spoken())
        await client.until(DELTA)
        session.detach()
        await asyncio.sleep(0.01)
        frames = engine.model.sessions[0].frames
        await asyncio.sleep(20)
        assert engine.model.sessions[0].frames == frames
        token = session.attachment.token
        session.attach(client.take_resumed, client.close, client.events[-1]["server_event_seq"])
        assert session.attachment.token != token
        assert not session.attachment.accepts(token)
        await client.until("response.done")

    scene(body, TurnModel(LONG))


def test_what_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal.Journal.__init__, "__defaults__", (20_000,))

    async def body(client: Client, engine: VirtualEngine) -> None:
        session = client.session
        assert isinstance(session, DuplexSession)
        client.send(spoken())
        await client.until("response.done")
        for last, code in ((0, "journal_overflow"), (10**6, "journal_gap"), (-1, "journal_gap")):
            with pytest.raises(JournalLost) as lost:
                session.attach(client.take_resumed, client.close, last)
            assert lost.value.code == code
        assert session.journal.size_bytes <= 20_000

    scene(body, TurnModel(LONG))


@pytest.fixture
def server() -> Any:
    with running_server(TurnModel(LONG), max_sessions=1, disconnect_grace_seconds=0.6) as server:
        yield server


def opened(url: str) -> Any:
    return talking(url, "duplex=1")


def resume(
    server: RunningServer, created: dict[str, Any], last: int, before: Talker | None = None, **fields: Any
) -> Talker:
    """Another socket that asks for the session; what it had of it came `before`."""
    socket = connect(f"{server.ws_url}?duplex=1&autostart=0", max_size=None).__enter__()
    talker = Talker(socket)
    talker.order = before.order if before is not None else talker.order
    asked = {"session_id": created["session"]["id"], "resume_token": created["resume_token"]}
    talker.send({"type": "session.resume", **asked, "last_received_server_event_seq": last, **fields})
    return talker


def closing(talker: Talker) -> int:
    with suppress(ConnectionClosed):
        while True:
            talker.receive()
    assert talker.socket.close_code is not None
    return talker.socket.close_code


def test_resume_over_the_wire(server: RunningServer) -> None:
    with opened(server.ws_url) as talker:
        created = talker.events[0]
        talker.send(spoken())
        last = talker.until(DELTA)["server_event_seq"]
        talker.socket.socket.close()
    again = resume(server, created, last, talker)
    resumed = again.receive()
    assert (resumed["type"], resumed["attachment_generation"]) == ("session.resumed", 2)
    assert resumed["resume_token"] != created["resume_token"]
    assert again.receive()["server_event_seq"] == last + 1
    third = resume(server, resumed, 0)
    assert third.receive()["type"] == "session.resumed"
    again.until("session.replaced")
    assert closing(again) == 1000
    for fields, code in (
        ({"resume_token": created["resume_token"]}, "invalid_resume_token"),
        ({"resume_token": 3}, "invalid_resume_token"),
        ({"session_id": "duplex-none"}, "session_resume_expired"),
        ({"session_id": None}, "session_resume_expired"),
        ({"resume_token": third.events[0]["resume_token"], "last_received_server_event_seq": "x"}, "invalid_event"),
    ):
        wrong = resume(server, resumed, 0, **fields)
        assert wrong.receive()["error"]["code"] == code
        assert closing(wrong) == 1008
    third.send({"type": "session.close"})
    third.until("session.closed")
    assert closing(third) == 1000


def test_a_session_that_nobody_resumes_expires(server: RunningServer) -> None:
    with opened(server.ws_url) as talker:
        created = talker.events[0]
    assert server.engine.busy
    deadline = time.monotonic() + 5
    while server.engine.busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    late = resume(server, created, 0)
    assert late.receive()["error"]["code"] == "session_resume_expired"
    late.socket.close()


@pytest.mark.parametrize("query", ["duplex=1", "duplex=1&autostart=0", "model=any"])
def test_a_new_client_takes_the_place_of_a_detached_one(query: str) -> None:
    with running_server(TurnModel(), max_sessions=1) as server:
        with opened(server.ws_url) as talker:
            created = talker.events[0]
            talker.send(spoken())
            talker.until(DELTA)
        with connect(f"{server.ws_url}?{query}", max_size=None) as socket:
            second = Talker(socket)
            if "autostart" in query:
                second.send(update(instructions="New."))
            session = second.until("session.created")["session"]
            assert session["id"] != created["session"]["id"]
            if query == "model=any":  # nothing could be resumed
                with pytest.raises(InvalidStatus, match="503"):
                    resume(server, created, 0)
            else:
                assert resume(server, created, 0).receive()["error"]["code"] == "session_resume_expired"


def test_the_handshake_of_a_client_that_updates_first(server: RunningServer) -> None:
    with connect(f"{server.ws_url}?duplex=1&autostart=0&model=m") as socket:
        talker = Talker(socket)
        talker.send(update(instructions="Be brief.", overlap_policy="barge_in_on_speech"))
        created, updated = talker.until("session.created"), talker.until("session.updated")
        assert created["session"]["instructions"] == updated["session"]["instructions"] == "Be brief."
        assert created["session"]["overlap_policy"] == "barge_in_on_speech"
        with pytest.raises(InvalidStatus, match="503"), connect(f"{server.ws_url}?model=m"):
            pass
        with connect(f"{server.ws_url}?duplex=1&autostart=0") as other:
            other.send(json.dumps(update()))
            error = json.loads(other.recv(5))["error"]
            assert (error["code"], error["type"]) == ("resource_exhausted", "rate_limit_error")
