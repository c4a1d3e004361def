"""Which dialect a connection speaks: by its path, its query, what it asks for in headers, else the server's own.

Precedence: path, `?protocol=`, `?duplex=`, `?model=` or OpenAI's beta header or subprotocol, `--protocol`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .settings import PROTOCOLS

MLXCEL, OPENAI, DUPLEX, STRICT_V3 = PROTOCOLS
REALTIME = "/v1/realtime"
PATHS = {REALTIME: None, "/v1/duplex": DUPLEX, "/v1/realtime/v3": STRICT_V3}  # the dialect of those that have one
BETA_HEADER, BETA_VALUE, BETA_SUBPROTOCOL = "openai-beta", "realtime=v1", "openai-beta.realtime-v1"
YES = ("1", "true", "on")
ALIASES = {"voicechat.realtime.v3": STRICT_V3}  # other names of a dialect in `?protocol=`


@dataclass(frozen=True)
class Dialect:
    """The dialect of one connection; `beta` whether it asked for OpenAI's beta names."""

    name: str
    beta: bool = False

    @property
    def refused_at_the_upgrade(self) -> bool:
        """Whether a busy server says so with HTTP 503: after an acceptance, two of OpenAI's clients wait for ever."""
        return self.name in (OPENAI, DUPLEX)


class UnknownProtocol(Exception):
    """`?protocol=` names no dialect."""


def chosen(
    path: str, query: Mapping[str, str], headers: Mapping[str, str], subprotocols: Sequence[str], default: str
) -> Dialect:
    """The dialect of a connection to one of PATHS. Header names are lower case. Raises UnknownProtocol."""
    asks = [part.strip() for part in headers.get(BETA_HEADER, "").split(",")]
    beta = BETA_VALUE in asks or BETA_SUBPROTOCOL in subprotocols
    by_query = DUPLEX if query.get("duplex", "").lower() in YES else None
    by_client = OPENAI if "model" in query or beta else default
    asked = query.get("protocol", "")
    name = PATHS[path] or ALIASES.get(asked, asked) or by_query or by_client
    if name not in PROTOCOLS:
        raise UnknownProtocol(name)
    return Dialect(name, beta and name == OPENAI)
