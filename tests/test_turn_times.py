"""The turns of `generate --json`: who spoke when."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_voicechat import AudioFrame, Event, TextDelta, TranscriptDelta, TurnClosed, TurnOpened
from mlx_voicechat.cli.main import run
from mlx_voicechat.cli.turn_times import TurnTimes
from mlx_voicechat.events import CloseReason

EXAMPLES = Path(__file__).parents[1] / "examples"


def listed(*events: Event) -> list[tuple[str, str, float, float]]:
    turns = TurnTimes()
    for event in events:
        turns.take(event)
    return [(turn["speaker"], turn["text"], turn["start"], turn["end"]) for turn in turns.listed(0.5)]


def opened(index: int) -> TurnOpened:
    return TurnOpened(index, "")


def closed(index: int) -> TurnClosed:
    return TurnClosed(index, CloseReason.MODEL)


def heard(index: int, delta: str) -> TranscriptDelta:
    return TranscriptDelta(index, delta, "")


def said(index: int, delta: str) -> TextDelta:
    return TextDelta(index, 5, delta, "")


def test_a_question_and_its_answer_whose_last_word_is_understood_late() -> None:
    events = [heard(2, "Who"), opened(5), said(6, "It is"), heard(7, " is it?"), said(8, " I."), closed(11)]
    assert listed(*events) == [("user", "Who is it?", 1.0, 4.0), ("assistant", "It is I.", 2.5, 6.0)]


def test_two_answers_in_a_row_are_two_turns() -> None:
    events = [opened(0), said(1, "Good."), closed(3), opened(40), said(41, "Day."), closed(43)]
    assert listed(*events) == [("assistant", "Good.", 0.0, 2.0), ("assistant", "Day.", 20.0, 22.0)]


def test_who_speaks_over_the_assistant_begins_a_turn_and_a_pause_begins_none() -> None:
    events = [heard(0, "A joke,"), heard(30, " please."), opened(32), said(33, "Why"), heard(60, "Stop."), closed(62)]
    wanted = [("user", "A joke, please.", 0.0, 15.5), ("assistant", "Why", 16.0, 31.5), ("user", "Stop.", 30.0, 30.5)]
    assert listed(*events) == wanted


def test_what_is_no_word_is_no_turn() -> None:
    assert listed(AudioFrame(0, np.zeros(0, np.float32), ())) == []


def test_turns_of_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", "tiny", "--audio", str(EXAMPLES / "conversation.wav"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    turns = printed["turns"]
    assert [(turn["speaker"], turn["text"]) for turn in turns] == [
        ("user", "Turn on the kitchen lights."),
        ("assistant", "The kitchen lights are on."),
        ("user", "What color is the sky?"),
        ("assistant", "The sky is blue."),
    ]
    assert printed["text"] == "The kitchen lights are on.The sky is blue."
    starts = [turn["start"] for turn in turns]
    assert starts == sorted(starts)
    assert all(0 <= turn["start"] < turn["end"] <= printed["seconds"] for turn in turns)
