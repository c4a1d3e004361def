"""strict-v3: what a client may send, each message checked by itself. What a session makes of it is not decided here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from . import json_messages
from .json_messages import ECHO_CHARACTERS, brief, decoded, is_integer, named
from .limits import PROMPT_CHARACTERS
from .strict_v3_codes import (
    CLIENT_AUTHORED,
    INPUT_RATE_HZ,
    MOST_PACKET_BYTES,
    MOST_RESULT_BYTES,
    MOST_TOOLS,
    VERSION,
    Refused,
)

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
KEEP = object()  # a field that an update leaves out


@dataclass(frozen=True)
class Update:
    """`session.update`; KEEP where a field is absent, None where it is to be the server's default."""

    instructions: Any
    tools: Any  # a tuple of {name, description, parameters}
    model_output: str | None  # the negotiated capability
    event_id: str | None


@dataclass(frozen=True)
class Append:
    """PCM16 at 16 kHz."""

    pcm: bytes
    event_id: str | None


@dataclass(frozen=True)
class TurnStart:
    client_turn_id: int
    event_id: str


@dataclass(frozen=True)
class Commit:
    client_turn_id: int
    event_id: str


@dataclass(frozen=True)
class TextRequest:
    """`input_text.request` as it came: what is wrong with it is answered by `input_text.rejected`."""

    job_id: Any
    text: Any
    event_id: str | None


@dataclass(frozen=True)
class Item:
    """`conversation.item.create`: its fields are checked against the open call."""

    item: Any
    event_id: str | None


@dataclass(frozen=True)
class Stop:
    event_id: str | None


Message: TypeAlias = Update | Append | TurnStart | Commit | TextRequest | Item | Stop


def parsed(frame: Mapping[str, Any]) -> dict[str, Any]:
    """A WebSocket message -> the JSON object in it, which has a type. Raises Refused."""
    if frame.get("text") is None:
        raise Refused("binary_audio_unsupported", "Binary frames are not supported: send audio as base64 in JSON.")
    try:
        message = json_messages.parsed(frame)
    except json_messages.Malformed as malformed:
        raise Refused("invalid_event" if malformed.is_json else "invalid_json", malformed.message) from None
    if not isinstance(message.get("type"), str):
        raise Refused("invalid_event", "The message has no type.", event_id_of(message))
    return message


def event_id_of(message: Mapping[str, Any]) -> str | None:
    """The client's event_id, where it is one that can be echoed."""
    return json_messages.client_event_id(message) or None


def understood(message: Mapping[str, Any], configured: bool) -> Message:
    """A message by its type; before `configured` only what may come then. Raises Refused."""
    kind = message["type"]
    read = _READERS.get(kind)
    if read is None:
        raise Refused("unsupported_event", f"There is no message {brief(kind)!r} in this protocol.")
    if not configured and kind in _AFTER_UPDATE:
        raise Refused("session_not_configured", f"Send session.update, and {kind} after session.updated.")
    return read(message)


def update_of(message: Mapping[str, Any], configured: bool, negotiated: str | None) -> Update:
    """`session.update`: `configured` and what was `negotiated` are those of the updates before. Raises Refused."""
    session = message.get("session")
    if not isinstance(session, dict):
        raise Refused("invalid_session_update", f"session is {named(session)}, expected an object.")
    version = session.get("protocol_version")
    if version is None and configured and "protocol_version" not in session:
        version = VERSION
    if not is_integer(version) or version != VERSION:
        raise Refused(
            "unsupported_protocol_version",
            f"protocol_version is {named(version)}, this server speaks {VERSION}.",
            final=not configured,
        )
    model_output = _capability(session)
    if configured and model_output != negotiated:
        raise Refused("settings_locked", "capabilities stand since the first session.update: send them again.")
    instructions = session.get("instructions", KEEP)
    if not (instructions is KEEP or instructions is None or isinstance(instructions, str)):
        raise Refused("invalid_session_update", f"instructions is {named(instructions)}, expected a string or null.")
    if isinstance(instructions, str):
        _check_text("invalid_session_update", "instructions", instructions)
        if len(instructions) > PROMPT_CHARACTERS:
            raise Refused("invalid_session_update", f"instructions has more than {PROMPT_CHARACTERS:,} characters.")
    tools = session.get("tools", KEEP)
    return Update(instructions, tools if tools is KEEP else _tools(tools), model_output, event_id_of(message))


def _capability(session: Mapping[str, Any]) -> str | None:
    capabilities = session.get("capabilities", {})
    if not isinstance(capabilities, dict):
        raise Refused("invalid_session_capabilities", f"capabilities is {named(capabilities)}, expected an object.")
    unknown = [key for key in capabilities if key != "function_output_model_output"]
    if unknown:
        raise Refused("unsupported_session_capability", f"There is no capability {brief(unknown[0])!r}.")
    mode = capabilities.get("function_output_model_output")
    if mode is not None and mode != CLIENT_AUTHORED:
        message = f"function_output_model_output is {named(mode)}, expected {CLIENT_AUTHORED!r}."
        raise Refused("unsupported_session_capability", message)
    return mode


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    """Tools, flat or wrapped in `function` -> name, description and parameters of each."""
    if given is None:
        return ()
    if not isinstance(given, list):
        raise Refused("invalid_tools", f"tools is {named(given)}, expected an array.")
    if len(given) > MOST_TOOLS:
        raise Refused("invalid_tools", f"There are {len(given)} tools, at most {MOST_TOOLS} may be.")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(given))
    names = [tool["name"].replace("-", "_") for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Refused("invalid_tools", f"tools[{index}] has a name that another has: {tools[index]['name']!r}.")
    return tools


def _tool(index: int, given: Any) -> dict[str, Any]:
    tool = given.get("function", given) if isinstance(given, dict) else given
    if not isinstance(tool, dict):
        raise Refused("invalid_tools", f"tools[{index}] is {named(tool)}, expected an object.")
    if given.get("type", "function") != "function":
        raise Refused("invalid_tools", f"tools[{index}] is no function.")
    name, description = tool.get("name"), tool.get("description", "")
    parameters = tool.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise Refused("invalid_tools", f"tools[{index}].name must match {TOOL_NAME.pattern}.")
    if not isinstance(description, str):
        raise Refused("invalid_tools", f"tools[{index}].description is {named(description)}, expected a string.")
    parameters = NO_PARAMETERS if parameters is None else parameters
    if not isinstance(parameters, dict):
        raise Refused("invalid_tools", f"tools[{index}].parameters is {named(parameters)}, expected an object.")
    tool = {"name": name, "description": description, "parameters": parameters}
    try:
        _check_text("invalid_tools", f"tools[{index}]", json.dumps(tool, ensure_ascii=False))
    except RecursionError:
        raise Refused("invalid_tools", f"tools[{index}].parameters is nested too deeply.") from None
    return tool


def result_of(item: Any, negotiated: bool) -> tuple[str, str]:
    """The item of a result -> call_id and what the model gets. Raises Refused."""
    if not isinstance(item, dict):
        raise Refused("invalid_conversation_item", f"item is {named(item)}, expected an object.")
    if item.get("type") != "function_call_output":
        raise Refused("invalid_conversation_item", "item.type must be 'function_call_output'.")
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str) or not isinstance(output, str):
        raise Refused("invalid_function_call_output", "item.call_id and item.output must be strings.")
    authored = item.get("model_output")
    if authored is not None and not negotiated:
        raise Refused("invalid_function_call_output", "item.model_output was not negotiated in session.update.")
    result = output if authored is None else authored
    if not isinstance(result, str):
        raise Refused("invalid_function_call_output", f"item.model_output is {named(result)}, expected a string.")
    _check_text("invalid_function_call_output", "The result", result)
    if len(result.encode()) > MOST_RESULT_BYTES:
        raise Refused("invalid_function_call_output", f"The result has more than {MOST_RESULT_BYTES:,} bytes.")
    return call_id, result


def _append(message: Mapping[str, Any]) -> Append:
    if message.get("encoding") != "pcm16":
        raise Refused("unsupported_audio_encoding", f"encoding is {named(message.get('encoding'))}, expected 'pcm16'.")
    for key, code, expected in (
        ("sample_rate", "unsupported_sample_rate", INPUT_RATE_HZ),
        ("channels", "unsupported_channel_count", 1),
    ):
        value = message.get(key)
        if not is_integer(value) or value != expected:
            raise Refused(code, f"{key} is {named(value)}, expected {expected}.")
    audio = message.get("audio")
    if not isinstance(audio, str):
        raise Refused("invalid_audio", f"audio is {named(audio)}, expected base64 of little-endian PCM16.")
    if not audio:
        raise Refused("empty_audio", "audio is empty.")
    try:
        pcm = decoded(audio)
    except ValueError as fault:
        raise Refused("invalid_audio", f"audio: {fault}.") from None
    if len(pcm) > MOST_PACKET_BYTES:
        raise Refused("audio_packet_too_large", f"audio has {len(pcm)} bytes, at most {MOST_PACKET_BYTES} may be.")
    if len(pcm) % 2:
        raise Refused("invalid_audio", f"audio has {len(pcm)} bytes, which are no whole number of samples.")
    return Append(pcm, event_id_of(message))


def _barrier(make: Callable[[int, str], Message]) -> Callable[[Mapping[str, Any]], Message]:
    def read(message: Mapping[str, Any]) -> Message:
        event_id, turn_id = event_id_of(message), message.get("client_turn_id")
        if event_id is None:
            wrong = f"{message['type']} needs an event_id: a string of 1 to {ECHO_CHARACTERS} characters."
            raise Refused("invalid_event_id", wrong)
        if not is_integer(turn_id) or turn_id < 1:
            raise Refused("invalid_client_turn_id", f"client_turn_id is {named(turn_id)}, expected an integer from 1.")
        return make(turn_id, event_id)

    return read


_READERS: dict[str, Callable[[Mapping[str, Any]], Message]] = {
    "session.update": lambda message: Update(KEEP, KEEP, None, event_id_of(message)),  # see `update_of`
    "input_audio_buffer.append": _append,
    "input_audio_buffer.turn_start": _barrier(TurnStart),
    "input_audio_buffer.commit": _barrier(Commit),
    "input_text.request": lambda m: TextRequest(m.get("job_id"), m.get("text"), event_id_of(m)),
    "conversation.item.create": lambda m: Item(m.get("item"), event_id_of(m)),
    "session.stop": lambda message: Stop(event_id_of(message)),
}
_AFTER_UPDATE = frozenset(
    kind for kind in _READERS if kind not in ("session.update", "session.stop", "input_text.request")
)


def _check_text(code: str, what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(code, f"{what} is not valid Unicode at character {error.start}: half a pair.") from None
