"""The tools of a command: those of a file that a program runs, and those of MCP servers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_voicechat.errors import InputError, ToolError

from .mcp_config import servers_of
from .mcp_servers import McpServers
from .mcp_tools import choose, result_text
from .tool_command import ToolCommand
from .tool_files import MOST_TOOLS, Description, read_tools

RECOMMENDED = 5  # tools of a session, by NVIDIA
MAX_RESULT_BYTES = 2**14


@dataclass(frozen=True)
class ToolOptions:
    """The options of tools, as `generate`, `talk` and `serve` take them; true if one is used."""

    tools: Path | None = None
    tool_command: str | None = None
    mcp: tuple[str, ...] = ()
    mcp_config: Path | None = None
    mcp_tools: tuple[str, ...] = ()
    on_hold: str | None = None

    def __bool__(self) -> bool:
        return self.tools is not None or bool(self.mcp) or self.mcp_config is not None

    @classmethod
    def of(
        cls,
        tools: Path | None,
        tool_command: str | None,
        mcp: list[str] | None,
        mcp_config: Path | None,
        mcp_tools: str | None,
        on_hold: str | None,
    ) -> ToolOptions:
        """The options as they were written. Raises InputError for one that lacks another."""
        if (tools is None) != (tool_command is None):
            have, lack = ("--tools", "--tool-command") if tool_command is None else ("--tool-command", "--tools")
            raise InputError(f"{have} works only together with {lack}.")
        picked = tuple(name.strip() for name in (mcp_tools or "").split(",") if name.strip())
        options = cls(tools, tool_command, tuple(mcp or ()), mcp_config, picked, on_hold)
        if mcp_tools is not None and not (options.mcp or mcp_config):
            raise InputError("--mcp-tools works only together with --mcp or --mcp-config.")
        if mcp_tools is not None and not picked:
            raise InputError("--mcp-tools names no tool.", "Write it like get_time,get_weather.")
        if on_hold is not None and not options:
            raise InputError("--on-hold works only together with --tools, --mcp or --mcp-config.")
        return options


class ToolSources:
    """What the model may call, ready when the block begins; a call may come from any thread.

    `say` gets a line about everything that is not as written: tools left out or called otherwise, servers that end.
    """

    def __init__(self, options: ToolOptions, say: Callable[[str], object]) -> None:
        self.tools: tuple[Description, ...] = ()
        self._options, self._say = options, say
        self._calls: dict[str, Callable[[dict[str, Any], str], str]] = {}
        self._fits: Callable[[str], bool] = lambda text: len(text.encode()) <= MAX_RESULT_BYTES
        self._open = ExitStack()

    def __enter__(self) -> ToolSources:
        """Start what is to be started. Raises InputError."""
        options, found = self._options, []
        if options.tools is not None and options.tool_command is not None:
            found = read_tools(options.tools)
            program = ToolCommand(options.tool_command)
            self._open.callback(program.close)
            self._calls |= {tool.name: partial(program.call, tool.name) for tool in found}
        entries = servers_of(list(options.mcp), options.mcp_config)
        if entries:
            servers = self._open.enter_context(McpServers(entries, self._say))
            try:
                found += self._listed(servers, [tool.name for tool in found])
            except BaseException:
                self._open.close()
                raise
        if len(found) > MOST_TOOLS:
            self._open.close()
            raise InputError(f"{len(found)} tools are more than the {MOST_TOOLS} that the model takes.")
        self.tools = tuple(self._on_hold(tool) for tool in found)
        if options:
            self._say(f"tools: {', '.join(tool.name for tool in found) or 'none'}.")
        if len(found) > RECOMMENDED:
            self._say(f"{len(found)} tools are many for this model: {RECOMMENDED} are recommended.")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def fit_results(self, fits: Callable[[str], bool]) -> None:
        """Cut the texts of MCP servers to what `fits` says a result may be."""
        self._fits = fits

    def call(self, name: str, arguments: dict[str, Any], call_id: str) -> str:
        """Call a tool and wait for its result. Raises ToolError."""
        if name not in self._calls:
            raise ToolError(f"There is no tool {name}.")
        result = self._calls[name](arguments, call_id)
        if not self._fits(result):
            raise ToolError(f"The result of {name} is longer than the model takes: {len(result):,} characters.")
        return result

    def start(self, name: str, arguments: dict[str, Any], call_id: str) -> Future[str]:
        """Call a tool on a thread of its own, which nobody waits for at the end."""
        future: Future[str] = Future()

        def run() -> None:
            try:
                future.set_result(self.call(name, arguments, call_id))
            except ToolError as fault:
                future.set_exception(fault)

        threading.Thread(target=run, name=f"tool {name}", daemon=True).start()
        return future

    def _listed(self, servers: McpServers, taken: list[str]) -> list[Description]:
        picked, complete = list(self._options.mcp_tools), servers.all_usable
        chosen = choose(servers.listed(), picked, taken, complete, self._say)
        for tool in chosen:

            def call(arguments: dict[str, Any], call_id: str, server: str = tool.server, name: str = tool.name) -> str:
                return result_text(servers.call(server, name, arguments), self._fits)

            self._calls[tool.told.name] = call
        return [tool.told for tool in chosen]

    def _on_hold(self, tool: Description) -> Description:
        sentence = self._options.on_hold
        return dataclasses.replace(tool, on_hold=sentence) if sentence and not tool.on_hold else tool
