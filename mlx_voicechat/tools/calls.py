"""What the model wrote on its function channel: parsed into calls, arguments coerced to the declared types."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..events import FailureReason
from .tool import Tool

OPENING, END = "<TOOLCALL>", "</TOOLCALL>"


@dataclass(frozen=True)
class WrittenCall:
    """One call as it was written; `failure` says why its tool cannot be run, `arguments` are then as they came."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]
    failure: FailureReason | None = None
    why: str = ""


class ArgumentError(ValueError):
    """Arguments that do not fit the declared parameters."""


def new_call_id() -> str:
    """`call_` and 24 hex digits."""
    return f"call_{secrets.token_hex(12)}"


def parse_calls(text: str, tools: Mapping[str, Tool]) -> list[WrittenCall]:
    """The calls in `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`, at least one.

    Tags may be missing, one object may stand for a list, and arguments may be JSON text. What cannot be read is one
    malformed call.
    """
    body = text.strip()
    body = body.removeprefix(OPENING).removesuffix(END).strip()
    try:
        written = strict_json(body)
    except ValueError:
        return [_malformed("The call is no JSON.")]
    entries = written if isinstance(written, list) else [written]
    if not entries:
        return [_malformed("The list of calls is empty.")]
    return [_parsed(entry, tools) for entry in entries]


def _parsed(entry: Any, tools: Mapping[str, Tool]) -> WrittenCall:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return _malformed("A call is an object with a name.")
    name, arguments = entry["name"], entry.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments) if arguments.strip() else {}
        except ValueError:
            return _failed(name, {}, FailureReason.BAD_ARGUMENTS, "The arguments are no JSON.")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return _failed(name, {}, FailureReason.BAD_ARGUMENTS, "The arguments are no object.")
    tool = tools.get(name) or {known.replace("-", "_"): tool for known, tool in tools.items()}.get(
        name.replace("-", "_")
    )
    if tool is None:
        return _failed(name, arguments, FailureReason.UNKNOWN_TOOL, f"There is no tool {name!r}.")
    try:
        return WrittenCall(new_call_id(), tool.name, coerced(arguments, tool.parameters))
    except ArgumentError as error:
        return _failed(tool.name, arguments, FailureReason.BAD_ARGUMENTS, str(error))


def _failed(name: str, arguments: Mapping[str, Any], failure: FailureReason, why: str) -> WrittenCall:
    return WrittenCall(new_call_id(), name, arguments, failure, why)


def _malformed(why: str) -> WrittenCall:
    return _failed("", {}, FailureReason.MALFORMED, why)


def strict_json(text: str) -> Any:
    """`json.loads` without NaN and infinity; ValueError also for what is nested too deep or holds too long a number."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def coerced(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with each value in its declared JSON type, where that loses nothing; ArgumentError otherwise.

    Arguments that the schema does not name pass as they are.
    """
    required = schema.get("required")
    named = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    missing = [name for name in named if name not in arguments]
    if missing:
        raise ArgumentError(f"Missing: {', '.join(missing)}.")
    properties = schema.get("properties")
    declared = properties if isinstance(properties, Mapping) else {}
    return {name: _value(name, value, declared.get(name)) for name, value in arguments.items()}


def _value(name: str, value: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or "type" not in schema:
        return value
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    known = [kind for kind in kinds if isinstance(kind, str) and kind in COERCIONS]
    if len(known) < len(kinds):
        return value  # a type that JSON Schema does not have says nothing
    for exact in (True, False):
        for kind in known:
            try:
                typed = COERCIONS[kind](value, exact)
            except (ValueError, OverflowError):
                continue
            return _inside(name, typed, schema)
    raise ArgumentError(f"{name} is not of type {' or '.join(map(str, kinds))}.")


def _inside(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return coerced(value, schema)
    if isinstance(value, list):
        return [_value(f"{name}[{index}]", item, schema.get("items")) for index, item in enumerate(value)]
    return value


def _string(value: Any, exact: bool) -> str:
    if isinstance(value, str):
        return value
    if exact or isinstance(value, dict | list) or value is None:
        raise ValueError
    return json.dumps(value)


def _integer(value: Any, exact: bool) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not exact and isinstance(value, str):
        return int(value.strip()) if "_" not in value else _never()
    raise ValueError


def _number(value: Any, exact: bool) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not exact and isinstance(value, str) and "_" not in value:
        number = strict_json(value.strip())
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            return number
    raise ValueError


def _boolean(value: Any, exact: bool) -> bool:
    if isinstance(value, bool):
        return value
    if not exact and isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ValueError


def _null(value: Any, exact: bool) -> None:
    if value is None or (not exact and value == "null"):
        return None
    raise ValueError


def _object(value: Any, exact: bool) -> dict[str, Any]:
    return _structured(value, exact, dict)


def _array(value: Any, exact: bool) -> list[Any]:
    return _structured(value, exact, list)


def _structured(value: Any, exact: bool, kind: type) -> Any:
    if isinstance(value, kind):
        return value
    if not exact and isinstance(value, str):
        inner = strict_json(value)
        if isinstance(inner, kind):
            return inner
    raise ValueError


def _never() -> Any:
    raise ValueError


COERCIONS: dict[str, Callable[[Any, bool], Any]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _object,
    "array": _array,
}
