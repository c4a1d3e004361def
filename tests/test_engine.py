"""The engine thread: turns, openings in steps, failures, queues that are full, the end."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import mlx_voicechat
from mlx_voicechat.errors import CheckpointError, InputError, VoiceChatError
from mlx_voicechat.events import Cancelled, Done
from mlx_voicechat.server import messages
from mlx_voicechat.server.engine import Engine, Slot
from mlx_voicechat.server.limits import GATHER_SECONDS
from mlx_voicechat.server.messages import Append, Cancel, Commit, Interrupt, Open, Relay
from mlx_voicechat.server.served_session import Backlog, ServedSession
from mlx_voicechat.server.settings import ServerSettings as Settings
from mlx_voicechat.voicechat import VoiceChat
from tests.support.checkpoints import GOLDEN
from tests.support.fake_model import FakeModel

OPEN = Open(None, 0, 600.0)
WAIT_SECONDS = 20


def frames(count: float, event_id: str | None = None) -> Append:
    return Append(bytes(4 * round(count * 1280)), event_id)


class Call:
    """One session at the engine; `events` as they came. With `reads` False nothing is ever sent on."""

    def __init__(self, engine: Engine, reads: bool = True, request: Open = OPEN) -> None:
        self.events: list[Any] = []
        self.reads = reads
        self._came = asyncio.Event()
        slot = engine.reserve(request, self._take)
        assert slot is not None
        self.slot: Slot = slot

    def _take(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, messages.Speech) and self.reads:
            self.slot.sent()
        self._came.set()

    def put(self, *requests: messages.Request) -> None:
        for request in requests:
            self.slot.put(request)

    async def until(self, kind: Any, count: int = 1) -> list[Any]:
        """Wait for `count` events of a kind; they."""
        while len(found := self.of(kind)) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), WAIT_SECONDS)
        return found

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def started(model: Any, **options: Any) -> AsyncIterator[Engine]:
    settled = asyncio.Event()
    engine = Engine(lambda: model, Settings(model="fake", **options), settled.set)
    engine.start(asyncio.get_running_loop())
    await asyncio.wait_for(settled.wait(), WAIT_SECONDS)
    try:
        yield engine
    finally:
        assert await engine.end(WAIT_SECONDS)


class Gate:
    """A hook that notes each call and holds the engine at the first until `open` is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._reached, self._opened = threading.Event(), threading.Event()

    def note(self, name: str) -> Callable[[int], None]:
        def hook(index: int) -> None:
            self.calls.append((name, index) if name else index)
            self._reached.set()
            assert self._opened.wait(WAIT_SECONDS)

        return hook

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, WAIT_SECONDS)

    def open(self) -> None:
        self._opened.set()


# Turns


def test_sessions_take_turns_frame_by_frame() -> None:
    model, gate = FakeModel(), Gate()
    model.before = gate.note("")

    async def scenario() -> None:
        async with started(model, max_sessions=3) as engine:
            calls = [Call(engine) for _ in range(3)]
            for call in calls:
                await call.until(messages.Opened)
            calls[0].put(frames(1))
            await gate.reached()
            calls[0].put(frames(5))
            calls[1].put(frames(2.5), frames(3.5))
            calls[2].put(*[frames(0.25)] * 24)
            gate.open()
            for call in calls:
                await call.until(messages.Speech, 6)

    asyncio.run(scenario())
    assert gate.calls == [index for index in range(6) for _ in range(3)]


@pytest.mark.parametrize(("batch", "rounds"), [(True, [1, 3, 3, 2, 1]), (False, [1] * 10)])
def test_who_has_audio_steps_together(batch: bool, rounds: list[int]) -> None:
    """Nobody waits for who has none; without batching each has a round for itself."""
    model, gate = FakeModel(), Gate()
    model.before = gate.note("")

    async def scenario() -> None:
        async with started(model, max_sessions=4, batch=batch) as engine:
            calls = [Call(engine) for _ in range(4)]
            for call in calls:
                await call.until(messages.Opened)
            calls[0].put(frames(1))
            await gate.reached()
            for call, count in zip(calls, (4, 3, 2), strict=False):
                call.put(frames(count))
            gate.open()
            for call, count in zip(calls, (5, 3, 2), strict=False):
                await call.until(messages.Speech, count)

    asyncio.run(scenario())
    assert model.rounds == rounds


def test_whose_audio_a_round_waits_for() -> None:
    """Of who streams in real time, for a moment: when the rest of a frame is about to come, or is a little late."""
    clock = [100.0]
    model: Any = FakeModel()
    served = ServedSession(model, OPEN, None, Backlog(), lambda events, last: None, lambda: clock[0])

    def turn() -> None:
        running = served.turn()
        try:
            asking = next(running)
            while True:
                asking = running.send(asking.step())
        except StopIteration:
            return

    turn()  # the opening
    assert not served.expected(100.0, GATHER_SECONDS)  # it has sent nothing
    served.take(frames(1))
    assert not served.expected(100.0, GATHER_SECONDS)  # it is due
    turn()
    expected = [served.expected(100.0 + after, GATHER_SECONDS) for after in (0.0, 0.07, 0.079, 0.095, 0.2)]
    assert expected == [False, False, True, True, False]
    clock[0] = 100.1
    served.take(frames(0.5))
    turn()
    assert [served.expected(100.1 + after, GATHER_SECONDS) for after in (0.03, 0.039)] == [False, True]
    served.take(messages.Pause(True))
    assert not served.expected(100.14, GATHER_SECONDS)


def test_a_long_opening_leaves_the_others_their_frames() -> None:
    model, gate = FakeModel(), Gate()

    async def scenario() -> None:
        async with started(model, max_sessions=2) as engine:
            one = Call(engine)
            await one.until(messages.Opened)
            model.opening_steps, model.before_opening, model.before = 30, gate.note("opening"), gate.note("frame")
            one.put(frames(1))
            await gate.reached()
            one.put(frames(9))
            other = Call(engine)
            other.put(frames(1))
            gate.open()
            await one.until(messages.Speech, 10)
            await other.until(messages.Speech)

    asyncio.run(scenario())
    while_both_had_work = gate.calls[1 : gate.calls.index(("frame", 9))]
    assert [name for name, _ in while_both_had_work] == ["frame", "opening"] * 8
    assert [call for call in gate.calls if call[0] == "opening"] == [("opening", step) for step in range(31)]


def test_more_sessions_than_slots() -> None:
    async def scenario() -> None:
        async with started(FakeModel(), max_sessions=2) as engine:
            calls = [Call(engine), Call(engine)]
            assert engine.busy
            assert engine.reserve(OPEN, print) is None
            calls[0].put(Commit())
            await calls[0].until(Done)
            assert not engine.busy
            assert engine.active == 1
            calls[1].slot.release()
            while engine.active:
                await asyncio.sleep(0.01)
            assert calls[1].of(Cancelled) == []

    asyncio.run(scenario())


def test_speech_that_is_not_sent_holds_its_own_session_only() -> None:
    async def scenario() -> None:
        async with started(FakeModel(), max_sessions=2) as engine:
            stalled, other = Call(engine, reads=False), Call(engine)
            stalled.put(frames(40))
            other.put(frames(100), Commit())
            await other.until(Done)
            assert len(await stalled.until(messages.Speech, 25)) == 25
            assert stalled.slot.backlog.samples == 15 * 1280
            stalled.slot.sent()
            await stalled.until(messages.Speech, 26)
            stalled.put(Cancel())
            assert await stalled.until(Cancelled) == [Cancelled(26)]

    asyncio.run(scenario())


def test_what_is_full() -> None:
    model, gate = FakeModel(), Gate()
    model.before = gate.note("")

    async def scenario() -> None:
        async with started(model, max_sessions=2) as engine:
            long, many = Call(engine), Call(engine)
            long.put(frames(124))
            assert not long.slot.full
            long.put(frames(1))
            assert long.slot.full
            assert long.slot.waiting_seconds == 10
            many.put(*[frames(0.001)] * 511)
            assert many.slot.full
            gate.open()
            await long.until(messages.Speech, 125)
            assert long.slot.backlog.samples == 0
            while many.slot.backlog.requests:
                await asyncio.sleep(0.01)
            assert not many.slot.full

    asyncio.run(scenario())


# What is asked for in the middle


def test_cancelling_and_interrupting_do_not_wait() -> None:
    model, gate = FakeModel(), Gate()
    model.before = gate.note("")

    async def scenario() -> None:
        async with started(model) as engine:
            call = Call(engine)
            call.put(frames(20))
            await gate.reached()
            call.put(Interrupt(), Interrupt())
            gate.open()
            await call.until(messages.Interrupted, 2)
            call.put(Cancel())
            (cancelled,) = await call.until(Cancelled)
            assert cancelled.frame_index == len(call.of(messages.Speech))
            kinds = [type(event).__name__ for event in call.events if not isinstance(event, messages.Lagging)]
            assert kinds[:5] == ["Opened", "Speech", "Interrupted", "Interrupted", "Speech"]
            assert [event.frame_index for event in call.of(messages.Interrupted)] == [1, 1]
            assert engine.active == 0

    asyncio.run(scenario())
    assert model.sessions[0].forced[0] == (1, 2)


def test_a_turn_can_be_ended_without_another_frame() -> None:
    async def scenario() -> list[Any]:
        async with started(FakeModel()) as engine:
            call = Call(engine)
            call.put(frames(2))
            await call.until(messages.Speech, 2)
            call.put(Interrupt(), Commit())
            await call.until(Done)
            return call.events[-3:]

    assert asyncio.run(scenario()) == [messages.Committed(), messages.Interrupted(2), Done(2)]


def test_the_order_of_what_waits() -> None:
    async def scenario() -> list[Any]:
        async with started(FakeModel()) as engine:
            call = Call(engine)
            call.put(Relay(1), frames(1), Relay(2), frames(0.5), Commit(), Relay(3))
            await call.until(Done)
            return call.events

    kinds = [getattr(event, "event", type(event).__name__) for event in asyncio.run(scenario())]
    assert kinds == ["Opened", 1, "Speech", 2, "Committed", 3, "Speech", "Done"]


def test_the_limit_is_told_once_an_append() -> None:
    async def scenario() -> list[Any]:
        async with started(FakeModel()) as engine:
            call = Call(engine, request=Open(None, 0, 0.2))
            call.put(frames(10, "first"), frames(1, "second"), Commit())
            await call.until(Done)
            return call.events

    events = asyncio.run(scenario())
    assert [event.event_id for event in events if isinstance(event, messages.AppendRefused)] == ["first", "second"]
    assert events[-1] == Done(2)


# Failures


def test_a_failure_ends_its_session_only(caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel()
    faults = [ZeroDivisionError("secret"), VoiceChatError("The model computed NaN.")]

    def before(index: int) -> None:
        if index == 3 and faults:
            raise faults.pop()

    model.before = before

    async def scenario() -> None:
        async with started(model, max_sessions=3) as engine:
            calls = [Call(engine) for _ in range(3)]
            for call in calls:
                call.put(frames(6, "mine"), Relay("kept"), Commit())
            await calls[2].until(Done)
            (nan,), (unexpected,) = await calls[0].until(messages.Broken), await calls[1].until(messages.Broken)
            assert nan == messages.Broken("The model computed NaN.", "mine")
            assert unexpected == messages.Broken("The model failed: ZeroDivisionError.", "mine")
            assert [len(call.of(messages.Speech)) for call in calls] == [3, 3, 6]
            assert [call.of(Relay) for call in calls] == [[Relay("kept")]] * 3
            assert engine.active == 0

    asyncio.run(scenario())
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [True]


def test_an_opening_that_fails() -> None:
    model = FakeModel()

    async def scenario() -> list[Any]:
        async with started(model) as engine:

            def refuse(step: int) -> None:
                raise InputError("Too long.", "Shorten it.")

            model.before_opening = refuse
            call = Call(engine)
            call.put(Interrupt("mine"), frames(1, "early"), Relay("kept"), Commit(event_id="end"))
            await call.until(messages.Unopened, 3)
            assert not engine.busy
            return call.events

    events = asyncio.run(scenario())
    unopened = [messages.Unopened(name) for name in ("mine", "early", "end")]
    assert events == [messages.OpeningFailed("Too long. Shorten it."), *unopened[:2], Relay("kept"), unopened[2]]


def test_cancelling_an_opening() -> None:
    model = FakeModel()
    model.opening_steps = 10**6

    async def scenario() -> list[Any]:
        async with started(model) as engine:
            call = Call(engine)
            await asyncio.sleep(0.02)
            call.put(Cancel())
            await call.until(Cancelled)
            assert engine.active == 0
            return call.events

    assert asyncio.run(scenario()) == [Cancelled(0)]


def test_a_model_that_cannot_be_loaded() -> None:
    def load() -> Any:
        raise CheckpointError("There is no folder x.")

    async def scenario() -> Engine:
        settled = asyncio.Event()
        engine = Engine(load, Settings(model="x"), settled.set)
        engine.start(asyncio.get_running_loop())
        await asyncio.wait_for(settled.wait(), WAIT_SECONDS)
        assert await engine.end(WAIT_SECONDS)
        return engine

    engine = asyncio.run(scenario())
    assert engine.state == "failed"
    with pytest.raises(CheckpointError, match="no folder x"):
        engine.wait_ready(0)


def test_the_engine_ends_in_the_middle() -> None:
    model = FakeModel()

    async def scenario() -> Engine:
        async with started(model) as engine:
            call = Call(engine)
            call.put(frames(10**5))
            await call.until(messages.Speech, 10)
            return engine

    engine = asyncio.run(scenario())
    assert engine.state == "ended"
    assert model.sessions[0].frames < 10**5
    assert not [thread for thread in threading.enumerate() if thread.name == "mlx-engine"]


# The real model


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load(GOLDEN / "tiny-f32")


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    return np.load(GOLDEN / "expected" / "perception.npz")["audio"][:12800]


def test_an_opening_in_steps_among_frames(model: VoiceChat, audio: np.ndarray) -> None:
    options: dict[str, Any] = {"system_prompt": "Be concise.", "seed": 5}
    at_once, alone = model.session(**options).push(audio), model.session(seed=6).push(audio)
    model._openings.clear()
    other, opening, events, steps, session = model.session(seed=6), model.opening(**options), [], 0, None
    for start in range(0, len(audio), 1280):
        events += other.push(audio[start : start + 1280])
        try:
            next(opening)
            steps += 1
        except StopIteration as done:
            session = session or done.value
    while session is None:
        try:
            next(opening)
            steps += 1
        except StopIteration as done:
            session = done.value
    assert session.push(audio) == at_once
    assert events == alone
    assert steps == len(model._prompt_ids("Be concise."))  # one for the language model, one for each but the first


def test_warming_changes_nothing(model: VoiceChat, audio: np.ndarray) -> None:
    before = model.session(seed=1).push(audio)
    model.warm()
    assert model.session(seed=1).push(audio) == before
    with pytest.raises(InputError, match="no voice 'Bob'"):
        model.warm("Bob")


def test_sessions_at_the_engine_equal_their_solo_runs(model: VoiceChat, audio: np.ndarray) -> None:
    expected = []
    for seed in range(3):
        session = model.session(seed=seed, system_prompt="Hi" if seed == 1 else None)
        expected.append([e.codes for e in session.push(audio) if isinstance(e, mlx_voicechat.AudioFrame)])
    model._openings.clear()

    async def scenario() -> list[list[Any]]:
        async with started(model, max_sessions=3) as engine:
            calls = [Call(engine, request=Open("Hi" if seed == 1 else None, seed, 600.0)) for seed in range(3)]
            for call in calls:
                call.put(Append(audio.astype(np.float32).tobytes()), Commit())
            for call in calls:
                await call.until(Done)
            return [[event.codes for event in call.of(messages.Speech)] for call in calls]

    assert asyncio.run(scenario()) == expected
