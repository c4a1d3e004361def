"""Which Model Context Protocol servers to use: the commands of `--mcp`, and the file of `--mcp-config`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from mlx_voicechat.errors import InputError

from .child import check_program, words_of
from .mcp_process import Program
from .tool_files import read_json

HTTP_TYPES = ("http", "streamable-http", "streamableHttp")


@dataclass(frozen=True)
class Address:
    """A server that is reached over HTTP; what its headers and its query hold is never shown."""

    url: str = field(repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ServerEntry:
    """A server: its name in notes, and where it is."""

    name: str
    where: Program | Address


def servers_of(commands: list[str], config: Path | None) -> list[ServerEntry]:
    """All servers that were named, each under a name of its own. Raises InputError."""
    entries = [ServerEntry(_short(words), Program(words)) for words in (words_of(text, "--mcp") for text in commands)]
    if config is not None:
        entries += read_config(config)
    named: list[ServerEntry] = []
    for entry in entries:
        count = sum(other.name == entry.name for other in entries[: len(named)])
        named.append(ServerEntry(f"{entry.name} ({count + 1})", entry.where) if count else entry)
    return named


def read_config(path: Path) -> list[ServerEntry]:
    """The servers of a file in the `mcpServers` form; what else other programs write there is passed over.

    Raises InputError, which names the server and the fault.
    """
    config = read_json(path, "--mcp-config")
    servers = config.get("mcpServers") if isinstance(config, dict) else None
    if not isinstance(servers, dict):
        raise InputError(
            f"--mcp-config {path} has no object mcpServers.",
            'Write it like {"mcpServers": {"clock": {"command": "mcp-server-time"}}}.',
        )
    entries = [_Server(path, name, value).entry() for name, value in servers.items()]
    found = [entry for entry in entries if entry is not None]
    if not found:
        raise InputError(f"--mcp-config {path} names no server that is not disabled.")
    return found


def _short(words: list[str]) -> str:
    """What a command is called in notes: its program, and the script it runs; the rest may hold secrets."""
    script = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
    return " ".join(os.path.basename(word) for word in (words[0], script) if word)[:60]


class _Server:
    """One entry of `mcpServers`."""

    def __init__(self, path: Path, name: str, value: Any) -> None:
        self._where, self._name = f"--mcp-config {path}, server {name[:60]!r}", name[:60]
        if not isinstance(value, dict):
            self._fail("is no object")
        self._value: dict[str, Any] = value

    def entry(self) -> ServerEntry | None:
        """What it names, if it is not disabled."""
        value = self._value
        if value.get("disabled") is True:
            return None
        if ("command" in value) == ("url" in value):
            self._fail("needs either a command or a url")
        return ServerEntry(self._name, self._program() if "command" in value else self._address())

    def _program(self) -> Program:
        value = self._value
        self._check_type(("stdio",))
        args, cwd = value.get("args", []), value.get("cwd")
        if not isinstance(value["command"], str) or not value["command"]:
            self._fail("has a command that is no text")
        if not isinstance(args, list) or not all(isinstance(word, str) for word in args):
            self._fail("has args that are no list of texts")
        if cwd is not None and not (isinstance(cwd, str) and os.path.isdir(cwd)):
            self._fail("has a cwd that is no folder")
        check_program(value["command"], self._where)
        return Program([value["command"], *args], self._texts("env"), cwd)

    def _address(self) -> Address:
        self._check_type(HTTP_TYPES)
        url = self._value["url"]
        try:
            good = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
        except (ValueError, AttributeError, TypeError):
            good = False
        if not good:
            self._fail("has a url that is no http or https address")
        return Address(url, self._texts("headers"))

    def _check_type(self, types: tuple[str, ...]) -> None:
        if self._value.get("type", types[0]) not in types:
            self._fail(f"has a type other than {' or '.join(types)}")

    def _texts(self, key: str) -> dict[str, str]:
        """An object of texts; its values are not for messages."""
        value = self._value.get(key, {})
        if not isinstance(value, dict):
            self._fail(f"has {key} that is no object")
        for name, text in value.items():
            if not isinstance(text, str):
                self._fail(f"has {key} whose {name!r} is no text")
        return dict(value)

    def _fail(self, fault: str) -> NoReturn:
        raise InputError(f"{self._where} {fault}.")
