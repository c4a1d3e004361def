"""`mlx-voicechat serve`: the model behind a WebSocket, for programs and pages that talk to it live."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mlx_voicechat.errors import InputError
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.server.settings import ServerSettings

from .endings import Ended
from .loading import open_model
from .machines import helps
from .options import (
    DEFAULT_MODEL,
    Arithmetic,
    Compiled,
    KeyValueCache,
    Mcp,
    McpConfig,
    McpTools,
    Model,
    OnHold,
    ShardLlm,
    SpeechWeights,
    ToolCommand,
    ToolsFile,
    Voice,
    option_of,
)
from .render import complain, note

if TYPE_CHECKING:
    from mlx_voicechat.voicechat import VoiceChat

setting = functools.partial(option_of, ServerSettings)
LEVELS = ("debug", "info", "warning", "error")
PREFIX = re.compile(r"([\w.~-]+(/[\w.~-]+)*)?", re.ASCII)
SWITCH_SECONDS = 0.001  # Python's 5 ms between threads would be added to a frame's time
NOISY = ("uvicorn", "asyncio")  # their notes are of no use to who runs the server; websockets' would show the key


def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, setting("host")] = ServerSettings.host,
    port: Annotated[int, setting("port")] = ServerSettings.port,
    protocol: Annotated[str, setting("protocol")] = ServerSettings.protocol,
    api_key: Annotated[str | None, setting("api_key")] = ServerSettings.api_key,
    api_prefix: Annotated[str, setting("api_prefix")] = ServerSettings.api_prefix,
    cors_origins: Annotated[list[str] | None, setting("cors_origins")] = None,
    allowed_origins: Annotated[list[str] | None, setting("allowed_origins")] = None,
    alias: Annotated[str | None, setting("alias")] = ServerSettings.alias,
    voice: Voice = ServerSettings.voice,
    ssl_certfile: Annotated[Path | None, setting("ssl_certfile")] = ServerSettings.ssl_certfile,
    ssl_keyfile: Annotated[Path | None, setting("ssl_keyfile")] = ServerSettings.ssl_keyfile,
    max_sessions: Annotated[int, setting("max_sessions")] = ServerSettings.max_sessions,
    batch: Annotated[bool, setting("batch", "--batch/--no-batch")] = ServerSettings.batch,
    max_audio_seconds: Annotated[float | None, setting("max_audio_seconds")] = ServerSettings.max_audio_seconds,
    idle_seconds: Annotated[float, setting("idle_seconds")] = ServerSettings.idle_seconds,
    setup_seconds: Annotated[float, setting("setup_seconds")] = ServerSettings.setup_seconds,
    max_message_bytes: Annotated[int | None, setting("max_message_bytes")] = ServerSettings.max_message_bytes,
    disconnect_grace_seconds: Annotated[
        float, setting("disconnect_grace_seconds")
    ] = ServerSettings.disconnect_grace_seconds,
    fixed_prompt: Annotated[bool, setting("fixed_prompt", "--fixed-prompt")] = ServerSettings.fixed_prompt,
    drain_seconds: Annotated[float, setting("drain_seconds")] = ServerSettings.drain_seconds,
    typed_voice: Annotated[str | None, setting("typed_voice")] = ServerSettings.typed_voice,
    turns: Annotated[str, setting("turns")] = ServerSettings.turns,
    instructions: Annotated[str | None, setting("instructions")] = ServerSettings.instructions,
    function_timeout: Annotated[float, setting("function_timeout")] = ServerSettings.function_timeout,
    speech_weights: SpeechWeights = LoadOptions.speech_weights,
    kv_cache: KeyValueCache = LoadOptions.kv_cache,
    arithmetic: Arithmetic = LoadOptions.arithmetic,
    shard_llm: ShardLlm = LoadOptions.shard_llm,
    compiled: Compiled = LoadOptions.compile,
    tools: ToolsFile = None,
    tool_command: ToolCommand = None,
    mcp: Mcp = None,
    mcp_config: McpConfig = None,
    mcp_tools: McpTools = None,
    on_hold: OnHold = None,
    log_level: Annotated[str, Option(metavar="|".join(LEVELS), help="How much is said on stderr.")] = "info",
) -> None:
    """Serve the model live at /v1/realtime, one WebSocket a conversation.

    Anyone who reaches the address can talk to it, and hear nothing of others: give a key where that is not wanted.
    """
    given = locals()
    if log_level not in LEVELS:
        raise typer.BadParameter(f"{log_level} is none of {', '.join(LEVELS)}.", param_hint="--log-level")
    _check_tls(ssl_certfile, ssl_keyfile)
    _check_key(api_key)
    load_options = LoadOptions(compiled, speech_weights, kv_cache, arithmetic, max_sessions, shard_llm, batch)
    if helps(model, load_options):
        return

    from mlx_voicechat.server.listening import listen

    from .tool_sources import ToolOptions, ToolSources

    if not host.strip():
        raise InputError("--host is empty.", "127.0.0.1 is this machine, 0.0.0.0 the whole network.")
    settings = _settings(given)
    wanted = ToolOptions.of(tools, tool_command, mcp, mcp_config, mcp_tools, on_hold)
    _log(log_level)
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(listener) for listener in listen(host, port)]
        _note_risks(settings)
        sources = opened.enter_context(ToolSources(wanted, note))
        settings = dataclasses.replace(settings, tools=sources.tools)
        ended_by, running = _run(
            settings, listeners, lambda lost: sources.fit_to(open_model(model, load_options, lost))
        )
    _leave(ended_by, running)


def _settings(given: Mapping[str, Any]) -> ServerSettings:
    """The options of the command that are the server's, by name; its tools come later."""
    names = {field.name for field in dataclasses.fields(ServerSettings)} - {"tools"}
    settings = ServerSettings(**{name: value for name, value in given.items() if name in names})
    return dataclasses.replace(
        settings,
        api_prefix=_prefix(settings.api_prefix),
        cors_origins=_origins("--cors-origins", given["cors_origins"]),
        allowed_origins=_origins("--allowed-origins", given["allowed_origins"]),
    )


def _note_risks(settings: ServerSettings) -> None:
    from mlx_voicechat.server.access import is_loopback, unsendable

    host, api_key = settings.host, settings.api_key
    if api_key is None and not is_loopback(host):
        note(
            f"{host} can be reached from other machines and there is no --api-key: anyone there can talk to the model."
        )
    if api_key is not None and (letters := unsendable(api_key)):
        note(f"pages cannot send this --api-key, for no browser sends {letters} with a WebSocket; programs can.")


def _run(
    settings: ServerSettings,
    listeners: list[socket.socket],
    load: Callable[[Callable[[BaseException], None]], VoiceChat],
) -> tuple[int | None, bool]:
    """Serve to the end; the signal that ended it, and whether the engine is still at work. Raises what loading does."""
    from mlx_voicechat.server.app import create_app
    from mlx_voicechat.server.dialects import REALTIME
    from mlx_voicechat.server.engine import Engine
    from mlx_voicechat.server.sockets import Server

    def announce() -> None:
        if engine.failure is not None:
            server.should_exit = True
        if server.should_exit:  # a signal came while the model loaded: nobody can connect any more
            return
        scheme = "wss" if settings.ssl_certfile else "ws"
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        complain(f"ready: {scheme}://{shown}:{listeners[0].getsockname()[1]}{settings.api_prefix}{REALTIME}")

    engine = Engine(lambda: load(engine.fail), settings, announce)
    server = Server(create_app(engine, settings), settings, engine)
    sys.setswitchinterval(SWITCH_SECONDS)
    with server.catch_signals():
        server.run(sockets=listeners)
    if engine.failure is not None:
        raise engine.failure
    return server.ended_by, engine.running


def _leave(ended_by: int | None, running: bool) -> None:
    """Leave as a signal wants it; at once if the engine is at something that nothing can stop: loading, say."""
    if running:
        note("ended while the model was at work.")
        os._exit(128 + (ended_by or 0))
    if ended_by is not None:
        raise Ended(128 + ended_by)


def _prefix(path: str) -> str:
    """`--api-prefix` as it stands before every path: a slash and no other at its end, or nothing."""
    prefix = path.strip("/")
    if not PREFIX.fullmatch(prefix):
        raise InputError(f"--api-prefix {path} is no path.", "Write it like /voice, of letters, digits and -._~")
    return f"/{prefix}" if prefix else ""


def _check_key(api_key: str | None) -> None:
    if api_key is not None and (not api_key or not api_key.isprintable() or " " in api_key):
        raise InputError("--api-key must be printable and without spaces.")


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise InputError("--ssl-keyfile works only together with --ssl-certfile.")
        return
    for file in filter(None, (certificate, key)):
        if not file.is_file():
            raise InputError(f"{file} is no file.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as fault:
        raise InputError(
            f"{certificate} and its key cannot be used: {fault.strerror}.", "Both must be PEM, the key unencrypted."
        ) from None


def _origins(option: str, values: list[str] | None) -> tuple[str, ...]:
    from mlx_voicechat.server.origins import normal

    found = []
    for origin in (origin.strip() for value in values or () for origin in value.split(",")):
        try:
            found += [normal(origin)] if origin else []
        except ValueError as fault:
            raise InputError(f"{option} {origin} is no origin that a browser could send.", str(fault)) from None
    return tuple(found)


def _log(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mlx_voicechat").setLevel(level.upper())
    logging.getLogger("uvicorn.error").addFilter(_is_ours)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR if level == "error" else logging.WARNING)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a fault is not a client's broken HTTP, which was answered with 400 and met the application's answer."""
    fault = record.exc_info[1] if record.exc_info else None
    return type(fault).__name__ != "LocalProtocolError"
