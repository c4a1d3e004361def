"""`mlx-voicechat calibrate`: recordings in, what quantising must know of the language model out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from mlx_voicechat.errors import InputError

from .options import (
    DEFAULT_MODEL,
    Mcp,
    McpConfig,
    McpTools,
    Model,
    SystemPrompt,
    ToolCommand,
    ToolsFile,
    Voice,
)
from .render import Output, complain, note, progress_bar


def calibrate(
    audio: Annotated[
        list[Path], Option(metavar="PATH", help="Recordings, or folders of them; repeat. The user's side alone.")
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Folder to write, or to go on with.")],
    model: Model = DEFAULT_MODEL,
    system_prompt: SystemPrompt = None,
    prompts: Annotated[
        Path | None,
        Option(metavar="FILE", show_default=False, help="System prompts, a JSON list of texts, taken in turn."),
    ] = None,
    voice: Voice = None,
    tools: ToolsFile = None,
    tool_command: ToolCommand = None,
    mcp: Mcp = None,
    mcp_config: McpConfig = None,
    mcp_tools: McpTools = None,
) -> None:
    """Gather what `convert --calibration` needs, from recorded conversations.

    Each recording is heard, then silence until the reply has ended; nothing is spoken. Disk and memory are told first.
    Stopped, it goes on where it was.
    """
    if prompts is not None and system_prompt is not None:
        raise InputError("--prompts and --system-prompt exclude each other.", "Give one of them.")

    from mlx_voicechat.convert import calibration, listening
    from mlx_voicechat.weights import checkpoint

    from .tool_sources import ToolOptions, ToolSources

    wanted = ToolOptions.of(tools, tool_command, mcp, mcp_config, mcp_tools, None)
    texts = [system_prompt] if prompts is None else _texts(prompts)
    opened = checkpoint.open_model(model, note)
    with ToolSources(wanted, note) as sources:
        options: dict[str, Any] = {"voice": voice}
        if sources.tools:
            options |= {"tools": sources.tools, "wait_for_tools": True}
        job = calibration.Job(output.expanduser(), opened, calibration.recordings(audio, texts, options))
        job.check()
        for line in job.describe():
            complain(line)
        loaded = listening.listener(model, opened, note)
        sources.fit_to(loaded)
        with progress_bar() as bar:

            def show(what: str, done: int, total: int) -> None:
                bar.desc, bar.total = what, total
                bar.update(done - bar.n)

            made = job.run(loaded, show)
    complain(f"{made.positions:,} positions of {len(job.heard)} conversations.")
    Output().write(f"{job.folder}\n")


def _texts(path: Path) -> list[str | None]:
    """The prompts of a file; an empty one is none. Raises InputError."""
    from .tool_files import read_json

    found = read_json(path, "--prompts")
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise InputError(f"--prompts {path} is no list of texts.", 'Write JSON: ["Be brief.", ""].')
    return [text or None for text in found]
