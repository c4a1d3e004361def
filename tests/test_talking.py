"""The packaged demonstration checkpoint really converses: what it hears, says and speaks, offline and streamed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat import AudioFrame
from mlx_voicechat.voicechat import VoiceChat
from tests.support.cases import a_part_of
from tests.support.spoken import nearest_answer

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
CONVERSATIONS = json.loads((EXAMPLES / "conversations.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load("tiny", compile=True)


def read(file: Path) -> np.ndarray:
    return sf.read(file, dtype="float32")[0]


def streamed(model: VoiceChat, audio: np.ndarray) -> tuple[str, str, np.ndarray]:
    session = model.session()
    events = session.push(audio) + session.finish()
    samples = np.concatenate([event.samples for event in events if isinstance(event, AudioFrame)])
    return session.transcript, session.text, samples


@pytest.mark.parametrize("question", a_part_of(QUESTIONS, lambda q: q["file"]))
def test_question(model: VoiceChat, question: dict[str, Any]) -> None:
    audio = np.concatenate([read(EXAMPLES / question["file"]), np.zeros(64000, np.float32)])
    answer = model.answer(audio)
    assert answer.transcript == question["transcript"]
    assert answer.text == question["answer"]
    assert answer.function == ""
    assert nearest_answer(answer.samples) == question["answer"]
    transcript, text, samples = streamed(model, audio)
    assert (transcript, text) == (answer.transcript, answer.text)
    np.testing.assert_array_equal(samples, answer.samples)


@pytest.mark.parametrize(
    "conversation",
    [
        pytest.param(each, id=each["file"], marks=[pytest.mark.slow] if each["seconds"] > 60 else [])
        for each in CONVERSATIONS
    ],
)
def test_conversation(model: VoiceChat, conversation: dict[str, Any]) -> None:
    audio = np.concatenate([read(EXAMPLES / conversation["file"]), np.zeros(48000, np.float32)])
    answer = model.answer(audio)
    assert answer.transcript == " ".join(turn["transcript"] for turn in conversation["turns"])
    assert answer.text == "".join(turn["answer"] for turn in conversation["turns"])
    if conversation["seconds"] <= 12:
        assert streamed(model, audio)[:2] == (answer.transcript, answer.text)


def test_it_yields_to_an_interruption(model: VoiceChat) -> None:
    """The user speaks from 3.4 s on; the agent's turn ends about 5 frames after the onset."""
    answer = model.answer(read(EXAMPLES / "barge_in.wav"))
    onset = round(3.4 / model.config.frame_seconds)
    ends = [index for index, token in enumerate(answer.text_ids) if token == model.config.eos_id]
    assert onset <= ends[0] <= onset + 12


@pytest.mark.parametrize("level", [0.0, 1e-4], ids=["silence", "faint noise"])
def test_silence_is_answered_by_silence(model: VoiceChat, level: float) -> None:
    noise = np.random.default_rng(0).normal(0, 1, 20 * 16000).astype(np.float32)
    answer = model.answer(noise * np.float32(level))
    assert (answer.transcript, answer.text, answer.function) == ("", "", "")
    assert np.sqrt(np.mean(np.square(answer.samples))) < 2e-3


def test_a_tool_is_called_and_its_result_spoken(model: VoiceChat) -> None:
    """Function channel: SOTC 20, the call, EOTC 21; the caller forces the response and EOTR 22."""
    session = model.session(system_prompt='<AVAILABLE_TOOLS>[{"name": "get_time", "arguments": {}}]</AVAILABLE_TOOLS>')
    audio = np.concatenate([read(EXAMPLES / "what_time_is_it.wav"), np.zeros(80000, np.float32)])
    session.push(audio)
    call = '<SPECIAL_20><TOOLCALL>[{"name": "get_time", "arguments": {}}]</TOOLCALL><SPECIAL_21>'
    assert session.function == call
    assert session.text == ""
    response = model.tokenizer.encode('<TOOL_RESPONSE>["10:30"]</TOOL_RESPONSE>')
    for token in [*response, 22]:
        session.force(function=token)
        session.push(np.zeros(1280, np.float32))
    session.push(np.zeros(64000, np.float32))
    assert session.text == "It is half past ten."
