"""The sub-commands brought together, and the version.

No module of this folder imports MLX, numpy or librosa at its top: a command does so once it has work for them.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .bench import bench
from .calibrate import calibrate
from .compare import compare
from .convert import convert
from .doctor import doctor
from .download import download
from .generate import generate
from .info import info
from .render import Output
from .serve import serve
from .synth import synth
from .talk import talk

app = typer.Typer(
    name="mlx-voicechat",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _OptionsOnly(TyperCommand):
    """A command whose usage line does not show the argument that it takes only to refuse it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return super().collect_usage_pieces(ctx)[:1]


def _version(wanted: bool) -> None:
    if wanted:
        Output().write(f"mlx-voicechat {metadata.version('mlx-voicechat')}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """NVIDIA NemotronLabs VoiceChat, a full-duplex speech-to-speech model, on Apple Silicon.

    Without a download: mlx-voicechat generate -m tiny --audio examples/question.wav
    """
    if context.invoked_subcommand is None:
        Output().write(context.get_help() + "\n")


app.command(cls=_OptionsOnly, short_help="Answer a recording: text on stdout, speech in a file.")(generate)
app.command(short_help="Talk with the model: microphone and loudspeakers.")(talk)
app.command(short_help="Serve the model live at /v1/realtime.")(serve)
app.command(short_help="Describe a model and the memory it takes.")(info)
app.command(short_help="Fetch a model ahead of its first use.")(download)
app.command(short_help="Look whether this machine can run the model.")(doctor)
app.command(short_help="Measure a model on this machine.")(bench)
app.command(short_help="Convert a checkpoint to another precision.")(convert)
app.command(short_help="Hear recordings, for `convert --calibration`.")(calibrate)
app.command(short_help="Compare two checkpoints of one model.")(compare)
app.command(short_help="Write a checkpoint of random weights.")(synth)
