"""Who may use the server: Host, Origin and key are checked before anything else, and before a WebSocket is accepted."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_voicechat.server.settings import ServerSettings

KEY_PROTOCOL = "openai-insecure-api-key."  # how a browser sends a key: among the subprotocols it offers
PROTOCOL = "realtime"
ANY = "*"


def refusal(status: int, code: str, message: str, **headers: str) -> JSONResponse:
    """An HTTP error as this server words it, also in the place of a WebSocket's acceptance."""
    return JSONResponse(
        {"error": {"code": code, "message": message}}, status, {k.replace("_", "-"): v for k, v in headers.items()}
    )


class Gate:
    """ASGI middleware in front of all routes; `open_paths` need no key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, open_paths: frozenset[str]) -> None:
        self.app = app
        self._open_paths = open_paths
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        self._origins = {origin.rstrip("/").lower() for origin in (*settings.cors_origins, *settings.allowed_origins)}
        self._hosts = {"localhost", settings.host.lower(), *_own_names()}
        self._hosts |= {_hostname(origin) for origin in self._origins}
        self._hosts.discard("")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            answer = self._refused(scope)
            if answer is not None:
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._host_allowed(host):
            return refusal(403, "forbidden_host", "This server does not go by that name. Allow it: --allowed-origins.")
        if scope["type"] == "websocket" and not self._origin_allowed(headers.get("origin"), host):
            return refusal(403, "forbidden_origin", "That origin is not allowed. Allow it: --allowed-origins.")
        if scope["path"] not in self._open_paths and not self._key_given(scope, headers):
            message = "The key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            return refusal(401, "unauthorized", message, WWW_Authenticate="Bearer")
        return None

    def _host_allowed(self, host: str) -> bool:
        """An address cannot be rebound by a foreign DNS server, a name can."""
        name = _hostname(f"http://{host}")
        return ANY in self._origins or name in self._hosts or _address(name) is not None

    def _origin_allowed(self, origin: str | None, host: str) -> bool:
        if origin is None or ANY in self._origins or origin.lower() in self._origins:
            return True
        name, address = _hostname(origin), _address(_hostname(origin))
        loopback = name == "localhost" or (address is not None and address.is_loopback)
        return loopback or (name != "" and origin.partition("://")[2].lower() == host.lower())

    def _key_given(self, scope: Scope, headers: Headers) -> bool:
        if self._key is None:
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip()] if kind.lower() == "bearer" else []
        given += [p.removeprefix(KEY_PROTOCOL) for p in scope.get("subprotocols", []) if p.startswith(KEY_PROTOCOL)]
        return any(hmac.compare_digest(one.encode("latin-1", "replace"), self._key) for one in given)


def chosen_protocol(scope: Scope) -> str | None:
    """The subprotocol to accept with: never the one that holds a key."""
    return PROTOCOL if PROTOCOL in scope.get("subprotocols", []) else None


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is heard on this machine only."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], name.partition(".")[0] + ".local"}


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
