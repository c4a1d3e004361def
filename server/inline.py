"""InlineDuplexClient: DuplexClient's methods on a model in this process, without a socket.

async with InlineDuplexClient("tiny", config=SessionConfig(instructions="Be brief.")) as client:
    await client.stream_pcm(read_pcm16_wav("question.wav"))
    async for response in client.responses(): ...

The same events come as over the wire: the server's own connection talks to the client's own, through two queues.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket

from mlx_voicechat.client import DuplexClient, DuplexConnectionError, SessionConfig

from .duplex_connection import DuplexConnection
from .duplex_sessions import DuplexSessions
from .engine import Engine
from .settings import ServerSettings
from .sockets import SCOPE_KEY
from .typed_voice import find_voice

if TYPE_CHECKING:
    from mlx_voicechat.client.link import Transport
    from mlx_voicechat.voicechat import VoiceChat

UNREAD_MESSAGES = 64  # beyond it the client counts as one that does not read
UNTAKEN_MESSAGES = 8  # of the client, beyond which it waits
END_SECONDS = 5.0  # for the frame that runs at the end
NEVER_SECONDS = 1e9


class InlineDuplexClient(DuplexClient):
    """One session on a model of this process; there is neither heartbeat nor resume.

    `model` is a checkpoint's name, a loaded one, or a function that loads one: it is called, and the model is used, on
    a thread of the client's own; nobody else may use it meanwhile. `seconds` is the longest session, `typed_voice` as
    the option of `serve`.
    """

    def __init__(
        self,
        model: str | VoiceChat | Callable[[], VoiceChat],
        *,
        config: SessionConfig | None = None,
        seconds: float | None = ServerSettings.max_audio_seconds,
        typed_voice: str | None = None,
    ) -> None:
        name = model if isinstance(model, str) else "model"
        self._load = model if callable(model) else lambda: _loaded(model)
        self._settings = ServerSettings(
            model=name, max_audio_seconds=seconds, idle_seconds=NEVER_SECONDS, typed_voice=typed_voice
        )
        self._engine: Engine | None = None
        super().__init__(
            "inline",
            config=config,
            reconnect=None,
            heartbeat_interval_s=None,
            handshake_timeout_s=threading.TIMEOUT_MAX,
            connect=self._reach,
        )

    async def _reach(self, _: str) -> Transport:
        """Load the model, and connect to it. Raises what loading raises."""
        self._engine = Engine(self._load, self._settings)
        self._engine.start(asyncio.get_running_loop())
        await asyncio.to_thread(self._engine.wait_ready, threading.TIMEOUT_MAX)
        return InlineTransport(self._engine, self._settings)

    async def __aenter__(self) -> InlineDuplexClient:
        try:
            await super().__aenter__()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """End the session, and the model's thread."""
        await super().close()
        if self._engine is not None:
            await self._engine.end(END_SECONDS)


class InlineTransport:
    """Both ends of a connection: the client's `send`, `recv`, `close`, and the WebSocket that the server sees."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue(UNTAKEN_MESSAGES)
        self._to_server.put_nowait({"type": "websocket.connect"})
        self._to_client: deque[str] = deque()
        self._arrived, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self._closed = False
        scope = {"type": "websocket", "path": "/v1/duplex", "query_string": b"autostart=0", "headers": []}
        websocket = WebSocket({**scope, "subprotocols": [], SCOPE_KEY: self}, self._to_server.get, self._from_server)
        voice = find_voice(settings.typed_voice)
        connection = DuplexConnection(websocket, engine, settings, voice, DuplexSessions())
        self._served = asyncio.create_task(connection.run())
        self._served.add_done_callback(self._ended)

    # -- the client's end --------------------------------------------------------------------------------------------

    async def send(self, text: str, /) -> None:
        if self._closed:
            raise DuplexConnectionError("The session has ended.")
        await self._to_server.put({"type": "websocket.receive", "text": text})

    async def recv(self) -> str:
        while not self._to_client:
            if self._closed:
                raise DuplexConnectionError("The session has ended.")
            self._arrived.clear()
            await self._arrived.wait()
        text = self._to_client.popleft()
        if len(self._to_client) < UNREAD_MESSAGES:
            self._room.set()
        return text

    async def close(self) -> None:
        self._close()
        self._served.cancel()
        with suppress(asyncio.CancelledError):
            await self._served

    # -- the server's end --------------------------------------------------------------------------------------------

    async def _from_server(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            self._to_client.append(message["text"])
            self._arrived.set()
            if len(self._to_client) >= UNREAD_MESSAGES:
                self._room.clear()
        elif message["type"] == "websocket.close":
            self._close()

    @property
    def blocked(self) -> bool:
        """Whether the client has not read for a while."""
        return not self._room.is_set()

    async def drained(self) -> None:
        await self._room.wait()

    def unblock(self) -> None:
        self._room.set()

    def hung_up(self) -> bool:
        return self._closed

    def allow_messages(self, size_bytes: int) -> None:
        """There is no limit here."""

    def _ended(self, served: asyncio.Task[None]) -> None:
        self._close()
        if not served.cancelled() and served.exception() is not None:
            context = {"message": "The connection failed.", "exception": served.exception()}
            asyncio.get_running_loop().call_exception_handler(context)

    def _close(self) -> None:
        self._closed = True
        self._arrived.set()


def _loaded(model: str | VoiceChat) -> VoiceChat:
    from mlx_voicechat import load

    return load(model) if isinstance(model, str) else model
