"""The page with the server itself: a spoken question, a tool called, the answer with its result; and push to talk.

Skipped where there is no Chromium, and without the package `mcp`.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from tests.support.caller import calling
from tests.support.chromium import Page
from tests.support.page_checks import captions, played, talk
from tests.support.server import serve_process

pytest.importorskip("mcp", reason="the extra tools is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
MCP = shlex.join([sys.executable, str(EXAMPLES / "mcp_server.py")])
CALL = 'get_weather(city="Paris") → {"city": "Paris", "weather": "sunny"}'
ANSWER = "It is sunny in Paris."
PATIENCE_SECONDS = 120  # of a busy machine, where the answer comes that much later


@pytest.fixture(scope="module")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question that needs a tool, eight times, between faint noise."""
    question, rate = sf.read(EXAMPLES / "what_is_the_weather_in_paris_f4.wav", dtype="int16")
    noise = np.random.default_rng(0).integers(-3, 4, 7 * rate).astype(np.int16)
    path = tmp_path_factory.mktemp("microphone") / "question.wav"
    sf.write(path, np.concatenate([noise[: 2 * rate], *[question, noise] * 8]), rate)
    return path


@contextmanager
def serving() -> Iterator[str]:
    """The page's address, of a server that has opened this prompt before: the next one begins at once."""
    with serve_process("--model", "tiny", "--mcp", MCP) as server:
        with calling(server.ws_url) as caller:
            caller.until("session.created")
            caller.send({"type": "session.update", "session": {}})
            caller.until("session.updated")
            caller.send({"type": "session.cancel"})
            caller.until("response.cancelled")
        yield f"{server.url}/"


def count(speaker: str, text: str) -> str:
    """How many turns of a speaker have this text."""
    return f"[...document.querySelectorAll('.turn.{speaker}')].filter((t) => t.textContent.includes('{text}')).length"


def test_a_spoken_question_is_answered_with_a_tools_result(page: Page) -> None:
    with serving() as url:
        talk(page, url)
        page.wait(f"document.getElementById('captions').textContent.includes('{ANSWER}')", PATIENCE_SECONDS)
        assert captions(page)[:3] == [
            ["You", "What is the weather in Paris?"],
            ["Tool", CALL],
            ["Assistant", ANSWER],
        ]
        page.wait_state("speaking")
        page.wait_state("listening")
        samples, rate = played(page)
        assert (np.abs(samples) > 0.02).sum() > 0.2 * rate  # it is heard, not only read
        page.click("#stop")
        page.wait_state("ready")
    assert page.complaints == []


def test_push_to_talk(page: Page) -> None:
    with serving() as url:
        page.open(url)
        page.wait_state("ready")
        page.click("#push-to-talk")
        page.click("#talk")
        page.wait_state("waiting")
        for turns in (1, 2):
            page.click("#turn")
            page.wait_state("listening")
            page.wait(f"{count('user', 'Paris?')} === {turns}", PATIENCE_SECONDS)
            page.click("#turn")
            page.wait(f"{count('assistant', 'Paris.')} === {turns}", PATIENCE_SECONDS)
            page.wait_state("speaking")
            page.wait_state("waiting")
        page.click("#stop")
        page.wait_state("ready")
        others = [turn for turn in captions(page) if turn[0] != "You"]
        assert others == [["Tool", CALL], ["Assistant", ANSWER]] * 2
    assert page.complaints == []
