"""The cycle of a tool call, position by position, and the functions that run for it; no model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.errors import InputError
from mlx_voicechat.events import Event, FailureReason, FunctionApplied, FunctionCall, FunctionFailed, OnHold
from mlx_voicechat.text import Tokenizer
from mlx_voicechat.tools import Tool
from mlx_voicechat.tools.cycle import Cycle, CycleState, ToolTokens
from mlx_voicechat.tools.running import Outcome, Runner
from mlx_voicechat.tools.tool import by_name
from mlx_voicechat.weights.assets import TINY

TOKENIZER = Tokenizer(TINY)
SOTC, EOTC, EOTR, PAD, BOS, EOS = 20, 21, 22, 12, 1, 2
TOKENS = ToolTokens(SOTC, EOTC, EOTR, PAD, BOS, EOS)
TIME = '<TOOLCALL>[{"name": "get_time", "arguments": {}}]</TOOLCALL>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def cycle_of(*tools: Tool, run: Callable[[FunctionCall, Tool], None] = lambda call, tool: None) -> Cycle:
    offered = tools or (Tool("get_time"), Tool("get_weather", "", CITY))
    return Cycle(by_name(offered), TOKENIZER, TOKENS, run, timeout_frames=375, frame_seconds=0.08)


def write(cycle: Cycle, text: str = TIME, frame_index: int = 7, end: bool = True) -> list[Event]:
    """The model writes a call."""
    events: list[Event] = []
    for token in [SOTC, *TOKENIZER.encode(text), *([EOTC] if end else [])]:
        events += cycle.took(token, frame_index)
    return events


def inject(cycle: Cycle) -> str:
    """Take up what is to be injected."""
    ids = list(cycle.known)
    for token in ids:
        assert cycle.took(token, 8) == []
    return TOKENIZER.decode(ids)


def test_a_whole_cycle() -> None:
    cycle = cycle_of()
    assert not cycle.active
    assert cycle.took(PAD, 3) == []
    (call,) = write(cycle)
    assert isinstance(call, FunctionCall)
    assert (call.frame_index, call.name, call.arguments, call.raw) == (7, "get_time", {}, TIME)
    assert cycle.state == CycleState.WAITING
    assert cycle.open_calls == (call,)
    assert cycle.waited(8) == []
    cycle.give(call.call_id, "ten past four")
    assert cycle.state == CycleState.INJECTING
    assert inject(cycle) == '<TOOL_RESPONSE>["ten past four"]</TOOL_RESPONSE>'
    assert cycle.state == CycleState.CLOSING
    assert cycle.took(EOTR, 8) == [FunctionApplied(8, (call.call_id,), ('"ten past four"',))]
    assert cycle.state == CycleState.IDLE
    assert cycle.open_calls == ()


def test_pads_inside_a_call_are_left_out() -> None:
    cycle = cycle_of()
    events: list[Event] = []
    for token in [SOTC, *(each for written in TOKENIZER.encode(TIME) for each in (PAD, written)), EOTC]:
        events += cycle.took(token, 0)
    assert [type(event) for event in events] == [FunctionCall]


def test_several_calls_wait_for_each_other() -> None:
    cycle = cycle_of()
    text = '[{"name": "get_time"}, {"name": "get_rich"}, {"name": "get_weather", "arguments": {"city": "Paris"}}]'
    first, weather, failed = write(cycle, text)
    assert isinstance(first, FunctionCall)
    assert isinstance(weather, FunctionCall)
    assert isinstance(failed, FunctionFailed)
    assert failed.reason == FailureReason.UNKNOWN_TOOL
    cycle.give(weather.call_id, {"weather": "snow"})
    assert cycle.waiting
    cycle.refuse(first.call_id, "not today")
    assert (
        inject(cycle)
        == '<TOOL_RESPONSE>[{"error": "not today"}, {"error": "There is no tool \'get_rich\'."}, {"weather": "snow"}]'
        "</TOOL_RESPONSE>"
    )
    (applied,) = cycle.took(EOTR, 9)
    assert isinstance(applied, FunctionApplied)
    assert applied.call_ids == (first.call_id, failed.call_id, weather.call_id)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("get_time()", FailureReason.MALFORMED),
        ('[{"name": "get_rich"}]', FailureReason.UNKNOWN_TOOL),
        ('[{"name": "get_weather"}]', FailureReason.BAD_ARGUMENTS),
    ],
)
def test_a_failed_call_is_told_to_the_model_too(text: str, reason: FailureReason) -> None:
    cycle = cycle_of()
    (failed,) = write(cycle, text)
    assert isinstance(failed, FunctionFailed)
    assert (failed.reason, failed.raw) == (reason, text)
    assert inject(cycle).startswith('<TOOL_RESPONSE>[{"error": ')
    (applied,) = cycle.took(EOTR, 9)
    assert isinstance(applied, FunctionApplied)


def test_bytes_that_are_no_text() -> None:
    cycle = cycle_of()
    lead = next(token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token) == b"\xe2")
    events: list[Event] = []
    for token in [SOTC, lead, *TOKENIZER.encode(TIME), EOTC]:
        events += cycle.took(token, 0)
    (failed,) = events
    assert isinstance(failed, FunctionFailed)
    assert failed.reason == FailureReason.MALFORMED
    assert "\ufffd" in failed.raw


@pytest.mark.parametrize(("token", "positions"), [(PAD, 125), (65, 125)])
def test_a_call_without_an_end(token: int, positions: int) -> None:
    cycle = cycle_of()
    cycle.took(SOTC, 0)
    for _ in range(positions - 1):
        assert cycle.took(token, 0) == []
    (failed,) = cycle.took(token, 0)
    assert isinstance(failed, FunctionFailed)
    assert failed.reason == FailureReason.TOO_LONG
    assert not cycle.active
    end = '<SPECIAL_21><TOOL_RESPONSE>[{"error": "the call did not end"}]</TOOL_RESPONSE><SPECIAL_22>'
    assert inject(cycle) == end
    write(cycle)
    assert cycle.waiting


def test_results_that_are_refused_leave_the_call_open() -> None:
    cycle = cycle_of()
    (call,) = write(cycle)
    assert isinstance(call, FunctionCall)
    for wrong in ("x" * 20_000, ["a"] * 500, object()):
        with pytest.raises(InputError):
            cycle.give(call.call_id, wrong)
    with pytest.raises(InputError, match=call.call_id):
        cycle.give("call_0", "x")
    cycle.give(call.call_id, "x")
    with pytest.raises(InputError, match="none"):
        cycle.give(call.call_id, "y")


def test_a_call_runs_out_of_time() -> None:
    cycle = cycle_of()
    (call,) = write(cycle)
    assert isinstance(call, FunctionCall)
    for frame in range(374):
        assert cycle.waited(frame) == []
    assert cycle.waited(374) == [FunctionFailed(374, call.call_id, FailureReason.TIMED_OUT, TIME)]
    assert inject(cycle) == '<TOOL_RESPONSE>[{"error": "timed out"}]</TOOL_RESPONSE>'


def test_no_end_of_the_response() -> None:
    cycle = cycle_of()
    (call,) = write(cycle)
    assert isinstance(call, FunctionCall)
    cycle.give(call.call_id, 1)
    inject(cycle)
    for _ in range(7):
        assert cycle.took(PAD, 9) == []
    assert cycle.took(PAD, 9) == [
        FunctionFailed(9, "", FailureReason.UNCLOSED, TIME),
        FunctionApplied(9, (call.call_id,), ("1",)),
    ]
    assert not cycle.active


def test_a_call_right_after_the_response() -> None:
    cycle = cycle_of()
    (call,) = write(cycle)
    assert isinstance(call, FunctionCall)
    cycle.give(call.call_id, 1)
    inject(cycle)
    assert [type(event) for event in write(cycle)] == [FunctionApplied, FunctionCall]
    assert cycle.cycles == 2


def test_the_ninth_cycle_of_a_turn() -> None:
    cycle = cycle_of()
    for count in range(8):
        assert not cycle.exhausted
        (call,) = write(cycle)
        assert isinstance(call, FunctionCall)
        cycle.give(call.call_id, count)
        inject(cycle)
        cycle.took(EOTR, 9)
    assert cycle.exhausted
    (failed,) = cycle.refused(10)
    assert isinstance(failed, FunctionFailed)
    assert failed.reason == FailureReason.TOO_MANY
    assert cycle.refused(11) == []
    cycle.new_turn()
    assert not cycle.exhausted


def test_a_sentence_on_hold() -> None:
    cycle = cycle_of(Tool("get_time", on_hold="One moment"), Tool("get_weather"))
    (call,) = write(cycle)
    assert isinstance(call, FunctionCall)
    spoken, told = [], []
    for frame in range(60):
        spoken.append(cycle.spoken)
        told += cycle.waited(frame)
        if frame == 15:
            cycle.give(call.call_id, "x")
            assert cycle.waiting  # the sentence is said to its end
        if not cycle.waiting:
            break
    sentence = TOKENIZER.encode("One moment")
    assert told == [OnHold(10, "One moment")]
    assert spoken == [PAD] * 10 + [BOS, *sentence, *[PAD] * 17, EOS]
    assert cycle.state == CycleState.INJECTING


def test_no_sentence_on_hold_for_a_quick_tool() -> None:
    cycle = cycle_of(Tool("get_time", on_hold="One moment"))
    (call,) = write(cycle)
    assert isinstance(call, FunctionCall)
    for frame in range(9):
        assert cycle.waited(frame) == []
    cycle.give(call.call_id, "x")
    assert cycle.state == CycleState.INJECTING


@pytest.mark.parametrize("state", list(CycleState))
def test_dropping_it_in_each_state(state: CycleState) -> None:
    cycle = cycle_of()
    failed = []
    if state != CycleState.IDLE:
        written = write(cycle, end=state != CycleState.CALLING)
        if state == CycleState.CALLING or state == CycleState.WAITING:
            failed = [TIME]
        else:
            (call,) = written
            assert isinstance(call, FunctionCall)
            cycle.give(call.call_id, 5)
        if state == CycleState.CLOSING:
            inject(cycle)
    assert cycle.state == state
    events = cycle.drop(3)
    assert [(e.frame_index, e.reason, e.raw) for e in events if isinstance(e, FunctionFailed)] == [
        (3, FailureReason.CANCELLED, raw) for raw in failed
    ]
    assert cycle.state == CycleState.IDLE
    assert cycle.drop(4) == []
    end = "<SPECIAL_22><SPECIAL_12><SPECIAL_12>"
    closing = {
        CycleState.IDLE: "",
        CycleState.CALLING: f'<SPECIAL_21><TOOL_RESPONSE>[{{"error": "cancelled"}}]</TOOL_RESPONSE>{end}',
        CycleState.WAITING: f'<TOOL_RESPONSE>[{{"error": "cancelled"}}]</TOOL_RESPONSE>{end}',
        CycleState.INJECTING: f"<TOOL_RESPONSE>[5]</TOOL_RESPONSE>{end}",
        CycleState.CLOSING: end,
    }
    assert cycle.opens(len(cycle.known)) is (state != CycleState.IDLE)
    assert not cycle.opens(len(cycle.known) - 1)
    assert cycle.dropped is (state != CycleState.IDLE)
    assert inject(cycle) == closing[state]
    assert not cycle.dropped
    assert not cycle.active
    assert [type(event) for event in write(cycle)] == [FunctionCall]


def test_repetition() -> None:
    cycle = cycle_of()
    cycle.took(SOTC, 0)
    for count in range(5):
        assert cycle.repeats is False, count
        cycle.took(TOKENIZER.encode("<TOOLCALL>")[0], 0)
    assert cycle.repeats


@settings(deadline=None)
@given(st.lists(st.sampled_from([SOTC, EOTC, EOTR, PAD, BOS, EOS, 14, 15, 65, 90, 91]), max_size=60))
def test_any_ids_keep_it_sound(ids: list[int]) -> None:
    """Whatever the channel carries: never an error, every call ends once, and it comes back to rest."""
    cycle = cycle_of()
    events: list[Event] = []
    for frame, token in enumerate(ids):
        known = cycle.known
        events += cycle.took(known[0] if known else token, frame)
        if cycle.waiting:
            events += cycle.waited(frame)
            for call in cycle.open_calls:
                cycle.give(call.call_id, frame)
    events += cycle.drop(len(ids))
    assert not cycle.active
    called = [event.call_id for event in events if isinstance(event, FunctionCall)]
    failed = [event.call_id for event in events if isinstance(event, FunctionFailed)]
    assert len(set(called)) == len(called)
    assert not set(called) & set(failed)


# -- functions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def runner() -> Runner:
    return Runner(timeout_seconds=5)


def call_of(name: str = "f", **arguments: Any) -> FunctionCall:
    return FunctionCall(0, f"call_{name}", name, arguments, "")


def test_a_function_runs_on_its_own_thread(runner: Runner) -> None:
    where: list[threading.Thread] = []
    woken = threading.Event()
    runner.ready = woken.set

    def f(x: int) -> int:
        where.append(threading.current_thread())
        return x + 1

    runner.start(call_of(x=1), Tool("f", callable=f))
    assert runner.runs("call_f")
    assert woken.wait(5)
    assert runner.due
    assert runner.ended() == [Outcome("call_f", 2)]
    assert where[0] is not threading.current_thread()
    assert not runner.pending
    assert runner.ended() == []


def test_a_function_that_wants_its_call(runner: Runner) -> None:
    runner.start(call_of(x=1), Tool("f", callable=lambda call: (call.call_id, call.arguments), wants_call=True))
    assert runner.wait(5)
    assert runner.ended() == [Outcome("call_f", ("call_f", {"x": 1}))]


def test_a_function_that_raises(runner: Runner) -> None:
    runner.start(call_of(), Tool("f", callable=lambda: 1 / 0))
    assert runner.wait(5)
    (outcome,) = runner.ended()
    assert outcome.raised == "ZeroDivisionError: division by zero"


def test_a_function_that_hangs() -> None:
    runner = Runner(timeout_seconds=0.05)
    let_go = threading.Event()
    runner.start(call_of(), Tool("f", callable=let_go.wait))
    assert not runner.wait(0.01)
    assert not runner.due
    started = time.monotonic()
    assert runner.wait()
    assert time.monotonic() - started < 2
    assert runner.due
    assert runner.ended() == [Outcome("call_f", timed_out=True)]
    let_go.set()  # what it gives now is dropped
    deadline = time.monotonic() + 5
    while not runner.due and time.monotonic() < deadline:
        time.sleep(0.005)
    assert runner.ended() == []


def test_forgotten_calls(runner: Runner) -> None:
    runner.start(call_of("a"), Tool("a", callable=lambda: 1))
    runner.forget()
    assert not runner.pending
    runner.start(call_of("b"), Tool("b", callable=lambda: 2))
    assert runner.wait(5)
    assert runner.ended() == [Outcome("call_b", 2)]
