"""The thread that owns MLX: it loads and warms the model, holds the sessions and gives each its frames.

In a round every session whose audio has come has a turn, and their frames are one evaluation; without batching a round
is one session's turn.

Nothing else in the process touches MLX. Requests come in through one queue, which every connection bounds for itself
(`Slot.full`); events go to the event loop, where they wait in their connection's queue, and a session whose queue is
full takes no turn.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx

from mlx_voicechat.errors import MachineLostError, VoiceChatError

from .limits import GATHER_SECONDS, INPUT_MESSAGES, INPUT_SECONDS, OUTGOING_SECONDS, ROOM_SECONDS
from .messages import Append, Broken, Cancel, EngineEvent, Open, Request
from .metrics import Metrics
from .served_session import FLOAT_BYTES, Backlog, ServedSession, Turn
from .settings import ServerSettings

if TYPE_CHECKING:
    from mlx_voicechat.events import Event
    from mlx_voicechat.session import Session
    from mlx_voicechat.voicechat import VoiceChat

LOADING, WARMING, READY, FAILED, ENDED = "loading", "warming", "ready", "failed", "ended"
_Item: TypeAlias = "tuple[Slot | None, Request | None]"

log = logging.getLogger(__name__)


class Slot:
    """A place for one session; its connection's side of it, used on the event loop.

    `deliver` gets the events there. The slot is free again when the engine says so: after `response.done`, say, or at
    the frame boundary after `release`.
    """

    def __init__(self, engine: Engine, deliver: Callable[[EngineEvent], None]) -> None:
        self.backlog = Backlog()
        self.deliver = deliver
        self.opened = False
        self._engine = engine

    @property
    def waiting_seconds(self) -> float:
        """Seconds of audio that wait for their turn."""
        return self.backlog.samples / self._engine.config.input_rate_hz

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be read from the client."""
        return self.backlog.requests >= INPUT_MESSAGES or self.waiting_seconds >= INPUT_SECONDS

    def put(self, request: Request) -> None:
        """Hand over a request."""
        self.backlog.requests_put += 1
        self.opened = self.opened or isinstance(request, Open)
        if isinstance(request, Append):
            self.backlog.samples_put += len(request.samples) // FLOAT_BYTES
        self._engine.put(self, request)

    def sent(self) -> None:
        """One frame of speech has left."""
        was_full = self.backlog.frames * self._engine.config.frame_seconds >= OUTGOING_SECONDS
        self.backlog.frames_sent += 1
        if was_full:
            self._engine.put(None, None)  # the session may have been waiting for this

    def release(self) -> None:
        """The client is gone: end the session if it has not ended."""
        if self.opened:
            self._engine.put(self, Cancel(reported=False))
        else:
            self._engine.give_back(self)


class Engine:
    """Sessions of one model on one thread. `load` and every use of the model happen there.

    `state` is loading, warming, ready, failed or ended. `announce` is called on the event loop when it is ready, and
    when it has failed: then `failure` is what was raised.
    """

    def __init__(
        self, load: Callable[[], VoiceChat], settings: ServerSettings, announce: Callable[[], None] = lambda: None
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.state = LOADING
        self.failure: BaseException | None = None
        self.config: Any = None
        self.can_call = False  # whether its checkpoint has tools
        self.draining = False  # no new conversations: the server ends when those that are there have
        self._load = load
        self._announce = announce
        self._slots: set[Slot] = set()
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._served: dict[Slot, ServedSession] = {}
        self._order: deque[Slot] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._fault: BaseException | None = None  # for which it is to end
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="mlx-engine", daemon=True)
        self.metrics.gauge("sessions_active", "Sessions that hold a slot", lambda: len(self._slots))
        self.metrics.gauge("sessions_max", "Slots", lambda: settings.max_sessions)
        self.metrics.gauge("queue_seconds", "Audio that waits for its turn", self._waiting_seconds)
        self.metrics.gauge("queue_frames", "Frames that wait to be sent", self._waiting_frames)

    # -- on the event loop ---------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to load; `loop` gets the events."""
        self._loop = loop
        self._thread.start()

    async def end(self, seconds: float) -> bool:
        """Stop after the frame that runs; False if the thread does not end in time (it may be loading)."""
        self._ending = True
        self.put(None, None)
        if self._thread.ident is not None:
            deadline = time.monotonic() + seconds
            while self.running and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        return not self.running

    def wait_ready(self, seconds: float) -> None:
        """Wait on any other thread until the model is warm; raises what loading raised, TimeoutError."""
        if not self._started.wait(seconds):
            raise TimeoutError(f"The model was not loaded within {seconds:g} s.")
        if self.failure is not None:
            raise self.failure

    def fail(self, fault: BaseException) -> None:
        """End for this reason, and tell every session; from any thread. The engine's own may be at a wait for ever."""
        self._fault = fault
        self._on_loop(self._tell_all)
        self.put(None, None)

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """How many slots are taken."""
        return len(self._slots)

    @property
    def busy(self) -> bool:
        """Whether every slot is taken."""
        return len(self._slots) >= self.settings.max_sessions

    async def room(self) -> bool:
        """Whether there is a free slot, once ROOM_SECONDS have passed for a client that has just left."""
        deadline = time.monotonic() + ROOM_SECONDS
        while self.busy and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.busy

    def reserve(self, request: Open, deliver: Callable[[EngineEvent], None]) -> Slot | None:
        """Take a slot and open a session in it; None if there is no free one."""
        slot = self.take_slot(deliver)
        if slot is not None:
            slot.put(request)
        return slot

    def take_slot(self, deliver: Callable[[EngineEvent], None]) -> Slot | None:
        """Take a slot, in which the first request opens a session; None if there is no free one."""
        if self.busy:
            return None
        slot = Slot(self, deliver)
        self._slots.add(slot)
        self.metrics.opened.inc()
        return slot

    def give_back(self, slot: Slot) -> None:
        """A slot is free in which no session was opened."""
        self._slots.discard(slot)

    def put(self, slot: Slot | None, request: Request | None) -> None:
        """Hand the thread a request of a slot, or wake it."""
        self._inbox.put((slot, request))

    def _tell(self, slot: Slot, events: list[EngineEvent], last: bool) -> None:
        if last:
            self._slots.discard(slot)
        for event in events:
            slot.deliver(event)

    def _tell_all(self) -> None:
        for slot in list(self._slots):
            self._tell(slot, [Broken(str(self._fault), None)], last=True)

    def _waiting_seconds(self) -> float:
        return sum(slot.waiting_seconds for slot in list(self._slots))

    def _waiting_frames(self) -> int:
        return sum(slot.backlog.frames for slot in list(self._slots))

    # -- on the engine thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        model = None
        try:
            model = self._load()
            self.state, self.config = WARMING, model.config
            self.can_call = model.call_tokens is not None
            model.warm(self.settings.voice, self.settings.sessions_together)
            self.state = READY
            self._announce_start()
            self._rounds(model)
            self.state = ENDED
        except BaseException as fault:  # raised again where the server was started
            if self._fault is None:
                self._fault = fault
                self._on_loop(self._tell_all)
            self.failure, self.state = fault, FAILED
            self._announce_start()
        finally:
            self._served.clear()
            del model
            mx.clear_streams()

    def _announce_start(self) -> None:
        self._started.set()
        self._on_loop(self._announce)

    def _rounds(self, model: VoiceChat) -> None:
        while not self._ending:
            slots, wait_seconds = self._due()
            self._take_requests(model, wait_seconds)
            if self._fault is not None:
                raise self._fault
            if slots and self.settings.sessions_together > 1:
                slots = self._gathered(model)
            slots = [slot for slot in slots if slot in self._served]
            if slots and not self._ending:
                self._round(model, slots)

    def _due(self) -> tuple[list[Slot], float | None]:
        """Whose turn it is, the longest without one first; else how long to wait (None: for ever)."""
        now = time.monotonic()
        due = {slot: at for slot in self._order if (at := self._served[slot].due(now)) is not None}
        ready = [slot for slot, at in due.items() if at <= now]
        if ready:
            return ready if self.settings.sessions_together > 1 else ready[:1], 0.0
        return [], min(due.values()) - now if due else None

    def _gathered(self, model: VoiceChat) -> list[Slot]:
        """Whose turn it is, once those have had a moment whose audio is about to come."""
        until = time.monotonic() + GATHER_SECONDS
        while (left := until - time.monotonic()) > 0 and not self._ending:
            now = time.monotonic()
            if not any(served.expected(now, left) for served in self._served.values()):
                break
            self._take_requests(model, left)
        return self._due()[0]

    def _round(self, model: VoiceChat, slots: list[Slot]) -> None:
        """A turn of each, frames before openings; then they go to the end of the row."""
        asking: dict[Session, tuple[Slot, Turn]] = {}
        opening = [slot for slot in slots if self._served[slot].opening]
        for slot in slots:
            self._order.remove(slot)
            self._order.append(slot)
            if slot not in opening:
                self._go_on(slot, self._served[slot].turn(), None, asking)
        while asking:
            asked, asking = asking, {}
            for session, outcome in model.step(list(asked)):
                self._go_on(*asked[session], outcome, asking)
        for slot in opening:
            self._go_on(slot, self._served[slot].turn(), None, asking)

    def _go_on(
        self,
        slot: Slot,
        turn: Turn,
        outcome: list[Event] | Exception | None,
        asking: dict[Session, tuple[Slot, Turn]],
    ) -> None:
        """Go on with a turn, told what its step gave, until it asks for the next or ends."""

        def work(served: ServedSession) -> None:
            if isinstance(outcome, Exception):
                raise outcome
            try:
                asking[turn.send(outcome)] = slot, turn  # type: ignore[arg-type]
            except StopIteration as done:
                if done.value is not None:
                    self.metrics.frame(done.value, self.config.frame_seconds)

        self._guarded(slot, work)

    def _take_requests(self, model: VoiceChat, wait_seconds: float | None) -> None:
        try:
            while True:
                slot, request = self._inbox.get(wait_seconds != 0, wait_seconds)
                wait_seconds = 0.0
                if slot is not None and isinstance(request, Open) and slot not in self._served:
                    self._open(model, slot, request)
                elif slot is not None and request is not None and slot in self._served:
                    self._guarded(slot, lambda s, r=request: s.take(r))  # type: ignore[misc]
        except queue.Empty:
            return

    def _open(self, model: VoiceChat, slot: Slot, request: Open) -> None:
        slot.backlog.requests_taken += 1

        def tell(events: list[EngineEvent], last: bool) -> None:
            self._on_loop(lambda: self._tell(slot, events, last))

        self._served[slot] = ServedSession(model, request, self.settings.voice, slot.backlog, tell)
        self._order.append(slot)

    def _guarded(self, slot: Slot, work: Callable[[ServedSession], None]) -> None:
        """Work for one session: what it raises ends that session, and no other."""
        served = self._served[slot]
        try:
            work(served)
        except MachineLostError:
            raise
        except VoiceChatError as fault:
            served.fail(str(fault))
        except Exception as fault:
            log.exception("A session failed.")
            served.fail(f"The model failed: {type(fault).__name__}.")
        if served.ended:
            del self._served[slot]
            self._order.remove(slot)

    def _on_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody is there
            self._loop.call_soon_threadsafe(call)
