"""`mlx-voicechat talk`: a person, or a recording, through a server of /v1/realtime. Needs no MLX where one runs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mlx_voicechat.errors import InputError

from .loading import open_model
from .options import (
    DEFAULT_MODEL,
    TOOL_OPTIONS,
    Compiled,
    KeyValueCache,
    Mcp,
    McpConfig,
    McpTools,
    Model,
    OnHold,
    SpeechWeights,
    ToolCommand,
    ToolsFile,
    Voice,
    extra_seconds,
    not_negative,
    positive_seconds,
)
from .outputs import Outputs, Targets
from .render import HEADPHONES, LiveText, Output, note

if TYPE_CHECKING:
    from mlx_voicechat import Event
    from mlx_voicechat.voicechat import VoiceChat

    from .dialogue import Dialogue

HALF_DUPLEX = "half duplex: while the assistant speaks the microphone is off, and interrupting it is, too."
PUSH_TO_TALK = "push to talk: the space bar or Enter begins what you say, and ends it; else nothing is heard."
OF_THE_FILE = ("extra_decoding_seconds", "fast")
OF_THE_MICROPHONE = ("duration", "half_duplex", "push_to_talk", "input_device", "output_device")
OF_THE_MODEL = ("model", "voice", "speech_weights", "kv_cache", "compiled", *TOOL_OPTIONS)


def talk(
    context: typer.Context,
    file: Annotated[
        str | None, Option(metavar="PATH", help="Say a recording, not what the microphone hears; - is stdin.")
    ] = None,
    output_audio: Annotated[
        Path | None, Option(metavar="FILE", help="Write the assistant's speech: WAV, 22050 Hz, mono, 16 bits.")
    ] = None,
    system_prompt: Annotated[
        str | None, Option("-p", "--system-prompt", "--prompt", metavar="TEXT", help="The model's own if absent.")
    ] = None,
    seed: Annotated[
        int, Option(metavar="N", callback=not_negative, help="Of the speech's noise: same seed, same speech.")
    ] = 0,
    list_devices: Annotated[bool, Option("--list-devices", help="List microphones and loudspeakers.")] = False,
    input_device: Annotated[
        str | None, Option(metavar="NAME", help="The microphone: its number, or a part of its name.")
    ] = None,
    output_device: Annotated[
        str | None, Option(metavar="NAME", help="The loudspeaker: its number, or a part of its name.")
    ] = None,
    duration: Annotated[
        float | None, Option(metavar="SECONDS", callback=positive_seconds, help="Close the microphone after so long.")
    ] = None,
    half_duplex: Annotated[
        bool, Option("--half-duplex", help="Microphone off while the assistant speaks: no interrupting.")
    ] = False,
    push_to_talk: Annotated[
        bool, Option("--push-to-talk", help="The space bar or Enter begins what you say, and ends it.")
    ] = False,
    url: Annotated[
        str | None,
        Option(metavar="URL", help="A running server: ws, wss, http or https. Without it, the model runs here."),
    ] = None,
    api_key: Annotated[
        str, Option(metavar="KEY", envvar="MLX_VOICECHAT_API_KEY", show_default=False, help="The server's key, if any.")
    ] = "",
    model: Model = DEFAULT_MODEL,
    voice: Voice = None,
    speech_weights: SpeechWeights = None,
    kv_cache: KeyValueCache = "f32",
    compiled: Compiled = None,
    tools: ToolsFile = None,
    tool_command: ToolCommand = None,
    mcp: Mcp = None,
    mcp_config: McpConfig = None,
    mcp_tools: McpTools = None,
    on_hold: OnHold = None,
    extra_decoding_seconds: Annotated[
        float,
        Option(metavar="SECONDS", callback=extra_seconds, help="Silence after a recording, for answers: 0 to 600."),
    ] = 3.0,
    fast: Annotated[bool, Option("--fast", help="A recording as fast as it can be heard, not in real time.")] = False,
    max_seconds: Annotated[
        float, Option(metavar="SECONDS", callback=positive_seconds, help="The longest recording, or conversation here.")
    ] = 3600.0,
) -> None:
    """Talk with the model: print what is said as it comes, play what the assistant speaks. Ctrl-C ends it.

    With --file, nothing is played, and the result is that of generate --stream for the same recording, prompt and seed.
    """
    if file is None:
        _refuse(context, OF_THE_FILE, "works only with --file")
    else:
        _refuse(context, OF_THE_MICROPHONE, "is for the microphone, and does not go with --file")
    if url is not None:
        _refuse(context, OF_THE_MODEL, "is for a model that runs here, and does not go with --url")
    if list_devices:
        from .devices import Devices

        Output().write("\n".join(Devices().listing()) + "\n")
        return
    targets = Targets(output_audio)
    targets.check(file or "-", "--file")

    from .client import realtime_url
    from .keyboard import check_terminal
    from .local_server import LocalServer
    from .tool_sources import ToolOptions, ToolSources

    if push_to_talk:
        check_terminal("--push-to-talk")
    wanted = ToolOptions.of(tools, tool_command, mcp, mcp_config, mcp_tools, on_hold)

    if url is not None:
        realtime_url(url)  # before a recording is decoded

    def load() -> VoiceChat:
        loaded = open_model(model, compiled, speech_weights, kv_cache)
        sources.fit_to(loaded)
        return loaded

    call = Call(targets, system_prompt, seed, push_to_talk)
    with LocalServer() as here, contextlib.ExitStack() as files:
        sources = files.enter_context(ToolSources(wanted, call.say))
        dialogue: Dialogue
        if file is None:
            dialogue = _live(call, input_device, output_device, duration, half_duplex, url is None)
        else:
            dialogue = _recital(files, file, max_seconds, extra_decoding_seconds, fast)
        if url is None:
            url, api_key = here.start(
                model, load, voice, max_seconds + extra_decoding_seconds, sources.tools, wait_for_tools=fast
            )
        call.hold(dialogue, url, api_key)


def _refuse(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raise InputError if one of these options was written; one that stands in the environment is meant for others."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{max(option.opts, key=len)} {why}.")


def _recital(files: contextlib.ExitStack, file: str, max_seconds: float, extra_seconds: float, fast: bool) -> Dialogue:
    from mlx_voicechat.sound.recordings import AudioReader

    from .recital import Recital

    recording = files.enter_context(AudioReader(file, max_seconds=max_seconds))
    if recording.note:
        note(recording.note)
    return Recital(recording, extra_seconds, fast)


def _live(
    call: Call, input_device: str | None, output_device: str | None, duration: float | None, half: bool, here: bool
) -> Dialogue:
    from .devices import Devices
    from .live import Live

    devices = Devices()
    microphone, loudspeaker = devices.choose(input_device, "input"), devices.choose(output_device, "output")
    note(HEADPHONES)
    if half:
        note(HALF_DUPLEX)
    if call.push_to_talk:
        note(PUSH_TO_TALK)
    return Live(
        devices,
        microphone,
        loudspeaker,
        call.say,
        duration=duration,
        half_duplex=half,
        push_to_talk=call.push_to_talk,
        here=here,
    )


class Call:
    """One conversation: how it is opened, and where its words and its speech go."""

    def __init__(self, targets: Targets, system_prompt: str | None, seed: int, push_to_talk: bool) -> None:
        self._targets, self._system_prompt, self._seed = targets, system_prompt, seed
        self.push_to_talk = push_to_talk
        self._output = Output()
        self._text = LiveText(self._output.write)

    def say(self, line: str) -> None:
        """A note between the words of the conversation."""
        if sys.stdout.isatty():
            self._text.end_line()
        note(line)

    def hold(self, dialogue: Dialogue, url: str, api_key: str) -> None:
        """Converse to the end, and say what went wrong. Raises VoiceChatError, and typer.Exit after Ctrl-C."""
        with contextlib.ExitStack() as files:
            files.callback(self._text.end_line)  # also before an error's line
            asyncio.run(self._converse(dialogue, url, api_key, files))
            if dialogue.seconds == 0:
                dialogue.fail_if_cut_short()  # and leave existing files as they are
        self._text.close()
        for fault in dialogue.faults():
            note(fault)
        dialogue.fail_if_cut_short(self._targets.output_audio)

    async def _converse(self, dialogue: Dialogue, url: str, api_key: str, files: contextlib.ExitStack) -> None:
        from .client import connect

        async with connect(url, api_key, note) as wire:
            await wire.open(self._system_prompt, self._seed, own_turns=self.push_to_talk)
            self._text.tools = bool(wire.tools)
            outputs = Outputs(files, self._targets, wire)

            def take(event: Event) -> bool:
                outputs.take(event)
                self._text.take(event)
                # Else nobody reads on or listens, and nothing is to be written.
                return bool(self._targets) or dialogue.audible or not self._output.closed

            with dialogue.opened(wire):
                await dialogue.run(wire, take)
