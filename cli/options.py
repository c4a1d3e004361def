"""Options that several commands share, and checks of their values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from mlx_voicechat.server.settings import described

MAX_EXTRA_SECONDS = 600
MAX_LIMIT_SECONDS = 1e9  # a number of samples beyond it is none
DESCRIBED = ("metavar", "help", "min", "max", "envvar", "show_default")  # of a setting, as an option takes it

DEFAULT_MODEL = "mlx-community/NemotronLabs-VoiceChat-11B-4bit"
MODEL_VARIABLE = "MLX_VOICECHAT_MODEL"
MODEL_HELP = "A folder, a Hub repository, or tiny; the 11B model in 4 bits if absent."

Model = Annotated[
    str,
    Option("-m", "--model", metavar="MODEL", envvar=MODEL_VARIABLE, show_default=False, help=MODEL_HELP),
]
ModelArgument = Annotated[str, Argument(metavar="[MODEL]", envvar=MODEL_VARIABLE, show_default=False, help=MODEL_HELP)]
SpeechWeights = Annotated[
    str | None, Option(metavar="f32|q8", show_default=False, help="How speech weights are held; else by memory.")
]
Compiled = Annotated[
    bool | None,
    Option("--compile/--no-compile", show_default=False, help="Fuse kernels first; on a GPU only if absent."),
]
Voice = Annotated[str | None, Option(metavar="NAME", help="One of the model's voices, if it has several.")]
KeyValueCache = Annotated[str, Option(metavar="f32|bf16", help="How the speech generator's keys and values are held.")]

ToolsFile = Annotated[
    Path | None, Option("--tools", metavar="FILE", help="What the model may call: a JSON list, run by --tool-command.")
]
ToolCommand = Annotated[
    str | None, Option(metavar="PROGRAM", help="Run once a call: JSON on its stdin, the result on its stdout.")
]
Mcp = Annotated[
    list[str] | None,
    Option(
        metavar="COMMAND", show_default=False, help="Start an MCP server, and let the model call its tools; repeat."
    ),
]
McpConfig = Annotated[Path | None, Option(metavar="FILE", help="MCP servers, in the usual mcpServers form.")]
McpTools = Annotated[str | None, Option(metavar="NAME,NAME", help="Of theirs only these; the first five if absent.")]
OnHold = Annotated[str | None, Option(metavar="TEXT", help="Said while a tool takes longer than 0.8 s.")]
TOOL_OPTIONS = ("tools", "tool_command", "mcp", "mcp_config", "mcp_tools", "on_hold")  # as ToolOptions takes them


def positive_seconds(value: float | None) -> float | None:
    """Check an option: more than 0 seconds."""
    if value is not None and not 0 < value <= MAX_LIMIT_SECONDS:
        raise typer.BadParameter(f"{value:g} is not a number above 0 and up to {MAX_LIMIT_SECONDS:g}.")
    return value


def setting(name: str) -> Any:
    """The option of a server's setting: `mlx_voicechat.server.settings` has its range and help."""
    told = described(name)
    check = positive_seconds if told.get("above") == 0 else None
    return Option(callback=check, **{key: told[key] for key in DESCRIBED if key in told})


def extra_seconds(value: float) -> float:
    """Check an option: seconds of silence to add."""
    if not 0 <= value <= MAX_EXTRA_SECONDS:
        raise typer.BadParameter(f"{value:g} is not a number from 0 to {MAX_EXTRA_SECONDS}.")
    return value


def not_negative(value: Any) -> Any:
    """Check an option: a finite number of at least 0."""
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a number of at least 0.")
    return value
