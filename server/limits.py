"""What the server is told and what it refuses: options, and every limit that a client can meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OUTGOING_SECONDS = 2.0  # of audio that may wait to be sent; a session whose queue is full takes no turn
SLOW_SECONDS = 3.0  # an event that waits so long to be sent: the client reads slower than real time
OUTGOING_EVENTS = 256  # beyond it no message is read: they are what is answered
INPUT_SECONDS = 10.0  # of audio that may wait for its turn; then the socket is not read
INPUT_MESSAGES = 512  # that may wait, however short
LAGGING_SECONDS = 0.5  # of waiting audio that a client is told of
LAGGING_PERIOD = 1.0  # seconds between two such events
PROMPT_CHARACTERS = 32_768  # each token of a prompt takes a step of the speech generator
ECHO_CHARACTERS = 512  # of a client's event_id that an error names
CLOSING_SECONDS = 10.0  # for a client to answer a closing; then the connection is cut
UNREAD_SECONDS = 120.0  # for one that has stopped reading to come to it
RETRY_SECONDS = 2  # what a client is told to wait while the model loads


@dataclass(frozen=True)
class Settings:
    """The options of `serve`; see its help."""

    model: str
    host: str = "127.0.0.1"
    api_key: str | None = None
    api_prefix: str = ""
    cors_origins: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    alias: str | None = None
    voice: str | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_sessions: int = 1
    max_audio_seconds: float = 600.0
    idle_seconds: float = 120.0
    setup_seconds: float = 30.0
    max_message_bytes: int = 2**20

    @property
    def model_id(self) -> str:
        """What `session.updated` and `/v1/models` report: the alias, else the last part of the model's name."""
        name = self.alias or Path(self.model).name or self.model
        return name.encode(errors="replace").decode()  # bytes of a file name that are no text
