"""What a session of OpenAI's vocabulary is configured to be: any number of partial updates, GA or beta, and its object.

Absent keys stay, null clears, unknown ones and what has no meaning here (voices, temperature, tracing) are echoed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .json_messages import is_integer, named
from .limits import PROMPT_CHARACTERS
from .messages import Owner, Tool
from .openai_events import Wrong
from .wire_audio import UnsupportedFormat, WireFormat, wire_format

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}", re.ASCII)
MOST_TOOLS = 32
SERVER_VAD: dict[str, Any] = {
    "type": "server_vad",
    "threshold": 0.5,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
}
OWN_KEYS = frozenset({"id", "object", "type", "expires_at", "client_secret"})  # of the server, whatever a client says
FLAT_AUDIO = {  # beta's flat keys -> where they stand since
    "input_audio_format": ("input", "format"),
    "input_audio_transcription": ("input", "transcription"),
    "input_audio_noise_reduction": ("input", "noise_reduction"),
    "turn_detection": ("input", "turn_detection"),
    "output_audio_format": ("output", "format"),
    "voice": ("output", "voice"),
    "speed": ("output", "speed"),
}
FLAT_NAMES = {"modalities": "output_modalities", "max_response_output_tokens": "max_output_tokens"}


@dataclass(frozen=True)
class SessionConfig:
    """A session's settings; `echoed` are the keys that change nothing."""

    model: str
    input_format: WireFormat
    output_format: WireFormat
    instructions: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Any = "auto"
    modalities: tuple[str, ...] = ("audio",)
    max_output_tokens: int | str = "inf"
    turn_detection: Mapping[str, Any] | None = None
    transcription: Any = None
    noise_reduction: Any = None
    voice: Any = None
    speed: Any = 1.0
    echoed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def detects_speech(self) -> bool:
        """Whether the server tells when the user speaks."""
        return self.turn_detection is not None

    @property
    def interrupts(self) -> bool:
        """Whether the user's speech ends the agent's turn."""
        return self.turn_detection is not None and self.turn_detection["interrupt_response"]

    @property
    def owner(self) -> Owner:
        """Who owns the turns: the model, unless the application asks for each response."""
        return "model" if self.turn_detection and self.turn_detection["create_response"] else "application"

    @property
    def prompt(self) -> tuple[str | None, tuple[Tool, ...]]:
        """What the model reads at the start."""
        return self.instructions, () if self.tool_choice == "none" else self.tools

    def updated(self, session: Mapping[str, Any]) -> SessionConfig:
        """These settings with a `session.update`'s changes. Raises Wrong."""
        changes: dict[str, Any] = {}
        echoed = dict(self.echoed)
        for key, value in _nested(session).items():
            if key == "audio":
                changes |= self._audio(value)
            elif key == "model":
                changes[key] = value if isinstance(value, str) and value else self.model
            elif key in PARSERS:
                name, parse = PARSERS[key]
                changes[name] = parse(value)
            elif key not in OWN_KEYS:
                echoed[key] = value
        return replace(self, **changes, echoed=echoed)

    def _audio(self, audio: Mapping[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for side in ("input", "output"):
            values = audio.get(side)
            if values is None:
                continue
            if not isinstance(values, dict):
                raise Wrong("invalid_event", f"session.audio.{side} must be an object, not {named(values)}.", "session")
            form: WireFormat = getattr(self, f"{side}_format")
            rate = values.get("sample_rate_hz")
            if values.get("format") is not None or rate is not None:
                given = values.get("format") or form.encoding
                changes[f"{side}_format"] = _format(given, rate, form.rate_hz, f"session.audio.{side}.format")
            for key in ("transcription", "noise_reduction", "voice", "speed"):
                if key in values:
                    changes[key] = values[key]
            if side == "input" and "turn_detection" in values:
                changes["turn_detection"] = _turn_detection(values["turn_detection"])
        return changes

    def as_json(self, session_id: str) -> dict[str, Any]:
        """The session object of a GA connection."""
        turn = None if self.turn_detection is None else dict(self.turn_detection)
        return {
            "max_output_tokens": self.max_output_tokens,
            "tracing": None,
            **self.echoed,
            **self._head(session_id),
            "output_modalities": list(self.modalities),
            "audio": {
                "input": {
                    "format": self.input_format.as_json(),
                    "transcription": self.transcription,
                    "noise_reduction": self.noise_reduction,
                    "turn_detection": turn,
                },
                "output": {"format": self.output_format.as_json(), "voice": self.voice, "speed": self.speed},
            },
        }

    def as_beta_json(self, session_id: str) -> dict[str, Any]:
        """The session object of a beta connection: flat."""
        return {
            "temperature": 0.8,
            **self.echoed,
            **self._head(session_id),
            "modalities": ["audio", "text"] if "audio" in self.modalities else ["text"],
            "voice": self.voice,
            "input_audio_format": self.input_format.beta_name,
            "output_audio_format": self.output_format.beta_name,
            "input_audio_transcription": self.transcription,
            "input_audio_noise_reduction": self.noise_reduction,
            "turn_detection": None if self.turn_detection is None else dict(self.turn_detection),
            "max_response_output_tokens": self.max_output_tokens,
            "speed": self.speed,
        }

    def _head(self, session_id: str) -> dict[str, Any]:
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "model": self.model,
            "instructions": self.instructions or "",
            "tools": [
                {"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters}
                for t in self.tools
            ],
            "tool_choice": self.tool_choice,
        }


def _nested(session: Mapping[str, Any]) -> dict[str, Any]:
    """A session with beta's flat keys where GA has them. Raises Wrong."""
    audio = session.get("audio") or {}
    if not isinstance(audio, dict):
        raise Wrong("invalid_event", f"session.audio must be an object, not {named(audio)}.", "session.audio")
    nested: dict[str, Any] = {"audio": dict(audio)}
    for key, value in session.items():
        if key in FLAT_AUDIO:
            side, name = FLAT_AUDIO[key]
            inside = nested["audio"].get(side) or {}
            if isinstance(inside, dict):
                nested["audio"][side] = {name: value, **inside}
        elif key != "audio":
            nested[FLAT_NAMES.get(key, key)] = value
    return nested


def _format(value: Any, rate_hz: Any, default_rate_hz: int, param: str) -> WireFormat:
    try:
        return wire_format(value, rate_hz, default_rate_hz)
    except UnsupportedFormat as fault:
        raise Wrong("unsupported_audio_format", str(fault), param) from None


def _instructions(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise Wrong("invalid_event", f"session.instructions must be a string, not {named(value)}.", "session")
    if value and len(value) > PROMPT_CHARACTERS:
        message = f"session.instructions is longer than {PROMPT_CHARACTERS:,} characters."
        raise Wrong("invalid_event", message, "session.instructions")
    return value or None


def _modalities(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("audio",)
    if not isinstance(value, list) or not value or any(one not in ("audio", "text") for one in value):
        message = "session.output_modalities must be an array of audio and text."
        raise Wrong("invalid_event", message, "session.output_modalities")
    return ("audio",) if "audio" in value else ("text",)


def _max_output_tokens(value: Any) -> int | str:
    if value is None or value == "inf":
        return "inf"
    if not is_integer(value) or value < 1:
        message = f'session.max_output_tokens must be an integer of at least 1 or "inf", not {named(value)}.'
        raise Wrong("invalid_event", message, "session.max_output_tokens")
    return int(value)


def _turn_detection(value: Any) -> Mapping[str, Any] | None:
    if value is None or (isinstance(value, dict) and value.get("type") == "none"):
        return None
    where = "session.audio.input.turn_detection"
    if not isinstance(value, dict):
        raise Wrong("invalid_event", f"{where} must be an object or null, not {named(value)}.", where)
    kind = value.get("type", "server_vad")
    if kind not in ("server_vad", "semantic_vad"):
        raise Wrong("invalid_event", f"{where}.type must be server_vad or semantic_vad, not {named(kind)}.", where)
    given = {key: one for key, one in value.items() if one is not None}
    turn = {"create_response": True, "interrupt_response": True, **(SERVER_VAD if kind == "server_vad" else {})}
    turn |= {"type": kind, **given}
    for key in ("create_response", "interrupt_response"):
        if not isinstance(turn[key], bool):
            raise Wrong("invalid_event", f"{where}.{key} must be true or false, not {named(turn[key])}.", where)
    if kind == "server_vad":
        for key, most in (("threshold", 1), ("prefix_padding_ms", 10_000), ("silence_duration_ms", 10_000)):
            number = turn[key]
            if not (is_integer(number) or isinstance(number, float)) or not 0 <= number <= most:
                message = f"{where}.{key} must be a number from 0 to {most}, not {named(number)}."
                raise Wrong("invalid_event", message, where)
    return turn


def parsed_tools(value: Any) -> tuple[Tool, ...]:
    """Flat functions, or wrapped in `function`. Raises Wrong(invalid_tools)."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        shown = f"{len(value)} of them" if isinstance(value, list) else named(value)
        raise Wrong("invalid_tools", f"tools must be an array of at most {MOST_TOOLS}, not {shown}.", "session.tools")
    tools: list[Tool] = []
    for number, given in enumerate(value):
        where = f"session.tools[{number}]"
        one = given.get("function", given) if isinstance(given, dict) else None
        if not isinstance(one, dict):
            raise Wrong("invalid_tools", f"{where} must be an object.", where)
        name, description = one.get("name"), one.get("description") or ""
        parameters = one.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise Wrong("invalid_tools", f"{where}.name must be a function's name, not {named(name)}.", where)
        if not isinstance(description, str) or not isinstance(parameters, dict):
            raise Wrong("invalid_tools", f"{where} must have a text as description, an object as parameters.", where)
        if any(name.replace("-", "_") == known.name.replace("-", "_") for known in tools):
            raise Wrong("invalid_tools", f"{where}.name {name} is there already.", where)
        tools.append(Tool(name, description, parameters))
    return tuple(tools)


PARSERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "instructions": ("instructions", _instructions),
    "tools": ("tools", parsed_tools),
    "tool_choice": ("tool_choice", lambda value: value or "auto"),
    "output_modalities": ("modalities", _modalities),
    "max_output_tokens": ("max_output_tokens", _max_output_tokens),
}
