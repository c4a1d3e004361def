"""The routes, and what stands before them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module

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
from .dialects import DUPLEX, MLXCEL, OPENAI, PATHS, REALTIME, STRICT_V3, Dialect, UnknownProtocol, chosen
from .duplex_sessions import DuplexSessions, waits_for_a_message
from .engine import LOADING, READY, WARMING, Engine
from .limits import RETRY_SECONDS
from .metrics import CONTENT_TYPE
from .origins import Origins, normal
from .page import page_paths, page_routes
from .settings import ServerSettings
from .typed_voice import find_voice

SERVED = (MLXCEL, OPENAI, DUPLEX, STRICT_V3)  # the dialects of this server
DIALECT_MODULES = (".mlxcel", ".openai_connection", ".duplex_connection", ".strict_v3")  # what makes their connections
NOT_HERE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
END_SECONDS = 1.0  # for the frame that runs when the server ends

log = logging.getLogger(__name__)


class Routes:
    """What each route answers."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self._started = time.time()
        self._voice = find_voice(settings.typed_voice)
        self._sessions = DuplexSessions()

    async def realtime(self, websocket: WebSocket) -> None:
        """A conversation, in the dialect that is asked for."""
        try:
            dialect = _dialect(websocket, self._settings)
        except UnknownProtocol as unknown:
            message = f"There is no protocol {unknown}. Those of this server: {', '.join(SERVED)}."
            await websocket.send_denial_response(refusal(400, "unknown_protocol", message))
            return
        if self._engine.state != READY:
            await websocket.send_denial_response(_not_ready(self._engine))
            return
        if self._engine.draining and not self._may_resume(dialect, websocket):
            message = "The server ends, and takes no new conversations. Connect again."
            await websocket.send_denial_response(refusal(503, "draining", message, Retry_After=str(RETRY_SECONDS)))
            return
        if not await self._room(dialect, websocket):
            message = f"The server has {sessions_in_use(self._settings.max_sessions)} in use. Try again later."
            await websocket.send_denial_response(refusal(503, "server_busy", message, Retry_After=str(RETRY_SECONDS)))
            return
        try:
            await self._connection(dialect, websocket).run()
        except ClientDisconnected:
            raise  # in the handshake; uvicorn knows
        except Exception:
            log.exception("A connection failed.")
            with suppress(RuntimeError, WebSocketDisconnect):  # it may be closed already
                await websocket.close(FAILED)

    async def _room(self, dialect: Dialect, websocket: WebSocket) -> bool:
        """Whether there is a free slot, where a dialect has to know that before the acceptance."""
        if self._may_resume(dialect, websocket):
            return True
        await self._sessions.make_room(self._engine)
        return not dialect.refused_at_the_upgrade or await self._engine.room()

    def _may_resume(self, dialect: Dialect, websocket: WebSocket) -> bool:
        """Whether a connection may resume a session that has its slot."""
        return dialect.name == DUPLEX and waits_for_a_message(websocket.query_params) and len(self._sessions) > 0

    def _connection(self, dialect: Dialect, websocket: WebSocket) -> Connection:
        from .duplex_connection import DuplexConnection
        from .mlxcel import Mlxcel
        from .openai_connection import OpenAIConnection
        from .strict_v3 import StrictV3Connection

        engine, settings, voice = self._engine, self._settings, self._voice
        if dialect.name == MLXCEL:
            return Mlxcel(websocket, engine, settings)
        if dialect.name == STRICT_V3:
            return StrictV3Connection(websocket, engine, settings, voice)
        if dialect.name == DUPLEX:
            return DuplexConnection(websocket, engine, settings, voice, self._sessions)
        return OpenAIConnection(websocket, engine, settings, voice, dialect.beta)

    async def upgrade_required(self, request: Request) -> Response:
        """A conversation is no plain request."""
        message = f"{request.url.path} is a WebSocket: connect to it with a WebSocket client."
        return refusal(426, "upgrade_required", message, Upgrade="websocket", Connection="Upgrade")

    async def health(self, request: Request) -> Response:
        """How the server is."""
        state = self._engine.state
        body = {
            "status": "busy" if state == READY and self._engine.busy else state,
            "model": self._settings.model_id,
            "sessions": {"active": self._engine.active, "max": self._settings.max_sessions},
            "protocols": SERVED,
            "uptime_seconds": round(time.time() - self._started, 3),
        }
        if state == READY:
            return JSONResponse(body)
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_SECONDS)})

    async def ready(self, request: Request) -> Response:
        """Whether a new conversation can begin: what a load balancer asks."""
        engine = self._engine
        status = engine.state
        if status == READY and (engine.draining or engine.busy):
            status = "draining" if engine.draining else "full"
        body = {"status": status, "sessions": {"active": engine.active, "max": self._settings.max_sessions}}
        if status == READY:
            return JSONResponse(body)
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_SECONDS)})

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = {"id": self._settings.model_id, "object": "model", "created": int(self._started)}
        data = [{**model, "owned_by": "mlx-voicechat", "protocols": SERVED}]
        return JSONResponse({"object": "list", "data": data})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        return Response(self._engine.metrics.text(), media_type=CONTENT_TYPE)

    async def not_here(self, request: Request) -> Response:
        """What other servers have at this path."""
        here = f"{self._settings.api_prefix}{REALTIME}"
        message = f"This model listens and speaks; it does not serve {request.url.path}. Use {here}."
        return refusal(501, "not_implemented", message)


def create_app(engine: Engine, settings: ServerSettings) -> Starlette:
    """The application around an engine, which starts and ends with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start(asyncio.get_running_loop())
        for name in DIALECT_MODULES:  # while the model loads
            import_module(name, __package__)
        yield
        await engine.end(END_SECONDS)

    answers, prefix = Routes(engine, settings), settings.api_prefix
    routes = [
        *(WebSocketRoute(prefix + path, answers.realtime) for path in PATHS),
        *(Route(prefix + path, answers.upgrade_required) for path in PATHS),
        Route(prefix + "/health", answers.health),
        Route(prefix + "/ready", answers.ready),
        Route(prefix + "/v1/models", answers.models),
        Route(prefix + "/metrics", answers.metrics),
        *(Route(prefix + path, answers.not_here, methods=["GET", "POST"]) for path in NOT_HERE),
        *page_routes(prefix),
        WebSocketRoute("/{path:path}", _no_socket),
    ]
    open_paths = page_paths(prefix) | {f"{prefix}/health", f"{prefix}/ready"}
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
