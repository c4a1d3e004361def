"""What a client raises: all of it a ServerError, so that a program may catch one thing."""

from __future__ import annotations

from mlx_voicechat.errors import ServerError


class DuplexClientError(ServerError):
    """Base of what DuplexClient raises."""

    code = "duplex_client_error"


class DuplexConnectionError(DuplexClientError):
    """The connection could not be made, or was lost and not brought back."""

    code = "connection_lost"


class DuplexProtocolError(DuplexClientError):
    """The server answered with an error event; `event_id` is that of the client's message it is about."""

    code = "protocol_error"

    def __init__(self, message: str, code: str = "", event_id: str | None = None) -> None:
        super().__init__(message, code=code)
        self.event_id = event_id


class DuplexSessionClosedError(DuplexClientError):
    """The session ended while it was waited for; `reason` is the server's word."""

    code = "session_closed"

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class StrictV3Error(ServerError):
    """The conversation is over: the server broke the protocol or ended it, or an answer did not come in time."""

    code = "strict_v3_error"
