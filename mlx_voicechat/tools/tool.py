"""A tool: what the model may call, and what runs then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}")
MAX_TOOLS = 32
EMPTY_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """What the model may call: a name, a sentence about it and a JSON Schema of its arguments, an object.

    `callable(**arguments)` gives the result; None leaves that to `Session.give`. It runs on a thread of its own and may
    return text or any JSON value. With `wants_call` it gets the `FunctionCall` event instead of the arguments.
    `on_hold` is said while a call waits. Raises InputError for a name or parameters that cannot be declared.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(EMPTY_SCHEMA))
    callable: Callable[..., Any] | None = None
    on_hold: str | None = None
    wants_call: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise InputError(
                f"A tool cannot be named {str(self.name)[:130]!r}.",
                "A name is a letter or _, then at most 127 letters, digits, _ or -.",
            )
        if not isinstance(self.description, str):
            raise InputError(f"The description of tool {self.name} is no text: {type(self.description).__name__}.")
        if not isinstance(self.parameters, Mapping):
            kind = type(self.parameters).__name__
            raise InputError(f"The parameters of tool {self.name} are no JSON Schema object: {kind}.")
        try:
            json.dumps(dict(self.parameters), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"The parameters of tool {self.name} are no JSON: {error}.") from None
        if self.callable is not None and not callable(self.callable):
            raise InputError(f"The callable of tool {self.name} cannot be called: {type(self.callable).__name__}.")
        if self.on_hold is not None and not isinstance(self.on_hold, str):
            raise InputError(f"on_hold of tool {self.name} is no text: {type(self.on_hold).__name__}.")


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """The tools by their names; InputError for more than 32, for something else, or for two of one name.

    Names are one when they differ in - and _ alone: the model mixes them up.
    """
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise InputError(f"tools is of type {type(tools).__name__}, expected a list of Tool.")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"{len(tools)} tools were given, a session takes {MAX_TOOLS}.", "Give the five it needs.")
    named: dict[str, Tool] = {}
    folded: dict[str, str] = {}
    for tool in tools:
        if not isinstance(tool, Tool):
            raise InputError(f"tools holds a {type(tool).__name__}, expected Tool.")
        other = folded.setdefault(tool.name.replace("-", "_"), tool.name)
        if tool.name in named or other != tool.name:
            raise InputError(f"Two tools are named alike: {other} and {tool.name}.", "Rename one of them.")
        named[tool.name] = tool
    return named
