"""What may be called, from a file: the JSON list of `--tools`. Every fault is named with its entry."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from mlx_voicechat.errors import InputError
from mlx_voicechat.tools import Tool
from mlx_voicechat.tools.tool import MAX_TOOLS

MAX_FILE_BYTES = 2**20
KEYS = ("type", "name", "description", "parameters", "strict", "on_hold")


def one_name(name: str) -> str:
    """What two names must not share: `-` and `_` are one to the model."""
    return name.replace("-", "_")


def read_tools(path: Path) -> list[Tool]:
    """The tools of a file. Raises InputError, which names the entry and the fault."""
    entries = read_json(path, "--tools")
    if not isinstance(entries, list):
        kind = "an object" if isinstance(entries, dict) else "no list"
        raise InputError(f"--tools {path} holds {kind}.", "Write a JSON list of tools: [{...}, {...}].")
    if not entries:
        raise InputError(f"--tools {path} holds an empty list.", "Name at least one tool, or leave the option out.")
    if len(entries) > MAX_TOOLS:
        raise InputError(f"--tools {path} lists {len(entries)} tools, the model takes at most {MAX_TOOLS}.")
    tools = [_Entry(path, index, entry).tool() for index, entry in enumerate(entries, 1)]
    if (twice := repeated(tool.name for tool in tools)) is not None:
        first, second = twice
        raise InputError(f"--tools {path}: {first} and {second} are one name to the model.", "Rename one of them.")
    return tools


def read_json(path: Path, option: str) -> Any:
    """What a small JSON file holds; a byte order mark is allowed. Raises InputError, naming the option."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as fault:
        raise InputError(f"{option} {path} cannot be read: {fault.strerror}.") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{option} {path} is larger than {MAX_FILE_BYTES:,} bytes.")
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as fault:
        raise InputError(f"{option} {path} is not UTF-8 at byte {fault.start}.") from None
    except json.JSONDecodeError as fault:
        raise InputError(
            f"{option} {path} is not JSON: {fault.msg}, line {fault.lineno} column {fault.colno}."
        ) from None
    except ValueError as fault:
        raise InputError(f"{option} {path} is not JSON: {fault}.") from None
    except RecursionError:
        raise InputError(f"{option} {path} is nested too deeply.") from None


def repeated(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that are one to the model."""
    seen: dict[str, str] = {}
    for name in names:
        first = seen.setdefault(one_name(name), name)
        if first is not name or seen[one_name(name)] is not first:
            return first, name
    return None


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


class _Entry:
    """One entry of the list, flat or wrapped in `function`."""

    def __init__(self, path: Path, index: int, entry: Any) -> None:
        self._where = f"--tools {path}, entry {index}"
        if not isinstance(entry, dict):
            self._fail("is no object")
        if entry.get("type", "function") != "function":
            self._fail(f"has the type {json.dumps(entry['type'])[:50]}, expected function")
        self._value: dict[str, Any] = entry
        if "function" in entry:
            inner = entry["function"]
            if not isinstance(inner, dict):
                self._fail("has a function that is no object")
            outer = {key: value for key, value in entry.items() if key not in ("type", "function")}
            self._value = {**outer, **inner}

    def tool(self) -> Tool:
        name = self._text("name", required=True)
        self._where += f" ({name[:40]})"
        unknown = [key for key in self._value if key not in KEYS]
        if unknown:
            self._fail(f"has an unknown key {unknown[0]!r}; known are {', '.join(KEYS[1:])}")
        parameters = self._value.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            self._fail("has parameters that are no object (a JSON Schema)")
        if parameters.get("type", "object") != "object":
            self._fail("has parameters whose type is not object")
        try:
            return Tool(name, self._text("description"), parameters, on_hold=self._text("on_hold") or None)
        except InputError as fault:
            raise InputError(f"{self._where}: {fault.message}", fault.remedy) from None

    def _text(self, key: str, required: bool = False) -> str:
        value = self._value.get(key)
        if value is None and not required:
            return ""
        if not isinstance(value, str) or (required and not value):
            self._fail(f"has no {key}" if value in (None, "") else f"has a {key} that is no text")
        return str(value)

    def _fail(self, fault: str) -> NoReturn:
        raise InputError(f"{self._where} {fault}.")
