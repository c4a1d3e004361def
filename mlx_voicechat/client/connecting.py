"""The way to a server: its address, a connected WebSocket, and in words why there is none. Needs no MLX."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import re
import socket
import ssl
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

from mlx_voicechat.errors import InputError, ServerError

PATH = "/v1/realtime"
DEFAULT_URL = f"ws://127.0.0.1:8080{PATH}"
CONNECT_SECONDS = 10.0
LOADING_SECONDS = 600.0  # a server that loads its model is waited for
MAX_MESSAGE_BYTES = 16 << 20


def realtime_url(url: str, name: str = "--url") -> str:
    """The WebSocket's address for what a person typed: http(s) or ws(s), with or without a path. Raises InputError.

    `name` is what an error calls it.
    """
    example = f"Write it like {DEFAULT_URL}."
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as fault:
        raise InputError(f"{name} {url!r} is no address: {fault}.", example) from None
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not host or port == 0 or not url.isprintable() or " " in url:
        raise InputError(f"{name} {url!r} is no address of a server.", example)
    if parts.username is not None:
        raise InputError(f"{name} holds a name or a password.", "A key is given with --api-key.")
    path = PATH if parts.path in ("", "/") else parts.path
    return urlunsplit(SplitResult(scheme, parts.netloc, path, parts.query, ""))


async def open_socket(address: str, api_key: str = "", say: Callable[[str], object] | None = None) -> ClientConnection:
    """A connected WebSocket, once the server has loaded its model; `say` gets a line when that is waited for.

    Raises InputError for a key that cannot be sent, ServerError for all that stands between.
    """
    if not (api_key.isascii() and api_key.isprintable()):
        raise InputError("The API key holds characters that cannot be sent.", "Check --api-key.")
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
                ping_timeout=None,  # behind a backlog a pong is late; a silent server is found by its silence
                close_timeout=2,
                max_size=MAX_MESSAGE_BYTES,
            )
        except InvalidStatus as answer:
            if not _is_loading(answer) or waited >= LOADING_SECONDS:
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


def refusal(code: str, why: str) -> ServerError:
    """A server's own reason for not opening a conversation."""
    if code in ("server_busy", "resource_exhausted"):
        remedy = "Try again when it has ended, or start the server with a larger --max-sessions."
        return ServerError("The server is busy with another conversation.", remedy, code)
    return ServerError(f"The server did not open the conversation: {why.rstrip('.')} ({code}).", code=code)


def _is_loading(answer: InvalidStatus) -> bool:
    return answer.response.status_code == 503 and _code(answer.response.body) not in ("server_busy", "unavailable")


def _code(body: bytes | bytearray | None) -> str | None:
    """The code of an error's body."""
    try:
        return str(json.loads(body or b"")["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _http_error(answer: InvalidStatus, address: str, with_key: bool) -> ServerError:
    """An HTTP answer in place of the upgrade, in words."""
    status, why = answer.response.status_code, _reason(answer.response.body)
    if status == 401:
        message = f"The server at {address} does not accept this API key." if with_key else ""
        message = message or f"The server at {address} asks for an API key."
        return ServerError(message, "Give its key with --api-key or MLX_VOICECHAT_API_KEY.", "unauthorized")
    if status == 403:
        return ServerError(f"The server at {address} refuses this client{why}.", "", "forbidden")
    if status == 503 and _code(answer.response.body) == "server_busy":
        return refusal("server_busy", why)
    if status == 503:
        return ServerError(f"The server at {address} is not ready after {LOADING_SECONDS:g} s{why}.", "", "loading")
    return _not_such_a_server(address, f"HTTP {status}{why}")


def _reason(body: bytes | bytearray | None) -> str:
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
