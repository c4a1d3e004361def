"""Tools as a system prompt declares them, in the text the model was trained on (spec/turns-and-tools)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .tool import Tool

DECLARED = "<AVAILABLE_TOOLS>"  # a prompt that has it stands as it is
INTRODUCTION = "You can use the following tools to assist the user if required:\n"
USE = (
    "If you decide to call any tool(s), use the following format:\n"
    '<TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}, '
    '{"name": "tool_name2", "arguments": "tool_args2"}]</TOOLCALL>\n\n'
    "The user will execute tool-calls and return responses from tool(s) in this format:\n"
    '<TOOL_RESPONSE>[{"tool_response1"}, {"tool_response2"}]</TOOL_RESPONSE>\n\n'
    "Based on the tool responses, you can call additional tools if needed, correct tool calls if any errors are found, "
    "or just respond to the user."
)


def prompt_with_tools(message: str, tools: Sequence[Tool], key_order: str = "given") -> str:
    """The system prompt that declares `tools` after the system message; without tools the message alone.

    `key_order` "sorted" sorts the keys of a tool's JSON; "given" keeps name, description, parameters and the schema's.
    """
    if not tools or DECLARED in message:
        return message
    declared = ", ".join(_declaration(tool, key_order == "sorted") for tool in tools)
    before = f"{message}\n\n" if message.strip() else ""
    return f"{before}{INTRODUCTION}{DECLARED}[{declared}]</AVAILABLE_TOOLS>\n\n{USE}"


def _declaration(tool: Tool, sort_keys: bool) -> str:
    facts: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return json.dumps(facts, ensure_ascii=False, sort_keys=sort_keys)
