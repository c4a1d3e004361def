"""DuplexClient over connections that break: what is replayed, what is sent again, what cannot be brought back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from mlx_voicechat.client import (
    ConnectionResumed,
    DuplexClient,
    DuplexConnectionError,
    DuplexSessionClosedError,
    ReconnectPolicy,
)
from mlx_voicechat.client import outbox as outboxes
from mlx_voicechat.client.outbox import Outbox
from mlx_voicechat.server.journal import Attachment, Journal
from tests.support.scripted_peers import Peer, scripted
from tests.test_duplex_client import SESSION, farewell, greet

QUICK = ReconnectPolicy(attempts=5, first_delay_s=0.01, most_delay_s=0.05)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 50))


def test_a_connection_that_drops_comes_back() -> None:
    async def script(peer: Peer) -> None:
        if peer.number == 0:
            await greet(peer)
            await peer.say("tick", text="3")
            await peer.say("tick", text="4")
            await peer.receive("input_audio_buffer.commit")
            await peer.cut()
            return
        peer.sequence = 3  # the fourth is said once more
        asked = await peer.receive()
        assert asked["type"] == "session.resume"
        assert (asked["session_id"], asked["resume_token"]) == ("duplex-1", "rt_1")
        assert asked["last_received_server_event_seq"] == 4
        resumed = {"session": SESSION, "resume_token": "rt_2", "attachment_generation": 2}
        await peer.send("session.resumed", server_event_seq=6, last_client_event_seq=1, **resumed)
        for text in ("4", "5"):
            await peer.say("tick", text=text)
        await farewell(peer)

    async def work() -> None:
        async with scripted(script) as server:
            async with DuplexClient(server.url, reconnect=QUICK) as client:
                events = client.events()
                async for event in events:
                    if event.text == "4":
                        break
                resumed = client.wait_for("connection.resumed", timeout_s=5)
                await client.commit()
                await client.clear_input()
                event = await resumed
                assert isinstance(event, ConnectionResumed)
                assert client.resume_token == "rt_2"
                await client.cancel_response()
            told = [event async for event in events]
            first, second = server.peers
        assert [event.text for event in told if event.type == "tick"] == ["5"]
        assert sum(isinstance(event, ConnectionResumed) for event in told) == 1
        assert "resume" not in first.path
        numbered = [(m["type"], m["client_event_seq"]) for m in second.heard if "client_event_seq" in m]
        assert numbered == [("input_audio_buffer.clear", 2), ("response.cancel", 3)]

    run(work())


REFUSED = ["session_resume_expired", "invalid_resume_token", "session_replaced"]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        *[({"type": "error", "error": {"code": code, "message": "No."}}, code) for code in REFUSED],
        ({"type": "error", "error": "Unknown or expired.", "code": "session_resume_expired"}, "session_resume_expired"),
        ({"type": "session.resync_required", "reason": "journal_gap"}, "journal_gap"),
        ({"type": "session.expired", "reason": "disconnect_grace_expired"}, "disconnect_grace_expired"),
    ],
)
def test_a_session_that_cannot_be_resumed(answer: dict[str, Any], code: str) -> None:
    async def script(peer: Peer) -> None:
        if peer.number == 0:
            await greet(peer)
            await peer.cut()
        else:
            await peer.receive("session.resume")
            await peer.socket.send(json.dumps(answer))

    async def work() -> None:
        async with scripted(script) as server:
            async with DuplexClient(server.url, reconnect=QUICK) as client:
                with pytest.raises(DuplexSessionClosedError, match="could not be resumed") as ended:
                    await client.wait_for("never")
                assert ended.value.reason == code
            assert len(server.peers) == 2

    run(work())


@pytest.mark.parametrize("able", [True, False])
def test_without_reconnecting_a_drop_is_the_end(able: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.receive("session.update")
        session = {**SESSION, "capabilities": {"supports_session_resume": able}}
        await peer.say("session.created", session=session, resume_token="rt_1")
        await peer.cut()

    async def work() -> None:
        async with scripted(script) as server:
            policy = None if able else QUICK
            async with DuplexClient(server.url, reconnect=policy) as client:
                with pytest.raises(DuplexSessionClosedError, match="connection to the server was lost"):
                    await client.wait_for("never")
                with pytest.raises(DuplexSessionClosedError):
                    await client.clear_input()
            assert len(server.peers) == 1

    run(work())


def test_a_server_that_stays_away() -> None:
    async def script(peer: Peer) -> None:
        if peer.number == 0:
            await greet(peer)
        await peer.cut()

    async def work() -> None:
        async with scripted(script) as server:
            async with DuplexClient(server.url, reconnect=QUICK) as client:
                with pytest.raises(DuplexSessionClosedError, match="It was not made again"):
                    await client.wait_for("never")
            assert len(server.peers) == 1 + QUICK.attempts

    run(work())


def test_a_server_that_is_silent_for_three_heartbeats_is_gone() -> None:
    async def script(peer: Peer) -> None:
        if peer.number == 0:
            await greet(peer)
            await peer.receive("never")
        await peer.receive("session.resume")
        await peer.send("session.resumed", session=SESSION, resume_token="rt_2", attachment_generation=2)
        while (await peer.receive("session.heartbeat", "session.close"))["type"] == "session.heartbeat":
            await peer.send("session.heartbeat_ack")
        await peer.send("session.closed", reason="client_close")

    async def work() -> None:
        async with scripted(script) as server, DuplexClient(server.url, heartbeat_interval_s=0.1) as client:
            began = time.monotonic()
            await client.wait_for("connection.resumed", timeout_s=20)
            assert time.monotonic() - began > 0.25

    run(work())


def test_closing_without_a_connection() -> None:
    async def script(peer: Peer) -> None:
        if peer.number == 0:
            await greet(peer)
        await peer.cut()

    async def work() -> None:
        policy = ReconnectPolicy(attempts=3, first_delay_s=10, most_delay_s=10)
        async with scripted(script) as server:
            client = DuplexClient(server.url, reconnect=policy)
            async with client:
                sending = asyncio.create_task(_send_until(client))
                await asyncio.sleep(0.2)
            with pytest.raises(DuplexSessionClosedError):
                await sending

    run(work())


async def _send_until(client: DuplexClient) -> None:
    while True:
        await client.clear_input()
        await asyncio.sleep(0)


def test_delays_grow_to_a_bound() -> None:
    policy = ReconnectPolicy(first_delay_s=0.25, most_delay_s=4)
    for attempt, most in enumerate([0.25, 0.5, 1, 2, 4, 4, 4]):
        delays = [policy.delay(attempt) for _ in range(50)]
        assert most / 2 <= min(delays) <= max(delays) <= most
        assert len(set(delays)) > 1


def test_the_outbox_is_bounded_and_honest() -> None:
    box = Outbox(most_bytes=30)
    for number in range(1, 6):
        assert box.number() == number
        box.put(number, "x" * 10)
        box.written = number - 1
    assert box.size_bytes == 30
    assert [number for number, _ in box.after(2) or []] == [3, 4, 5]
    assert [number for number, _ in box.after(None) or []] == [5]
    assert box.after(1) is None
    box.arrived(4)
    assert (box.size_bytes, [number for number, _ in box.after(4) or []]) == (10, [5])


def test_what_did_not_fit_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(peer: Peer) -> None:
        if peer.number == 0:
            await greet(peer)
            await peer.receive("last")
            await peer.cut()
            return
        await peer.receive("session.resume")
        await peer.send("session.resumed", session=SESSION, resume_token="rt_2", last_client_event_seq=0)
        await peer.receive("never")

    async def work() -> None:
        async with scripted(script) as server, DuplexClient(server.url, reconnect=QUICK) as client:
            client._link._outbox = Outbox(most_bytes=1000)
            wait = client.wait_for("never", timeout_s=10)
            await client.append_audio(bytes(5000))
            await client.send({"type": "last"})
            with pytest.raises(DuplexSessionClosedError, match="More was said"):
                await wait

    run(work())
    assert outboxes.MOST_BYTES == 8 << 20


class Resumable:
    """A server that takes numbers 1, 2, ... and echoes each, over connections that it cuts at random places."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.taken: list[int] = []
        self.last_client = 0
        self.journal = Journal()
        self.attachment = Attachment()
        self.peer: Peer | None = None

    async def serve(self, peer: Peer) -> None:
        first = await peer.receive()
        if first["type"] == "session.update":
            self.peer = peer
            await self.say("session.created", session=SESSION, resume_token=self.attachment.token)
        else:
            assert self.attachment.accepts(first["resume_token"])
            entries = self.journal.after(first["last_received_server_event_seq"])
            self.peer = peer
            token = self.attachment.attach()
            await peer.send(
                "session.resumed", session=SESSION, resume_token=token, last_client_event_seq=self.last_client
            )
            for entry in entries:
                await peer.socket.send(entry.text)
        while (message := await peer.receive())["type"] != "session.close":
            if self.peer is not peer:
                return
            if message["type"] == "session.event_ack":
                self.journal.acknowledge(message["server_event_seq"])
                continue
            assert message["client_event_seq"] == self.last_client + 1
            self.last_client += 1
            self.taken.append(message["n"])
            await self.maybe_cut(peer)
            await self.say("echo", n=message["n"])
            await self.maybe_cut(peer)
        await self.say("session.closed", reason="client_close")

    async def say(self, kind: str, **fields: Any) -> None:
        number = self.journal.number()
        text = json.dumps({"type": kind, "server_event_seq": number, **fields})
        self.journal.write(number, text)
        assert self.peer is not None
        await self.peer.socket.send(text)

    async def maybe_cut(self, peer: Peer) -> None:
        if self.chance.random() < 0.1:
            await peer.cut()


def test_a_hundred_cuts_lose_nothing_and_repeat_nothing() -> None:
    async def work() -> None:
        here = Resumable(seed=1)
        async with scripted(here.serve) as server:
            async with DuplexClient(server.url, reconnect=QUICK) as client:
                events, sent = client.events(), 0
                echoed: list[int] = []
                while len(server.peers) <= 100:
                    for _ in range(7):
                        sent += 1
                        await client.send({"type": "number", "n": sent})
                    while len(echoed) < sent:
                        event = await anext(events)
                        if event.type == "echo":
                            echoed.append(event.raw["n"])
            assert here.taken == list(range(1, sent + 1))
            assert echoed == here.taken

    run(work())


def test_a_client_that_was_never_opened() -> None:
    async def work() -> None:
        client = DuplexClient("ws://127.0.0.1:1")
        with pytest.raises(DuplexSessionClosedError, match="not open"):
            await client.commit()
        with pytest.raises(DuplexConnectionError, match="Nobody listens"):
            async with client:
                pass

    run(work())
