"""How a session is opened for a request: its options, and its prompt with the conversation so far."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from mlx_voicechat.tools import Tool

from . import messages

if TYPE_CHECKING:
    from mlx_voicechat.session import Session
    from mlx_voicechat.text import Tokenizer
    from mlx_voicechat.voicechat import VoiceChat

HISTORY_TOKENS = 1_500  # the newest of a conversation that a prompt takes over: each takes a step of the opening
HISTORY_HEAD = "Conversation so far:"


def opening(
    model: VoiceChat, request: messages.Open, voice: str | None, heard_seconds: float
) -> Generator[None, None, Session]:
    """The opening of a session in steps; `heard_seconds` of its limit are used up."""
    options: dict[str, Any] = {
        "system_prompt": request.system_prompt,
        "seed": request.seed,
        "max_seconds": request.max_seconds - heard_seconds,
        "voice": voice,
    }
    if request.history:
        prompt = model.config.default_system_prompt if request.system_prompt is None else request.system_prompt
        options["system_prompt"] = prompt_with(prompt, request.history, model.tokenizer)
    if request.stepped:
        options |= {"tools": _tools(request.tools), "turns": request.turns, "turn_events": request.pace is not None}
        options |= {"wait_for_tools": request.wait_for_tools, "tool_timeout": request.tool_timeout}
    session = yield from model.opening(**options)
    return session


def _tools(tools: Sequence[messages.Tool | Tool]) -> list[Tool]:
    return [
        tool if isinstance(tool, Tool) else Tool(tool.name, tool.description, dict(tool.parameters)) for tool in tools
    ]


def prompt_with(prompt: str, history: Sequence[str], tokenizer: Tokenizer) -> str:
    """A prompt that ends with the newest lines of a conversation, as many as HISTORY_TOKENS hold."""
    kept: list[str] = []
    left = HISTORY_TOKENS
    for line in reversed(history):
        left -= len(tokenizer.encode(line + "\n"))
        if left < 0:
            break
        kept.append(line)
    if not kept:
        return prompt
    return "\n".join([*([prompt, ""] if prompt else []), HISTORY_HEAD, *reversed(kept)])
