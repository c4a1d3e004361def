"""A stand-in for the realtime server behind the page: it plays a scene, without a model, on a free loopback port."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from mlx_voicechat.server.page import page_routes
from tests.support.scripted_server import FORMATS

FRAME_SAMPLES = 1764
RATE_HZ = 22050
TONE_HZ = 440
AMPLITUDE = 0.3
WAIT_SECONDS = 30
TRANSCRIPT = "conversation.item.input_audio_transcription.delta"
# frame -> type, delta, cumulative text; three turns and a function's
SAID = {
    4: (TRANSCRIPT, "What is the capital", "What is the capital"),
    7: (TRANSCRIPT, " of France?", "What is the capital of France?"),
    9: ("response.text.delta", "The capital of France", "The capital of France"),
    12: ("response.function.delta", "look_up(", "look_up("),
    13: ("response.function.delta", '"Paris")', 'look_up("Paris")'),
    14: ("response.text.delta", " is Paris.", "The capital of France is Paris."),
}
TOOL_EVENTS: dict[int, dict[str, Any]] = {
    8: {"type": "tool.call", "call_id": "call_1", "name": "look_up", "arguments": {"country": "France", "most": 1}},
    11: {"type": "tool.result", "call_id": "call_1", "result": '"Paris"'},
}


def spoken(index: int) -> bool:
    """Whether the assistant speaks in this frame: always."""
    return True


@dataclass
class Scene:
    """What the server does. `ahead` frames are answered before they were asked for, so that playback has a reserve."""

    health: str = "ready"
    ahead: int = 0
    speaks: Callable[[int], bool] = spoken
    error_code: str = ""  # of an event sent instead of frame `frames`
    error_message: str = ""
    frames: int | None = None
    close_code: int | None = None  # at frame `frames`
    busy: bool = False
    stalled: bool = False  # hears and does not answer
    status: int = 101  # of the upgrade
    tools: bool = False  # whether a tool is called
    received: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0

    def heard(self) -> np.ndarray:
        """Samples that were appended, int16."""
        chunks = [base64.b64decode(m["audio"]) for m in self.received if m["type"] == "input_audio_buffer.append"]
        return np.frombuffer(b"".join(chunks), "<i2")


def tone(index: int) -> bytes:
    """One frame of a tone that runs on from frame to frame, PCM16."""
    at = np.arange(index * FRAME_SAMPLES, (index + 1) * FRAME_SAMPLES)
    return np.round(AMPLITUDE * 32767 * np.sin(2 * math.pi * TONE_HZ * at / RATE_HZ)).astype("<i2").tobytes()


@contextmanager
def stand_in(scene: Scene) -> Iterator[str]:
    """Serve the page and the scene; the page's address."""

    async def health(request: Request) -> Response:
        loading = scene.health in ("loading", "warming")
        return JSONResponse({"status": scene.health}, 503 if loading else 200)

    async def plain(request: Request) -> Response:
        return JSONResponse({"error": {}}, 426 if scene.status == 403 else scene.status)

    async def realtime(socket: WebSocket) -> None:
        if scene.status != 101 or scene.health in ("loading", "warming"):
            await socket.send_denial_response(Response(status_code=scene.status if scene.status != 101 else 503))
            return
        scene.connections += 1
        await socket.accept("realtime")
        with suppress(WebSocketDisconnect):
            await _play(scene, socket)

    routes = [*page_routes(), Route("/health", health), Route("/v1/realtime", plain)]
    app = Starlette(routes=[*routes, WebSocketRoute("/v1/realtime", realtime)])
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, ws="websockets-sansio", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), name="test-stand-in")
    thread.start()
    try:
        for _ in range(WAIT_SECONDS * 100):
            if server.started:
                break
            threading.Event().wait(0.01)
        assert server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(WAIT_SECONDS)


async def _play(scene: Scene, socket: WebSocket) -> None:
    if scene.busy:
        await _send(socket, "error", error={"code": "server_busy", "message": "Another connection holds the session."})
        await socket.close(1013)
        return
    await _send(socket, "session.created", session={"id": "sess_0", "state": "configuring", **FORMATS})
    index = 0
    async for message in _messages(scene, socket):
        kind = message["type"]
        if kind == "session.update":
            session = {"id": "sess_0", "state": "ready", "model": "stand-in", "frame_samples": 1280, **FORMATS}
            await _send(socket, "session.updated", session=session)
        elif kind in ("response.interrupt", "turn.begin"):
            await _send(socket, "response.interrupted", frame_index=index)
        elif kind == "session.cancel":
            await _send(socket, "response.cancelled", frame_index=index)
            await socket.close(1000)
            return
        elif kind == "input_audio_buffer.append" and not scene.stalled:
            for _ in range(1 if index else 1 + scene.ahead):
                if index == scene.frames:
                    await _end(scene, socket)
                    return
                await _frame(scene, socket, index)
                index += 1


async def _frame(scene: Scene, socket: WebSocket, index: int) -> None:
    if index in SAID:
        kind, delta, text = SAID[index]
        field_name = "transcript" if kind == TRANSCRIPT else "text"
        await _send(socket, kind, frame_index=index, token_id=1, delta=delta, **{field_name: text})
    if scene.tools and index in TOOL_EVENTS:
        await socket.send_text(json.dumps({"frame_index": index, **TOOL_EVENTS[index]}))
    samples = tone(index) if scene.speaks(index) else bytes(2 * FRAME_SAMPLES)
    await _send(
        socket,
        "response.audio.delta",
        frame_index=index,
        delta=base64.b64encode(samples).decode(),
        audio_codes=[0] * 31,
    )


async def _end(scene: Scene, socket: WebSocket) -> None:
    if scene.error_code:
        await _send(socket, "error", error={"code": scene.error_code, "message": scene.error_message})
    if scene.close_code:
        await socket.close(scene.close_code)
    else:
        async for message in _messages(scene, socket):
            if message["type"] == "session.cancel":
                await socket.close(1000)
                return


async def _messages(scene: Scene, socket: WebSocket) -> AsyncIterator[dict[str, Any]]:
    while True:
        message = json.loads(await socket.receive_text())
        scene.received.append(message)
        yield message


async def _send(socket: WebSocket, kind: str, **fields: Any) -> None:
    await socket.send_text(json.dumps({"type": kind, "event_id": "event_0", **fields}))
