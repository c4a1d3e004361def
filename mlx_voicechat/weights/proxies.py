"""The proxy between this machine and the hub, named when it is what fails. The HTTP client reads the same settings."""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SCHEMES = ("http", "https")
SOCKS = ("socks5", "socks5h")


class Proxy(NamedTuple):
    """A proxy and the setting that it comes from."""

    url: str
    setting: str

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    def __str__(self) -> str:
        """Without what it takes to log in."""
        shown = self.url
        if "@" in shown:
            shown = self.url.partition("://")[0] + "://" + self.url.rpartition("@")[2]
        return f"{shown} ({self.setting})"


def all_proxies() -> list[Proxy]:
    """Those of every address."""
    found = getproxies()
    return [_proxy(kind, found[kind]) for kind in ("all", "https", "http") if found.get(kind)]


def proxy_of(url: str) -> Proxy | None:
    """The one that is used for an address, if any."""
    parts = urlsplit(url)
    found = getproxies()
    if proxy_bypass(parts.netloc):
        return None
    for kind in (parts.scheme, "all"):
        if found.get(kind):
            return _proxy(kind, found[kind])
    return None


def _proxy(kind: str, url: str) -> Proxy:
    named = [name for name in (f"{kind}_proxy", f"{kind.upper()}_PROXY") if os.environ.get(name)]
    return Proxy(url if "://" in url else f"http://{url}", named[0] if named else "the system's settings")


def fault_of(error: Exception) -> tuple[str, str] | None:
    """What is wrong with a proxy's own address, and the remedy, for what the HTTP client raised before any request."""
    for proxy in all_proxies():
        change = f"Set {proxy.setting} to http://NAME:PORT, or remove it."
        if isinstance(error, ImportError) and proxy.scheme in SOCKS:
            return (
                f"The proxy {proxy} is a SOCKS proxy, for which a package is missing.",
                f"`pip install socksio`, or set {proxy.setting} to http://NAME:PORT.",
            )
        if isinstance(error, ValueError) and proxy.scheme not in (*SCHEMES, *SOCKS):
            return f"The proxy {proxy} is of a kind that is not supported.", change
        try:
            empty = not urlsplit(proxy.url).hostname
        except ValueError:
            empty = True
        if empty:
            return f"The proxy {proxy} has no address.", change
    return None
