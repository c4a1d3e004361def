"""What crosses between a connection and the engine thread: bytes and small frozen messages, never arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mlx_voicechat.events import Event
from mlx_voicechat.options import SessionOptions

if TYPE_CHECKING:
    from mlx_voicechat.tools import Tool as OwnTool

# To the engine


Owner: TypeAlias = Literal["model", "application"]


@dataclass(frozen=True)
class Tool:
    """One function that the model may call; `parameters` is its JSON Schema, and is not changed by anyone."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Pace:
    """The server keeps the time of a session: where no audio waits, it hears zeros in real time.

    `when_idle`: also while the agent is silent and no call is open. The agent's speech is at most `ahead_seconds`
    ahead of who plays it as it comes.
    """

    when_idle: bool = True
    ahead_seconds: float = 0.5


@dataclass(frozen=True)
class Open:
    """Open the session; its seconds are at most `max_seconds`. A session that is open already is opened anew.

    Without `pace` the audio alone is its time, and a model's turn is not told. `turns`: who owns them. A tool with a
    callable runs here, with `wait_for_tools` before the next frame; any other at the client. `history`: a line for each
    turn so far, which the prompt ends with.
    """

    system_prompt: str | None
    seed: int
    max_seconds: float
    tools: tuple[Tool | OwnTool, ...] = ()
    turns: Owner = "model"
    pace: Pace | None = None
    history: tuple[str, ...] = ()
    wait_for_tools: bool = SessionOptions.wait_for_tools
    tool_timeout: float = SessionOptions.tool_timeout

    @property
    def stepped(self) -> bool:
        """Whether the session may have to do what needs no audio: settle, or take a tool's result."""
        return self.pace is not None or bool(self.tools) or self.turns == "application"


@dataclass(frozen=True)
class Append:
    """Float32 samples at the model's input rate, as bytes; `event_id` is the client's, for an error."""

    samples: bytes
    event_id: str | None = None


@dataclass(frozen=True)
class Commit:
    """Flush and end the session."""

    pad_partial: bool = True
    event_id: str | None = None


@dataclass(frozen=True)
class Interrupt:
    """End the assistant's turn at the next frame."""

    event_id: str | None = None


@dataclass(frozen=True)
class Clear:
    """Drop the audio that waits."""


@dataclass(frozen=True)
class Quiet:
    """No audio comes now: silence takes its place at once."""


@dataclass(frozen=True)
class BeginTurn:
    """The user's turn begins behind the audio that waits; the agent's is driven to its end first."""


@dataclass(frozen=True)
class EndTurn:
    """The user's turn ends behind the audio that waits: settle, and open the agent's.

    Where the model owns the turns, it may open its own within `patience_frames`; then it is opened.
    """

    patience_frames: int = 0


@dataclass(frozen=True)
class OpenTurn:
    """Open the agent's turn at the next frame, without settling."""


@dataclass(frozen=True)
class Give:
    """The result of a call."""

    call_id: str
    result: str


@dataclass(frozen=True)
class Refuse:
    """A call has no result, and why."""

    call_id: str
    why: str


@dataclass(frozen=True)
class Pause:
    """Stand still, or go on: nobody listens meanwhile."""

    paused: bool


@dataclass(frozen=True)
class Cancel:
    """Drop what waits and end the session; `reported` False when nobody is there to be told."""

    reported: bool = True


@dataclass(frozen=True)
class Relay:
    """An event of the connection's own that is to keep its place among those of the engine."""

    event: Any


Request: TypeAlias = (
    Open
    | Append
    | Commit
    | Interrupt
    | Clear
    | Quiet
    | BeginTurn
    | EndTurn
    | OpenTurn
    | Give
    | Refuse
    | Pause
    | Cancel
    | Relay
)

# From the engine; besides these a session's own events, but AudioFrame and LimitReached


@dataclass(frozen=True)
class Opened:
    """The session hears."""


@dataclass(frozen=True)
class OpeningFailed:
    """The session could not be opened, and why."""

    message: str


@dataclass(frozen=True)
class Unopened:
    """A request that waited for a session that could not be opened."""

    event_id: str | None


@dataclass(frozen=True)
class Speech:
    """One frame of speech: float32 samples as bytes, and its codes."""

    frame_index: int
    samples: bytes
    codes: tuple[int, ...]
    cancelled: bool = False  # of a turn that is being driven to its end
    unheard: bool = False  # no audio was there: the model heard silence in its place
    seconds: float = 0.0  # that the model took


@dataclass(frozen=True)
class AppendRefused:
    """An append that was not heard to its end."""

    message: str
    event_id: str | None


@dataclass(frozen=True)
class Broken:
    """The model failed: the session is no more."""

    message: str
    event_id: str | None


@dataclass(frozen=True)
class Interrupted:
    """The assistant's turn was ended at `frame_index`."""

    frame_index: int


@dataclass(frozen=True)
class Answering:
    """Behind a call the agent goes on speaking at `frame_index`, in the turn that is open."""

    frame_index: int


@dataclass(frozen=True)
class ResultRefused:
    """The result of a call that was not taken: the call stays open."""

    call_id: str
    message: str


@dataclass(frozen=True)
class Lagging:
    """So many seconds of audio wait for their turn."""

    seconds: float


@dataclass(frozen=True)
class Committed:
    """All that came before the commit was heard."""


EngineEvent: TypeAlias = (
    Opened
    | OpeningFailed
    | Unopened
    | Speech
    | AppendRefused
    | Broken
    | Interrupted
    | Answering
    | ResultRefused
    | Lagging
    | Committed
    | Relay
    | Event
)
