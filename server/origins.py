"""Origins that may connect: `https://name`, with a port, with `*.` for any name below, `:*` for any port; `null`; `*`.

An origin is what a browser sends of a page's address (RFC 6454): scheme, name and port, the scheme's own port left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

ANY, NULL = "*", "null"  # all; pages without an address of their own, such as files
OWN_PORTS = {"http": 80, "https": 443}
WITHOUT_ORIGIN = ("file", "data", "blob", "about", "javascript")  # browsers send `null` for them
SOCKETS = {"ws": "http", "wss": "https"}
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*\.?")
ADDRESS = re.compile(r"\[[0-9a-f:.]+\]")
EXAMPLE = "Write it as https://name or https://name:port."


def normal(text: str) -> str:
    """An origin or a pattern of origins as browsers write them. Raises ValueError, in words, if none could match."""
    origin = text.strip().rstrip("/").lower()
    if origin in (ANY, NULL):
        return origin
    scheme, separator, rest = origin.partition("://")
    if scheme in WITHOUT_ORIGIN or scheme.partition(":")[0] in WITHOUT_ORIGIN:
        raise ValueError(f"Browsers send the origin {NULL} for such pages: allow {NULL}.")
    if scheme in SOCKETS:
        raise ValueError(f"An origin is the page's address, not the server's: {SOCKETS[scheme]}://{rest}")
    if not separator or not SCHEME.fullmatch(scheme) or re.search(r"[/?#@\\\s]", rest):
        raise ValueError(EXAMPLE)
    name, port = _parts(f"{scheme}://{rest}")
    if "*" in name.removeprefix("*."):
        raise ValueError("A * stands for whole names before the first dot: https://*.name, or for any port: name:*")
    if not (NAME.fullmatch(name) or ADDRESS.fullmatch(name)):
        raise ValueError(EXAMPLE)
    return f"{scheme}://{name}" + (f":{port}" if port not in ("", str(OWN_PORTS.get(scheme))) else "")


def _parts(origin: str) -> tuple[str, str]:
    """Name, in the letters of DNS, and port of an origin."""
    wild = origin.endswith(":*")
    try:
        parts = urlsplit(origin.removesuffix(":*"))
        name, number = parts.hostname or "", parts.port
        port = "*" if wild else "" if number is None else str(number)
        if ":" in name:
            return f"[{name}]", port
        if not name.isascii():
            name = name.encode("idna").decode("ascii")
    except ValueError as fault:
        raise ValueError(EXAMPLE) from fault
    if number == 0 or parts.netloc.endswith(":"):
        raise ValueError(EXAMPLE)
    return name, port


class Origins:
    """What `normal` has made of the options; `names` are the hosts that they speak of, patterns among them."""

    def __init__(self, origins: Iterable[str]) -> None:
        origins = set(origins)
        self.any = ANY in origins
        origins -= {ANY}
        self.pattern = "|".join(sorted(_expression(origin) for origin in origins))
        self._matches = re.compile(self.pattern).fullmatch
        names = {_parts(origin)[0].strip("[]") for origin in origins - {NULL}}
        self._is_host = re.compile("|".join(sorted(_expression(name) for name in names))).fullmatch

    def allow(self, origin: str) -> bool:
        """Whether a browser's Origin header is among them."""
        return self.any or (origin != "" and self._matches(origin.lower()) is not None)

    def name(self, host: str) -> bool:
        """Whether a host's name, without port, is that of one of them."""
        return self.any or (host != "" and self._is_host(host) is not None)


def _expression(pattern: str) -> str:
    if pattern.endswith(":*"):
        return _expression(pattern.removesuffix(":*")) + r"(:\d+)?"
    return re.escape(pattern).replace(r"\*\.", r"([^/:]+\.)+")
