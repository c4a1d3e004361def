"""`mlx-voicechat generate`: a recording in, the conversation and the assistant's speech out."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from mlx_voicechat.errors import InputError, LimitError
from mlx_voicechat.options import LoadOptions, SessionOptions

from .loading import open_model
from .machines import helps
from .offline import INTERRUPTED, Interrupt, converse, cut, silence
from .options import (
    COMPILED,
    DEFAULT_MODEL,
    EXTRA_SECONDS,
    LONGEST_SECONDS,
    Arithmetic,
    ExtraSeconds,
    GuidanceScale,
    KeyValueCache,
    Mcp,
    McpConfig,
    McpTools,
    Model,
    OnHold,
    OutputAudio,
    Seed,
    ShardLlm,
    SpeechWeights,
    SystemPrompt,
    ToolCommand,
    ToolsFile,
    Voice,
    option_of,
    positive_seconds,
)
from .outputs import Outputs, Targets, TextFile
from .profiling import frames_file, wants_parts
from .render import LiveText, Output, Progress, complain, note

if TYPE_CHECKING:
    from mlx_voicechat import Event, Session
    from mlx_voicechat.voicechat import VoiceChat

    from .tool_sources import ToolOptions

COMPILE_WORTH_SECONDS = 120.0  # on a CPU the first compilation takes tens of seconds, a frame then 0.6 of the time


def _no_argument(value: str | None) -> None:
    if value is not None:
        raise InputError(f"A recording is named with --audio: --audio {shlex.quote(value)}")


def generate(
    audio: Annotated[str, Option(metavar="PATH", help="The user's side: WAV, FLAC, OGG, MP3 ...; - is stdin.")],
    model: Model = DEFAULT_MODEL,
    system_prompt: SystemPrompt = SessionOptions.system_prompt,
    output_audio: OutputAudio = None,
    extra_decoding_seconds: ExtraSeconds = EXTRA_SECONDS,
    seed: Seed = SessionOptions.seed,
    voice: Voice = SessionOptions.voice,
    guidance_scale: GuidanceScale = SessionOptions.guidance_scale,
    max_seconds: Annotated[
        float, Option(metavar="SECONDS", callback=positive_seconds, help="Refuse a longer recording at once.")
    ] = LONGEST_SECONDS,
    stream: Annotated[bool, Option("--stream", help="Run frame by frame, print as it speaks.")] = False,
    max_streaming_seconds: Annotated[
        float | None, option_of(SessionOptions, "max_seconds", help="Stop, with an error, after so much.")
    ] = SessionOptions.max_seconds,
    profile: Annotated[bool, Option("--profile", help="Frame times by stage as JSON on stderr.")] = False,
    profile_json: Annotated[Path | None, Option(metavar="FILE", help="Write them to a file instead.")] = None,
    compiled: Annotated[
        bool | None,
        option_of(LoadOptions, "compile", *COMPILED, help="Fuse kernels first, or not; decided by the job if absent."),
    ] = LoadOptions.compile,
    speech_weights: SpeechWeights = LoadOptions.speech_weights,
    kv_cache: KeyValueCache = LoadOptions.kv_cache,
    arithmetic: Arithmetic = LoadOptions.arithmetic,
    shard_llm: ShardLlm = LoadOptions.shard_llm,
    tools: ToolsFile = None,
    tool_command: ToolCommand = None,
    mcp: Mcp = None,
    mcp_config: McpConfig = None,
    mcp_tools: McpTools = None,
    on_hold: OnHold = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, not text.")] = False,
    both_sides: Annotated[Path | None, Option(metavar="FILE", help="Stereo WAV: user left, assistant right.")] = None,
    events: Annotated[Path | None, Option(metavar="FILE", help="Every event with its times, JSON lines.")] = None,
    n: Annotated[str | None, Option("-n", hidden=True)] = None,
    image: Annotated[str | None, Option(hidden=True)] = None,
    video: Annotated[str | None, Option(hidden=True)] = None,
    argument: Annotated[str | None, Argument(hidden=True, callback=_no_argument)] = None,
) -> None:
    """Answer a recording: print what was said, and write what the assistant speaks.

    Both speak on one timeline: the answer begins and ends with the recording, plus the silence after it.
    """
    _refuse({"--image": image, "--video": video}, "is not supported: this model hears and speaks, it does not see.")
    if not stream:
        timed = {"--profile": profile or None, "--profile-json": profile_json}
        _refuse({"--max-streaming-seconds": max_streaming_seconds, **timed}, "works only together with --stream.")
    profile = profile or profile_json is not None
    if n is not None:
        note("-n is ignored: the output is as long as the recording and the silence after it.")
    targets = Targets(output_audio, both_sides, events, profile_json, frames_file() if profile else None)
    targets.check(audio)
    load_options = LoadOptions(compiled, speech_weights, kv_cache, arithmetic, shard_llm=shard_llm)
    if helps(model, load_options):
        return

    from .tool_sources import ToolOptions

    wanted = ToolOptions.of(tools, tool_command, mcp, mcp_config, mcp_tools, on_hold)
    options = {
        "system_prompt": system_prompt,
        "seed": seed,
        "max_seconds": max_streaming_seconds,
        "voice": voice,
        "guidance_scale": guidance_scale,
        "profile": profile,
    }

    def load(total_seconds: float) -> VoiceChat:
        worth_it = True if compiled is None and total_seconds >= COMPILE_WORTH_SECONDS else compiled
        return open_model(model, replace(load_options, compile=worth_it))

    _answer(_Asked(audio, max_seconds, extra_decoding_seconds, stream, as_json, targets, load, options, wanted))


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise InputError for the first option that was given."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} {why}")


class _Asked(NamedTuple):
    """What is to be answered and how; `load` makes the model for so many seconds, `options` are the session's."""

    audio: str
    max_seconds: float
    extra_seconds: float
    stream: bool
    as_json: bool
    targets: Targets
    load: Callable[[float], VoiceChat]
    options: dict[str, Any]
    tools: ToolOptions


def _answer(asked: _Asked) -> None:
    from mlx_voicechat.sound.recordings import AudioReader

    from .tool_sources import ToolSources
    from .turn_times import TurnTimes

    output = Output()
    live, offline = asked.stream and not asked.as_json, io.StringIO()
    text = LiveText(output.write if live else offline.write, tools=bool(asked.tools))
    calls: list[dict[str, Any]] = []
    turns = TurnTimes()
    last: Event | None = None
    with contextlib.ExitStack() as files:
        recording = files.enter_context(AudioReader(asked.audio, max_seconds=asked.max_seconds))
        if recording.note:
            note(recording.note)
        total_seconds = recording.seconds + asked.extra_seconds
        sources = files.enter_context(ToolSources(asked.tools, note))
        loaded = sources.fit_to(asked.load(total_seconds))
        from mlx_voicechat.model import BLOCK_FRAMES  # only now: it imports MLX

        config = loaded.config
        of_tools = {"tools": sources.tools, "wait_for_tools": True} if sources.tools else {}
        session = loaded.session(**asked.options, **of_tools, turn_events=True)
        if session.profile and wants_parts():
            from mlx_voicechat.gauges.parts import timed

            files.enter_context(timed(loaded, session.profile))
        interrupt = files.enter_context(Interrupt())
        outputs = Outputs(files, asked.targets, config)
        progress = files.enter_context(Progress(total_seconds, config.frame_seconds, live))
        block_frames = 1 if asked.stream else BLOCK_FRAMES
        pieces = chain(recording, silence(round(asked.extra_seconds * config.input_rate_hz)))
        blocks = outputs.hearing(cut(pieces, block_frames * config.frame_samples_in))
        files.callback(text.end_line)  # also before an error's line
        for last in converse(session, blocks, block_frames, interrupt):
            outputs.take(last)
            progress.take(last)
            text.take(last)
            _note_call(last, calls)
            turns.take(last)
            if output.closed and not asked.targets:
                return  # nobody reads on, and nothing is to be written
        if session.frames == 0:
            _fail_if_cut_short(session, last)  # and leave existing files as they are
        outputs.finish()
        summary = _write_profile(session, asked.targets, files)
        text.close()  # before the files are put in place, which may fail
        result = {**({"calls": calls} if asked.tools else {}), **_result(session)}
        result["turns"] = turns.listed(config.frame_seconds)
        output.write(json.dumps(result) + "\n" if asked.as_json else offline.getvalue())
    if outputs.fault:
        raise outputs.fault
    if summary:
        complain(summary)
    _fail_if_cut_short(session, last)
    if recording.hint and not session.transcript:
        note(recording.hint)
    _note_what_is_missing(session, asked.extra_seconds)


def _write_profile(session: Session, targets: Targets, files: contextlib.ExitStack) -> str:
    """Frame times where they are wanted; the summary, when it goes to no file."""
    if not session.profile:
        return ""
    summary = json.dumps(session.profile.summary(), indent=2)
    if targets.profile_json:
        files.enter_context(TextFile(targets.profile_json)).write(summary + "\n")
    if targets.profile_frames:
        timings = json.dumps(session.profile.every_frame(), indent=1)
        files.enter_context(TextFile(targets.profile_frames)).write(timings + "\n")
    return "" if targets.profile_json else summary


def _note_what_is_missing(session: Session, extra_seconds: float) -> None:
    remedy = f"give it more silence with --extra-decoding-seconds (now {extra_seconds:g})."
    if session.speaking:
        note(f"the assistant is still speaking at the end: {remedy}")
    elif session.transcript and not session.text and not session.function:
        note(f"the assistant heard this and did not answer: if it had no time to, {remedy}")


def _note_call(event: Event, calls: list[dict[str, Any]]) -> None:
    """Add a tool's call, or what became of it, to those that `--json` prints."""
    from mlx_voicechat.events import FunctionApplied, FunctionCall, FunctionFailed

    if isinstance(event, FunctionCall):
        calls.append({"call_id": event.call_id, "name": event.name, "arguments": dict(event.arguments)})
    elif isinstance(event, FunctionFailed):
        calls.append({"call_id": event.call_id, "failed": event.reason.value, "raw": event.raw})
    elif isinstance(event, FunctionApplied):
        results = dict(zip(event.call_ids, event.results, strict=True))
        for call in calls:
            if call["call_id"] in results:
                call["result"] = results[call["call_id"]]


def _result(session: Session) -> dict[str, str | int | float]:
    """What `--json` prints, besides the turns, and the calls where there are tools."""
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
        note(f"interrupted after {seconds:.2f} s of the conversation.")
        raise typer.Exit(INTERRUPTED)
    if session.limited:
        limit = f"{session.max_seconds:g} s (--max-streaming-seconds)"
        raise LimitError(f"The conversation was stopped after {seconds:.2f} s by its limit of {limit}.")
