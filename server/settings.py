"""The options of a server, spelled once: default, range and help. The command `serve` is made from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_voicechat.options import SessionOptions, option

if TYPE_CHECKING:
    from mlx_voicechat.tools import Tool

PROTOCOLS = ("mlxcel", "openai", "duplex", "strict-v3")  # the dialects' names, everywhere
TURNS = ("client", "server")  # who ends the user's turns in strict-v3
AUDIO_SECONDS, STRICT_V3_SECONDS = 600.0, 960.0  # 12,000 frames
MESSAGE_BYTES, LONG_MESSAGE_BYTES = 2**20, 15 * 2**20  # of one message, unless an option says otherwise


@dataclass(frozen=True)
class ServerSettings:
    """The options of `serve`; see its help."""

    model: str
    host: str = option("127.0.0.1", "Where to listen; 0.0.0.0 is heard by the whole network.", metavar="ADDRESS")
    port: int = option(8080, "0 takes a free one.", metavar="N", min=0, max=65535)
    protocol: str = option(PROTOCOLS[0], "What a connection to the bare /v1/realtime speaks.", PROTOCOLS)
    api_key: str | None = option(
        None, "Ask clients for this key.", metavar="KEY", envvar="MLX_VOICECHAT_API_KEY", show_default=False
    )
    api_prefix: str = option("", "Put before every path.", metavar="PATH")
    cors_origins: tuple[str, ...] = option(
        (), "Pages that may use all routes; repeat or separate by commas.", metavar="ORIGIN", show_default=False
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Pages that may connect, besides those of this machine.", metavar="ORIGIN", show_default=False
    )
    alias: str | None = option(None, "The model's name for clients; else its folder's.", metavar="NAME")
    voice: str | None = SessionOptions.voice
    ssl_certfile: Path | None = option(
        None, "Serve TLS: other machines' browsers have no microphone without it.", metavar="FILE"
    )
    ssl_keyfile: Path | None = option(None, "Its key, if not in the same file.", metavar="FILE")
    max_sessions: int = option(1, "Conversations at once.", metavar="N", min=1, max=1000)
    batch: bool = option(True, "Frames of several conversations together, or in turns.")
    max_audio_seconds: float | None = option(
        None,
        "Audio that one conversation may hear.",
        metavar="SECONDS",
        above=0,
        show_default=f"{AUDIO_SECONDS:g}; of strict-v3 {STRICT_V3_SECONDS:g}",
    )
    idle_seconds: float = option(120.0, "End a conversation without a message.", metavar="SECONDS", above=0)
    setup_seconds: float = option(30.0, "End a connection without session.update.", metavar="SECONDS", above=0)
    max_message_bytes: int | None = option(
        None,
        "Close a connection that sends a larger message.",
        metavar="N",
        min=4096,
        max=2**30,
        show_default=f"{MESSAGE_BYTES}; of OpenAI's vocabulary {LONG_MESSAGE_BYTES}",
    )
    disconnect_grace_seconds: float = option(
        30.0, "How long a dropped duplex session can be resumed.", metavar="SECONDS", above=0
    )
    fixed_prompt: bool = option(
        False, "Refuse other instructions or tools in a conversation that has begun, instead of carrying it over."
    )
    drain_seconds: float = option(
        0.0,
        "On SIGTERM, let conversations end by themselves for so long, and take no new ones.",
        metavar="SECONDS",
        min=0,
    )
    typed_voice: str | None = option(
        None,
        "Speaks typed text to the model: text on stdin, WAV on stdout; else say or espeak-ng.",
        metavar="COMMAND",
        show_default=False,
    )
    turns: str = option(TURNS[0], "Who ends a user's turn in strict-v3: the client, or the model.", TURNS)
    instructions: str | None = option(
        None, "The system prompt of strict-v3's clients that bring none.", metavar="TEXT", show_default=False
    )
    function_timeout: float = option(
        SessionOptions.tool_timeout, "How long strict-v3 waits for the result of a call.", metavar="SECONDS", above=0
    )
    tools: tuple[Tool, ...] = ()  # for clients that bring none; each with what calls it
    wait_for_tools: bool = False  # for a client that is faster than real time

    @property
    def sessions_together(self) -> int:
        """How many sessions' frames may run in one evaluation."""
        return self.max_sessions if self.batch else 1

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
