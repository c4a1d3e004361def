"""The dialect of `/v1/realtime`: one connection, its messages and its events.

JSON text frames both ways. What the protocol leaves open is decided here: errors about a message of an open session
keep their place among the events of the audio before it; `session.ping`, `response.interrupt` and `session.cancel`
do not wait for that audio; null counts as absent in `session.update`, and is a wrong type elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.websockets import WebSocket

from mlx_voicechat.events import Cancelled, Done, FunctionDelta, TextDelta, TranscriptDelta
from mlx_voicechat.sound.recordings import pcm16

from . import messages
from .connection import NORMAL, Connection, Error, Patience
from .limits import ECHO_CHARACTERS, PROMPT_CHARACTERS, Settings

if TYPE_CHECKING:
    from .engine import Engine

WIRE_SCALE = 32767
CONFIGURING, OPENING, READY, COMMITTED, BROKEN = "configuring", "opening", "ready", "committed", "broken"
MOST_DIGITS = 4300  # of an integer
AUDIO = "audio must be base64 of little-endian 16-bit PCM"

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


def parsed(frame: Mapping[str, Any]) -> dict[str, Any]:
    """A WebSocket message -> the JSON object in it. Raises Wrong."""
    text = frame.get("text")
    if text is None:
        raise Wrong("invalid_request", "Messages are JSON text frames, not binary ones.")
    try:
        message = json.loads(text, parse_int=number)
    except RecursionError:
        raise Wrong("invalid_request", "The message is nested too deeply.") from None
    except ValueError as fault:
        raise Wrong("invalid_request", f"The message is not JSON: {brief(str(fault), 100)}.") from None
    if not isinstance(message, dict):
        raise Wrong("invalid_request", f"The message is {named(message)}, expected a JSON object.")
    return message


def number(digits: str) -> int | float:
    """A JSON integer; Python refuses or takes seconds for very long ones, which are all too large here."""
    return int(digits) if len(digits) <= MOST_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def session_options(message: dict[str, Any], most_seconds: float) -> messages.Open:
    """What `session.update` asks for. Raises Wrong."""

    def need(condition: bool, expected: str, value: object) -> None:
        if not condition:
            raise Wrong("session_initialization_failed", f"{expected}, not {named(value)}.")

    session = message.get("session", {})
    need(isinstance(session, dict), "session must be an object", session)
    prompt, seed, seconds = (session.get(key) for key in ("system_prompt", "seed", "max_streaming_seconds"))
    need(prompt is None or isinstance(prompt, str), "session.system_prompt must be a string", prompt)
    if prompt is not None and len(prompt) > PROMPT_CHARACTERS:
        limit = f"{PROMPT_CHARACTERS:,} characters"
        raise Wrong("session_initialization_failed", f"session.system_prompt is longer than {limit}.")
    seed = 0 if seed is None else seed
    need(is_integer(seed) and seed >= 0, "session.seed must be an integer of at least 0", seed)
    seconds = most_seconds if seconds is None else seconds
    numeric = is_integer(seconds) or isinstance(seconds, float)
    need(numeric and seconds > 0, "session.max_streaming_seconds must be a number above 0", seconds)
    return messages.Open(prompt, seed, float(min(seconds, most_seconds)))


def audio_samples(message: dict[str, Any], rate_hz: int) -> bytes:
    """The audio of an append, PCM16 in base64 -> float32 samples as bytes. Raises Wrong."""
    rate = message.get("sample_rate", rate_hz)
    if not is_integer(rate) or rate != rate_hz:
        raise Wrong("inference_error", f"sample_rate is {named(rate)}, the model hears {rate_hz} Hz.")
    audio = message.get("audio")
    if not isinstance(audio, str):
        missing = "" if "audio" in message else " (it is missing)"
        raise Wrong("inference_error", f"{AUDIO}, not {named(audio)}{missing}.")
    try:
        pcm = base64.b64decode(audio, validate=True)
        strict = base64.b64encode(pcm) == audio.encode("ascii")  # also no bits or padding too many
    except (ValueError, binascii.Error):
        strict = False
    if not strict:
        raise Wrong("inference_error", f"{AUDIO}: this is not valid base64.")
    if len(pcm) % 2:
        raise Wrong("inference_error", f"{AUDIO}: {len(pcm)} bytes are no whole number of samples.")
    return (np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)).tobytes()


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer; in Python a bool is an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def named(value: object) -> str:
    """A JSON value in a message: scalars themselves, the rest by its kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    try:
        return brief(json.dumps(value))
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "too long a number"


def brief(text: str, most: int = 50) -> str:
    """At most `most` characters of a text."""
    return text if len(text) <= most else f"{text[:most]}..."


# -- the connection ----------------------------------------------------------------------------------------------------


class Realtime(Connection):
    """A connection of this dialect."""

    def __init__(self, websocket: WebSocket, engine: Engine, settings: Settings) -> None:
        super().__init__(websocket, engine, settings)
        self._state = CONFIGURING
        self._setup_from = self.heard_at
        self._update_id: str | None = None
        self._frames = 0

    def greet(self) -> None:
        self.send(Created())

    def patience(self) -> Patience:
        """A client that waits for the server is not silent."""
        if self._state == CONFIGURING:
            seconds = self.settings.setup_seconds
            return Patience(self._setup_from, seconds, f"No session.update within {seconds:g} s.")
        if self._state in (OPENING, COMMITTED) or (self.slot and self.slot.traffic.requests):
            self.heard_at = self.loop.time()
        seconds = self.settings.idle_seconds
        return Patience(self.heard_at, seconds, f"No message for {seconds:g} s.")

    # -- messages ------------------------------------------------------------------------------------------------

    def take(self, frame: Mapping[str, Any]) -> None:
        event_id = None
        try:
            message = parsed(frame)
            event_id = message.get("event_id")
            if not isinstance(event_id, str) or len(event_id) > ECHO_CHARACTERS:
                event_id = None
            self._dispatch(message, event_id)
        except Wrong as wrong:
            error = Error(wrong.code, wrong.message, event_id)
            if self.slot is not None:
                self.slot.put(messages.Relay(error))
            else:
                self.send(error)

    def _dispatch(self, message: dict[str, Any], event_id: str | None) -> None:
        kind = message.get("type")
        if kind == "session.ping":
            self.send(Pong())
        elif kind == "session.update":
            self._update(message, event_id)
        elif self._state == CONFIGURING:
            raise Wrong("invalid_request", "Send session.update before audio.")
        elif kind == "input_audio_buffer.append":
            self._append(message, event_id)
        elif kind == "input_audio_buffer.commit":
            self._commit(message, event_id)
        elif kind == "response.interrupt":
            self._require_open()
            self._put(messages.Interrupt(event_id))
        elif kind in ("session.cancel", "response.cancel"):
            self._cancel()
        else:
            shown = "missing" if "type" not in message else named(kind)
            raise Wrong("invalid_request", f"The type of the message is {shown}: there is no such type.")

    def _update(self, message: dict[str, Any], event_id: str | None) -> None:
        if self._state != CONFIGURING:
            raise Wrong("invalid_request", "The session is configured: a second session.update is not possible.")
        self._setup_from = self.loop.time()
        options = session_options(message, self.settings.max_audio_seconds)
        self._update_id = event_id
        self.slot = self.engine.reserve(options, self._deliver)
        if self.slot is None:
            self.refuse_busy(event_id)
        else:
            self._state = OPENING

    def _append(self, message: dict[str, Any], event_id: str | None) -> None:
        self._require_open()
        samples = audio_samples(message, self.engine.config.input_rate_hz)
        if samples:
            self._put(messages.Append(samples, event_id))

    def _commit(self, message: dict[str, Any], event_id: str | None) -> None:
        pad_partial = message.get("pad_partial", True)
        if not isinstance(pad_partial, bool):
            raise Wrong("invalid_request", f"pad_partial must be true or false, not {named(pad_partial)}.")
        self._require_open()
        self._put(messages.Commit(pad_partial, event_id))
        self._state = COMMITTED

    def _cancel(self) -> None:
        if self.slot is not None:
            self._put(messages.Cancel())
        elif self._state == BROKEN:
            self._deliver(Cancelled(self._frames))

    def _require_open(self) -> None:
        if self._state == BROKEN:
            raise Wrong("inference_error", "The session ended when the model failed. Connect again.")
        if self._state == COMMITTED:
            raise Wrong("invalid_request", "The audio is committed: the session ends with response.done.")

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
        elif isinstance(event, messages.Refused | messages.Broken):
            if isinstance(event, messages.Broken):
                self._state, self.slot = BROKEN, None
            event = Error("inference_error", event.message, event.event_id)
        elif isinstance(event, messages.Speech):
            self._frames = event.frame_index + 1
        self.send(event)
        if isinstance(event, messages.Opened | Error):
            self.watch_silence()
        if isinstance(event, Done | Cancelled):
            log.info("%s ended after %d frames.", self.id, event.frame_index)
            self.slot = None
            self.close(NORMAL)

    def encoded(self, event: Any) -> str:
        return json.dumps({"type": "", "event_id": f"event_{secrets.token_hex(8)}", **self._fields(event)})

    def _fields(self, event: Any) -> dict[str, Any]:
        if isinstance(event, messages.Speech):
            return self._speech(event)
        if isinstance(event, TranscriptDelta):
            kind = "conversation.item.input_audio_transcription.delta"
            return {
                "type": kind,
                "frame_index": event.frame_index,
                "delta": event.delta,
                "transcript": event.text,
            }
        if isinstance(event, TextDelta | FunctionDelta):
            channel = "text" if isinstance(event, TextDelta) else "function"
            return {
                "type": f"response.{channel}.delta",
                "frame_index": event.frame_index,
                "token_id": event.token_id,
                "delta": event.delta,
                "text": event.text,
            }
        if isinstance(event, Error):
            named_event = {} if event.event_id is None else {"event_id": event.event_id}
            return {"type": "error", "error": {"code": event.code, "message": event.message, **named_event}}
        if isinstance(event, Done | Cancelled | messages.Interrupted):
            ends = {Done: "done", Cancelled: "cancelled", messages.Interrupted: "interrupted"}
            return {"type": f"response.{ends[type(event)]}", "frame_index": event.frame_index}
        if isinstance(event, messages.Lagging):
            return {"type": "session.lagging", "backlog_seconds": event.seconds}
        if isinstance(event, messages.Committed):
            return {"type": "input_audio_buffer.committed"}
        if isinstance(event, Pong):
            return {"type": "session.pong"}
        return self._session(ready=isinstance(event, messages.Opened))

    def _speech(self, event: messages.Speech) -> dict[str, Any]:
        pcm = pcm16(np.frombuffer(event.samples, np.float32), WIRE_SCALE).tobytes()
        return {
            "type": "response.audio.delta",
            "frame_index": event.frame_index,
            "delta": base64.b64encode(pcm).decode("ascii"),
            "format": "pcm16",
            "sample_rate": self.engine.config.output_rate_hz,
            "channels": 1,
            "audio_codes": event.codes,
        }

    def _session(self, ready: bool) -> dict[str, Any]:
        config = self.engine.config
        session: dict[str, Any] = {"id": self.id, "state": "ready" if ready else "configuring"}
        if ready:
            session |= {"model": self.settings.model_id, "frame_samples": config.frame_samples_in}
        session["input_audio_format"] = {"type": "pcm16", "sample_rate": config.input_rate_hz}
        session["output_audio_format"] = {"type": "pcm16", "sample_rate": config.output_rate_hz}
        return {"type": "session.updated" if ready else "session.created", "session": session}
