"""What any dialect needs to read a client's JSON: parsing, strict base64, and the naming of values in an error."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

ECHO_CHARACTERS = 512  # of a client's event_id that an error names
MOST_DIGITS = 4300  # of an integer


class Malformed(Exception):
    """A frame that holds no JSON object, and why; `is_json` whether it is JSON at all."""

    def __init__(self, message: str, is_json: bool) -> None:
        super().__init__(message)
        self.message = message
        self.is_json = is_json


def parsed(frame: Mapping[str, Any]) -> dict[str, Any]:
    """A WebSocket message -> the JSON object in it. Raises Malformed."""
    text = frame.get("text")
    if text is None:
        raise Malformed("Messages are JSON text frames, not binary ones.", False)
    try:
        message = json.loads(text.removeprefix("\ufeff"), parse_int=number)
    except RecursionError:
        raise Malformed("The message is nested too deeply.", False) from None
    except ValueError as fault:
        raise Malformed(f"The message is not JSON: {brief(str(fault), 100)}.", False) from None
    if not isinstance(message, dict):
        raise Malformed(f"The message is {named(message)}, expected a JSON object.", True)
    return message


def client_event_id(message: Mapping[str, Any]) -> str | None:
    """The client's name for its message, if an error can name it."""
    event_id = message.get("event_id")
    return event_id if isinstance(event_id, str) and len(event_id) <= ECHO_CHARACTERS else None


def decoded(text: str) -> bytes:
    """Strict base64: no whitespace, no bits or padding too many. Raises ValueError."""
    try:
        data = base64.b64decode(text, validate=True)
        strict = base64.b64encode(data) == text.encode("ascii")
    except (ValueError, binascii.Error):
        strict = False
    if not strict:
        raise ValueError("this is not valid base64")
    return data


def number(digits: str) -> int | float:
    """A JSON integer; Python refuses or takes seconds for very long ones, which are all too large here."""
    return int(digits) if len(digits) <= MOST_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def is_integer(value: object) -> TypeGuard[int]:
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
