"""`mlx-voicechat talk`: a person, or a recording, through a server of /v1/realtime. Needs no MLX where one runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.options import LoadOptions, SessionOptions
from mlx_voicechat.server.settings import PROTOCOLS

from .loading import open_model
from .options import (
    DEFAULT_MODEL,
    EXTRA_SECONDS,
    LONGEST_SECONDS,
    TOOL_OPTIONS,
    Arithmetic,
    Compiled,
    ExtraSeconds,
    KeyValueCache,
    Mcp,
    McpConfig,
    McpTools,
    Model,
    OnHold,
    OutputAudio,
    Seed,
    SpeechWeights,
    SystemPrompt,
    ToolCommand,
    ToolsFile,
    Voice,
    positive_seconds,
)
from .outputs import Outputs, Targets
from .render import LiveText, Output, note

if TYPE_CHECKING:
    from mlx_voicechat import Event
    from mlx_voicechat.sound.echo import EchoCanceller

    from .client import Wire
    from .conversation import Conversation
    from .live import LiveConversation

    MakeCanceller = Callable[[int, int, int], EchoCanceller]

HEADPHONES = "use headphones: through loudspeakers the model hears itself."
HALF_DUPLEX = "half duplex: while the assistant speaks the microphone is off, and interrupting it is, too."
OF_THE_FILE = ("extra_decoding_seconds", "fast")
OF_THE_CANCELLER = ("noise_suppression", "auto_gain")
OF_THE_MICROPHONE = (
    *("duration", "half_duplex", "push_to_talk", "input_device", "input_channel", "output_device"),
    "echo_cancellation",
    *OF_THE_CANCELLER,
)
OF_OUR_PROTOCOL = ("seed", "fast", "push_to_talk")
OF_THE_MODEL = ("model", "voice", "speech_weights", "kv_cache", "arithmetic", "compiled", *TOOL_OPTIONS)

# Options of this command alone
File = Annotated[str | None, Option(metavar="PATH", help="Say a recording, not what the microphone hears; - is stdin.")]
InputDevice = Annotated[str | None, Option(metavar="NAME", help="The microphone: its number, or a part of its name.")]
InputChannel = Annotated[
    int | None,
    Option(metavar="N", min=1, help="The input of the microphone's device, from 1; the one with sound if absent."),
]
OutputDevice = Annotated[str | None, Option(metavar="NAME", help="The loudspeaker: its number, or a part of its name.")]
Duration = Annotated[
    float | None, Option(metavar="SECONDS", callback=positive_seconds, help="Close the microphone after so long.")
]
HalfDuplex = Annotated[
    bool, Option("--half-duplex", help="Microphone off while the assistant speaks: no interrupting.")
]
EchoCancellation = Annotated[
    bool,
    Option(
        "--echo-cancellation/--no-echo-cancellation",
        help="Take what the loudspeaker plays out of what the microphone hears.",
    ),
]
NoiseSuppression = Annotated[
    bool, Option("--noise-suppression", help="Take steady noise out, too; the model was trained without.")
]
AutoGain = Annotated[
    bool, Option("--auto-gain", help="Bring the microphone to one level; the model was trained without.")
]
Url = Annotated[
    str | None,
    Option(metavar="URL", help="A running server: ws, wss, http or https. Without it, the model runs here."),
]
ApiKey = Annotated[
    str, Option(metavar="KEY", envvar="MLX_VOICECHAT_API_KEY", show_default=False, help="The server's key, if any.")
]
MaxSeconds = Annotated[
    float, Option(metavar="SECONDS", callback=positive_seconds, help="The longest recording, or conversation here.")
]
PushToTalkKeys = Annotated[
    bool, Option("--push-to-talk", help="The space bar or Enter begins what you say, and ends it.")
]


def talk(
    context: typer.Context,
    file: File = None,
    output_audio: OutputAudio = None,
    system_prompt: SystemPrompt = SessionOptions.system_prompt,
    seed: Seed = SessionOptions.seed,
    list_devices: Annotated[bool, Option("--list-devices", help="List microphones and loudspeakers.")] = False,
    input_device: InputDevice = None,
    input_channel: InputChannel = None,
    output_device: OutputDevice = None,
    duration: Duration = None,
    half_duplex: HalfDuplex = False,
    push_to_talk: PushToTalkKeys = False,
    echo_cancellation: EchoCancellation = True,
    noise_suppression: NoiseSuppression = False,
    auto_gain: AutoGain = False,
    url: Url = None,
    protocol: Annotated[str, Option(metavar="|".join(PROTOCOLS), help="What the server at --url speaks.")] = PROTOCOLS[
        0
    ],
    typed: Annotated[bool, Option("--type", help="strict-v3: what is typed is said; an empty line is a turn.")] = False,
    api_key: ApiKey = "",
    model: Model = DEFAULT_MODEL,
    voice: Voice = SessionOptions.voice,
    speech_weights: SpeechWeights = LoadOptions.speech_weights,
    kv_cache: KeyValueCache = LoadOptions.kv_cache,
    arithmetic: Arithmetic = LoadOptions.arithmetic,
    compiled: Compiled = LoadOptions.compile,
    tools: ToolsFile = None,
    tool_command: ToolCommand = None,
    mcp: Mcp = None,
    mcp_config: McpConfig = None,
    mcp_tools: McpTools = None,
    on_hold: OnHold = None,
    extra_decoding_seconds: ExtraSeconds = EXTRA_SECONDS,
    fast: Annotated[bool, Option("--fast", help="A recording as fast as it can be heard, not in real time.")] = False,
    max_seconds: MaxSeconds = LONGEST_SECONDS,
) -> None:
    """Talk with the model: print what is said as it comes, play what the assistant speaks. Ctrl-C ends it.

    With --file, nothing is played, and the result is that of generate --stream for the same recording, prompt and seed.
    """
    if file is None:
        _refuse(context, OF_THE_FILE, "works only with --file")
    else:
        _refuse(context, OF_THE_MICROPHONE, "is for the microphone, and does not go with --file")
    if not echo_cancellation:
        _refuse(context, OF_THE_CANCELLER, "is a part of echo cancellation, and does not go without")
    if url is not None:
        _refuse(context, OF_THE_MODEL, "is for a model that runs here, and does not go with --url")
    _check_protocol(context, protocol, url, typed, file)
    if list_devices:
        return _list_devices()
    targets = Targets(output_audio)
    targets.check(file or "-", "--file")

    from mlx_voicechat.client.connecting import realtime_url

    from .keyboard import check_terminal
    from .local_server import LocalServer
    from .tool_sources import ToolOptions, ToolSources

    if push_to_talk:
        check_terminal("--push-to-talk")
    wanted = ToolOptions.of(tools, tool_command, mcp, mcp_config, mcp_tools, on_hold)
    if url is not None:
        realtime_url(url)  # before a recording is decoded
    client = TalkClient(targets, system_prompt, seed, protocol, file is None, push_to_talk)
    with LocalServer() as here, contextlib.ExitStack() as files:
        conversation: Conversation
        if file is None:
            make = _canceller(echo_cancellation, noise_suppression, auto_gain)
            kind = _kind(protocol, typed, push_to_talk)
            devices = _devices(input_device, input_channel, output_device)
            conversation = _live(client, kind, devices, duration, half_duplex, url is None, make)
        else:
            conversation = _recorded(files, file, max_seconds, extra_decoding_seconds, fast)
        if url is None:
            sources = files.enter_context(ToolSources(wanted, client.say))
            load_options = LoadOptions(compiled, speech_weights, kv_cache, arithmetic)
            url, api_key = here.start(
                lambda: sources.fit_to(open_model(model, load_options)),
                model=model,
                voice=voice,
                max_audio_seconds=max_seconds + extra_decoding_seconds,
                tools=sources.tools,
                wait_for_tools=fast,
            )
        client.hold(conversation, url, api_key)


def _list_devices() -> None:
    from .devices import Devices

    Output().write("\n".join(Devices().listing()) + "\n")


def _refuse(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raise InputError if one of these options was written; one that stands in the environment is meant for others."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{max(option.opts, key=len)} {why}.")


def _check_protocol(context: typer.Context, protocol: str, url: str | None, typed: bool, file: str | None) -> None:
    """Raise InputError for a protocol that there is not, or that does not go with the other options."""
    if protocol not in PROTOCOLS:
        raise InputError(f"--protocol must be one of {', '.join(PROTOCOLS)}, not {protocol!r}.")
    if protocol != PROTOCOLS[0]:
        if url is None:
            raise InputError(f"--protocol {protocol} needs --url: a model that runs here speaks {PROTOCOLS[0]}.")
        _refuse(context, OF_OUR_PROTOCOL, f"does not go with --protocol {protocol}")
    if typed and (protocol != "strict-v3" or file is not None):
        raise InputError("--type works only with --protocol strict-v3, and without --file.")


def _recorded(
    files: contextlib.ExitStack, file: str, max_seconds: float, extra_seconds: float, fast: bool
) -> Conversation:
    from mlx_voicechat.sound.recordings import AudioReader

    from .recorded import RecordedConversation

    recording = files.enter_context(AudioReader(file, max_seconds=max_seconds))
    if recording.note:
        note(recording.note)
    return RecordedConversation(recording, extra_seconds, fast)


def _canceller(wanted: bool, noise_suppression: bool, auto_gain: bool) -> MakeCanceller | None:
    """What makes the echo canceller, or None and a line. Raises InputError for options that need the package."""
    if not wanted:
        note(HEADPHONES)
        return None
    from mlx_voicechat.sound.echo import EchoCanceller

    try:
        EchoCanceller()
    except InputError as missing:
        if noise_suppression or auto_gain:
            raise
        note(f"no echo cancellation without the package livekit ({missing.remedy}); {HEADPHONES}")
        return None
    return functools.partial(EchoCanceller, noise_suppression=noise_suppression, auto_gain=auto_gain, continuous=True)


def _kind(protocol: str, typed: bool, push_to_talk: bool) -> Callable[..., LiveConversation]:
    """What a person's conversation is held with: an open microphone, or turns of their own."""
    from .live import LiveConversation
    from .push import KEYS, KeyedTurns, PushToTalk

    if protocol == "strict-v3":
        return functools.partial(PushToTalk, typed=typed)
    if not push_to_talk:
        return LiveConversation
    note(KEYS)
    return KeyedTurns


def _devices(input_device: str | None, input_channel: int | None, output_device: str | None) -> tuple[Any, ...]:
    """What knows the devices, the microphone, the loudspeaker."""
    from .devices import Devices

    devices = Devices()
    return devices, devices.choose(input_device, "input", input_channel), devices.choose(output_device, "output")


def _live(
    client: TalkClient,
    kind: Callable[..., LiveConversation],
    devices: tuple[Any, ...],
    duration: float | None,
    half: bool,
    here: bool,
    canceller: MakeCanceller | None,
) -> Conversation:
    if half:
        note(HALF_DUPLEX)
    return kind(
        *devices,
        client.say,
        duration=duration,
        half_duplex=half,
        here=here,
        canceller=canceller,
    )


class TalkClient:
    """One conversation: how it is opened, and where its words and its speech go."""

    def __init__(
        self, targets: Targets, system_prompt: str | None, seed: int, protocol: str, live: bool, own_turns: bool
    ) -> None:
        self._targets, self._system_prompt, self._seed = targets, system_prompt, seed
        self._protocol, self._live = protocol, live
        self._own_turns = own_turns
        self._output = Output()
        self._unwritten: VoiceChatError | None = None
        self._text = LiveText(self._output.write)

    def say(self, line: str) -> None:
        """A note between the words of the conversation."""
        if sys.stdout.isatty():
            self._text.end_line()
        note(line)

    def hold(self, conversation: Conversation, url: str, api_key: str) -> None:
        """Converse to the end, and say what went wrong. Raises VoiceChatError, and typer.Exit after Ctrl-C."""
        with contextlib.ExitStack() as files:
            files.callback(self._text.end_line)  # also before an error's line
            asyncio.run(self._converse(conversation, url, api_key, files))
            if conversation.seconds == 0:
                conversation.fail_if_cut_short()  # and leave existing files as they are
            self._text.close()  # before the files, which may fail
        for fault in conversation.faults():
            note(fault)
        if self._unwritten:
            raise self._unwritten
        conversation.fail_if_cut_short(self._targets.output_audio)

    async def _converse(self, conversation: Conversation, url: str, api_key: str, files: contextlib.ExitStack) -> None:
        from .client import MlxcelWire

        async with self._connected(url, api_key) as wire:
            if self._own_turns:
                assert isinstance(wire, MlxcelWire)
                await wire.open(self._system_prompt, self._seed, own_turns=True)
            else:
                await wire.open(self._system_prompt, self._seed)
            self._text.tools = bool(wire.tools)
            outputs = Outputs(files, self._targets, wire)

            def take(event: Event) -> bool:
                outputs.take(event)
                if outputs.fault and not self._unwritten:
                    self._unwritten = outputs.fault
                    self.say(f"{outputs.fault.message} The conversation goes on without it.")
                self._text.take(event)
                # Else nobody reads on or listens, and nothing is to be written.
                return bool(self._targets) or conversation.audible or not self._output.closed

            with conversation.opened(wire):
                await conversation.run(wire, take)

    def _connected(self, url: str, api_key: str) -> contextlib.AbstractAsyncContextManager[Wire]:
        """The connection in the protocol that was asked for."""
        if self._protocol == PROTOCOLS[0]:
            from .client import connect

            return connect(url, api_key, note)
        from . import wires

        return wires.connect(self._protocol, url, api_key, self._live)
