"""The dialect `mlxcel` (seed of `/v1/realtime`): one connection, its messages and its events.

JSON text frames both ways. What the protocol leaves open is decided here: errors about a message of an open session
keep their place among the events of the audio before it; `session.ping`, `response.interrupt` and `session.cancel`
do not wait for that audio; null counts as absent in `session.update`, and is a wrong type elsewhere.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.websockets import WebSocket

from mlx_voicechat.events import Cancelled, Done, FunctionDelta, SettleTimeout, TextDelta, TranscriptDelta
from mlx_voicechat.sound.pcm import pcm16

from . import messages
from .connection import NORMAL, Connection, Error, Patience, sessions_in_use
from .json_messages import Malformed, client_event_id, decoded, is_integer, named, parsed
from .limits import PROMPT_CHARACTERS, SLOW_SECONDS
from .mlxcel_extensions import EXTENSIONS, WRITTEN, Timeline, TurnBegun, TurnEnds, extension_events, turns_asked
from .mlxcel_offer import check_audio, check_offer
from .settings import ServerSettings

if TYPE_CHECKING:
    from .engine import Engine

WIRE_SCALE = 32767
AUDIO = "audio must be base64 of little-endian 16-bit PCM"

CONFIGURING, OPENING, READY, COMMITTED, BROKEN = "configuring", "opening", "ready", "committed", "broken"
PING, UPDATE, CANCEL = "session.ping", "session.update", "session.cancel"
APPEND, COMMIT = "input_audio_buffer.append", "input_audio_buffer.commit"
INTERRUPT, CANCEL_RESPONSE = "response.interrupt", "response.cancel"
BEGIN_TURN, END_TURN = "turn.begin", "turn.end"

# The legal moves: a message in a state, and the state after it. A ping is legal in any.
MOVES: dict[tuple[str, str], str] = {
    (CONFIGURING, UPDATE): OPENING,
    **{(state, kind): state for state in (OPENING, READY) for kind in (APPEND, INTERRUPT, BEGIN_TURN, END_TURN)},
    **{(state, COMMIT): COMMITTED for state in (OPENING, READY)},
    **{(state, kind): state for state in (OPENING, READY, COMMITTED, BROKEN) for kind in (CANCEL, CANCEL_RESPONSE)},
}
# Why any other message is none in a state: code and message.
ILLEGAL: dict[str, tuple[str, str]] = {
    CONFIGURING: ("invalid_request", "Send session.update before audio."),
    COMMITTED: ("invalid_request", "The audio is committed: the session ends with response.done."),
    BROKEN: ("inference_error", "The session ended when the model failed. Connect again."),
}

log = logging.getLogger(__name__)


class Wrong(Exception):
    """A message that cannot be done: the error's code and message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Created:
    """The connection is accepted."""


@dataclass(frozen=True)
class Pong:
    """The answer to session.ping."""


# -- messages of the client --------------------------------------------------------------------------------------------


def session_options(
    message: dict[str, Any], settings: ServerSettings, voice: str, rates_hz: tuple[int, int]
) -> messages.Open:
    """What `session.update` asks for; `voice` and `rates_hz` are what there is. Raises Wrong."""

    def need(condition: bool, expected: str, value: object) -> None:
        if not condition:
            raise Wrong("session_initialization_failed", f"{expected}, not {named(value)}.")

    session = message.get("session", {})
    need(isinstance(session, dict), "session must be an object", session)
    try:
        check_offer(message, session, voice, rates_hz)
        turns = turns_asked(session)
    except ValueError as fault:
        raise Wrong("session_initialization_failed", str(fault)) from None
    prompt, seed, seconds = (session.get(key) for key in ("system_prompt", "seed", "max_streaming_seconds"))
    need(prompt is None or isinstance(prompt, str), "session.system_prompt must be a string", prompt)
    if prompt is not None and len(prompt) > PROMPT_CHARACTERS:
        limit = f"{PROMPT_CHARACTERS:,} characters"
        raise Wrong("session_initialization_failed", f"session.system_prompt is longer than {limit}.")
    seed = 0 if seed is None else seed
    need(is_integer(seed) and seed >= 0, "session.seed must be an integer of at least 0", seed)
    seconds = settings.audio_seconds if seconds is None else seconds
    numeric = is_integer(seconds) or isinstance(seconds, float)
    need(numeric and seconds > 0, "session.max_streaming_seconds must be a number above 0", seconds)
    seconds = float(min(seconds, settings.audio_seconds))
    return messages.Open(prompt, seed, seconds, settings.tools, turns, wait_for_tools=settings.wait_for_tools)


def audio_samples(message: dict[str, Any], rate_hz: int) -> bytes:
    """The audio of an append, PCM16 in base64 -> float32 samples as bytes. Raises Wrong."""
    rate = message.get("sample_rate", rate_hz)
    if not is_integer(rate) or rate != rate_hz:
        raise Wrong("inference_error", f"sample_rate is {named(rate)}, the model hears {rate_hz} Hz.")
    try:
        check_audio(message)
    except ValueError as fault:
        raise Wrong("inference_error", str(fault)) from None
    audio = message.get("audio")
    if not isinstance(audio, str):
        missing = "" if "audio" in message else " (it is missing)"
        raise Wrong("inference_error", f"{AUDIO}, not {named(audio)}{missing}.")
    try:
        pcm = decoded(audio)
    except ValueError as fault:
        raise Wrong("inference_error", f"{AUDIO}: {fault}.") from None
    if len(pcm) % 2:
        raise Wrong("inference_error", f"{AUDIO}: {len(pcm)} bytes are no whole number of samples.")
    return (np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)).tobytes()


# -- the connection ----------------------------------------------------------------------------------------------------


class Mlxcel(Connection):
    """A connection of this dialect."""

    def __init__(self, websocket: WebSocket, engine: Engine, settings: ServerSettings) -> None:
        super().__init__(websocket, engine, settings)
        self._state = CONFIGURING
        self._setup_from = self.heard_at
        self._update_id: str | None = None
        self._frames = 0
        self._extensions = self._own_turns = False
        self._timeline = Timeline()

    def greet(self) -> None:
        self.send(Created())

    def patience(self) -> Patience:
        """A client that waits for the server is not silent."""
        if self._state == CONFIGURING:
            seconds, said = self.settings.setup_seconds, "No session.update within"
            return Patience(self._setup_from, seconds, Error("invalid_request", f"{said} {seconds:g} s."))
        if self._state in (OPENING, COMMITTED) or (self.slot and self.slot.backlog.requests):
            self.heard_at = self.loop.time()
        seconds = self.settings.idle_seconds
        return Patience(self.heard_at, seconds, Error("invalid_request", f"No message for {seconds:g} s."))

    def busy(self, event_id: str | None) -> Error:
        message = f"The server has {sessions_in_use(self.settings.max_sessions)} in use. Try again later."
        return Error("server_busy", message, event_id)

    def slow(self) -> Error:
        message = f"What was said waited {SLOW_SECONDS:g} s to be read: the client is slower than real time."
        return Error("slow_consumer", message)

    def written(self, event: Any) -> tuple[str, dict[str, Any]]:
        kind, fields = EVENTS[type(event)]
        return kind, fields(self, event)

    # -- messages ------------------------------------------------------------------------------------------------

    def take(self, frame: Mapping[str, Any]) -> None:
        event_id = None
        try:
            message = parsed(frame)
            event_id = client_event_id(message)
            self._dispatch(message, event_id)
        except (Wrong, Malformed) as wrong:
            code = wrong.code if isinstance(wrong, Wrong) else "invalid_request"
            error = Error(code, wrong.message, event_id)
            if self.slot is not None:
                self.slot.put(messages.Relay(error))
            else:
                self.send(error)

    def _dispatch(self, message: dict[str, Any], event_id: str | None) -> None:
        kind = message.get("type")
        if kind == PING:
            self.send(Pong())
        elif self._state == CONFIGURING and kind != UPDATE:
            raise Wrong(*ILLEGAL[CONFIGURING])
        elif isinstance(kind, str) and kind in HANDLERS:
            HANDLERS[kind](self, message, event_id)
        else:
            shown = "missing" if "type" not in message else named(kind)
            raise Wrong("invalid_request", f"The type of the message is {shown}: there is no such type.")

    def _after(self, kind: str) -> str:
        """The state after a message of this kind. Raises Wrong."""
        if (self._state, kind) in MOVES:
            return MOVES[self._state, kind]
        if kind == UPDATE:
            raise Wrong("invalid_request", "The session is configured: a second session.update is not possible.")
        raise Wrong(*ILLEGAL[self._state])

    def _update(self, message: dict[str, Any], event_id: str | None) -> None:
        after = self._after(UPDATE)
        self._setup_from = self.loop.time()
        config = self.engine.config
        voice, rates_hz = self.settings.voice or config.speaker, (config.input_rate_hz, config.output_rate_hz)
        options = session_options(message, self.settings, voice, rates_hz)
        self._extensions = bool(message.get("session", {}).get("extensions"))
        self._own_turns = options.turns == "application"
        self._update_id = event_id
        self.slot = self.engine.reserve(options, self._deliver)
        if self.slot is None:
            self.refuse_busy(event_id)
        else:
            self._state = after

    def _append(self, message: dict[str, Any], event_id: str | None) -> None:
        self._state = self._after(APPEND)
        samples = audio_samples(message, self.engine.config.input_rate_hz)
        if samples:
            self._put(messages.Append(samples, event_id))

    def _commit(self, message: dict[str, Any], event_id: str | None) -> None:
        pad_partial = message.get("pad_partial", True)
        if not isinstance(pad_partial, bool):
            raise Wrong("invalid_request", f"pad_partial must be true or false, not {named(pad_partial)}.")
        after = self._after(COMMIT)
        self._put(messages.Commit(pad_partial, event_id))
        self._state = after

    def _interrupt(self, message: dict[str, Any], event_id: str | None) -> None:
        self._state = self._after(INTERRUPT)
        self._put(messages.Interrupt(event_id))

    def _begin_turn(self, message: dict[str, Any], event_id: str | None) -> None:
        self._state = self._after_turn(BEGIN_TURN)
        self._put(messages.BeginTurn())
        self._put(messages.Relay(TurnBegun()))

    def _end_turn(self, message: dict[str, Any], event_id: str | None) -> None:
        self._state = self._after_turn(END_TURN)
        self._put(messages.Relay(TurnEnds()))
        self._put(messages.EndTurn())

    def _after_turn(self, kind: str) -> str:
        after = self._after(kind)
        if not self._own_turns:
            raise Wrong("invalid_request", f'{kind} needs a session.update with "turns": "application".')
        return after

    def _cancel(self, message: dict[str, Any], event_id: str | None) -> None:
        self._state = self._after(CANCEL)
        if self.slot is not None:
            self._put(messages.Cancel())
        elif self._state == BROKEN:
            self._deliver(Cancelled(self._frames))

    def _put(self, request: messages.Request) -> None:
        if self.slot is not None:
            self.slot.put(request)

    # -- events --------------------------------------------------------------------------------------------------

    def _deliver(self, event: Any) -> None:
        """Take one event of the engine."""
        if isinstance(event, messages.Relay):
            event = event.event
        if isinstance(event, messages.Opened):
            self.heard_at = self.loop.time()
            self._state = READY if self._state == OPENING else self._state  # it may be committed already
        elif isinstance(event, messages.OpeningFailed):
            self._state, self.slot, self._setup_from = CONFIGURING, None, self.loop.time()
            event = Error("session_initialization_failed", event.message, self._update_id)
        elif isinstance(event, messages.Unopened):
            event = Error("invalid_request", "Send session.update before audio: it failed.", event.event_id)
        elif isinstance(event, messages.AppendRefused | messages.Broken):
            if isinstance(event, messages.Broken):
                self._state, self.slot = BROKEN, None
            event = Error("inference_error", event.message, event.event_id)
        elif isinstance(event, TurnBegun):
            self._timeline.take(event)
            event = messages.Interrupted(self._frames)
        elif isinstance(event, SettleTimeout):
            self._put(messages.OpenTurn())
        elif isinstance(event, messages.Speech):
            self._frames = event.frame_index + 1
        self._tell(event)
        if isinstance(event, messages.Opened | Error):
            self.watch_silence()
        if isinstance(event, Done | Cancelled):
            log.info("%s ended after %d frames.", self.id, event.frame_index)
            self.slot = None
            self.close(NORMAL)

    def _tell(self, event: Any) -> None:
        """Send an event, if it is for this client."""
        if not self._timeline.take(event):
            if self.slot is not None:
                self.slot.sent()
            return
        events = [event]
        if isinstance(event, EXTENSIONS):
            events = extension_events(event) if self._extensions else []
        for each in events:
            self.send(self._timeline.numbered(each))

    def _speech(self, event: messages.Speech) -> dict[str, Any]:
        pcm = pcm16(np.frombuffer(event.samples, np.float32), WIRE_SCALE).tobytes()
        return {
            "frame_index": event.frame_index,
            "delta": base64.b64encode(pcm).decode("ascii"),
            "format": "pcm16",
            "sample_rate": self.engine.config.output_rate_hz,
            "channels": 1,
            "audio_codes": event.codes,
        }

    def _session(self, event: Created | messages.Opened) -> dict[str, Any]:
        config = self.engine.config
        ready = isinstance(event, messages.Opened)
        session: dict[str, Any] = {"id": self.id, "state": "ready" if ready else "configuring"}
        if ready:
            session |= {"model": self.settings.model_id, "frame_samples": config.frame_samples_in}
        if ready and self._extensions:
            session["tools"] = [tool.name for tool in self.settings.tools]
        session["input_audio_format"] = {"type": "pcm16", "sample_rate": config.input_rate_hz}
        session["output_audio_format"] = {"type": "pcm16", "sample_rate": config.output_rate_hz}
        return {"session": session}


def _transcript(_: Mlxcel, event: TranscriptDelta) -> dict[str, Any]:
    return {"frame_index": event.frame_index, "delta": event.delta, "transcript": event.text}


def _token(_: Mlxcel, event: TextDelta | FunctionDelta) -> dict[str, Any]:
    return {
        "frame_index": event.frame_index,
        "token_id": event.token_id,
        "delta": event.delta,
        "text": event.text,
    }


def _error(_: Mlxcel, event: Error) -> dict[str, Any]:
    named_event = {} if event.event_id is None else {"event_id": event.event_id}
    return {"error": {"code": event.code, "message": event.message, **named_event}}


def _at_frame(_: Mlxcel, event: Done | Cancelled | messages.Interrupted) -> dict[str, Any]:
    return {"frame_index": event.frame_index}


HANDLERS: dict[str, Callable[[Mlxcel, dict[str, Any], str | None], None]] = {
    UPDATE: Mlxcel._update,
    APPEND: Mlxcel._append,
    COMMIT: Mlxcel._commit,
    INTERRUPT: Mlxcel._interrupt,
    BEGIN_TURN: Mlxcel._begin_turn,
    END_TURN: Mlxcel._end_turn,
    CANCEL: Mlxcel._cancel,
    CANCEL_RESPONSE: Mlxcel._cancel,
}

# How each event is written: its name on the wire, and its fields. Another event is a fault of the server.
EVENTS: dict[type, tuple[str, Callable[[Mlxcel, Any], dict[str, Any]]]] = {
    Created: ("session.created", Mlxcel._session),
    messages.Opened: ("session.updated", Mlxcel._session),
    Pong: ("session.pong", lambda _, __: {}),
    Error: ("error", _error),
    TranscriptDelta: ("conversation.item.input_audio_transcription.delta", _transcript),
    TextDelta: ("response.text.delta", _token),
    FunctionDelta: ("response.function.delta", _token),
    **WRITTEN,
    messages.Speech: ("response.audio.delta", Mlxcel._speech),
    messages.Lagging: ("session.lagging", lambda _, event: {"backlog_seconds": event.seconds}),
    messages.Committed: ("input_audio_buffer.committed", lambda _, __: {}),
    messages.Interrupted: ("response.interrupted", _at_frame),
    Done: ("response.done", _at_frame),
    Cancelled: ("response.cancelled", _at_frame),
}
