"""The routes, and what stands before them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.utils import ClientDisconnected

from .access import Gate, refusal
from .connection import FAILED, Connection, sessions_in_use
from .dialects import DUPLEX, MLXCEL, OPENAI, PATHS, REALTIME, Dialect, UnknownProtocol, chosen
from .duplex_connection import DuplexConnection, DuplexSessions, waits_for_a_message
from .engine import LOADING, READY, WARMING, Engine
from .limits import RETRY_SECONDS
from .metrics import CONTENT_TYPE
from .mlxcel import Mlxcel
from .openai_connection import OpenAIConnection
from .origins import Origins, normal
from .page import page_paths, page_routes
from .settings import ServerSettings
from .typed_voice import find_voice

SERVED = (MLXCEL, OPENAI, DUPLEX)  # the dialects of this server
NOT_HERE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
END_SECONDS = 1.0  # for the frame that runs when the server ends

log = logging.getLogger(__name__)


def create_app(engine: Engine, settings: ServerSettings) -> Starlette:
    """The application around an engine, which starts and ends with it."""
    started = time.time()
    voice = find_voice(settings.typed_voice)
    sessions = DuplexSessions()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start(asyncio.get_running_loop())
        yield
        await engine.end(END_SECONDS)

    def connection(dialect: Dialect, websocket: WebSocket) -> Connection:
        if dialect.name == MLXCEL:
            return Mlxcel(websocket, engine, settings)
        if dialect.name == DUPLEX:
            return DuplexConnection(websocket, engine, settings, voice, sessions)
        return OpenAIConnection(websocket, engine, settings, voice, dialect.beta)

    async def realtime(websocket: WebSocket) -> None:
        try:
            dialect = _dialect(websocket, settings)
        except UnknownProtocol as unknown:
            message = f"There is no protocol {unknown}. Those of this server: {', '.join(SERVED)}."
            await websocket.send_denial_response(refusal(400, "unknown_protocol", message))
            return
        if engine.state != READY:
            await websocket.send_denial_response(_not_ready(engine))
            return
        may_resume = dialect.name == DUPLEX and waits_for_a_message(websocket.query_params) and len(sessions) > 0
        if not may_resume:
            await sessions.make_room(engine)
        if dialect.refused_at_the_upgrade and not may_resume and not await engine.room():
            message = f"The server has {sessions_in_use(settings.max_sessions)} in use. Try again later."
            await websocket.send_denial_response(refusal(503, "server_busy", message, Retry_After=str(RETRY_SECONDS)))
            return
        try:
            await connection(dialect, websocket).run()
        except ClientDisconnected:
            raise  # in the handshake; uvicorn knows
        except Exception:
            log.exception("A connection failed.")
            with suppress(RuntimeError, WebSocketDisconnect):  # it may be closed already
                await websocket.close(FAILED)

    async def upgrade_required(request: Request) -> Response:
        message = f"{request.url.path} is a WebSocket: connect to it with a WebSocket client."
        return refusal(426, "upgrade_required", message, Upgrade="websocket", Connection="Upgrade")

    async def health(request: Request) -> Response:
        status = "busy" if engine.state == READY and engine.busy else engine.state
        body = {
            "status": status,
            "model": settings.model_id,
            "sessions": {"active": engine.active, "max": settings.max_sessions},
            "protocols": SERVED,
            "uptime_seconds": round(time.time() - started, 3),
        }
        if engine.state == READY:
            return JSONResponse(body)
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_SECONDS)})

    async def models(request: Request) -> Response:
        model = {"id": settings.model_id, "object": "model", "created": int(started), "owned_by": "mlx-voicechat"}
        return JSONResponse({"object": "list", "data": [{**model, "protocols": SERVED}]})

    async def metrics(request: Request) -> Response:
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE)

    async def not_here(request: Request) -> Response:
        message = f"This model listens and speaks; it does not serve {request.url.path}. Use {prefix}{REALTIME}."
        return refusal(501, "not_implemented", message)

    prefix = settings.api_prefix
    routes = [
        *(WebSocketRoute(prefix + path, realtime) for path in PATHS),
        *(Route(prefix + path, upgrade_required) for path in PATHS),
        Route(prefix + "/health", health),
        Route(prefix + "/v1/models", models),
        Route(prefix + "/metrics", metrics),
        *(Route(prefix + path, not_here, methods=["GET", "POST"]) for path in NOT_HERE),
        *page_routes(prefix),
        WebSocketRoute("/{path:path}", _no_socket),
    ]
    open_paths = page_paths(prefix) | {f"{prefix}/health"}
    middleware = [Middleware(Gate, settings=settings, open_paths=open_paths)]
    if settings.cors_origins:
        origins = Origins(map(normal, settings.cors_origins))
        allowed = {"allow_origins": ["*"]} if origins.any else {"allow_origin_regex": origins.pattern}
        middleware.insert(0, Middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **allowed))
    return Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: _http_error}
    )


def _dialect(websocket: WebSocket, settings: ServerSettings) -> Dialect:
    """What a connection asks for. Raises UnknownProtocol, also for a dialect that is not served."""
    path = websocket.url.path.removeprefix(settings.api_prefix)
    subprotocols = websocket.scope.get("subprotocols", [])
    dialect = chosen(path, websocket.query_params, websocket.headers, subprotocols, settings.protocol)
    if dialect.name not in SERVED:
        raise UnknownProtocol(dialect.name)
    return dialect


async def _no_socket(websocket: WebSocket) -> None:
    await websocket.send_denial_response(refusal(404, "not_found", "There is no WebSocket at this path."))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "bad_request"
    return refusal(error.status_code, code, f"{error.detail}.", **(dict(error.headers) if error.headers else {}))


def _not_ready(engine: Engine) -> JSONResponse:
    if engine.state in (LOADING, WARMING):
        message = f"The model is {engine.state}."
        return refusal(503, "loading", message, Retry_After=str(RETRY_SECONDS))
    return refusal(503, "unavailable", "The server ends.")
