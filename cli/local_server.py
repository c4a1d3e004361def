"""A server in this process, for the one conversation of a command: on a free loopback port, with a key of its own."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from .endings import Ended, report
from .offline import INTERRUPTED
from .render import note
from .serve import NOISY, SWITCH_SECONDS

if TYPE_CHECKING:
    from mlx_voicechat.voicechat import VoiceChat

JOIN_SECONDS = 5.0  # for a server to end; it takes two at most


class LocalServer:
    """Begins with `start`, ends with its block. Must be the outermost block: it may end the process.

    That is so when the engine is at something that nothing can stop at the end: loading, say. Leaving with the thread
    at work would abort, so the process then ends here, with the words and the exit code of what left the block.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._server: Any = None
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)
        self._switch_seconds = sys.getswitchinterval()

    def __enter__(self) -> LocalServer:
        return self

    def start(self, load: Callable[[], VoiceChat], **options: Any) -> tuple[str, str]:
        """Serve what `load` gives; returns address and key once it is warm. Raises what loading raises.

        `options` are those of `ServerSettings`; address and key are chosen here.
        """
        import secrets

        from mlx_voicechat.server.app import create_app
        from mlx_voicechat.server.dialects import REALTIME
        from mlx_voicechat.server.engine import Engine
        from mlx_voicechat.server.listening import listen
        from mlx_voicechat.server.settings import ServerSettings
        from mlx_voicechat.server.sockets import Server

        for name in (*NOISY, "mlx_voicechat.server"):
            logging.getLogger(name).setLevel(logging.ERROR)
        key = secrets.token_urlsafe(32)  # nobody else on this machine takes the one slot
        settings = ServerSettings(api_key=key, **options)
        self._listeners = listen(settings.host, 0)
        self._engine = Engine(load, settings)
        self._server = Server(create_app(self._engine, settings), settings)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()
        self._engine.wait_ready(threading.TIMEOUT_MAX)
        return f"ws://{settings.host}:{self._listeners[0].getsockname()[1]}{REALTIME}", key

    def __exit__(self, kind: object, fault: BaseException | None, _: object) -> None:
        if self._server is None:
            return
        self._server.should_exit = True
        self._thread.join(JOIN_SECONDS)
        for listener in self._listeners:
            listener.close()
        sys.setswitchinterval(self._switch_seconds)
        if self._engine.running:
            _end_process(fault)

    def _serve(self) -> None:
        self._server.run(sockets=self._listeners)


def _end_process(fault: BaseException | None) -> None:
    code = 0
    if isinstance(fault, typer.Exit):
        code = fault.exit_code
    elif isinstance(fault, Exception):
        code = report(fault)
    elif fault is not None:
        code = fault.args[0] if isinstance(fault, Ended) else INTERRUPTED
        note("ended while the model was at work.")
    sys.stdout.flush()
    os._exit(code)
