"""Servers for tests: the application under a real uvicorn on a free loopback port, and the command as a process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = "from mlx_voicechat.cli.main import main; main()"  # as the installed script has it
WAIT_SECONDS = 60  # for what takes a second or two


@dataclass
class RunningServer:
    """An application that runs in a thread of this process; `engine`, `app` and `server` are its live objects."""

    url: str  # http://127.0.0.1:PORT
    ws_url: str  # ws://127.0.0.1:PORT[/prefix]/v1/realtime
    engine: Any  # mlx_voicechat.server.engine.Engine
    app: Any  # the Starlette application
    server: Any  # mlx_voicechat.server.sockets.Server, a uvicorn.Server
    loop: asyncio.AbstractEventLoop  # the server's own


@dataclass
class ServerProcess:
    """`mlx-voicechat serve` as a process that has announced its address; `stderr` grows while it runs."""

    process: subprocess.Popen[str]
    url: str = ""
    ws_url: str = ""
    stderr: list[str] = field(default_factory=list)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 10) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def running_server(model: Any = "tiny", *, wait_ready: bool = True, **options: Any) -> Iterator[RunningServer]:
    """Serve `model`: a name or folder that `mlx_voicechat.load` takes, a loaded VoiceChat, or a FakeModel.

    `options` are the fields of `server.settings.ServerSettings`, which are those of the command: max_sessions, api_key,
    api_prefix, cors_origins, allowed_origins (tuples of str), alias, voice, max_audio_seconds, idle_seconds,
    setup_seconds, max_message_bytes, host. With `wait_ready` the model is loaded and warm when the block begins.
    An error of loading is raised here.
    """
    import mlx_voicechat
    from mlx_voicechat.server.app import create_app
    from mlx_voicechat.server.engine import Engine
    from mlx_voicechat.server.settings import ServerSettings
    from mlx_voicechat.server.sockets import Server, listen

    name = str(model) if isinstance(model, str | Path) else str(getattr(model, "name", model))
    settings = ServerSettings(model=name, **options)

    def load() -> Any:
        return mlx_voicechat.load(model, say=lambda line: None) if isinstance(model, str | Path) else model

    engine = Engine(load, settings)
    app = create_app(engine, settings)
    listener = listen(settings.host, 0)
    server = Server(app, settings)
    started, loops, faults = threading.Event(), [], []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()
        await server.serve([listener])

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as fault:
            faults.append(fault)
            started.set()

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    try:
        started.wait(WAIT_SECONDS)
        if wait_ready:
            engine.wait_ready(WAIT_SECONDS)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        ws_url = f"ws://{address}{settings.api_prefix}/v1/realtime"
        yield RunningServer(f"http://{address}", ws_url, engine, app, server, loops[0])
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        listener.close()
    if faults:
        raise faults[0]
    assert not thread.is_alive(), "the server did not end"


@contextmanager
def serve_process(*arguments: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run `mlx-voicechat serve --port 0` with more `arguments`; begins when it is ready, ends it by SIGTERM.

    Raises AssertionError with its stderr when it ends before it is ready.
    """
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env)
    served = ServerProcess(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            served.stderr.append(line)
            for word in line.split():
                if word.startswith(("ws://", "wss://")):
                    served.ws_url = word.rstrip(".,")
                    served.url = served.ws_url.replace("ws", "http", 1).removesuffix("/v1/realtime")
                    ready.set()
        ready.set()

    reader = threading.Thread(target=read, name="test-server-stderr")
    reader.start()
    try:
        assert ready.wait(WAIT_SECONDS), "the server was not ready in time"
        assert served.url, "".join(served.stderr)
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(WAIT_SECONDS)
        if process.stderr is not None:
            process.stderr.close()
