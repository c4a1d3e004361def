"""Options that several commands share, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from mlx_voicechat.options import MAX_SECONDS, LoadOptions, SessionOptions, described

MAX_EXTRA_SECONDS = 600
EXTRA_SECONDS, LONGEST_SECONDS = 3.0, 3600.0  # of silence after a recording; of a recording
SHOWN = ("metavar", "help", "min", "max", "envvar", "show_default")  # what a command takes of a field's description

DEFAULT_MODEL = "mlx-community/NemotronLabs-VoiceChat-11B-4bit"
MODEL_VARIABLE = "MLX_VOICECHAT_MODEL"
MODEL_HELP = "A folder, a Hub repository, or tiny; the 11B model in 4 bits if absent."


def option_of(options: type, name: str, *flags: str, **other: Any) -> Any:
    """The option of a field of an options class, which has its range and help; `other` says more of it, or else."""
    field = {**described(options, name), **other}
    if field["choices"]:
        field.setdefault("metavar", "|".join(str(choice) for choice in field["choices"] if choice is not None))
    return Option(*flags, callback=_checking(field), **{key: field[key] for key in SHOWN if key in field})


def _checking(field: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Check an option: one of its choices, in its range."""
    choices = [choice for choice in field["choices"] if choice is not None]

    def check(value: Any) -> Any:
        if value is None:
            return None
        if choices and value not in choices:
            raise typer.BadParameter(f"{value} is none of {', '.join(choices)}.")
        if "above" in field:
            return positive_seconds(value)
        return not_negative(value) if "min" in field else value

    return check


def positive_seconds(value: float | None) -> float | None:
    """Check an option: more than 0 seconds."""
    if value is not None and not 0 < value <= MAX_SECONDS:
        raise typer.BadParameter(f"{value:g} is not a number above 0 and up to {MAX_SECONDS:g}.")
    return value


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


def bandwidth(value: float | None) -> float | None:
    """Check an option: GB a second."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is not a number above 0.")
    return value


Model = Annotated[
    str,
    Option("-m", "--model", metavar="MODEL", envvar=MODEL_VARIABLE, show_default=False, help=MODEL_HELP),
]
ModelArgument = Annotated[str, Argument(metavar="[MODEL]", envvar=MODEL_VARIABLE, show_default=False, help=MODEL_HELP)]
SpeechWeights = Annotated[str | None, option_of(LoadOptions, "speech_weights")]
COMPILED = ("--compile/--no-compile",)
Compiled = Annotated[bool | None, option_of(LoadOptions, "compile", *COMPILED)]
ShardLlm = Annotated[bool, option_of(LoadOptions, "shard_llm", "--shard-llm")]
KeyValueCache = Annotated[str | None, option_of(LoadOptions, "kv_cache")]
Arithmetic = Annotated[str | None, option_of(LoadOptions, "arithmetic")]
Voice = Annotated[str | None, option_of(SessionOptions, "voice")]
SystemPrompt = Annotated[str | None, option_of(SessionOptions, "system_prompt", "-p", "--prompt", "--system-prompt")]
GuidanceScale = Annotated[float | None, option_of(SessionOptions, "guidance_scale")]
Seed = Annotated[int, option_of(SessionOptions, "seed")]
OutputAudio = Annotated[
    Path | None, Option(metavar="FILE", help="Write the assistant's speech: WAV, 22050 Hz, mono, 16 bits.")
]
ExtraSeconds = Annotated[
    float,
    Option(metavar="SECONDS", callback=extra_seconds, help="Silence after a recording, for answers: 0 to 600."),
]

Bandwidth = Annotated[
    float | None,
    Option(metavar="GBPS", callback=bandwidth, help="Memory bandwidth in GB/s for the floor; else measured."),
]

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
