"""The options of a server, spelled once: default, range and help. The command `serve` is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_voicechat.tools import Tool

PROTOCOLS = ("mlxcel", "openai", "duplex", "strict-v3")  # the dialects' names, everywhere
TURNS = ("client", "server")  # who ends the user's turns in strict-v3
AUDIO_SECONDS, STRICT_V3_SECONDS = 600.0, 960.0  # 12,000 frames
MESSAGE_BYTES, LONG_MESSAGE_BYTES = 2**20, 15 * 2**20  # of one message, unless an option says otherwise


def told(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    """What the command line says of a field; `more` are min, max, above, envvar, show_default."""
    return {"metavar": metavar, "help": text, **more}


@dataclass(frozen=True)
class ServerSettings:
    """The options of `serve`; see its help."""

    model: str
    host: str = field(
        default="127.0.0.1", metadata=told("ADDRESS", "Where to listen; 0.0.0.0 is heard by the whole network.")
    )
    port: int = field(default=8080, metadata=told("N", "0 takes a free one.", min=0, max=65535))
    protocol: str = field(
        default="mlxcel", metadata=told("|".join(PROTOCOLS), "What a connection to the bare /v1/realtime speaks.")
    )
    api_key: str | None = field(
        default=None,
        metadata=told("KEY", "Ask clients for this key.", envvar="MLX_VOICECHAT_API_KEY", show_default=False),
    )
    api_prefix: str = field(default="", metadata=told("PATH", "Put before every path."))
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata=told("ORIGIN", "Pages that may use all routes; repeat or separate by commas.", show_default=False),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=told("ORIGIN", "Pages that may connect, besides those of this machine.", show_default=False),
    )
    alias: str | None = field(default=None, metadata=told("NAME", "The model's name for clients; else its folder's."))
    voice: str | None = None
    ssl_certfile: Path | None = field(
        default=None, metadata=told("FILE", "Serve TLS: other machines' browsers have no microphone without it.")
    )
    ssl_keyfile: Path | None = field(default=None, metadata=told("FILE", "Its key, if not in the same file."))
    max_sessions: int = field(default=1, metadata=told("N", "Conversations at once, in turns.", min=1, max=1000))
    max_audio_seconds: float | None = field(
        default=None,
        metadata=told(
            "SECONDS",
            "Audio that one conversation may hear.",
            above=0,
            show_default=f"{AUDIO_SECONDS:g}; of strict-v3 {STRICT_V3_SECONDS:g}",
        ),
    )
    idle_seconds: float = field(
        default=120.0, metadata=told("SECONDS", "End a conversation without a message.", above=0)
    )
    setup_seconds: float = field(
        default=30.0, metadata=told("SECONDS", "End a connection without session.update.", above=0)
    )
    max_message_bytes: int | None = field(
        default=None,
        metadata=told(
            "N",
            "Close a connection that sends a larger message.",
            min=4096,
            max=2**30,
            show_default=f"{MESSAGE_BYTES}; of OpenAI's vocabulary {LONG_MESSAGE_BYTES}",
        ),
    )
    disconnect_grace_seconds: float = field(
        default=30.0, metadata=told("SECONDS", "How long a dropped duplex session can be resumed.", above=0)
    )
    typed_voice: str | None = field(
        default=None,
        metadata=told(
            "COMMAND",
            "Speaks typed text to the model: text on stdin, WAV on stdout; else say or espeak-ng.",
            show_default=False,
        ),
    )
    tools: tuple[Tool, ...] = ()  # for clients that bring none; each with what calls it
    wait_for_tools: bool = False  # for a client that is faster than real time

    turns: str = field(
        default=TURNS[0],
        metadata=told("|".join(TURNS), "Who ends a user's turn in strict-v3: the client, or the model."),
    )
    instructions: str | None = field(
        default=None,
        metadata=told("TEXT", "The system prompt of strict-v3's clients that bring none.", show_default=False),
    )
    function_timeout: float = field(
        default=30.0, metadata=told("SECONDS", "How long strict-v3 waits for the result of a call.", above=0)
    )

    @property
    def audio_seconds(self) -> float:
        """What a conversation may hear."""
        return AUDIO_SECONDS if self.max_audio_seconds is None else self.max_audio_seconds

    @property
    def strict_v3_seconds(self) -> float:
        """The same in strict-v3, which has a limit of its own."""
        return STRICT_V3_SECONDS if self.max_audio_seconds is None else self.max_audio_seconds

    @property
    def model_id(self) -> str:
        """What `session.updated` and `/v1/models` report: the alias, else the last part of the model's name."""
        name = self.alias or Path(self.model).name or self.model
        return name.encode(errors="replace").decode()  # bytes of a file name that are no text


def described(name: str) -> Mapping[str, Any]:
    """What the command line says of a field."""
    return ServerSettings.__dataclass_fields__[name].metadata
