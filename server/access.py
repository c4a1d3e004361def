"""Who may use the server: Host, Origin and key are checked before anything else, and before a WebSocket is accepted."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .origins import Origins, normal
from .settings import ServerSettings

TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # of RFC 7230: what a subprotocol may be made of
KEY_PROTOCOL = "openai-insecure-api-key."  # how a browser sends a key: among the subprotocols it offers
PROTOCOL = "realtime"


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
        self._origins = Origins(map(normal, (*settings.cors_origins, *settings.allowed_origins)))
        self._hosts = {"localhost", settings.host.lower(), *_own_names()} - {""}

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
        # Without a Host it is HTTP/1.0, which no browser speaks: h11 refuses it of any other.
        if "host" in headers and not self._host_allowed(host):
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
        return name in self._hosts or self._origins.name(name) or _address(name) is not None

    def _origin_allowed(self, origin: str | None, host: str) -> bool:
        if origin is None or self._origins.allow(origin):
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


def unsendable(key: str) -> str:
    """The characters of a key that a browser cannot send with a WebSocket: it refuses the whole call."""
    return "".join(dict.fromkeys(letter for letter in key if not TOKEN.fullmatch(letter)))


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
