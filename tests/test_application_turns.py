"""Turns that the application owns, on the talking checkpoint: one end of the user's turn, one answer, the right one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat import (
    AudioFrame,
    CloseReason,
    Done,
    Event,
    FailureReason,
    FunctionApplied,
    FunctionCall,
    FunctionFailed,
    Session,
    SettleTimeout,
    TextDelta,
    Tool,
    TranscriptDelta,
    TurnClosed,
    TurnOpened,
)
from mlx_voicechat.errors import InputError, SessionClosedError
from mlx_voicechat.frame import Frame
from mlx_voicechat.turns import Phase
from mlx_voicechat.voicechat import VoiceChat

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
PROMPT = '<AVAILABLE_TOOLS>[{"name": "get_time", "parameters": {}}]</AVAILABLE_TOOLS>'
SILENCE = np.zeros(1280, np.float32)
EMPTY = np.zeros(0, np.float32)


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load("tiny", compile=True)


@cache
def recording(name: str) -> np.ndarray:
    return sf.read(EXAMPLES / name, dtype="float32")[0]


def of(kind: type, events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def said(events: list[Event]) -> str:
    return "".join(event.delta for event in of(TextDelta, events))


def ask(session: Session, name: str, late_frames: int = 0, rng: np.random.Generator | None = None) -> list[Event]:
    """One turn of the user, in packets of random size, and everything up to the agent's first frame."""
    rng = rng or np.random.default_rng(0)
    audio = np.concatenate([recording(name), np.zeros(1280 * late_frames, np.float32)])
    events: list[Event] = []
    session.begin_turn()
    while len(audio):
        size = int(rng.integers(1, 6000))
        events += session.push(audio[:size])
        audio = audio[size:]
    session.end_turn()
    return events + session.push(EMPTY)


def until_closed(session: Session, most: int = 100) -> list[Event]:
    events: list[Event] = []
    while not of(TurnClosed, events):
        events += session.push(SILENCE)
        most -= 1
        assert most, session.turn
    return events


@pytest.mark.parametrize("count", [8, pytest.param(len(QUESTIONS), marks=pytest.mark.slow)])
def test_every_question_has_one_answer(model: VoiceChat, count: int) -> None:
    """In one long session; the turn ends at once, and up to 25 frames later."""
    session, rng = model.session(turns="application"), np.random.default_rng(0)
    frames: list[Frame] = []
    session.observe(frames.append)
    wrong = []
    for number, question in enumerate(QUESTIONS[:count]):
        start = len(frames)
        events = ask(session, question["file"], number % 26 if number else 25, rng)
        events += until_closed(session)
        (opened,), (closed,) = of(TurnOpened, events), of(TurnClosed, events)
        got = (opened.transcript, said(events), closed.reason)
        if got != (question["transcript"], question["answer"], CloseReason.MODEL):
            wrong.append((question["file"], got))
        assert [frame.text_id for frame in frames[start:]].count(model.config.bos_id) == 1
        assert frames[opened.frame_index].text_id == model.config.bos_id
    assert wrong == []
    assert session.finish() == [Done(len(frames))]


def test_at_the_very_end_of_the_speech(model: VoiceChat) -> None:
    session = model.session(turns="application")
    events = ask(session, "what_color_is_the_sky.wav")
    assert session.turn == Phase.AGENT
    (opened,) = of(TurnOpened, events)
    assert opened.frame_index <= -(-len(recording("what_color_is_the_sky.wav")) // 1280) + 20
    assert said(until_closed(session)) == "The sky is blue."


def test_the_transcript_is_of_the_turn(model: VoiceChat) -> None:
    session = model.session(turns="application")
    first = ask(session, "hello.wav") + until_closed(session)
    assert session.transcript == ""
    second = ask(session, "goodbye.wav")
    assert [of(TranscriptDelta, events)[-1].text for events in (first, second)] == ["Hello.", "Goodbye."]
    assert of(TurnOpened, second)[0].transcript == "Goodbye."


def test_nothing_is_said_before_the_turn_ends(model: VoiceChat) -> None:
    session = model.session(turns="application")
    session.begin_turn()
    events = session.push(np.concatenate([recording("hello.wav"), np.zeros(1280 * 40, np.float32)]))
    assert said(events) == ""
    assert of(TurnOpened, events) == []
    session.end_turn()
    events = session.push(EMPTY)
    assert len(of(TurnOpened, events)) == 1
    assert len(of(AudioFrame, events)) == 2  # the rest of a frame, and BOS: it was quiet long enough
    assert said(until_closed(session)) == "Hello, how can I help you?"


def test_an_empty_turn(model: VoiceChat) -> None:
    session = model.session(turns="application")
    session.begin_turn()
    session.end_turn()
    events = session.push(EMPTY)
    (opened,) = of(TurnOpened, events)
    assert opened == TurnOpened(10, "")
    assert said(until_closed(session)) == "I did not hear anything."


@pytest.mark.parametrize("words", [1, 6])
def test_begin_turn_while_it_speaks(model: VoiceChat, words: int) -> None:
    session = model.session(turns="application")
    ask(session, "tell_me_a_joke.wav")
    while len(session.text.split()) < words:
        session.push(SILENCE)
    session.begin_turn()
    session.add(recording("what_is_two_plus_two.wav"))  # it waits until the agent is silent
    events: list[Event] = []
    while not of(TurnClosed, events):
        events += session.step()
    cancelled = of(AudioFrame, events)
    assert all(frame.cancelled for frame in cancelled)
    assert len(cancelled) <= 27
    assert of(TurnClosed, events) == [TurnClosed(cancelled[-1].frame_index, CloseReason.CANCELLED)]
    assert said(events) == ""
    events = session.push(EMPTY)
    session.end_turn()
    events += session.push(EMPTY) + until_closed(session)
    assert not any(frame.cancelled for frame in of(AudioFrame, events))
    assert of(TurnOpened, events)[0].transcript == "What is two plus two?"
    assert said(events) == "Two plus two is four."


def test_interrupt(model: VoiceChat) -> None:
    session = model.session(turns="application")
    ask(session, "tell_me_a_joke.wav")
    session.push(np.zeros(12800, np.float32))
    session.interrupt()
    events = until_closed(session, 27)
    assert of(TurnClosed, events)[0].reason == CloseReason.INTERRUPTED
    assert said(events) == ""
    assert said(ask(session, "hello.wav") + until_closed(session)) == "Hello, how can I help you?"


def test_the_users_turn_goes_on(model: VoiceChat) -> None:
    """begin_turn while the transcript settles: nothing was opened."""
    session = model.session(turns="application")
    session.begin_turn()
    session.push(recording("hello.wav"))
    session.end_turn()
    session.step()
    session.begin_turn()
    assert session.turn == Phase.USER
    assert of(TurnOpened, session.push(np.zeros(12800, np.float32))) == []
    session.end_turn()
    assert of(TurnOpened, session.push(EMPTY))[0].transcript == "Hello."


def test_refusals(model: VoiceChat) -> None:
    session = model.session(turns="application")
    session.end_turn()
    with pytest.raises(InputError, match="settling"):
        session.end_turn()
    session.push(EMPTY)
    for call in (session.end_turn, session.open_turn):
        with pytest.raises(InputError, match="begin_turn"):
            call()
    with pytest.raises(InputError, match="model or application"):
        model.session(turns="mine")
    session.finish()
    for call in (session.begin_turn, session.end_turn, session.open_turn, session.interrupt):
        with pytest.raises(SessionClosedError):
            call()


def test_it_does_not_settle(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recogniser that goes on and on: told, and the application decides."""
    session = model.session(turns="application")
    session.begin_turn()
    frame = model.frame

    def babble(*arguments: Any) -> Frame:
        made = frame(*arguments)
        return Frame(made.text_id, made.function_id, (5,), made.samples, made.codes)

    monkeypatch.setattr(model, "frame", babble)
    session.end_turn()
    events = session.push(EMPTY)
    assert len(of(AudioFrame, events)) == 20
    assert isinstance(events[-1], SettleTimeout)
    assert session.turn == Phase.USER
    monkeypatch.undo()
    session.open_turn()
    assert of(TurnOpened, session.push(EMPTY))


def test_finish_and_cancel_with_an_open_turn(model: VoiceChat) -> None:
    for end in ("finish", "cancel"):
        session = model.session(turns="application")
        ask(session, "hello.wav")
        events = getattr(session, end)()
        assert of(TurnClosed, events) == [TurnClosed(session.frames - 1, CloseReason.ENDED)]
    session = model.session(turns="application")
    session.begin_turn()
    session.push(recording("hello.wav"))
    session.end_turn()
    events = session.finish()  # settles first
    assert [type(event) for event in events[-2:]] == [TurnClosed, Done]
    assert of(TurnOpened, events)


# -- with tools -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 3, 12, 25])
@pytest.mark.parametrize("clock", ["held", "running"])
def test_one_call_and_one_answer(model: VoiceChat, clock: str, late: int) -> None:
    tools = [Tool("get_time", callable=lambda: "ten past four")]
    options = {"system_prompt": PROMPT, "tools": tools, "wait_for_tools": True}
    session = model.session(turns="application", tool_clock=clock, **options)
    frames: list[Frame] = []
    session.observe(frames.append)
    events = ask(session, "what_time_is_it.wav", late) + until_closed(session, 160)
    kinds = (TurnOpened, FunctionCall, FunctionApplied, TurnClosed)
    assert [type(event) for event in events if isinstance(event, kinds)] == list(kinds)
    assert said(events) == "It is ten past four."
    assert of(TurnOpened, events)[0].transcript == "What time is it?"
    assert [frame.text_id for frame in frames].count(model.config.bos_id) == 1
    events = ask(session, "hello.wav", late) + until_closed(session)
    assert said(events) == "Hello, how can I help you?"
    assert of(FunctionCall, events) == []


def test_begin_turn_while_a_call_waits(model: VoiceChat) -> None:
    session = model.session(turns="application", system_prompt=PROMPT, tools=[Tool("get_time")])
    events = ask(session, "what_time_is_it.wav")
    (call,) = session.calls
    session.push(np.zeros(12800, np.float32))
    session.begin_turn()
    events = session.push(EMPTY)
    (failed,) = of(FunctionFailed, events)
    assert (failed.call_id, failed.reason) == (call.call_id, FailureReason.CANCELLED)
    assert len(of(AudioFrame, events)) <= 27
    assert of(TurnClosed, events)[0].reason == CloseReason.CANCELLED
    assert said(ask(session, "hello.wav") + until_closed(session)) == "Hello, how can I help you?"


def test_end_turn_is_refused_while_a_call_waits(model: VoiceChat) -> None:
    session = model.session(turns="application", system_prompt=PROMPT, tools=[Tool("get_time")])
    ask(session, "what_time_is_it.wav")
    with pytest.raises(InputError, match="agent"):
        session.end_turn()


# -- watchdogs, woken by forced ids -----------------------------------------------------------------------------------


def opened(model: VoiceChat, **options: Any) -> Session:
    session = model.session(turns="application", **options)
    session.begin_turn()
    session.end_turn()
    assert of(TurnOpened, session.push(EMPTY))
    return session


def closed_by(session: Session, text: int | None, frames: int = 60) -> CloseReason:
    for _ in range(frames):
        if text is not None and session.speaking:
            session.force(text=text)
        events = session.push(SILENCE)
        if of(TurnClosed, events):
            return of(TurnClosed, events)[0].reason
    raise AssertionError("it goes on")


def test_no_text(model: VoiceChat) -> None:
    assert closed_by(opened(model), model.config.pad_id) == CloseReason.NO_TEXT


def test_longest_turn(model: VoiceChat) -> None:
    assert closed_by(opened(model, longest_turn=0.8), None) == CloseReason.LONGEST_TURN


def test_function_repetition(model: VoiceChat) -> None:
    session = opened(model, system_prompt=PROMPT, tools=[Tool("get_time")])
    session.force(function=[20, *[14] * 8])
    assert closed_by(session, None) == CloseReason.FUNCTION_REPETITION
    assert not session.in_cycle


def silent(frame: Frame) -> Frame:
    return Frame(frame.text_id, frame.function_id, frame.symbols, np.zeros_like(frame.samples), frame.codes)


def test_no_audio(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(model)
    frame = model.frame
    monkeypatch.setattr(model, "frame", lambda *arguments: silent(frame(*arguments)))
    word = model.tokenizer.encode("Hello")[0]
    assert closed_by(session, word) == CloseReason.NO_AUDIO


def test_decoded_silence(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(model)
    session.push(np.zeros(12800, np.float32))
    frame = model.frame
    monkeypatch.setattr(model, "frame", lambda *arguments: silent(frame(*arguments)))
    assert closed_by(session, model.config.pad_id) == CloseReason.DECODED_SILENCE


# -- turns that the model owns ----------------------------------------------------------------------------------------


def test_turn_events_of_the_model(model: VoiceChat) -> None:
    audio = np.concatenate([recording("hello.wav"), np.zeros(1280 * 45, np.float32), recording("goodbye.wav")])
    audio = np.concatenate([audio, np.zeros(1280 * 45, np.float32)])
    plain, told = model.session().push(audio), model.session(turn_events=True).push(audio)
    turns = [event for event in told if isinstance(event, TurnOpened | TurnClosed)]
    assert [event for event in told if event not in turns] == plain
    assert [event.transcript for event in of(TurnOpened, turns)] == ["Hello.", "Goodbye."]
    assert [event.reason for event in of(TurnClosed, turns)] == [CloseReason.MODEL] * 2


@pytest.mark.parametrize("patience", [0, 12])
def test_end_turn_of_a_model_that_owns_its_turns(model: VoiceChat, patience: int) -> None:
    session = model.session()
    session.begin_turn()
    session.push(recording("hello.wav"))
    session.end_turn(patience)
    events = session.push(EMPTY) + until_closed(session)
    assert len(of(TurnOpened, events)) == 1
    assert said(events) == "Hello, how can I help you?"
