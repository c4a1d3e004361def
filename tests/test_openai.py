"""Conversations in OpenAI's vocabulary, against a model of simple rules."""

import base64
from collections.abc import Iterator

import pytest

from tests.support.openai_caller import Talker, said, talking
from tests.support.server import RunningServer, running_server
from tests.support.turn_model import TurnModel

MANUAL = {"audio": {"input": {"turn_detection": None}}}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
ANSWER = "One two three four five six."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(TurnModel(), max_sessions=4) as server:
        yield server


@pytest.fixture
def talker(server: RunningServer) -> Iterator[Talker]:
    with talking(server.ws_url) as talker:
        yield talker


def asked(talker: Talker) -> dict:
    """A spoken question, committed, and the response that was asked for."""
    talker.send(said(0.5), {"type": "input_audio_buffer.commit"}, {"type": "response.create"})
    return talker.until("response.done")["response"]


def test_a_committed_question(talker: Talker) -> None:
    talker.configure(**MANUAL)
    response = asked(talker)
    assert response["status"] == "completed"
    (item,) = response["output"]
    assert item["content"] == [{"type": "output_audio", "transcript": ANSWER}]
    data = b"".join(base64.b64decode(event["delta"]) for event in talker.of("response.output_audio.delta"))
    assert len(data) // 2 == 24_000 * 0.08 * 9
    (transcript,) = talker.of("conversation.item.input_audio_transcription.completed")
    assert transcript["transcript"].startswith("w1 w2")
    assert not talker.of("input_audio_buffer.speech_started")
    talker.until("rate_limits.updated")
    talker.order.end()
