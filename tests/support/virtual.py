"""A server's sessions on one event loop whose clock jumps: no socket, no thread, no waiting.

`VirtualEngine` runs each session as the engine does, `Client` is a client of one: what it sends is done at once, and
what comes goes through the checker of the legal order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from mlx_voicechat.server import detector, messages, openai_input
from mlx_voicechat.server.detector import STEP_SAMPLES, Activity, SpeechDetector
from mlx_voicechat.server.duplex import DuplexSession
from mlx_voicechat.server.duplex_messages import DUPLEX_HANDLERS
from mlx_voicechat.server.openai import OpenAISession
from mlx_voicechat.server.openai_events import ServerEvent
from mlx_voicechat.server.openai_messages import HANDLERS, take
from mlx_voicechat.server.served_session import FLOAT_BYTES, Backlog, ServedSession
from mlx_voicechat.server.settings import ServerSettings
from tests.support.openai_order import Order

TICK_SECONDS = 0.001
LEAST_SECONDS = 1e-6  # a timer of less is called without the clock moving


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Never waits: it lets the loop's clock jump."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            self.loop.now += TICK_SECONDS if timeout is None else max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is to be done."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop, self.now = self, 0.0

    def time(self) -> float:
        return self.now


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on a virtual clock; its result. What a callback or task raised is raised here."""
    loop = VirtualLoop()
    faults: list[Any] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    try:
        result = loop.run_until_complete(main())
        for context in faults:
            raise context.get("exception") or AssertionError(context["message"])
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class VirtualSlot:
    """A slot of a VirtualEngine."""

    def __init__(self, engine: VirtualEngine, deliver: Callable[[Any], None]) -> None:
        self.engine, self.deliver = engine, deliver
        self.backlog = Backlog()
        self.session: ServedSession | None = None
        self.released = False

    @property
    def waiting_seconds(self) -> float:
        return self.backlog.samples / 16_000

    def put(self, request: messages.Request) -> None:
        self.backlog.requests_put += 1
        if isinstance(request, messages.Append):
            self.backlog.samples_put += len(request.samples) // FLOAT_BYTES
        if self.session is None and isinstance(request, messages.Open):
            self.backlog.requests_taken += 1
            self.session = ServedSession(
                self.engine.model,
                request,
                None,
                self.backlog,
                self._tell,
                self.engine.loop.time,  # type: ignore[arg-type]
            )
        elif self.session is not None and not self.session.ended:
            self.session.take(request)
        self.engine.wake.set()

    def _tell(self, events: list[Any], last: bool) -> None:
        for event in events:
            self.engine.loop.call_soon(self.deliver, event)

    def sent(self) -> None:
        self.backlog.frames_sent += 1
        self.engine.wake.set()

    def release(self) -> None:
        self.released = True
        self.engine.slots.remove(self)


class VirtualEngine:
    """The engine's loop as a task; a frame takes no time."""

    def __init__(self, model: Any, max_sessions: int = 4) -> None:
        self.model, self.config, self.max_sessions = model, model.config, max_sessions
        self.loop = asyncio.get_running_loop()
        self.slots: list[VirtualSlot] = []
        self.wake = asyncio.Event()
        self.task = self.loop.create_task(self._run())

    @property
    def busy(self) -> bool:
        return len(self.slots) >= self.max_sessions

    def take_slot(self, deliver: Callable[[Any], None]) -> VirtualSlot | None:
        if self.busy:
            return None
        self.slots.append(VirtualSlot(self, deliver))
        return self.slots[-1]

    async def _run(self) -> None:
        while True:
            self.wake.clear()
            first: float | None = None
            for slot in list(self.slots):
                if slot.session is None or slot.session.ended:
                    continue
                due = slot.session.due(self.loop.time())
                if due is not None and due <= self.loop.time():
                    try:
                        turn = slot.session.turn()
                        asking = next(turn, None)
                        while asking is not None:
                            try:
                                asking = turn.send(asking.step())
                            except StopIteration:
                                asking = None
                    except Exception as fault:
                        slot.session.fail(f"The model failed: {fault!r}.")
                    first = self.loop.time()
                elif due is not None:
                    first = due if first is None else min(first, due)
            if first is not None and first <= self.loop.time():
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                wait = None if first is None else max(first - self.loop.time(), LEAST_SECONDS)
                await asyncio.wait_for(self.wake.wait(), wait)


class Client:
    """One client of a session, its socket left out."""

    def __init__(
        self,
        engine: VirtualEngine,
        duplex: bool = False,
        beta: bool = False,
        voice: Any = None,
        seconds: float = 3600.0,
        **options: Any,
    ) -> None:
        self.settings = ServerSettings(model="fake", max_audio_seconds=seconds, **options)
        self.events: list[dict[str, Any]] = []
        self.order = Order(beta)
        self.closed: int | None = None
        self.times: list[float] = []
        self.loop = engine.loop
        self.more = asyncio.Event()
        made: Any = engine
        if duplex:
            self.session: OpenAISession = DuplexSession(
                made, self.settings, voice, self.take, self.close, lambda s: None
            )
            self.handlers = DUPLEX_HANDLERS
        else:
            self.session = OpenAISession(made, self.settings, voice, beta, self.take, self.close)
            self.handlers = HANDLERS
        assert self.session.start()
        self.session.greet()

    def take(self, event: ServerEvent) -> None:
        """An event of the session."""
        assert self.closed is None, f"{event.name} after the closing"
        wire = json.loads(json.dumps({"type": event.name, "event_id": f"event_{len(self.events)}", **event.fields}))
        self.events.append(wire)
        self.times.append(self.loop.time())
        self.order.take(wire)
        self.session.frames_left(event.frames)
        self.more.set()

    def take_resumed(self, event: ServerEvent) -> None:
        """An event of the session on another socket; what greets it is no part of the conversation."""
        if event.name == "session.resumed":
            self.session.frames_left(event.frames)
        else:
            self.take(event)

    def close(self, code: int) -> None:
        self.closed = code
        self.more.set()

    def send(self, *sent: dict[str, Any] | str) -> None:
        """Messages, done one after another."""
        for message in sent:
            if not self.session.ended:
                take(
                    self.session, self.handlers, {"text": message if isinstance(message, str) else json.dumps(message)}
                )

    async def until(self, kind: str, since: int = 0, seconds: float = 30.0) -> dict[str, Any]:
        """Wait for an event of this type."""
        deadline = self.loop.time() + seconds
        while True:
            for event in self.events[since:]:
                if event["type"] == kind:
                    return event
            assert self.loop.time() < deadline, f"no {kind}; {[event['type'] for event in self.events]}"
            await asyncio.sleep(0.02)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


def loudness(samples: np.ndarray) -> float:
    """A detector's network for tests: what is loud is speech."""
    assert len(samples) == STEP_SAMPLES
    return float(np.abs(samples).mean() > 0.01)


@pytest.fixture
def quick_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detectors that go by loudness, in the thread that asks."""

    async def detect(one: SpeechDetector, samples: np.ndarray) -> list[Activity]:
        return one.push(samples)

    monkeypatch.setattr(openai_input, "SpeechDetector", lambda *values: SpeechDetector(*values, probability=loudness))
    monkeypatch.setattr(openai_input, "detect", detect)
    monkeypatch.setattr(openai_input, "end", SpeechDetector.end)
    assert detector.RATE_HZ == 16_000
