"""StrictV3Client: `voicechat.realtime` version 3, turns owned by the client. Needs no MLX.

async with StrictV3Client("ws://127.0.0.1:8080", tools=[...]) as client:
    await client.start_turn()
    await client.stream_pcm(read_pcm16_wav("question.wav"))
    await client.commit()
    response = await client.next_response()
    async for chunk in response.audio(): ...
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from websockets.exceptions import ConnectionClosed

from mlx_voicechat.client.connecting import PATH, open_socket, realtime_url
from mlx_voicechat.client.errors import StrictV3Error
from mlx_voicechat.client.feed import Feed, Subscription
from mlx_voicechat.client.link import Transport
from mlx_voicechat.client.strict_handles import Call, Deadlines, StrictResponse, Turn, TypedJob
from mlx_voicechat.client.strict_state import CONCISE, Event, State, broken
from mlx_voicechat.errors import InputError, ServerError

INPUT_RATE_HZ = 16_000
PACKET_BYTES = 40_960
TEXT_CHARACTERS = 1_000
STARTED, COMMITTED = "input_audio_buffer.turn_started", "input_audio_buffer.committed"


class StrictV3Client:
    """One conversation. Entering shakes hands up to the model-ready barrier, leaving stops it for good.

    What breaks the protocol, a deadline or a fatal error ends it: every later call, and every handle, raises that
    StrictV3Error. What the server refuses without ending raises one from its own call alone.
    """

    def __init__(
        self,
        url: str,
        *,
        instructions: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        api_key: str = "",
        deadlines: Deadlines = Deadlines(),  # noqa: B008  it is frozen
        connect: Callable[[str], Awaitable[Transport]] | None = None,
    ) -> None:
        self._address = url if connect else _address(url)
        self._connect = connect or (lambda address: open_socket(address, api_key))
        self._wanted: Event = {"protocol_version": 3, "instructions": instructions, "tools": [dict(t) for t in tools]}
        self._deadlines = deadlines
        self._transport: Transport | None = None
        self._reader: asyncio.Task[None] | None = None
        self._state = State()
        self._feed: Feed[Event] = Feed()
        self._changed = asyncio.Event()
        self._turns = 0
        self._open_turn: int | None = None
        self._typing = 0  # calls that wait to send typed text
        self._silent_since: float | None = None  # of audio sent with no event after it

    # -- the conversation --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> StrictV3Client:
        state, deadlines = self._state, self._deadlines
        try:
            self._transport = await self._connect(self._address)
            self._reader = asyncio.create_task(self._read())
            await self._within(lambda: state.created is not None, deadlines.created_s, "session.created")
            agreed = {"capabilities": {"function_output_model_output": CONCISE}} if state.concise else {}
            sent = await self._send({"type": "session.update", "session": {**self._wanted, **agreed}})
            await self._within(lambda: state.updated is not None, deadlines.updated_s, "session.updated", sent)
            negotiated = (self.session.get("capabilities") or {}).get("function_output_model_output")
            if negotiated != (CONCISE if state.concise else None):
                raise self._end(broken(f"function_output_model_output is {negotiated!r}"))
        except BaseException:
            await self._hang_up()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """session.stop, and the server's word that it is over; nothing happens when it is already."""
        with suppress(ServerError):
            if not self._feed.ended:
                await self._send({"type": "session.stop"})
                await self._within(lambda: self._feed.ended, self._deadlines.closed_s, "session.closed")
        await self._hang_up()

    def abort(self) -> None:
        """End it at once: leaving then hangs up without a farewell."""
        self._end(None)

    @property
    def capabilities(self) -> dict[str, Any]:
        """What the server told at its greeting."""
        return dict((self._state.created or {}).get("capabilities") or {})

    @property
    def session(self) -> dict[str, Any]:
        """The session in force."""
        return dict((self._state.updated or {}).get("session") or {})

    @property
    def ended(self) -> bool:
        return self._feed.ended

    # -- saying ------------------------------------------------------------------------------------------------------

    async def append(self, pcm: bytes) -> bool:
        """Say PCM16 mono at 16 kHz, at any time; False where it is dropped: a call or typed work is under way."""
        if len(pcm) % 2:
            raise InputError(f"{len(pcm)} bytes are no whole number of samples.")
        self._check()
        if self._open_turn is None and (self._state.call or self._state.jobs):
            return False
        for at in range(0, len(pcm), PACKET_BYTES):
            audio = base64.b64encode(pcm[at : at + PACKET_BYTES]).decode()
            form = {"encoding": "pcm16", "sample_rate": INPUT_RATE_HZ, "channels": 1}
            await self._send({"type": "input_audio_buffer.append", **form, "audio": audio})
            self._silent_since = self._silent_since or time.monotonic()
        return True

    async def stream_pcm(self, pcm: bytes, *, chunk_ms: float = 20, realtime: bool = True) -> None:
        """Say audio in pieces, in real time or as fast as it goes."""
        size = max(int(chunk_ms * INPUT_RATE_HZ / 1000), 1) * 2
        began = time.monotonic()
        for at in range(0, len(pcm), size):
            await self.append(pcm[at : at + size])
            if realtime:
                said = min(at + size, len(pcm)) / 2 / INPUT_RATE_HZ
                await asyncio.sleep(began + said - time.monotonic())

    async def start_turn(self) -> int:
        """Begin a turn once no call and no typed work is open; its number. An open response is cancelled by it."""
        if self._open_turn is not None:
            raise InputError("A turn is open: commit it first.")
        state = self._state
        await self._until(lambda: state.call is None and not state.jobs and not self._typing)
        self._turns += 1
        self._open_turn = number = self._turns
        try:
            await self._barrier("input_audio_buffer.turn_start", STARTED, number, {})
        except BaseException:
            self._open_turn = None
            raise
        return number

    async def commit(self, diagnostics: Mapping[str, Any] | None = None) -> Turn:
        """End the turn: exactly one response follows."""
        if self._open_turn is None:
            raise InputError("No turn is open: start one first.")
        number, more = self._open_turn, {"diagnostics": dict(diagnostics)} if diagnostics else {}
        turn_id = str((await self._barrier("input_audio_buffer.commit", COMMITTED, number, more))["turn_id"])
        self._open_turn = None
        self._changed.set()
        loop = asyncio.get_running_loop()
        loop.call_later(self._deadlines.response_s, self._check_answered, turn_id)
        return Turn(number, turn_id)

    async def request_text(self, text: str) -> TypedJob:
        """Say typed text once no call and no turn is open, before a turn that waits for the same."""
        if not text.strip() or len(text) > TEXT_CHARACTERS:
            raise InputError(f"Typed text has 1 to {TEXT_CHARACTERS:,} characters, not {len(text):,}.")
        self._typing += 1
        try:
            await self._until(lambda: self._state.call is None and self._open_turn is None)
            job = TypedJob(secrets.token_hex(16))
            self._state.jobs[job.job_id] = job
            await self._send({"type": "input_text.request", "job_id": job.job_id, "text": text})
        finally:
            self._typing -= 1
            self._changed.set()
        return job

    async def give(self, call: Call, output: str, model_output: str | None = None) -> None:
        """A call's result; returns when it was applied. `model_output` is what the model gets instead, where agreed."""
        item = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        if model_output is not None and self._state.concise:
            item["model_output"] = model_output
        sent = await self._send({"type": "conversation.item.create", "item": item})
        kind = "conversation.item.function_call_output.applied"
        await self._within(lambda: self._state.call is not call, self._deadlines.applied_s, kind, sent)
        if self._state.applied != call.call_id:
            raise StrictV3Error(f"The call {call.call_id} ended without its result.", code="function_call_ended")

    # -- hearing -----------------------------------------------------------------------------------------------------

    def events(self) -> Subscription[Event]:
        """Every event from now on, as the wire has it."""
        return self._feed.subscribe()

    async def next_response(self) -> StrictResponse:
        """The next response that nobody was given."""
        await self._until(lambda: bool(self._state.responses))
        return self._state.responses.popleft()

    async def next_call(self) -> Call:
        """The next function call that nobody was given."""
        await self._until(lambda: bool(self._state.calls))
        return self._state.calls.popleft()

    # -- the connection ----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Take events to the end."""
        fault: ServerError | None = None
        assert self._transport is not None
        try:
            while self._state.closed is None and not self._feed.ended:  # wait_for may swallow a cancellation
                event = _parsed(await self._received(self._transport))
                self._silent_since = None
                try:
                    self._state.take(event)
                finally:
                    self._feed.publish(event)
                    self._changed.set()
        except asyncio.TimeoutError:
            fault = StrictV3Error(f"The server has sent nothing for {self._deadlines.silent_s:g} s.", code="silent")
        except (ConnectionClosed, OSError, EOFError) as lost:
            code = lost.rcvd.code if isinstance(lost, ConnectionClosed) and lost.rcvd else None
            shown = f" (closing code {code})" if code else ""
            fault = StrictV3Error(f"The connection was lost without session.closed{shown}.", code="connection_lost")
        except ServerError as wrong:
            fault = wrong
        self._end(fault)

    async def _received(self, transport: Transport) -> str | bytes:
        """The next message. Raises TimeoutError when none has come for too long since audio was sent."""
        patience = self._deadlines.silent_s
        while True:
            try:
                return await asyncio.wait_for(transport.recv(), patience)
            except asyncio.TimeoutError:
                since = time.monotonic() if self._silent_since is None else self._silent_since
                patience = since + self._deadlines.silent_s - time.monotonic()
                if patience <= 0:
                    raise

    def _end(self, fault: ServerError | None) -> ServerError:
        """The conversation is over; what ended it first."""
        self._feed.end(fault)
        ended = self._feed.fault or StrictV3Error("The conversation is over.", code="session_closed")
        self._state.fail(ended)
        self._changed.set()
        return ended

    async def _hang_up(self) -> None:
        self._end(None)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(ConnectionClosed, OSError, EOFError, ServerError):
                await transport.close()

    async def _send(self, message: Event) -> str:
        self._check()
        assert self._transport is not None
        stamped = {"event_id": f"client_evt_{secrets.token_hex(16)}", **message}
        try:
            await self._transport.send(json.dumps(stamped))
        except (ConnectionClosed, OSError, EOFError, ServerError):
            await self._until(lambda: False)  # the reader says why
        return str(stamped["event_id"])

    async def _barrier(self, kind: str, answer: str, turn: int, more: Event) -> Event:
        """Send a turn's start or end until it is acknowledged: the same message again when no answer comes."""
        sent = f"client_evt_{secrets.token_hex(16)}"
        message = {"type": kind, "event_id": sent, "client_turn_id": turn, **more}
        acknowledged, refusals = self._state.acknowledged, self._state.refusals
        first = time.monotonic()
        while (left := first + self._deadlines.acknowledged_s - time.monotonic()) > 0:
            self._state.expect(answer, turn, sent)
            await self._send(message)
            with suppress(asyncio.TimeoutError):
                done = self._until(lambda: (answer, turn) in acknowledged or sent in refusals)
                await asyncio.wait_for(done, min(self._deadlines.retry_s, left))
                if sent in refusals:
                    raise refusals.pop(sent)
                return acknowledged.pop((answer, turn))
        seconds = self._deadlines.acknowledged_s
        raise self._end(StrictV3Error(f"No {answer} within {seconds:g} s.", code="deadline"))

    async def _within(self, ready: Callable[[], bool], seconds: float, what: str, sent: str = "") -> None:
        """Wait for what must come in time, or for the refusal of what was sent."""
        refusals = self._state.refusals
        try:
            await asyncio.wait_for(self._until(lambda: ready() or sent in refusals), seconds)
        except asyncio.TimeoutError:
            raise self._end(StrictV3Error(f"No {what} within {seconds:g} s.", code="deadline")) from None
        if sent in refusals:
            raise refusals.pop(sent)

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._check()
            self._changed.clear()
            await self._changed.wait()

    def _check(self) -> None:
        if self._feed.ended:
            raise self._end(None)

    def _check_answered(self, turn_id: str) -> None:
        if turn_id in self._state.answered:
            self._state.answered.discard(turn_id)
        elif not self._feed.ended:
            seconds = self._deadlines.response_s
            self._end(StrictV3Error(f"No response.created within {seconds:g} s of the commit.", code="deadline"))


def _parsed(text: str | bytes) -> Event:
    if isinstance(text, bytes):
        raise broken("a binary frame")
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise broken("what is no JSON object")
    return event


def _address(url: str) -> str:
    """The address with what the dialect is chosen by, where the url has the common path."""
    parts = urlsplit(realtime_url(url, "url"))
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.path == PATH:
        query.setdefault("protocol", "strict-v3")
    return urlunsplit(parts._replace(query=urlencode(query)))
