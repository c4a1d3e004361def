"""A client of /v1/realtime: one conversation over a WebSocket, its events the session's own. Needs no MLX.

async with connect("ws://127.0.0.1:8080") as wire:
    await wire.open(system_prompt="Be brief.", seed=0)
    await wire.append(samples)  # while another task reads
    async for event in wire.events(): ...
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mlx_voicechat.client.connecting import CONNECT_SECONDS, open_socket, realtime_url, refusal
from mlx_voicechat.errors import ServerError

if TYPE_CHECKING:
    import numpy.typing as npt

    from mlx_voicechat import Event

OPEN_SECONDS = 600.0  # a system prompt takes one step of the speech generator a token
SILENT_SECONDS = 60.0  # a server that owes an event and sends none for so long is gone
WIRE_SCALE = 32767  # of the samples a server sends; what it receives is PCM as files have it, of 32768


@dataclass(frozen=True)
class Refusal:
    """The server did not do what a message asked for; the connection is still open."""

    code: str
    message: str


@dataclass(frozen=True)
class Lagging:
    """The server has this much audio waiting: it is slower than real time, or shared."""

    seconds: float


@dataclass(frozen=True)
class Interrupted:
    """The assistant's turn was ended as asked, at this frame."""

    frame_index: int


Notice: TypeAlias = Refusal | Lagging | Interrupted


@asynccontextmanager
async def connect(url: str, api_key: str = "", say: Callable[[str], object] | None = None) -> AsyncIterator[MlxcelWire]:
    """Connect to a server, waiting for one that loads its model; `say` gets a line when that happens.

    Raises InputError for an address or a key that cannot be one, ServerError for everything a server can refuse.
    """
    address = realtime_url(url)
    wire = MlxcelWire(await open_socket(address, api_key, say), address)
    try:
        await wire.created()
        yield wire
    finally:
        await wire.close()


class Wire(Protocol):
    """What a conversation needs of a connection, whatever dialect it speaks; `MlxcelWire` says what each means."""

    model: str
    tools: tuple[str, ...]
    frame_samples: int
    input_rate_hz: int
    output_rate_hz: int

    @property
    def frame_seconds(self) -> float: ...
    async def open(self, system_prompt: str | None = None, seed: int = 0) -> None: ...
    async def append(self, samples: npt.ArrayLike) -> None: ...
    async def commit(self) -> None: ...
    async def cancel(self) -> None: ...
    async def interrupt(self) -> None: ...
    async def close(self) -> None: ...
    def abort(self) -> None: ...
    def events(self) -> AsyncIterator[Event | Notice]: ...


class MlxcelWire:
    """One conversation: `open` it, then `append` and `commit` in one task while another takes the `events`.

    Samples are float mono, heard at `input_rate_hz` and spoken at `output_rate_hz`. Every call raises ServerError
    when the connection is lost.
    """

    def __init__(self, socket: ClientConnection, address: str) -> None:
        self._socket = socket
        self._address = address
        self.model = ""
        self.tools: tuple[str, ...] = ()
        self.frame_samples = 0
        self.input_rate_hz = self.output_rate_hz = 0

    @property
    def frame_seconds(self) -> float:
        """Length of a frame; after `open`."""
        return self.frame_samples / self.input_rate_hz

    async def created(self) -> None:
        """Take the server's greeting; ServerError when it is busy."""
        session = (await self._answer("session.created", CONNECT_SECONDS))["session"]
        with self._understanding():
            self.input_rate_hz = int(session["input_audio_format"]["sample_rate"])
            self.output_rate_hz = int(session["output_audio_format"]["sample_rate"])

    async def open(
        self,
        system_prompt: str | None = None,
        seed: int = 0,
        max_seconds: float | None = None,
        own_turns: bool = False,
    ) -> None:
        """Begin the conversation; with `own_turns`, `begin_turn` and `end_turn` say when the user speaks."""
        wanted = {"system_prompt": system_prompt, "seed": seed, "max_streaming_seconds": max_seconds}
        wanted |= {"extensions": True, "turns": "application" if own_turns else None}
        session = {name: value for name, value in wanted.items() if value is not None}
        await self._send({"type": "session.update", "session": session})
        updated = (await self._answer("session.updated", OPEN_SECONDS))["session"]
        with self._understanding():
            self.model, self.frame_samples = str(updated["model"]), int(updated["frame_samples"])
            self.tools = tuple(map(str, updated.get("tools", ())))

    async def append(self, samples: npt.ArrayLike) -> None:
        """Say float samples (S,); waits while the server takes no more."""
        from mlx_voicechat.sound.pcm import pcm16

        audio = base64.b64encode(pcm16(samples).tobytes()).decode()
        await self._send({"type": "input_audio_buffer.append", "audio": audio, "sample_rate": self.input_rate_hz})

    async def commit(self, pad_partial: bool = True) -> None:
        """End the user's side; what waits is still answered, then Done."""
        await self._send({"type": "input_audio_buffer.commit", "pad_partial": pad_partial})

    async def cancel(self) -> None:
        """End the conversation without an answer to what waits; then Cancelled."""
        await self._send({"type": "session.cancel"})

    async def interrupt(self) -> None:
        """End the assistant's turn at the next frame; then Interrupted."""
        await self._send({"type": "response.interrupt"})

    async def begin_turn(self) -> None:
        """Begin the user's turn, which ends the assistant's; then Interrupted. Of a conversation with own turns."""
        await self._send({"type": "turn.begin"})

    async def end_turn(self) -> None:
        """End the user's turn: it is answered."""
        await self._send({"type": "turn.end"})

    async def close(self) -> None:
        """Hang up; a server drops an unfinished conversation then."""
        await self._socket.close()

    def abort(self) -> None:
        """Hang up without a farewell: nothing is waited for."""
        self._socket.transport.abort()

    async def events(self) -> AsyncIterator[Event | Notice]:
        """What the server tells, to the end, Done or Cancelled. Raises ServerError when it ends otherwise."""
        from mlx_voicechat import Cancelled, Done

        while True:
            message = await self._receive(SILENT_SECONDS)
            with self._understanding():
                event = _event(message)
            if event is not None:
                yield event
            if isinstance(event, Done | Cancelled):
                return

    async def _answer(self, kind: str, seconds: float) -> dict[str, Any]:
        """The next message, which must be of this kind and hold a session; an error event becomes a ServerError."""
        message = await self._receive(seconds)
        with self._understanding():
            if message["type"] == "error":
                code, why = str(message["error"]["code"]), str(message["error"]["message"])
                raise refusal(code, why)
            if message["type"] != kind or not isinstance(message["session"], dict):
                raise ValueError(kind)
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._socket.send(json.dumps(message))
        except ConnectionClosed as end:
            raise self._lost(end) from None

    async def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            data = await asyncio.wait_for(self._socket.recv(), seconds)
        except ConnectionClosed as end:
            raise self._lost(end) from None
        except (TimeoutError, asyncio.TimeoutError):
            raise ServerError(f"The server at {self._address} has sent nothing for {seconds:g} s.") from None
        with self._understanding():
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError(message)
        return message

    def _understanding(self) -> _Understanding:
        return _Understanding(self._address)

    def _lost(self, end: ConnectionClosed) -> ServerError:
        code, why = (end.rcvd.code, end.rcvd.reason) if end.rcvd else (1006, "")
        if code == 1013:
            return refusal("server_busy", why)
        words = {1001: "The server is shutting down", 1006: "The connection to the server was lost"}
        message = words.get(code, f"The server closed the connection (code {code})")
        return ServerError(f"{message}{f': {why}' if why else ''}.", code="connection_lost")


class _Understanding:
    """Inside it, a message that is not as the protocol has it becomes a ServerError."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, _: object) -> None:
        if isinstance(fault, KeyError | TypeError | ValueError | RecursionError):
            message = f"What answers at {self._address} does not speak this protocol ({type(fault).__name__}: {fault})."
            raise ServerError(message, "Is it a server of mlx-voicechat?") from None


def _event(message: dict[str, Any]) -> Event | Notice | None:
    """A server's message as an event; None for one that needs no attention (pong, committed, what is yet unknown)."""
    from mlx_voicechat import AudioFrame, Cancelled, Done, FunctionDelta, TextDelta, TranscriptDelta
    from mlx_voicechat.events import FailureReason, FunctionApplied, FunctionCall, FunctionFailed

    kind = message["type"]
    if kind == "response.audio.delta":
        return AudioFrame(int(message["frame_index"]), _samples(message["delta"]), tuple(message["audio_codes"]))
    if kind == "conversation.item.input_audio_transcription.delta":
        return TranscriptDelta(int(message["frame_index"]), str(message["delta"]), str(message["transcript"]))
    if kind in ("response.text.delta", "response.function.delta"):
        make = TextDelta if kind == "response.text.delta" else FunctionDelta
        index, token = int(message["frame_index"]), int(message["token_id"])
        return make(index, token, str(message["delta"]), str(message["text"]))
    if kind == "tool.call":
        arguments = dict(message["arguments"])
        return FunctionCall(int(message["frame_index"]), str(message["call_id"]), str(message["name"]), arguments, "")
    if kind == "tool.result":
        return FunctionApplied(int(message["frame_index"]), (str(message["call_id"]),), (str(message["result"]),))
    if kind == "tool.failed":
        reason = FailureReason(message["reason"])
        return FunctionFailed(int(message["frame_index"]), str(message["call_id"]), reason, str(message["raw"]))
    if kind in ("response.done", "response.cancelled"):
        return (Done if kind == "response.done" else Cancelled)(int(message["frame_index"]))
    if kind == "response.interrupted":
        return Interrupted(int(message["frame_index"]))
    if kind == "session.lagging":
        return Lagging(float(message["backlog_seconds"]))
    if kind == "error":
        return Refusal(str(message["error"]["code"]), str(message["error"]["message"]))
    return None


def _samples(delta: str) -> Any:
    """Base64 PCM16 of the wire -> float32 samples (S,)."""
    import numpy as np

    return np.frombuffer(base64.b64decode(delta, validate=True), "<i2").astype(np.float32) / WIRE_SCALE
