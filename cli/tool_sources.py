"""The tools of a command: those of a file that a program runs, and those of MCP servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_voicechat.errors import InputError, ToolError
from mlx_voicechat.tools import Tool
from mlx_voicechat.tools.results import fits
from mlx_voicechat.tools.tool import MAX_TOOLS

from .mcp_config import servers_of
from .mcp_servers import McpServers
from .mcp_tools import McpTool, choose, result_text
from .tool_command import ToolCommand
from .tool_files import read_tools

if TYPE_CHECKING:
    from mlx_voicechat.events import FunctionCall
    from mlx_voicechat.voicechat import VoiceChat

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
        self.tools: tuple[Tool, ...] = ()
        self._options, self._say = options, say
        self._calls: dict[str, Callable[[Mapping[str, Any], str], str]] = {}
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
        if len(found) > MAX_TOOLS:
            self._open.close()
            raise InputError(f"{len(found)} tools are more than the {MAX_TOOLS} that the model takes.")
        self.tools = tuple(self._callable(tool) for tool in found)
        if options:
            self._say(f"tools: {', '.join(tool.name for tool in found) or 'none'}.")
        if len(found) > RECOMMENDED:
            self._say(f"{len(found)} tools are many for this model: {RECOMMENDED} are recommended.")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def fit_to(self, model: VoiceChat) -> VoiceChat:
        """Cut the texts of MCP servers to what this model takes as a result; the model, for where one is loaded."""
        self._fits = lambda text: fits(text, model.tokenizer)
        return model

    def call(self, call: FunctionCall) -> str:
        """Call a tool and wait for its result, on the calling thread. Raises ToolError."""
        result = self._calls[call.name](call.arguments, call.call_id)
        if not self._fits(result):
            raise ToolError(f"The result of {call.name} is longer than the model takes: {len(result):,} characters.")
        return result

    def _listed(self, servers: McpServers, taken: list[str]) -> list[Tool]:
        picked, complete = list(self._options.mcp_tools), servers.all_usable
        chosen = choose(servers.listed(), picked, taken, complete, self._say)
        self._calls |= {tool.offered.name: partial(self._ask, servers, tool) for tool in chosen}
        return [tool.offered for tool in chosen]

    def _ask(self, servers: McpServers, tool: McpTool, arguments: Mapping[str, Any], call_id: str) -> str:
        return result_text(servers.call(tool.server, tool.name, dict(arguments)), self._fits)

    def _callable(self, tool: Tool) -> Tool:
        on_hold = tool.on_hold or self._options.on_hold
        return dataclasses.replace(tool, callable=self.call, on_hold=on_hold, wants_call=True)
