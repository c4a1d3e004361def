"""`mlx-voicechat generate`: a recording in, the conversation and the assistant's speech out."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_voicechat.errors import InputError, LimitError

from .conversation import Interrupt, converse, open_recording, timeline
from .outputs import Sinks, check_targets, replacing
from .render import LiveText, Output, Progress, final_text, note

if TYPE_CHECKING:
    from mlx_voicechat import Event, Session

DEFAULT_MODEL = "mlx-community/NemotronLabs-VoiceChat-11B-4bit"
INTERRUPTED = 130  # exit code of a program ended by Ctrl-C
STREAMING, MORE = "Streaming", "More output"  # panels of the help text


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def _positive(value: float | None) -> float | None:
    if value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return _finite(value)


def generate(
    audio: Annotated[
        str,
        typer.Option(metavar="PATH", help="The user's side: WAV, FLAC, OGG or MP3 at any rate; - is standard input."),
    ],
    model: Annotated[
        str,
        typer.Option("-m", "--model", envvar="MLX_VOICECHAT_MODEL", help="A folder, a Hub repository, or tiny."),
    ] = DEFAULT_MODEL,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", "--system-prompt", metavar="TEXT", help="System prompt; none if absent."),
    ] = None,
    output_audio: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the assistant's speech: 22050 Hz mono 16-bit WAV.")
    ] = None,
    extra_decoding_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, max=600, callback=_finite, help="Silence after the recording: time to answer."
        ),
    ] = 3.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the speech's noise: same seed, same bytes.")] = 0,
    voice: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the checkpoint's voices; its own if absent.")
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(min=0, callback=_finite, help="Of the speech; the checkpoint's own if absent.")
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", callback=_positive, help="Refuse a longer recording before any work.")
    ] = 3600.0,
    stream: Annotated[
        bool, typer.Option("--stream", rich_help_panel=STREAMING, help="Run frame by frame (80 ms), print as it speaks.")
    ] = False,
    max_streaming_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", callback=_positive, rich_help_panel=STREAMING, help="Stop with an error after so much."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", rich_help_panel=STREAMING, help="Print frame times by stage, JSON on stderr.")
    ] = False,
    profile_json: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=STREAMING, help="Write the profile there instead.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=MORE, help="Print one JSON object instead of text.")
    ] = False,
    both_sides: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=MORE, help="Stereo WAV: user left, assistant right.")
    ] = None,
    events: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=MORE, help="JSON lines: every event with its times.")
    ] = None,
    n: Annotated[str | None, typer.Option("-n", hidden=True)] = None,
    image: Annotated[str | None, typer.Option(hidden=True)] = None,
    video: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Answer a recording: print what was said, and write what the assistant speaks.

    Both speak on one timeline: the answer begins and ends with the recording, plus the silence after it.
    """
    for option, value in (("--image", image), ("--video", video)):
        if value is not None:
            raise InputError(f"{option} is not supported: this model hears and speaks, it does not see.")
    profile = profile or profile_json is not None
    for option, used in (("--max-streaming-seconds", max_streaming_seconds is not None), ("--profile", profile)):
        if used and not stream:
            raise InputError(f"{option} works only together with --stream.")
    if n is not None:
        note("-n is ignored: the output is as long as the recording and the silence after it.")
    targets = {"--output-audio": output_audio, "--both-sides": both_sides}
    targets |= {"--events": events, "--profile-json": profile_json}
    check_targets(targets, audio)
    recording = open_recording(audio, max_seconds)

    import mlx_voicechat
    from mlx_voicechat.model import BLOCK_FRAMES

    loaded = mlx_voicechat.load(model, say=note)
    if loaded.config.demonstration:
        note(f"{loaded.name} is {loaded.config.demonstration}. The real checkpoint is {DEFAULT_MODEL}.")
    session = loaded.session(
        system_prompt=prompt,
        seed=seed,
        max_seconds=max_streaming_seconds,
        voice=voice,
        guidance_scale=guidance_scale,
        profile=profile,
    )
    block_frames = 1 if stream else BLOCK_FRAMES
    blocks, total_frames = timeline(recording, extra_decoding_seconds, loaded.config, block_frames)
    output = Output()
    live = LiveText(output) if stream and not as_json else None
    last: Event | None = None
    with contextlib.ExitStack() as files, Interrupt() as interrupt:
        sinks = Sinks(files, loaded.config, output_audio, both_sides, events)
        progress = files.enter_context(Progress(total_frames, loaded.config.frame_seconds, live is not None))
        for last in converse(session, sinks.hearing(blocks), block_frames, interrupt):
            sinks.take(last)
            progress.take(last)
            if live:
                live.take(last)
            if output.closed and not any(targets.values()):
                return  # nobody reads on, and nothing is to be written
        if session.frames == 0:
            _fail_if_cut_short(session, last)  # and leave existing files as they are
        sinks.finish()
        if session.profile:
            report = json.dumps(session.profile.summary(), indent=2) + "\n"
            (files.enter_context(replacing(profile_json)) if profile_json else sys.stderr).write(report)
    if live:
        live.close()
    elif as_json:
        output.write(json.dumps(_result(session)) + "\n")
    else:
        output.write(final_text(session.transcript, session.text, session.function))
    _fail_if_cut_short(session, last)
    if session.speaking:
        note(
            "the assistant is still speaking at the end: "
            f"give it more silence with --extra-decoding-seconds (now {extra_decoding_seconds:g})."
        )


def _result(session: Session) -> dict[str, str | int | float]:
    """What `--json` prints."""
    return {
        "transcript": session.transcript,
        "text": session.text,
        "function": session.function,
        "frames": session.frames,
        "seconds": round(session.frames * session.model.config.frame_seconds, 6),
        "seed": session.seed,
        "model": session.model.name,
    }


def _fail_if_cut_short(session: Session, last: Event | None) -> None:
    """Leave with Ctrl-C's exit code or LimitError when the conversation ended before the recording did."""
    from mlx_voicechat import Cancelled

    seconds = session.frames * session.model.config.frame_seconds
    if isinstance(last, Cancelled):
        note(f"interrupted after {seconds:.2f} s; what was spoken so far is complete.")
        raise typer.Exit(INTERRUPTED)
    if session.limited:
        raise LimitError(
            f"The session reached its limit of {session.max_seconds:g} s (--max-streaming-seconds).",
            f"The {seconds:.2f} s spoken so far are complete.",
        )
