"""A client of /v1/realtime: one conversation over a WebSocket, its events the session's own. Needs no MLX.

async with connect("ws://127.0.0.1:8080") as wire:
    await wire.open(system_prompt="Be brief.", seed=0)
    await wire.append(samples)  # while another task reads
    async for event in wire.events(): ...
"""

from __future__ import annotations

import asyncio
import base64
import errno
import ipaddress
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import SplitResult, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from mlx_voicechat.errors import InputError, ServerError

if TYPE_CHECKING:
    import numpy.typing as npt

    from mlx_voicechat import Event

PATH = "/v1/realtime"
DEFAULT_URL = f"ws://127.0.0.1:8080{PATH}"
CONNECT_SECONDS = 10.0
LOADING_SECONDS = 600.0  # a server that loads its model is waited for
OPEN_SECONDS = 600.0  # a system prompt takes one step of the speech generator a token
SILENT_SECONDS = 60.0  # a server that owes an event and sends none for so long is gone
MAX_MESSAGE_BYTES = 16 << 20
WIRE_SCALE = 32767  # of the samples a server sends; what it receives is PCM as files have it, of 32768


@dataclass(frozen=True)
class Refused:
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


Notice: TypeAlias = Refused | Lagging | Interrupted


def realtime_url(url: str) -> str:
    """The WebSocket's address for what a person typed: http(s) or ws(s), with or without a path. Raises InputError."""
    example = f"Write it like {DEFAULT_URL}."
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as fault:
        raise InputError(f"--url {url!r} is no address: {fault}.", example) from None
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not host or port == 0 or not url.isprintable() or " " in url:
        raise InputError(f"--url {url!r} is no address of a server.", example)
    if parts.username is not None:
        raise InputError("--url holds a name or a password.", "A key is given with --api-key.")
    path = PATH if parts.path in ("", "/") else parts.path
    return urlunsplit(SplitResult(scheme, parts.netloc, path, parts.query, ""))


@asynccontextmanager
async def connect(url: str, api_key: str = "", say: Callable[[str], object] | None = None) -> AsyncIterator[Wire]:
    """Connect to a server, waiting for one that loads its model; `say` gets a line when that happens.

    Raises InputError for an address or a key that cannot be one, ServerError for everything a server can refuse.
    """
    address = realtime_url(url)
    if not (api_key.isascii() and api_key.isprintable()):
        raise InputError("The API key holds characters that cannot be sent.", "Check --api-key.")
    wire = Wire(await _socket(address, api_key, say), address)
    try:
        await wire.created()
        yield wire
    finally:
        await wire.close()


class Wire:
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
                raise _refusal(code, why)
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
            return _refusal("server_busy", why)
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
        return Refused(str(message["error"]["code"]), str(message["error"]["message"]))
    return None


def _samples(delta: str) -> Any:
    """Base64 PCM16 of the wire -> float32 samples (S,)."""
    import numpy as np

    return np.frombuffer(base64.b64decode(delta, validate=True), "<i2").astype(np.float32) / WIRE_SCALE


def _refusal(code: str, why: str) -> ServerError:
    if code == "server_busy":
        remedy = "Try again when it has ended, or start the server with a larger --max-sessions."
        return ServerError("The server is busy with another conversation.", remedy, code)
    return ServerError(f"The server did not open the conversation: {why.rstrip('.')} ({code}).", code=code)


# Connecting


async def _socket(address: str, api_key: str, say: Callable[[str], object] | None) -> ClientConnection:
    """A connected WebSocket, once the server has loaded its model."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    waited = 0.0
    while True:
        try:
            return await connect_socket(
                address,
                additional_headers=headers,
                compression=None,  # base64 of noise does not shrink
                proxy=None if _is_loopback(address) else True,
                open_timeout=CONNECT_SECONDS,
                ping_timeout=None,  # behind a backlog a pong is late; `SILENT_SECONDS` finds a server that is gone
                close_timeout=2,
                max_size=MAX_MESSAGE_BYTES,
            )
        except InvalidStatus as answer:
            if answer.response.status_code != 503 or waited >= LOADING_SECONDS:
                raise _http_error(answer, address, bool(api_key)) from None
            if not waited and say:
                say("the server is still loading its model: waiting for it.")
        except InvalidURI:
            raise InputError(f"--url {address!r} is no address.", f"Write it like {DEFAULT_URL}.") from None
        except InvalidHandshake as fault:
            raise _not_such_a_server(address, str(fault)) from None
        except (OSError, EOFError, asyncio.TimeoutError) as fault:
            raise _unreachable(address, fault) from None
        await asyncio.sleep(0.5)
        waited += 0.5


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _http_error(answer: InvalidStatus, address: str, with_key: bool) -> ServerError:
    """An HTTP answer in place of the upgrade, in words."""
    status, why = answer.response.status_code, _told(answer.response.body)
    if status == 401:
        message = f"The server at {address} does not accept this API key." if with_key else ""
        message = message or f"The server at {address} asks for an API key."
        return ServerError(message, "Give its key with --api-key or MLX_VOICECHAT_API_KEY.", "unauthorized")
    if status == 403:
        return ServerError(f"The server at {address} refuses this client{why}.", "", "forbidden")
    if status == 503:
        return ServerError(f"The server at {address} is not ready after {LOADING_SECONDS:g} s{why}.", "", "loading")
    return _not_such_a_server(address, f"HTTP {status}{why}")


def _told(body: bytes | bytearray | None) -> str:
    """What an error's body says, as the end of a sentence."""
    try:
        error = json.loads(body or b"")["error"]
        why = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        why = (body or b"").decode(errors="replace")
    line = " ".join(str(why).split()).rstrip(".")
    return f": {line[:200]}" if line and not line.startswith("<") else ""


def _not_such_a_server(address: str, answer: str) -> ServerError:
    other = (
        "with a certificate is reached with wss://"
        if address.startswith("ws:")
        else "without a certificate is reached with ws://"
    )
    remedy = f"Check the port and the path; a server {other}."
    return ServerError(f"There is no realtime server at {address}: it answered {answer.rstrip('.')}.", remedy)


def _unreachable(address: str, fault: Exception) -> ServerError:
    parts = urlsplit(address)
    host = parts.hostname
    if isinstance(fault, ssl.SSLCertVerificationError):
        remedy = "Name a file with its certificate, or its authority's, in SSL_CERT_FILE."
        return ServerError(f"The certificate of {parts.netloc} is not trusted: {fault.verify_message}.", remedy)
    if isinstance(fault, ssl.SSLError):
        remedy = "If it has no certificate, write ws://."
        return ServerError(f"No encrypted connection with {parts.netloc}: {fault.reason or fault}.", remedy)
    if isinstance(fault, socket.gaierror):
        return ServerError(f"There is no machine named {host}: {fault.strerror}.", "Check --url.")
    if isinstance(fault, TimeoutError | asyncio.TimeoutError):
        return ServerError(f"{parts.netloc} did not answer within {CONNECT_SECONDS:g} s.", "Check --url.")
    numbers = {fault.errno} if isinstance(fault, OSError) and fault.errno else set()
    numbers |= {int(number) for number in re.findall(r"\[Errno (\d+)\]", str(fault))}  # localhost: of two addresses
    if numbers == {errno.ECONNREFUSED}:
        return ServerError(f"Nobody listens at {parts.netloc}.", "Start a server with: mlx-voicechat serve")
    if isinstance(fault, ConnectionError | EOFError):
        return _not_such_a_server(address, "by hanging up")
    why = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
    return ServerError(f"Cannot reach {parts.netloc}: {why}.", "Check --url.")
