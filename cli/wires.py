"""Other dialects than this project's own, made to look like it: a frame back for each frame said. No MLX.

These dialects send speech only while the assistant speaks. Here the user's audio is the clock: each 80 ms of it gives a
frame, of speech where some has come, else of silence, so that a conversation has one timeline whatever the dialect.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np
import numpy.typing as npt
from websockets.exceptions import ConnectionClosed

from mlx_voicechat.client import AudioFormat, DuplexClient, SessionConfig, StrictV3Client
from mlx_voicechat.client.connecting import open_socket, realtime_url
from mlx_voicechat.errors import ServerError
from mlx_voicechat.events import AudioFrame, Cancelled, Done, TextDelta, TranscriptDelta
from mlx_voicechat.sound.pcm import pcm16
from mlx_voicechat.sound.resampler import Resampler

from .client import CONNECT_SECONDS, SILENT_SECONDS, Interrupted, Refusal

if TYPE_CHECKING:
    from mlx_voicechat import Event

    from .client import Notice

LINGER_SECONDS = 1.5  # after the last word said, for an answer to begin
FULL_SCALE = 32768


class Timeline:
    """The server as a conversation sees it: a `client.Wire`.

    A dialect gives `open`, `_say`, `_interrupt`, `_end`, and puts what it hears into `_text`, `_transcript`, `_speak`.
    """

    input_rate_hz = 16_000
    frame_samples = 1_280
    tools: tuple[str, ...] = ()  # of the server's operator; these dialects do not tell

    def __init__(self, output_rate_hz: int) -> None:
        self.output_rate_hz = output_rate_hz
        self.model = ""
        self._out: asyncio.Queue[Event | Notice | ServerError] = asyncio.Queue()
        self._speech = np.zeros(0, np.float32)
        self._frames = self._said = 0
        self._words = {TextDelta: "", TranscriptDelta: ""}
        self._speaking = False
        self._moved = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def frame_seconds(self) -> float:
        return self.frame_samples / self.input_rate_hz

    async def open(self, system_prompt: str | None = None, seed: int = 0) -> None:
        """Begin the conversation."""
        raise NotImplementedError

    async def _say(self, samples: npt.NDArray[np.float32]) -> None:
        raise NotImplementedError

    async def _interrupt(self) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        """The user's side is over: wait for what is still to come."""
        await self._quiet()

    async def close(self) -> None:
        """Hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """Hang up without a farewell."""

    async def append(self, samples: npt.ArrayLike) -> None:
        """Say float samples (S,); as much time passes."""
        said = np.asarray(samples, np.float32)
        await self._say(said)
        self._said += len(said)
        while self._said >= (self._frames + 1) * self.frame_samples:
            self._frame()

    async def commit(self) -> None:
        """End the user's side; what is owed is still answered, then Done."""
        self._start(self._finish())

    async def cancel(self) -> None:
        """End the conversation now; then Cancelled."""
        self._out.put_nowait(Cancelled(self._frames))

    async def interrupt(self) -> None:
        """End the assistant's turn; then Interrupted."""
        await self._interrupt()

    async def events(self) -> AsyncIterator[Event | Notice]:
        """What happens, to Done or Cancelled. Raises ServerError when it ends otherwise."""
        while True:
            event = await self._out.get()
            if isinstance(event, ServerError):
                raise event
            yield event
            if isinstance(event, Done | Cancelled):
                return

    async def _finish(self) -> None:
        ending = asyncio.create_task(self._end())
        self._tasks.append(ending)
        while not ending.done() or len(self._speech):  # nobody speaks any more: the clock is the room's
            self._frame()
            await asyncio.sleep(self.frame_seconds)
        await ending
        self._out.put_nowait(Done(self._frames))

    async def _quiet(self) -> None:
        """Wait until nobody speaks, and nobody has begun to for a while."""
        while True:
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), SILENT_SECONDS if self._speaking else LINGER_SECONDS)
            except asyncio.TimeoutError:
                return

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the rest; what it raises ends the conversation."""

        async def guarded() -> None:
            try:
                await work
            except ServerError as fault:
                self._out.put_nowait(fault)

        self._tasks.append(asyncio.create_task(guarded()))

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _frame(self) -> None:
        """The next frame of the timeline."""
        size = self.output_rate_hz * self.frame_samples // self.input_rate_hz
        piece, self._speech = self._speech[:size], self._speech[size:]
        samples = np.concatenate([piece, np.zeros(size - len(piece), np.float32)])
        self._out.put_nowait(AudioFrame(self._frames, samples, ()))
        self._frames += 1

    def _speak(self, pcm: bytes) -> None:
        samples = np.frombuffer(pcm[: len(pcm) // 2 * 2], "<i2").astype(np.float32) / FULL_SCALE
        self._speech = np.concatenate([self._speech, samples])

    def _text(self, delta: str) -> None:
        self._words[TextDelta] += delta
        self._out.put_nowait(TextDelta(self._frames, 0, delta, self._words[TextDelta]))

    def _transcript(self, delta: str) -> None:
        self._words[TranscriptDelta] += delta
        self._out.put_nowait(TranscriptDelta(self._frames, delta, self._words[TranscriptDelta]))

    def _began(self) -> None:
        self._speaking = True
        if self._words[TextDelta]:
            self._text(" ")
        self._moved.set()

    def _ended(self, cancelled: bool) -> None:
        self._speaking = False
        self._moved.set()
        if cancelled:
            self._drop()

    def _drop(self) -> None:
        """What has come and was not heard yet is not wanted any more."""
        self._speech = self._speech[:0]
        self._out.put_nowait(Interrupted(self._frames))

    def _take(self, raw: dict[str, Any]) -> None:
        """An event of OpenAI's vocabulary."""
        kind = raw.get("type")
        if kind == "response.output_audio.delta":
            self._speak(base64.b64decode(raw["delta"]))
        elif kind == "response.output_audio_transcript.delta":
            self._text(str(raw["delta"]))
        elif kind == "conversation.item.input_audio_transcription.delta":
            self._transcript(str(raw["delta"]))
        elif kind == "conversation.item.input_audio_transcription.completed":
            self._transcript(" ")
        elif kind == "response.created":
            self._began()
        elif kind == "response.done":
            self._ended(raw["response"].get("status") == "cancelled")
        elif kind == "input_audio_buffer.speech_started" and len(self._speech):
            self._drop()
        elif kind == "error":
            error = raw["error"] if isinstance(raw.get("error"), dict) else {}
            self._out.put_nowait(Refusal(str(error.get("code")), str(error.get("message"))))


class DuplexTimeline(Timeline):
    """OpenAI's vocabulary with the duplex extensions: the model owns the turns, and a lost connection comes back."""

    def __init__(self, url: str, api_key: str) -> None:
        super().__init__(22_050)
        self._url, self._api_key = url, api_key
        self._client: DuplexClient | None = None

    async def open(self, system_prompt: str | None = None, seed: int = 0) -> None:
        config = SessionConfig(instructions=system_prompt, output_audio=AudioFormat("pcm16", self.output_rate_hz))
        client = DuplexClient(self._url, config=config, api_key=self._api_key)
        self._client = await client.__aenter__()
        self.model = str(client.session_info.get("model") or "")
        self._start(self._listen(client))

    async def _listen(self, client: DuplexClient) -> None:
        async for event in client.events():
            self._take(event.raw)

    async def _say(self, samples: npt.NDArray[np.float32]) -> None:
        assert self._client is not None
        await self._client.append_audio(pcm16(samples).tobytes())

    async def _interrupt(self) -> None:
        assert self._client is not None
        await self._client.cancel_response()

    def abort(self) -> None:
        if self._client is not None:
            self._client.abort()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await super().close()


class OpenAITimeline(Timeline):
    """OpenAI's vocabulary alone, at 24 kHz: also for servers that know nothing else."""

    wire_rate_hz = 24_000

    def __init__(self, url: str, api_key: str) -> None:
        super().__init__(self.wire_rate_hz)
        self._url, self._api_key = url, api_key
        self._resampler = Resampler(self.input_rate_hz, self.wire_rate_hz)
        self._socket: Any = None

    async def open(self, system_prompt: str | None = None, seed: int = 0) -> None:
        self._socket = await open_socket(_with_query(self._url, model="default"), self._api_key)
        created = await self._receive(CONNECT_SECONDS)
        self._check(created)
        self.model = str((created.get("session") or {}).get("model") or "")
        form = {"type": "audio/pcm", "rate": self.wire_rate_hz}
        audio = {"input": {"format": form, "turn_detection": {"type": "server_vad"}}, "output": {"format": form}}
        session: dict[str, Any] = {"type": "realtime", "output_modalities": ["audio"], "audio": audio}
        if system_prompt is not None:
            session["instructions"] = system_prompt
        await self._send({"type": "session.update", "session": session})
        self._start(self._listen())

    def _check(self, event: dict[str, Any]) -> None:
        if event.get("type") == "error":
            error = event.get("error") or {}
            raise ServerError(f"The server refuses: {error.get('message')}", code=str(error.get("code") or ""))

    async def _listen(self) -> None:
        while True:
            self._take(await self._receive(None))

    async def _receive(self, seconds: float | None) -> dict[str, Any]:
        try:
            event = json.loads(await asyncio.wait_for(self._socket.recv(), seconds))
        except (ConnectionClosed, OSError, EOFError):
            raise ServerError("The connection to the server was lost.", code="connection_lost") from None
        except asyncio.TimeoutError:
            raise ServerError(f"The server has sent nothing for {seconds:g} s.") from None
        except ValueError:
            raise ServerError("The server does not speak this protocol.") from None
        return event if isinstance(event, dict) else {}

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._socket.send(json.dumps(message))
        except ConnectionClosed:
            raise ServerError("The connection to the server was lost.", code="connection_lost") from None

    async def _say(self, samples: npt.NDArray[np.float32]) -> None:
        pcm = pcm16(self._resampler.push(samples)).tobytes()
        if pcm:
            await self._send({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})

    async def _interrupt(self) -> None:
        await self._send({"type": "response.cancel"})

    def abort(self) -> None:
        if self._socket is not None:
            self._socket.transport.abort()

    async def close(self) -> None:
        await super().close()
        if self._socket is not None:
            await self._socket.close()


class StrictTimeline(Timeline):
    """strict-v3: the client owns the turns. A recording is one turn; `toggle` is push-to-talk, `type_text` speaks."""

    def __init__(self, url: str, api_key: str, push_to_talk: bool) -> None:
        super().__init__(22_050)
        self._url, self._api_key = url, api_key
        self._push_to_talk = push_to_talk
        self._client: StrictV3Client | None = None
        self.turn_open = False

    async def open(self, system_prompt: str | None = None, seed: int = 0) -> None:
        client = StrictV3Client(self._url, instructions=system_prompt, api_key=self._api_key)
        self._client = await client.__aenter__()
        self.model = str(client.session.get("checkpoint") or "")
        self._start(self._listen(client))
        if not self._push_to_talk:
            await self.toggle()

    async def toggle(self) -> bool:
        """Begin a turn, or end it; whether one is open now."""
        assert self._client is not None
        if self.turn_open:
            self.turn_open = False
            await self._client.commit()
        else:
            await self._client.start_turn()
            self.turn_open = True
        return self.turn_open

    async def type_text(self, text: str) -> None:
        """Say typed text. Raises ServerError where the server refuses it."""
        assert self._client is not None
        job = await (await self._client.request_text(text)).wait()
        if job.state == "rejected":
            raise ServerError(f"The server does not take typed text: {job.reason}.", code=job.reason or "")

    async def _listen(self, client: StrictV3Client) -> None:
        async for event in client.events():
            kind = event.get("type")
            if kind == "response.output_audio.delta":
                self._speak(base64.b64decode(event["delta"]))
            elif kind == "response.output_text.delta":
                self._text(str(event["delta"]))
            elif kind == "conversation.item.input_audio_transcription.delta":
                self._transcript(str(event["delta"]))
            elif kind == "conversation.item.input_audio_transcription.completed":
                self._transcript(" ")
            elif kind == "response.created":
                self._began()
            elif kind == "response.done":
                self._ended(event.get("status") == "cancelled")
            elif kind == "error":
                self._out.put_nowait(Refusal(str(event["error"]["code"]), str(event["error"]["message"])))

    async def _say(self, samples: npt.NDArray[np.float32]) -> None:
        assert self._client is not None
        await self._client.append(pcm16(samples).tobytes())

    async def _interrupt(self) -> None:
        await self.toggle()

    async def _end(self) -> None:
        if self.turn_open:
            await self.toggle()
        await self._quiet()

    def abort(self) -> None:
        if self._client is not None:
            self._client.abort()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.stop()
        await super().close()


def timeline(protocol: str, url: str, api_key: str, push_to_talk: bool) -> Timeline:
    """The conversation in a dialect other than this project's own."""
    if protocol == "strict-v3":
        return StrictTimeline(url, api_key, push_to_talk)
    return (DuplexTimeline if protocol == "duplex" else OpenAITimeline)(url, api_key)


@asynccontextmanager
async def connect(protocol: str, url: str, api_key: str, push_to_talk: bool) -> AsyncIterator[Timeline]:
    """A conversation in this dialect, hung up at the end; `open` connects it."""
    wire = timeline(protocol, url, api_key, push_to_talk)
    try:
        yield wire
    finally:
        with suppress(ServerError):
            await wire.close()


def _with_query(url: str, **wanted: str) -> str:
    parts = urlsplit(realtime_url(url))
    return urlunsplit(parts._replace(query=urlencode({**wanted, **dict(parse_qsl(parts.query))})))
