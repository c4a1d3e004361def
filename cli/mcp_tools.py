"""What Model Context Protocol servers list, as tools of this model: which ones, under which names, with which results.

The model's prompt and a spoken answer have room for little: five tools, names of a pattern, short descriptions.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_voicechat.errors import InputError, ToolError
from mlx_voicechat.tools import Tool
from mlx_voicechat.tools.tool import NAME

from .tool_files import one_name

MOST_OFFERED = 5  # NVIDIA's recommendation for a session
MAX_DESCRIPTION = 500  # characters
MAX_SCHEMA = 4000  # characters of JSON
MOST_NAMED = 10  # tools in a note
NAME_LENGTH = 128
SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)|\n")
WORD_END = re.compile(r"(?=\s)")


@dataclass(frozen=True)
class McpTool:
    """A tool as the model knows it, and the server and the name by which it is called."""

    offered: Tool
    server: str
    name: str


def choose(
    listed: Sequence[tuple[str, Any]],
    picked: Sequence[str],
    taken: Iterable[str],
    complete: bool,
    say: Callable[[str], object],
) -> list[McpTool]:
    """Choose from (server, tool): the picked ones, or the first five; `taken` names are others' already.

    `complete` is whether every server has answered: else a name that is not listed is told of through `say`, and no
    InputError.
    """
    known = _named(listed, taken)
    if picked:
        chosen = [tool for tool in known if tool.name in picked or tool.offered.name in picked]
        missing = [name for name in picked if all(name not in (tool.name, tool.offered.name) for tool in known)]
        if missing:
            there = _some([tool.offered.name for tool in known]) or "none"
            fault = f"--mcp-tools: no MCP server lists {', '.join(missing)}; there are {there}."
            if complete:
                raise InputError(fault)
            say(fault)
    else:
        chosen = known[:MOST_OFFERED]
        if len(known) > len(chosen):
            names = ", ".join(tool.offered.name for tool in chosen)
            say(
                f"{len(known)} MCP tools are listed and {len(chosen)} offered to the model: {names}. "
                "Pick others with --mcp-tools."
            )
    chosen = [tool for tool in chosen if _small(tool, say)]
    for tool in chosen:
        if tool.offered.name != tool.name:
            say(f"the tool {tool.name[:NAME_LENGTH]!r} of {tool.server} is called {tool.offered.name} here.")
    return chosen


def allowed_name(name: str, taken: set[str]) -> str:
    """`name` itself if it is allowed and free, else one made of it; it is put into `taken`."""
    allowed = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:NAME_LENGTH]
    if not NAME.fullmatch(allowed):
        allowed = f"_{allowed}"[:NAME_LENGTH]
    unique, count = allowed, 1
    while one_name(unique) in taken:
        count += 1
        unique = f"{allowed[: NAME_LENGTH - len(str(count)) - 1]}_{count}"
    taken.add(one_name(unique))
    return unique


def result_text(result: Any, fits: Callable[[str], bool]) -> str:
    """The text of a `CallToolResult`, cut to what `fits`. Raises ToolError for an error, and where there is no text."""
    texts = [block.text for block in result.content if block.type == "text"]
    text = "\n".join(texts).strip()
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content)
    text = _on_one_line(text)
    if result.is_error:
        raise ToolError(cut(" ".join(text.split()), fits) or "The tool failed.")
    if not text and result.content:
        kinds = ", ".join(sorted({block.type for block in result.content}))
        raise ToolError(f"The tool gave no text, but {kinds}.")
    return cut(text, fits)


def cut(text: str, fits: Callable[[str], bool]) -> str:
    """The text, or as many of its first sentences as fit; of a longer sentence words, of a longer word letters."""
    if fits(text):
        return text
    for ends in (
        [match.end() for match in SENTENCE_END.finditer(text)],
        [match.end() for match in WORD_END.finditer(text)],
        range(len(text)),
    ):
        end = bisect.bisect_left(ends, True, key=lambda end: not fits(text[:end].rstrip()))
        if end and (short := text[: ends[end - 1]].rstrip()):
            return short
    return ""


def _named(listed: Sequence[tuple[str, Any]], taken: Iterable[str]) -> list[McpTool]:
    used = {one_name(name) for name in taken}
    tools = []
    for server, tool in listed:
        description = cut(" ".join((tool.description or "").split()), lambda text: len(text) <= MAX_DESCRIPTION)
        offered = Tool(allowed_name(tool.name, used), description, _untitled(tool.input_schema))
        tools.append(McpTool(offered, server, tool.name))
    return tools


def _untitled(schema: Any) -> Any:
    """A JSON Schema without the titles that generators put everywhere: they repeat the names."""
    if isinstance(schema, list):
        return [_untitled(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _untitled(value)
        for key, value in schema.items()
        if key != "$schema" and not (key == "title" and isinstance(value, str))
    }


def _small(tool: McpTool, say: Callable[[str], object]) -> bool:
    small = len(json.dumps(dict(tool.offered.parameters))) <= MAX_SCHEMA
    if not small:
        named = f"the tool {tool.offered.name} of {tool.server}"
        say(f"{named} is not offered: its parameters take more than {MAX_SCHEMA} characters.")
    return small


def _on_one_line(text: str) -> str:
    """JSON that was laid out for reading, as the model gets it; any other text as it is."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
