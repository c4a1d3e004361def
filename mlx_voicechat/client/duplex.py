"""DuplexClient: a session over a WebSocket that comes back by itself. Needs no MLX.

async with DuplexClient("ws://127.0.0.1:8080", config=SessionConfig(instructions="Be brief.")) as client:
    await client.stream_pcm(read_pcm16_wav("question.wav"))
    async for response in client.responses():
        async for chunk in response.audio(): ...
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from mlx_voicechat.client.connecting import open_socket, realtime_url
from mlx_voicechat.client.duplex_events import DuplexEvent, ErrorEvent
from mlx_voicechat.client.errors import DuplexSessionClosedError
from mlx_voicechat.client.feed import Subscription
from mlx_voicechat.client.link import Link, Transport, event_id, protocol_error
from mlx_voicechat.client.responses import ResponseHandle
from mlx_voicechat.client.session_config import ReconnectPolicy, SessionConfig
from mlx_voicechat.errors import InputError


class DuplexClient:
    """One session. Entering connects and configures it, leaving closes it.

    A lost connection is made again as `reconnect` says (None: not), and the session goes on without a gap: events come
    once, and what the server may not have got is sent again. Every call raises DuplexClientError or a kind of it;
    `connect` takes another way than a WebSocket to the server at an address.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        config: SessionConfig | None = None,
        api_key: str = "",
        reconnect: ReconnectPolicy | None = ReconnectPolicy(),  # noqa: B008  it is frozen
        heartbeat_interval_s: float | None = 30.0,
        handshake_timeout_s: float = 60.0,
        connect: Callable[[str], Awaitable[Transport]] | None = None,
    ) -> None:
        self.model = model
        self.config = config or SessionConfig()
        address = url if connect else _address(url, model)

        def reach() -> Awaitable[Transport]:
            return connect(address) if connect else open_socket(address, api_key)

        self._link = Link(reach, self.config.output_audio, reconnect, heartbeat_interval_s, handshake_timeout_s)

    async def __aenter__(self) -> DuplexClient:
        await self._link.open(self.config.as_json(self.model))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session, wait for the server's word that it has, and hang up."""
        await self._link.close()

    def abort(self) -> None:
        """End it at once: leaving then hangs up without a farewell."""
        self._link.abort()

    @property
    def session_id(self) -> str | None:
        """The server's name of the session."""
        return self._link.session_id

    @property
    def session_info(self) -> dict[str, Any]:
        """The session object, as the server last told it."""
        return self._link.session_info

    @property
    def resume_token(self) -> str | None:
        """What the next connection of this session will show."""
        return self._link.resume_token

    # -- saying ------------------------------------------------------------------------------------------------------

    async def send(self, event: dict[str, Any]) -> str:
        """Send any client event; its event_id, given or made. Waits while the connection is made again."""
        if not isinstance(event.get("type"), str):
            raise InputError("An event to send needs a type.")
        stamped = {"event_id": event_id(), **event}
        await self._link.send(stamped)
        return str(stamped["event_id"])

    async def append_audio(self, audio: bytes, *, is_speech: bool | None = None) -> str:
        """Say one piece of audio in the session's input format."""
        form = self.config.input_audio
        event: dict[str, Any] = {
            "type": "input_audio_buffer.append",
            "audio": base64.b64encode(audio).decode(),
            "format": form.format,
            "sample_rate_hz": form.sample_rate_hz,
        }
        return await self.send(event if is_speech is None else {**event, "is_speech": is_speech})

    async def stream_pcm(
        self, audio: bytes, *, chunk_ms: float = 100, realtime: bool = True, is_speech: bool | None = None
    ) -> int:
        """Say audio in pieces, in real time or as fast as it goes; how many pieces."""
        size = max(self.config.input_audio.byte_count(chunk_ms), self.config.input_audio.sample_bytes)
        began, count = time.monotonic(), 0
        for at in range(0, len(audio), size):
            await self.append_audio(audio[at : at + size], is_speech=is_speech)
            count += 1
            if realtime:
                said = self.config.input_audio.milliseconds(min(at + size, len(audio))) / 1000
                await asyncio.sleep(began + said - time.monotonic())
        return count

    async def commit(self, *, create_response: bool = True, is_speech: bool | None = None) -> str:
        """Seal what was said into an item; `create_response` False leaves the answer to the model's own decision."""
        event = {"type": "input_audio_buffer.commit", "final": True, "response_create": create_response}
        return await self.send(event if is_speech is None else {**event, "is_speech": is_speech})

    async def clear_input(self) -> str:
        """Drop what was said and is not committed."""
        return await self.send({"type": "input_audio_buffer.clear"})

    async def cancel_response(self, response_id: str | None = None) -> str:
        """End the response that is under way."""
        return await self.send({"type": "response.cancel", **({"response_id": response_id} if response_id else {})})

    async def ack_playback(
        self,
        played_ms: float,
        *,
        response_id: str | None = None,
        item_id: str | None = None,
        committed_ms: float | None = None,
        truncate: bool = False,
    ) -> str:
        """Report how much of a response was heard so far, of it all how much counts; `truncate`: no more will be."""
        ids = {"response_id": response_id, "item_id": item_id}
        event: dict[str, Any] = {"type": "playback.ack", **{name: one for name, one in ids.items() if one}}
        event["played_ms"] = int(played_ms)
        event["committed_ms"] = int(played_ms if committed_ms is None else committed_ms)
        return await self.send({**event, "truncate": True} if truncate else event)

    # -- hearing -----------------------------------------------------------------------------------------------------

    def events(self) -> Subscription[DuplexEvent]:
        """Every event from now on; ends with the session, and raises where that was not asked for."""
        return self._link.feed.subscribe()

    def __aiter__(self) -> Subscription[DuplexEvent]:
        return self.events()

    async def responses(self) -> AsyncIterator[ResponseHandle]:
        """A handle for each response of the session that was given to nobody yet."""
        while (handle := await self._link.responses.next()) is not None:
            yield handle

    def wait_for(self, *types: str, timeout_s: float | None = None) -> Coroutine[Any, Any, DuplexEvent]:
        """The next event of these types, from this call on.

        Raises DuplexProtocolError at an error event (unless it is waited for), TimeoutError, DuplexSessionClosedError.
        """
        return self._awaited(self._link.feed.subscribe(), types, timeout_s)

    async def _awaited(
        self, events: Subscription[DuplexEvent], types: tuple[str, ...], timeout_s: float | None
    ) -> DuplexEvent:
        async def first() -> DuplexEvent:
            async for event in events:
                if event.type in types:
                    return event
                if isinstance(event, ErrorEvent):
                    raise protocol_error(event)
            raise DuplexSessionClosedError(f"The session was closed while {' or '.join(types)} was waited for.")

        try:
            return await asyncio.wait_for(first(), timeout_s)
        except asyncio.TimeoutError:
            raise TimeoutError(f"No {' or '.join(types)} within {timeout_s:g} s.") from None


def _address(url: str, model: str) -> str:
    """The address with what the dialect is chosen by; a query that the url has stays."""
    parts = urlsplit(realtime_url(url, "url"))
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    query = {"duplex": "1", "autostart": "0", **({"model": model} if model else {}), **query}
    return urlunsplit(parts._replace(query=urlencode(query)))
