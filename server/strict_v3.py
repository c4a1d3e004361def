"""The dialect `strict-v3` (seed of `voicechat.realtime`, version 3).

One WebSocket around the rules of `strict_v3_core`, and the way from there to the engine and back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.websockets import WebSocket

from mlx_voicechat.events import FunctionCall, FunctionDelta, FunctionFailed, TurnOpened
from mlx_voicechat.sound.pcm import pcm16

from . import messages
from .connection import POLICY, Connection, Patience, sessions_in_use
from .settings import ServerSettings
from .strict_v3_codes import FRAME_SECONDS
from .strict_v3_core import StrictV3
from .strict_v3_events import CLIENT_TURNS, Terms
from .strict_v3_order import OutOfOrder
from .strict_v3_requests import (
    Broken,
    Hear,
    Limited,
    Mark,
    Open,
    OpeningFailed,
    Request,
    ResultRefused,
)
from .strict_v3_turns import samples_of
from .strict_v3_work import Spoken
from .typed_voice import TypedVoice, TypedVoiceError

if TYPE_CHECKING:
    from .engine import Engine

PACE = messages.Pace(when_idle=False, ahead_seconds=0.0)  # stands still while nothing is open

log = logging.getLogger(__name__)


def terms_of(settings: ServerSettings, engine: Engine, voice: TypedVoice | None) -> Terms:
    """What this server tells its clients of itself."""
    default = engine.config.default_system_prompt if settings.instructions is None else settings.instructions
    return Terms(
        checkpoint=settings.model_id,
        turns=settings.turns,
        typed_input=voice is not None,
        single_client=settings.max_sessions == 1,
        function_calling=engine.can_call,
        instructions=default,
        default_tools=tuple(
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in settings.tools
        ),
        function_seconds=settings.function_timeout,
        most_frames=round(settings.strict_v3_seconds / FRAME_SECONDS),
    )


class StrictV3Connection(Connection):
    """A connection of this dialect, which is the host of its rules."""

    slow_seconds = 120.0  # a client that lags on purpose is waited for; the session stands still meanwhile

    def __init__(
        self, websocket: WebSocket, engine: Engine, settings: ServerSettings, voice: TypedVoice | None
    ) -> None:
        super().__init__(websocket, engine, settings)
        self.rules = StrictV3(terms_of(settings, engine, voice), self)
        self.id = self.rules.wire.session_id
        self._voice = voice
        self._setup_from = self.heard_at
        self._timer: asyncio.TimerHandle | None = None
        self._synthesis: asyncio.Task[None] | None = None
        self._unsent = 0  # frames
        self._bos = self._call = False  # of the step that is being told
        self._relayed: dict[type, Any] = {
            messages.Relay: lambda relay: relay.event,
            messages.Opened: lambda event: event,
            messages.OpeningFailed: lambda failed: OpeningFailed(failed.message),
            messages.ResultRefused: lambda refused: ResultRefused(refused.call_id, refused.message),
            messages.AppendRefused: lambda refused: Limited(refused.message),
            messages.Broken: lambda broken: Broken(broken.message),
            messages.Speech: self._spoken,
            **{kind: lambda event: event for kind in StrictV3.SESSION_EVENTS},
        }

    # -- the connection ------------------------------------------------------------------------------------------

    def greet(self) -> None:
        self.slot = self.engine.take_slot(self._deliver)
        if self.slot is None:
            self.refuse_busy(None)
        else:
            self.rules.greet()
            self._socket.stop_keepalive()

    def take(self, frame: Mapping[str, Any]) -> None:
        self._do(self.rules.receive, frame)

    def busy(self, event_id: str | None) -> dict[str, Any]:
        message = f"The server has {sessions_in_use(self.settings.max_sessions)} in use. Try again later."
        return self.rules.busy(message)

    def slow(self) -> dict[str, Any]:
        return self.rules.cut("slow_consumer")

    def patience(self) -> Patience:
        """A client that waits for the server is not silent."""
        if self.rules.waits:
            self.heard_at = self._setup_from = self.loop.time()
        if not self.rules.configured:
            return Patience(self._setup_from, self.settings.setup_seconds, "setup_timeout")
        return Patience(self.heard_at, self.settings.idle_seconds, "idle_timeout")

    def out_of_patience(self, event: Any) -> None:
        self.rules.hang_up(event, POLICY)

    def written(self, event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return event["type"], event

    def left(self, event: Any) -> None:
        """Each frame has one event of metrics, the last of what it gave."""
        metrics = isinstance(event, dict) and event["type"] == "voicechat.metrics"
        if metrics and self._unsent and self.slot is not None:
            self._unsent -= 1
            self.slot.sent()

    def gone(self) -> None:
        super().gone()
        self.rules.ended = True
        self.stop_synthesis()
        if self._timer is not None:
            self._timer.cancel()

    # -- the host of the rules -----------------------------------------------------------------------------------

    def now(self) -> float:
        return self.loop.time()

    def send(self, event: Any) -> None:
        if isinstance(event, dict) and event["type"] == "error":
            self.engine.metrics.error(event["error"]["code"])
        super().send(event)

    def close(self, code: int) -> None:
        super().close(code)
        self.gone()

    def put(self, request: Request) -> None:
        if self.slot is None and isinstance(request, Open):  # the one before could not be opened
            self.slot = self.engine.take_slot(self._deliver)
            if self.slot is None:
                self.refuse_busy(None)
        if self.slot is not None:
            self.slot.put(self._asked(request))

    def _asked(self, request: Request) -> messages.Request:
        if isinstance(request, Open):
            return self._open(request)
        if isinstance(request, Hear):
            return messages.Append(samples_of(request.pcm).tobytes())
        if isinstance(request, Mark):
            return messages.Relay(request)
        return request

    def _open(self, request: Open) -> messages.Open:
        return messages.Open(
            system_prompt=request.instructions,
            seed=0,
            max_seconds=request.frames * FRAME_SECONDS,
            tools=self.settings.tools if request.tools is None else tuple(messages.Tool(**t) for t in request.tools),
            turns="application" if self.settings.turns == CLIENT_TURNS else "model",
            pace=PACE,
            tool_timeout=2 * self.settings.function_timeout + 10,  # the rules' own is looked at first
        )

    def synthesise(self, job_id: str, text: str) -> None:
        self._synthesis = self.loop.create_task(self._speak(job_id, text))

    def stop_synthesis(self) -> None:
        if self._synthesis is not None:
            self._synthesis.cancel()

    async def _speak(self, job_id: str, text: str) -> None:
        assert self._voice is not None
        try:
            samples = await self._voice.speak(text)
        except TypedVoiceError as fault:
            self._do(self.rules.synthesis_failed, job_id, str(fault))
        else:
            self._do(self.rules.synthesised, job_id, pcm16(samples).tobytes())

    # -- what is told to the rules -------------------------------------------------------------------------------

    def _deliver(self, event: Any) -> None:
        """Take one event of the engine."""
        if isinstance(event, messages.Answering):
            self._bos = True
        elif isinstance(event, FunctionDelta):
            self._call = True
        else:
            self._bos = self._bos or isinstance(event, TurnOpened)
            self._call = self._call or isinstance(event, FunctionCall | FunctionFailed)
            relayed = self._relayed.get(type(event))
            if relayed is not None:
                self._do(self.rules.observe, relayed(event))
        if isinstance(event, messages.OpeningFailed | messages.Broken):
            self.slot = None  # it is free
        if isinstance(event, messages.Opened | messages.OpeningFailed):
            self.heard_at = self._setup_from = self.loop.time()
            self.watch_silence()

    def _spoken(self, event: messages.Speech) -> Spoken:
        self._unsent += 1
        bos, self._bos, self._call = self._bos and not self._call, False, False
        return Spoken(np.frombuffer(event.samples, np.float32), event.seconds, bos)

    def _do(self, what: Any, *arguments: Any) -> None:
        """Let the rules work, and look when they are to be woken."""
        try:
            what(*arguments)
        except OutOfOrder as defect:
            log.exception("%s: an event out of order.", self.id)
            self.rules.broke(f"The server would have sent {defect}.")
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.rules.deadline
        if deadline is not None:
            self._timer = self.loop.call_at(deadline, self._do, self.rules.tick)
