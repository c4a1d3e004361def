"""The packaged demonstration checkpoint really converses: what it hears, says and speaks, offline and streamed."""

import json
from pathlib import Path
from typing import Any

import librosa
import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat import AudioFrame
from mlx_voicechat.voicechat import VoiceChat
from tests.support.checkpoints import GOLDEN

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
CONVERSATIONS = json.loads((EXAMPLES / "conversations.json").read_text(encoding="utf-8"))
# answers/N.flac speaks the Nth of these
ANSWERS = [answer["text"] for answer in json.loads((GOLDEN / "answers" / "answers.json").read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load("tiny")


def read(file: Path) -> np.ndarray:
    return sf.read(file, dtype="float32")[0]


def log_mel(samples: np.ndarray) -> np.ndarray:
    mel = librosa.feature.melspectrogram(y=samples, sr=22050, n_fft=1024, hop_length=441, n_mels=40)
    return np.log(mel + 1e-4).T


def distance(spoken: np.ndarray, reference: np.ndarray) -> float:
    """Mean log-mel difference at the best alignment of the reference inside what was spoken."""
    starts = range(len(spoken) - len(reference) + 1)
    return min(float(np.abs(spoken[at : at + len(reference)] - reference).mean()) for at in starts)


def streamed(model: VoiceChat, audio: np.ndarray) -> tuple[str, str, np.ndarray]:
    session = model.session()
    events = session.push(audio) + session.finish()
    samples = np.concatenate([event.samples for event in events if isinstance(event, AudioFrame)])
    return session.transcript, session.text, samples


@pytest.fixture(scope="module")
def references() -> list[np.ndarray]:
    return [log_mel(read(GOLDEN / "answers" / f"{index}.flac")) for index in range(len(ANSWERS))]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q["file"])
def test_question(model: VoiceChat, references: list[np.ndarray], question: dict[str, Any]) -> None:
    audio = np.concatenate([read(EXAMPLES / question["file"]), np.zeros(64000, np.float32)])
    answer = model.answer(audio)
    assert answer.transcript == question["transcript"]
    assert answer.text == question["answer"]
    assert answer.function == ""
    distances = [distance(log_mel(answer.samples), reference) for reference in references]
    assert ANSWERS[int(np.argmin(distances))] == question["answer"]
    transcript, text, samples = streamed(model, audio)
    assert (transcript, text) == (answer.transcript, answer.text)
    np.testing.assert_array_equal(samples, answer.samples)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c["file"])
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
