"""The command `mlx-voicechat`: its sub-commands, and the one place where an error becomes a line and an exit code.

No module of this folder imports MLX, numpy or librosa at its top: a command does so once it has work for them.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

from mlx_voicechat.errors import VoiceChatError

from .bench import bench
from .generate import generate
from .info import info
from .synth import synth

DEBUG_VARIABLE = "MLX_VOICECHAT_DEBUG"

app = typer.Typer(
    name="mlx-voicechat",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-voicechat {metadata.version('mlx-voicechat')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """NVIDIA NemotronLabs VoiceChat, a full-duplex speech-to-speech model, on Apple Silicon.

    Try it without a download: [bold]mlx-voicechat generate -m tiny --audio question.wav[/bold]
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(generate)
app.command()(info)
app.command()(bench)
app.command()(synth)


def main() -> None:
    """Entry point: runs `sys.argv` and leaves with the exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code, having said any error in one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a transcript must not fail in a terminal without its letters
    try:
        code: Any = app(list(arguments), prog_name="mlx-voicechat", standalone_mode=False)
    except Exception as error:
        return report(error)
    return code if isinstance(code, int) else 0


def report(error: Exception) -> int:
    """Print `error: ...` on stderr, one line, and return the exit code; the traceback only for those who ask for it."""
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    format_usage = getattr(error, "format_message", None)  # typer's own errors, whichever click it comes with
    if format_usage is not None:
        context = getattr(error, "ctx", None)
        hint = f" See '{context.command_path} --help'." if context is not None else ""
        message, code = format_usage().rstrip(".") + "." + hint, getattr(error, "exit_code", 2)
    elif isinstance(error, VoiceChatError):
        message, code = str(error), error.exit_code
    elif isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        message, code = f"{where}{error.strerror}.", 1
    else:
        message = f"Unexpected {type(error).__name__}: {error}. Set {DEBUG_VARIABLE}=1 to see where it comes from."
        code = 1
    print("error:", " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
