"""Tools on the talking checkpoint: spoken question in, call out, result in, answer out."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat import (
    AudioFrame,
    Cancelled,
    Done,
    Event,
    FailureReason,
    FunctionApplied,
    FunctionCall,
    FunctionFailed,
    LimitReached,
    OnHold,
    Session,
    TextDelta,
    Tool,
    TranscriptDelta,
)
from mlx_voicechat.errors import InputError
from mlx_voicechat.tools.cycle import CycleState
from mlx_voicechat.voicechat import VoiceChat
from tests.support.cases import a_part_of
from tests.support.checkpoints import GOLDEN
from tests.support.spoken import nearest_answer

EXAMPLES = Path(__file__).parents[1] / "examples"
SCENARIOS = json.loads((GOLDEN / "scenarios.json").read_text(encoding="utf-8"))
# short, so that a session opens quickly; the trained text is in the scenarios
PROMPT = '<AVAILABLE_TOOLS>[{"name": "get_time", "parameters": {}}]</AVAILABLE_TOOLS>'
CALL = '<TOOLCALL>[{"name": "get_time", "arguments": {}}]</TOOLCALL>'
SILENCE = np.zeros(1280, np.float32)


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load("tiny", compile=True)


@cache
def recording(name: str) -> np.ndarray:
    return sf.read(EXAMPLES / name, dtype="float32")[0]


def question(seconds: float = 0.0, name: str = "what_time_is_it.wav") -> np.ndarray:
    return np.concatenate([recording(name), np.zeros(round(seconds * 16000), np.float32)])


def of(kind: type, events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def asked(model: VoiceChat, **options: Any) -> tuple[Session, FunctionCall, list[Event]]:
    """A session that has called get_time and waits, with what it told."""
    session = model.session(**{"system_prompt": PROMPT, "tools": [Tool("get_time")], **options})
    events = session.push(question())
    for _ in range(40):
        if session.calls:
            return session, session.calls[0], events
        events += session.push(SILENCE)
    raise AssertionError(session.function)


def until_done(session: Session, frames: int = 45) -> list[Event]:
    return session.push(np.zeros(1280 * frames, np.float32))


# -- the scenarios --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", a_part_of(SCENARIOS, lambda s: s["name"]))
def test_scenario(model: VoiceChat, scenario: dict[str, Any]) -> None:
    """Offline and in packets alike: the call with its arguments, the answer in text, and in speech."""
    called: list[FunctionCall] = []

    def run(call: FunctionCall) -> str:
        called.append(call)
        return scenario["result"].removeprefix("<TOOL_RESPONSE>[").removesuffix("]</TOOL_RESPONSE>")

    tools = [Tool(name, callable=run, wants_call=True) for name in ("get_time", "get_weather")]
    options = {"system_prompt": scenario["system_prompt"], "tools": tools, "wait_for_tools": True}
    audio = question(4.0, scenario["file"])
    answer = model.answer(audio, **options)
    assert answer.transcript == scenario["transcript"]
    assert answer.text == scenario["answer"]
    assert nearest_answer(answer.samples) == scenario["answer"]
    if scenario["call"] is None:
        assert called == []
        assert answer.function == ""
        return
    (call,) = called
    assert call.raw == scenario["call"]
    (written,) = json.loads(scenario["call"].removeprefix("<TOOLCALL>").removesuffix("</TOOLCALL>"))
    assert (call.name, call.arguments) == (written["name"], written["arguments"])
    session = model.session(**options)
    rng, events = np.random.default_rng(0), []
    while len(audio):
        size = int(rng.integers(1, 8000))
        events += session.push(audio[:size])
        audio = audio[size:]
    events += session.finish()
    np.testing.assert_array_equal(np.concatenate([e.samples for e in of(AudioFrame, events)]), answer.samples)
    assert (session.text, session.function) == (answer.text, answer.function)
    assert [type(event) for event in of(FunctionCall, events) + of(FunctionApplied, events)] == [
        FunctionCall,
        FunctionApplied,
    ]


def test_no_tool_in_the_prompt_no_call(model: VoiceChat) -> None:
    session = model.session()
    events = session.push(question(4.0))
    assert session.text == "It is half past ten."
    assert session.function == ""
    assert of(FunctionCall, events) == []


def test_a_prompt_is_made_of_the_tools(model: VoiceChat) -> None:
    tools = [
        Tool("get_time", "Returns the current time.", {"type": "object", "properties": {}}, lambda: "ten past four")
    ]
    answer = model.answer(question(4.0), tools=tools)
    assert answer.text == "It is ten past four."
    assert model.answer(question(4.0), tools=tools, prompt_copies=1, tool_key_order="sorted").text == answer.text


# -- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [0, 1, 10, 100])
@pytest.mark.parametrize("clock", ["held", "running"])
def test_a_result_after_some_frames(model: VoiceChat, clock: str, frames: int) -> None:
    session, call, events = asked(model, tool_clock=clock)
    assert (call.name, call.arguments, call.raw) == ("get_time", {}, CALL)
    waiting = session.push(np.zeros(1280 * frames, np.float32))
    assert len(of(AudioFrame, waiting)) == frames
    assert session.text == ""
    assert max((float(np.abs(e.samples).max()) for e in of(AudioFrame, waiting[5:])), default=0) < 0.01
    session.give(call.call_id, {"time": "quarter to nine"})
    assert session.calls == ()
    rest = until_done(session, 45 if clock == "held" else 75)
    (applied,) = of(FunctionApplied, rest)
    assert (applied.call_ids, applied.results) == ((call.call_id,), ('{"time": "quarter to nine"}',))
    assert session.text == "It is quarter to nine."
    assert nearest_answer(np.concatenate([e.samples for e in of(AudioFrame, rest)])) == "It is quarter to nine."
    assert of(FunctionFailed, [*events, *waiting, *rest]) == []
    assert [e.frame_index for e in of(AudioFrame, [*events, *waiting, *rest])] == list(range(session.frames))


def test_the_held_clock_needs_no_audio(model: VoiceChat) -> None:
    """Call, result and closing run between two frames; the language model does not step while the call waits."""
    session, call, _ = asked(model)
    position, frames = session.state.position, session.frames
    session.push(np.zeros(12800, np.float32))
    assert session.state.position == position
    session.give(call.call_id, "ten past four")
    assert session.runnable
    events: list[Event] = []
    while session.runnable:
        events += session.step()
    assert of(FunctionApplied, events)
    assert of(AudioFrame, events) == []
    assert session.frames == frames + 10
    response = model.tokenizer.encode('<TOOL_RESPONSE>["ten past four"]</TOOL_RESPONSE>')
    assert session.state.position == position + len(response) + 1  # and EOTR
    assert session.step() == []


def test_the_running_clock_takes_a_frame_a_token(model: VoiceChat) -> None:
    session, call, events = asked(model, tool_clock="running")
    start = next(e for e in events if isinstance(e, mlx_voicechat.FunctionDelta))
    assert call.frame_index - start.frame_index == len(model.tokenizer.encode(CALL)) + 1
    position, frames = session.state.position, session.frames
    session.give(call.call_id, "ten past four")
    assert not session.runnable
    assert of(FunctionApplied, until_done(session, 30))
    assert session.state.position - position == session.frames - frames == 30


def test_the_transcript_goes_on_while_a_call_waits(model: VoiceChat) -> None:
    session, call, _ = asked(model)
    said = of(TranscriptDelta, session.push(question(0.5, "hello.wav")))
    assert "".join(event.delta for event in said).strip() == "Hello."
    session.give(call.call_id, "ten past four")
    until_done(session)
    assert session.text == "It is ten past four."  # what was said meanwhile never reached the language model


@pytest.mark.parametrize("audio", ["silence", "zero"])
def test_what_it_hears_meanwhile(model: VoiceChat, audio: str) -> None:
    session, call, _ = asked(model, tool_audio=audio)
    session.give(call.call_id, "ten past four")
    until_done(session)
    assert session.text == "It is ten past four."


def test_two_calls_in_a_session(model: VoiceChat) -> None:
    results = iter(["ten past four", {"error": "no clock"}])
    tools = [Tool("get_time", callable=lambda: next(results))]
    session = model.session(system_prompt=PROMPT, tools=tools, wait_for_tools=True)
    events = session.push(question(4.0)) + session.push(question(4.0))
    assert session.text == "It is ten past four.Sorry, that did not work."
    first, second = of(FunctionCall, events)
    assert first.call_id != second.call_id


def boom() -> str:
    raise RuntimeError("no clock here")


@pytest.mark.parametrize(
    ("function", "result", "reason"),
    [
        (boom, '{"error": "RuntimeError: no clock here"}', FailureReason.RAISED),
        (
            lambda: "x" * 20_000,
            '{"error": "The result has 20,002 bytes, a result takes 16,384."}',
            FailureReason.RAISED,
        ),
        (lambda: object(), None, FailureReason.RAISED),
        (lambda: 1610, "1610", None),
        (lambda: ["ten past four"], '["ten past four"]', None),
        (
            lambda: "zehn nach vier, gr\u00fc\u00df \u2014 \U0001f600",
            '"zehn nach vier, gr\u00fc\u00df \u2014 \U0001f600"',
            None,
        ),
    ],
    ids=["raises", "20 KB", "no JSON", "number", "list", "non-ASCII"],
)
def test_what_a_function_gives(
    model: VoiceChat, function: Callable[[], Any], result: str | None, reason: FailureReason | None
) -> None:
    session = model.session(
        system_prompt=PROMPT, tools=[Tool("get_time", callable=function)], wait_for_tools=True, seed=1
    )
    events = session.push(question(3.0))
    (applied,) = of(FunctionApplied, events)
    assert [event.reason for event in of(FunctionFailed, events)] == ([] if reason is None else [reason])
    if result is not None:
        assert applied.results == (result,)
    if reason is not None:
        assert session.text == "Sorry, that did not work."
    assert session.text != ""
    assert session.finish()[-1] == Done(session.frames)


def test_a_function_that_hangs(model: VoiceChat) -> None:
    let_go = threading.Event()
    tools = [Tool("get_time", callable=lambda: let_go.wait())]
    session = model.session(system_prompt=PROMPT, tools=tools, wait_for_tools=True, tool_timeout=0.2)
    events = session.push(question(4.0))
    let_go.set()
    (failed,) = of(FunctionFailed, events)
    assert failed.reason == FailureReason.TIMED_OUT
    assert session.text == "Sorry, that did not work."


def test_a_function_runs_beside_the_frames(model: VoiceChat) -> None:
    """Without waiting for it, frames go on; `on_ready` says when its result is there."""
    let_go, ready = threading.Event(), threading.Event()
    tools = [Tool("get_time", callable=lambda: "ten past four" if let_go.wait(60) else "")]
    session = model.session(system_prompt=PROMPT, tools=tools)
    session.on_ready(ready.set)
    session.push(question(2.4))
    assert session.results_pending
    assert session.calls == ()  # nobody else is asked
    assert not session.runnable
    let_go.set()
    assert session.wait_results(60)
    assert ready.wait(60)
    assert session.runnable
    until_done(session)
    assert session.text == "It is ten past four."


def test_a_call_that_nobody_answers(model: VoiceChat) -> None:
    session, call, _ = asked(model, tool_timeout=0.8)
    assert of(FunctionFailed, session.push(np.zeros(1280 * 9, np.float32))) == []
    (failed,) = of(FunctionFailed, session.push(SILENCE))
    assert (failed.call_id, failed.reason) == (call.call_id, FailureReason.TIMED_OUT)
    with pytest.raises(InputError, match=call.call_id):
        session.give(call.call_id, "late")
    until_done(session)
    assert session.text == "Sorry, that did not work."


def test_a_result_that_is_too_long_leaves_the_call_open(model: VoiceChat) -> None:
    session, call, _ = asked(model)
    for wrong in ("x" * 20_000, "word " * 200):
        with pytest.raises(InputError, match="a result takes"):
            session.give(call.call_id, wrong)
    session.refuse(call.call_id, "not allowed")
    until_done(session)
    assert session.text == "Sorry, that did not work."


def test_a_sentence_on_hold(model: VoiceChat) -> None:
    """It is heard and is no text; the language model does not know of it, and the answer comes after it."""
    plain, call, _ = asked(model)
    plain.push(np.zeros(1280 * 60, np.float32))
    plain.give(call.call_id, "ten past four")
    until_done(plain)
    session, call, _ = asked(model, tools=[Tool("get_time", on_hold="Hello, how can I help you?")])
    waiting = session.push(np.zeros(1280 * 60, np.float32))
    (hold,) = of(OnHold, waiting)
    assert hold.text == "Hello, how can I help you?"
    assert session.text == ""
    assert nearest_answer(np.concatenate([e.samples for e in of(AudioFrame, waiting)])) == hold.text
    session.give(call.call_id, "ten past four")
    rest = until_done(session)
    assert session.text == plain.text == "It is ten past four."
    assert nearest_answer(np.concatenate([e.samples for e in of(AudioFrame, rest)])) == "It is ten past four."
    assert session.state.position == plain.state.position


# -- interrupting and ending ------------------------------------------------------------------------------------------


def in_state(model: VoiceChat, state: CycleState, clock: str = "running") -> tuple[Session, list[Event]]:
    """A session whose cycle is in `state`; the running clock stops in each of them at a frame."""
    session = model.session(system_prompt=PROMPT, tools=[Tool("get_time")], tool_clock=clock)
    events = session.push(question())
    for _ in range(90):
        if session.calls and state in (CycleState.INJECTING, CycleState.CLOSING):
            session.give(session.calls[0].call_id, "ten past four")
        if session._channel.cycle.state == state:
            return session, events
        if session.runnable:
            events += session.step()
        else:
            session.add(SILENCE)
    raise AssertionError(state)


STATES = [CycleState.CALLING, CycleState.WAITING, CycleState.INJECTING, CycleState.CLOSING]


@pytest.mark.parametrize("clock", ["held", "running"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("what", ["interrupt", "begin_turn"])
def test_interrupted_in_each_state(model: VoiceChat, state: CycleState, clock: str, what: str) -> None:
    session, _ = in_state(model, state, clock)
    getattr(session, what)()
    assert not session.in_cycle
    frames = session.frames
    events = until_done(session, 12)
    failed = [event.reason for event in of(FunctionFailed, events)]
    assert failed == ([FailureReason.CANCELLED] if state in (CycleState.CALLING, CycleState.WAITING) else [])
    assert of(FunctionApplied, events) == []
    cancelled = [event for event in of(AudioFrame, events) if event.cancelled]
    assert (0 < len(cancelled) <= 27) if what == "begin_turn" else cancelled == []
    assert session.frames == frames + 12 + len(cancelled)
    assert of(TextDelta, events) == []


def test_a_question_after_an_interrupted_call(model: VoiceChat) -> None:
    session, call, _ = asked(model)
    session.interrupt()
    until_done(session, 5)
    with pytest.raises(InputError, match=call.call_id):
        session.give(call.call_id, "late")
    session.push(question(4.0, "what_is_two_plus_two.wav"))
    assert session.text.endswith("Two plus two is four.")


@pytest.mark.parametrize("clock", ["held", "running"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_ended_in_each_state(model: VoiceChat, state: CycleState, clock: str, end: str) -> None:
    session, before = in_state(model, state, clock)
    events = session.finish() if end == "finish" else session.cancel()
    assert events[-1] == (Done if end == "finish" else Cancelled)(session.frames)
    called = {event.call_id for event in of(FunctionCall, [*before, *events])}
    ended = {event.call_id for event in of(FunctionFailed, events)}
    ended |= {call_id for event in of(FunctionApplied, [*before, *events]) for call_id in event.call_ids}
    if state in (CycleState.CALLING, CycleState.WAITING):
        assert called <= ended
        assert [event.reason for event in of(FunctionFailed, events)] == [FailureReason.CANCELLED]
    else:
        assert of(FunctionFailed, events) == []


@pytest.mark.parametrize("clock", ["held", "running"])
def test_a_limit_inside_a_cycle(model: VoiceChat, clock: str) -> None:
    seconds = len(question()) / 16000 + 1.2
    session = model.session(system_prompt=PROMPT, tools=[Tool("get_time")], tool_clock=clock, max_seconds=seconds)
    events = session.push(question(10.0))
    assert isinstance(events[-1], LimitReached)
    assert session.in_cycle
    assert session.finish()[-1] == Done(session.frames)


def test_a_cycle_leaves_other_sessions_alone(model: VoiceChat) -> None:
    audio = question(4.0, "what_is_two_plus_two.wav")
    alone = model.session(seed=7).push(audio)
    other = model.session(seed=7)
    session, call, _ = asked(model)
    together: list[Event] = []
    for start in range(0, len(audio), 1280):
        together += other.push(audio[start : start + 1280])
        session.push(SILENCE)
        if start == 1280 * 20:
            session.give(call.call_id, "ten past four")
    assert together == alone
    assert session.text == "It is ten past four."


# -- a scripted channel -----------------------------------------------------------------------------------------------


def scripted(
    model: VoiceChat, ids: list[int], clock: str, functions: list[Tool] | None = None
) -> tuple[Session, list[Event]]:
    """A session whose function channel carries `ids` from its first frame on."""
    tools = functions or [Tool("get_time"), Tool("get_weather", "", {"properties": {"city": {"type": "string"}}})]
    session = model.session(system_prompt="", tools=tools, tool_clock=clock, wait_for_tools=True)
    session.force(function=ids)
    return session, session.push(np.zeros(1280 * (4 if clock == "held" else len(ids) + 4), np.float32))


@pytest.mark.parametrize("clock", ["held", "running"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("get_time", FailureReason.MALFORMED),
        ("<TOOLCALL>5</TOOLCALL>", FailureReason.MALFORMED),
        ('<TOOLCALL>[{"name": "get_rich"}]</TOOLCALL>', FailureReason.UNKNOWN_TOOL),
        ('<TOOLCALL>[{"name": "get_weather", "arguments": {"city": []}}]</TOOLCALL>', FailureReason.BAD_ARGUMENTS),
        (b"\xe2", FailureReason.MALFORMED),
    ],
)
def test_malformed_calls(model: VoiceChat, text: str | bytes, reason: FailureReason, clock: str) -> None:
    if isinstance(text, bytes):
        written = [t for t in range(model.tokenizer.vocab_size) if model.tokenizer.token_bytes(t) == text]
    else:
        written = model.tokenizer.encode(text)
    session, events = scripted(model, [20, *written, 21], clock)
    (failed,) = of(FunctionFailed, events)
    assert failed.reason == reason
    assert failed.raw == model.tokenizer.decode(written)
    assert until_done(session, 40 if clock == "running" else 5)
    assert not session.in_cycle
    assert session.finish()[-1] == Done(session.frames)


@pytest.mark.parametrize("clock", ["held", "running"])
def test_odd_calls_that_are_understood(model: VoiceChat, clock: str) -> None:
    for text in (
        '{"name": "get_weather", "arguments": "{\\"city\\": 5}"}',
        '[{"name":"get-weather","arguments":{"city":5}}]',
    ):
        session, events = scripted(model, [20, *model.tokenizer.encode(text), 21], clock)
        (call,) = of(FunctionCall, events)
        assert (call.name, call.arguments) == ("get_weather", {"city": "5"})
        assert session.calls == (call,)


def test_two_calls_in_one_list(model: VoiceChat) -> None:
    written = model.tokenizer.encode('[{"name": "get_time"}, {"name": "get_weather", "arguments": {"city": "Rome"}}]')
    session, events = scripted(model, [20, *written, 21], "held")
    first, second = of(FunctionCall, events)
    session.give(second.call_id, "sunny")
    assert session.calls == (first,)
    session.give(first.call_id, 7)
    (applied,) = of(FunctionApplied, until_done(session, 2))
    assert (applied.call_ids, applied.results) == ((first.call_id, second.call_id), ("7", '"sunny"'))


@pytest.mark.parametrize("clock", ["held", "running"])
def test_a_call_without_an_end(model: VoiceChat, clock: str) -> None:
    session, events = scripted(model, [20, *[65] * 130], clock)
    (failed,) = of(FunctionFailed, events)
    assert failed.reason == FailureReason.TOO_LONG
    assert not session.in_cycle


def test_nine_cycles_in_a_turn(model: VoiceChat) -> None:
    tools = [Tool("get_time", callable=lambda: 5)]
    written = model.tokenizer.encode(CALL)
    session = model.session(system_prompt="", tools=tools, wait_for_tools=True)
    events: list[Event] = []
    for _ in range(9):
        session.force(function=[20, *written, 21])
        events += session.push(SILENCE)
        if session._channel.cycle.exhausted:
            break
    assert len(of(FunctionApplied, events)) == 8
    # a forced id stands, so the ninth call is the model's own
    session._forcing.functions.clear()
    session.push(question(2.0))
    assert session._channel.cycle.cycles <= 1  # the user has spoken: counted anew


def test_golden_checkpoints_have_no_tools() -> None:
    golden = mlx_voicechat.load(GOLDEN / "tiny-f32")
    with pytest.raises(InputError, match="has no tools"):
        golden.session(tools=[Tool("get_time")])
    session = golden.session()
    for call in (lambda: session.give("call_1", "x"), lambda: session.refuse("call_1", "x")):
        with pytest.raises(InputError, match="no tools"):
            call()
