"""Ctrl-C for all tests; for the page's, a headless Chromium that hears a question, and a tab that is watched."""

import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import soundfile as sf

from tests.support.chromium import ELSEWHERE, Page, chromium, find_chromium
from tests.support.page_checks import tap

QUESTION = Path(__file__).parents[1] / "examples" / "question.wav"
MISSING = "Failed to load worklet module"  # the browser's own note, as those of its network, of a server that is gone

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job, whose children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question after a second, between faint noise: what a person says to the page."""
    question, rate = sf.read(QUESTION, dtype="int16")
    noise = np.random.default_rng(0).integers(-3, 4, 12 * rate).astype(np.int16)
    path = tmp_path_factory.mktemp("microphone") / "question.wav"
    sf.write(path, np.concatenate([noise[:rate], question, noise]), rate)
    return path


@pytest.fixture(scope="module")
def browser(microphone: Path) -> Iterator[Page]:
    if find_chromium() is None:
        pytest.skip("no Chromium: set MLX_VOICECHAT_CHROMIUM")
    with chromium(microphone) as page:
        tap(page)
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """A tab that must not complain, nor ask anything of another machine than this one."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.resize(1280, 800, dark=False)
    yield browser
    browser.call("Page.navigate", url="about:blank")
    assert {urlsplit(address).hostname for address in browser.requests} <= {"127.0.0.1", ELSEWHERE}
    assert [what for source, what in browser.complaints if source != "network" and MISSING not in what] == []
