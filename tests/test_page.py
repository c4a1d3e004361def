"""The page: its files and headers, its pure parts in node, and the whole in a headless Chromium with a fake microphone.

The browser's tests are skipped where there is none (MLX_VOICECHAT_CHROMIUM names one), those of axe-core where
MLX_VOICECHAT_AXE does not name its axe.min.js.
"""

import http.client
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import soundfile as sf
from websockets.sync.client import connect

from tests.support.chromium import Page, chromium, find_chromium
from tests.support.fake_model import FakeModel
from tests.support.page_checks import faults, played, tap
from tests.support.server import running_server, serve_process
from tests.support.stand_in import AMPLITUDE, RATE_HZ, TONE_HZ, Scene, spoken, stand_in, tone

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "server" / "static"
NODE_VERSION = 20
WIDTHS = {360: 740, 768: 1024, 1280: 800}
AXE = os.environ.get("MLX_VOICECHAT_AXE")
MISSING = "Failed to load worklet module"  # the browser's own note, as those of its network, of a server that is gone
RESERVE_FRAMES = 12  # so that a test does not starve on a busy machine

needs_browser = pytest.mark.skipif(find_chromium() is None, reason="no Chromium: set MLX_VOICECHAT_CHROMIUM")


def node_version() -> int:
    program = shutil.which("node")
    found = (
        re.match(r"v(\d+)", subprocess.run([program, "--version"], capture_output=True, text=True).stdout)
        if program
        else None
    )
    return int(found[1]) if found else 0


@pytest.mark.skipif(node_version() < NODE_VERSION, reason=f"no node of version {NODE_VERSION} or later")
def test_the_pure_parts_pass_in_node() -> None:
    tests = sorted(map(str, (ROOT / "tests" / "page").glob("*.test.mjs")))
    run = subprocess.run(["node", "--test", *tests], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def fetch(url: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10)


def test_files_have_their_types_and_headers() -> None:
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    with stand_in(Scene()) as url:
        for file in STATIC.iterdir():
            with fetch(f"{url}static/{file.name}") as answer:
                assert answer.read() == file.read_bytes()
                assert answer.headers["Content-Type"] == f"{types[file.suffix]}; charset=utf-8"
        with fetch(url) as page:
            assert page.read() == (STATIC / "index.html").read_bytes()
            policy = page.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "connect-src 'self'" in policy
            assert "http" not in policy
            assert page.headers["X-Content-Type-Options"] == "nosniff"
            assert page.headers["Cache-Control"] == "no-cache"
        with pytest.raises(urllib.error.HTTPError) as same:
            fetch(url, {"If-None-Match": page.headers["ETag"]}).close()
        same.value.close()
        assert same.value.code == 304
        for path in ("static/none.js", "static/..%2fpage.py", "static/%2e%2e/page.py"):
            with pytest.raises(urllib.error.HTTPError) as missing:
                fetch(url + path).close()
            missing.value.close()
            assert missing.value.code == 404


def test_no_file_names_another_machine() -> None:
    for file in STATIC.iterdir():
        addresses = re.findall(r"(?:https?|wss?)://[\w.-]+", file.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org", "http://localhost"}, file.name  # a namespace, and advice


# In a browser


@pytest.fixture(scope="module")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question after a second, between faint noise: what a person says to the page."""
    question, rate = sf.read(ROOT / "examples" / "question.wav", dtype="int16")
    noise = np.random.default_rng(0).integers(-3, 4, 12 * rate).astype(np.int16)
    path = tmp_path_factory.mktemp("microphone") / "question.wav"
    sf.write(path, np.concatenate([noise[:rate], question, noise]), rate)
    return path


@pytest.fixture(scope="module")
def browser(microphone: Path) -> Iterator[Page]:
    if find_chromium() is None:
        pytest.skip("no Chromium: set MLX_VOICECHAT_CHROMIUM")
    with chromium(microphone, "--host-resolver-rules=MAP voice.example 127.0.0.1") as page:
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
    assert {urlsplit(address).hostname for address in browser.requests} <= {"127.0.0.1", "voice.example"}
    assert [what for source, what in browser.complaints if source != "network" and MISSING not in what] == []


def talk(page: Page, url: str) -> None:
    page.open(url)
    page.wait_state("ready", "busy")
    page.click("#talk")


def captions(page: Page) -> list[list[str]]:
    return page.evaluate(
        "[...document.querySelectorAll('.turn')].map((turn) => [...turn.children].map((e) => e.textContent))"
    )


def test_captions_appear_and_a_tone_plays_without_a_seam(page: Page) -> None:
    with stand_in(Scene(ahead=RESERVE_FRAMES)) as url:
        talk(page, url)
        page.wait_state("speaking")
        page.wait("window.tapped.blocks.length * 128 > 3.5 * window.tapped.rate")
        samples, rate = played(page)
        assert captions(page) == [
            ["You", "What is the capital of France?"],
            ["Assistant", "The capital of France is Paris."],
        ]
        colours = page.evaluate("[...document.querySelectorAll('.text')].map((e) => getComputedStyle(e).color)")
        assert len(set(colours)) == 2
        assert page.evaluate("document.getElementById('functions').textContent") == 'look_up("Paris")'
        assert re.fullmatch(r"\d\.\d\d", page.evaluate("document.getElementById('factor').textContent"))
        assert re.fullmatch(r"\d\.\d s", page.evaluate("document.getElementById('lag').textContent"))
        page.click("#stop")
        page.wait_state("ready")
    assert page.complaints == []
    begun = int(np.flatnonzero(samples)[0]) + int(0.02 * rate)
    steady = samples[begun:].astype(np.float64)
    assert len(steady) > 2 * rate
    # A gap, a repeated or a lost sample at a seam is a step; a tone's own steps are at most these.
    step = 2 * AMPLITUDE * np.sin(np.pi * TONE_HZ / rate)
    assert np.abs(np.diff(steady)).max() < 1.01 * step
    assert np.abs(np.diff(steady, 2)).max() < 1.05 * step * 2 * np.sin(np.pi * TONE_HZ / rate) + 1e-4
    at = 2 * np.pi * TONE_HZ * np.arange(len(steady)) / rate
    waves = np.stack([np.sin(at), np.cos(at)], axis=1)
    error = steady - waves @ np.linalg.lstsq(waves, steady, rcond=None)[0]
    assert 20 * np.log10(error.std() / steady.std()) < -60


def test_what_is_heard_is_sent_and_saved_on_one_timeline(page: Page, tmp_path: Path) -> None:
    scene = Scene(ahead=RESERVE_FRAMES)
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    with stand_in(scene) as url:
        page.open(url)
        page.wait_state("ready")
        page.evaluate("document.getElementById('prompt').value = 'Be brief.'")
        page.evaluate("document.getElementById('seed').value = '7'")
        page.click("#talk")
        page.wait_state("speaking")
        time.sleep(3.5)
        page.click("#stop")
        page.wait_state("ready")
        for button, suffix in (("#save-sound", "wav"), ("#save-text", "txt")):
            page.click(button)
            wait_for_file(tmp_path, suffix)
    update = scene.received[0]
    assert update == {"type": "session.update", "session": {"system_prompt": "Be brief.", "seed": 7}}
    appends = [m for m in scene.received if m["type"] == "input_audio_buffer.append"]
    assert {m["sample_rate"] for m in appends} == {16000}
    heard = scene.heard()
    assert len(heard) == 1280 * len(appends)
    loudest = np.abs(heard).max() / 32768
    assert loudest > 0.05  # the question came through

    saved, rate = sf.read(next(tmp_path.glob("*.wav")), dtype="int16")
    assert rate == RATE_HZ
    assert saved.shape[1] == 2
    assert len(saved) == 1764 * (len(appends) + RESERVE_FRAMES)
    answer = b"".join(tone(index) for index in range(len(appends)))
    assert saved[: len(answer) // 2, 1].tobytes() == answer
    # 441 samples left for 320 that were sent: their envelopes lie on each other
    blocks = len(heard) // 320
    sent_levels = np.abs(heard[: blocks * 320].astype(float)).reshape(blocks, 320).mean(axis=1)
    saved_levels = np.abs(saved[: blocks * 441, 0].astype(float)).reshape(blocks, 441).mean(axis=1)
    assert np.corrcoef(sent_levels, saved_levels)[0, 1] > 0.99
    text = next(tmp_path.glob("*.txt")).read_text(encoding="utf-8")
    assert "with stand-in\nSystem prompt: Be brief.\nSeed: 7\n" in text
    assert "] user: What is the capital of France?\n" in text


def wait_for_file(folder: Path, suffix: str) -> None:
    end = time.monotonic() + 20
    while not list(folder.glob(f"*.{suffix}")):
        assert time.monotonic() < end, f"no {suffix} was saved"
        time.sleep(0.05)


def test_interrupt_and_stop_empty_what_waits(page: Page) -> None:
    scene = Scene(ahead=25)  # two seconds wait to be played
    with stand_in(scene) as url:
        talk(page, url)
        page.wait_state("speaking")
        scene.speaks = lambda index: False
        page.click("#interrupt")
        page.wait_state("listening", seconds=1.5)
        assert {"type": "response.interrupt"} in scene.received
        page.click("#stop")
        page.wait_state("ready")
        stopped = page.evaluate("window.tapped.blocks.length")
        time.sleep(0.3)
        assert page.evaluate("window.tapped.blocks.length") - stopped < 20
    assert scene.received[-1] == {"type": "session.cancel"}


def test_mute_and_half_duplex_send_silence(page: Page) -> None:
    scene = Scene(ahead=RESERVE_FRAMES)
    with stand_in(scene) as url:
        page.open(url)
        page.wait_state("ready")
        page.click("#mute")
        assert page.evaluate("document.getElementById('mute').ariaPressed") == "true"
        page.click("#talk")
        page.wait("document.querySelectorAll('.turn').length === 2")
        assert not scene.heard().any()
        page.click("#mute")
        page.click("#mute")
        scene.speaks = lambda index: False
        page.wait("document.getElementById('words').textContent.startsWith('You are muted')")
        scene.speaks = spoken
        page.click("#stop")
        page.wait_state("ready")
        page.click("#mute")
        page.click("#half-duplex")
        assert "Interrupting by voice is off" in page.evaluate(
            "document.getElementById('half-duplex-hint').textContent"
        )
        scene.received.clear()
        page.click("#talk")
        page.wait_state("speaking")
        assert "your microphone is off meanwhile" in page.words()
        time.sleep(0.3)
        spoken_over = len(scene.heard())
        time.sleep(0.5)
        heard = scene.heard()
        assert len(heard) > spoken_over
        assert not heard[spoken_over:].any()
        page.click("#stop")
        page.wait_state("ready")


ENDS = {
    "busy": (Scene(busy=True), "busy", "Somebody is talking with the model"),
    "limit": (
        Scene(frames=3, error_code="inference_error", error_message="The session's limit of 600 s is reached."),
        "lost",
        "limit of 600 s",
    ),
    "slow": (Scene(frames=3, error_code="slow_consumer", error_message="slow", close_code=1008), "lost", "fast enough"),
    "idle": (
        Scene(frames=3, error_code="invalid_request", error_message="Nothing came for 120 s.", close_code=1008),
        "lost",
        "Nothing came for 120 s",
    ),
    "ends": (Scene(frames=3, close_code=1001), "lost", "shutting down"),
    "origin": (Scene(status=403), "lost", "--allowed-origins http://127.0.0.1"),
    "key": (Scene(status=401), "lost", "asks for an API key"),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_has_its_state_and_words_and_one_may_talk_again(page: Page, name: str) -> None:
    scene, state, words = ENDS[name]
    with stand_in(scene) as url:
        talk(page, url)
        page.wait_state(state)
        assert words in page.words()
        assert page.evaluate("document.getElementById('stop').hidden")
        if name == "key":
            assert page.evaluate("document.activeElement.id") == "key"
        scene.status, scene.busy, scene.frames = 101, False, None
        page.click("#talk")
        page.wait_state("listening", "speaking")
        page.click("#stop")
        page.wait_state("ready")
    if name not in ("origin", "key"):  # the browser itself notes a refused handshake
        assert page.complaints == []


def test_a_server_that_loads_is_waited_for(page: Page) -> None:
    scene = Scene(health="loading")
    with stand_in(scene) as url:
        page.open(url)
        page.wait_state("loading")
        page.click("#talk")
        page.wait("document.getElementById('stop').checkVisibility()")
        page.wait_state("loading")
        scene.health = "ready"
        page.wait_state("listening", "speaking")
        page.click("#stop")
        page.wait_state("ready")


def test_a_server_that_is_gone_is_said_to_be(page: Page) -> None:
    with stand_in(Scene()) as url:
        talk(page, url)
        page.wait_state("speaking")
    page.wait_state("lost")
    page.click("#talk")
    page.wait("document.getElementById('words').textContent.includes('mlx-voicechat serve')")


def test_over_plain_http_from_elsewhere_it_says_what_to_do(page: Page) -> None:
    with stand_in(Scene()) as url:
        port = urlsplit(url).port
        page.open(f"http://voice.example:{port}/")
        page.wait_state("microphone")
        words = page.words()
        assert f"http://localhost:{port}/" in words
        assert "--ssl-certfile" in words
        assert f"https://voice.example:{port}/" in words
        assert page.evaluate("document.getElementById('talk').disabled")
    assert page.complaints == []


def test_a_microphone_that_is_not_allowed_is_said_to_be(page: Page) -> None:
    refuse = "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError'); }"
    with stand_in(Scene()) as url:
        page.open(url)
        page.wait_state("ready")
        page.evaluate(refuse)
        page.click("#talk")
        page.wait_state("microphone")
        assert "was not allowed" in page.words()
        assert page.evaluate("document.getElementById('talk').checkVisibility()")


def test_it_is_used_with_the_keyboard_alone(page: Page) -> None:
    with stand_in(Scene(ahead=RESERVE_FRAMES)) as url:
        page.open(url)
        page.wait_state("ready")
        page.evaluate("document.activeElement.blur()")
        order = []
        for _ in range(8):
            page.press("Tab", 9)
            order.append(page.evaluate("document.activeElement.id"))
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(outline) == "solid", order
        assert order == ["theme", "talk", "mute", "captions", "half-duplex", "prompt", "seed", "key"]
        page.evaluate("document.getElementById('talk').focus()")
        page.press("Enter", 13, "\r")
        page.wait_state("speaking")
        assert page.evaluate("document.activeElement.id") == "stop"
        log = "document.getElementById('captions')"
        assert page.evaluate(f"[{log}.role, {log}.ariaLive]") == ["log", "polite"]
        page.press("Enter", 13, "\r")
        page.wait_state("ready")
        assert page.evaluate("document.activeElement.id") == "talk"


def test_a_wrong_seed_or_key_is_not_sent(page: Page) -> None:
    scene = Scene()
    with stand_in(scene) as url:
        page.open(url)
        page.wait_state("ready")
        for field, value in (("seed", "-1"), ("seed", "1.5"), ("seed", ""), ("key", "two words")):
            page.evaluate(
                f"(() => {{ const e = document.getElementById('{field}'); window.before = e.value;"
                f" e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input')); }})()"
            )
            page.click("#talk")
            assert page.evaluate("document.activeElement.id") == field
            page.evaluate(
                f"(() => {{ const e = document.getElementById('{field}'); e.value = window.before;"
                " e.dispatchEvent(new Event('input')); })()"
            )
        assert scene.connections == 0


def looks(page: Page, state: str) -> None:
    """Look at the page at every width, in light and dark."""
    for width, height in WIDTHS.items():
        for dark in (False, True):
            page.resize(width, height, dark)
            assert faults(page) == [], f"{state} at {width} pixels, {'dark' if dark else 'light'}"
            if AXE:
                page.evaluate(Path(AXE).read_text(encoding="utf-8"))
                found = page.evaluate(
                    "axe.run().then(({ violations }) => violations.map(({ id, nodes }) => [id, nodes[0].html]))"
                )
                assert found == [], f"{state} at {width} pixels, {'dark' if dark else 'light'}"
            if folder := os.environ.get("MLX_VOICECHAT_SHOTS"):
                page.screenshot(Path(folder) / f"{state}-{width}-{'dark' if dark else 'light'}.png", whole=False)
    page.resize(1280, 800, dark=False)


def test_every_state_can_be_read_and_pressed_at_every_width(page: Page) -> None:
    scene = Scene(health="loading", speaks=lambda index: index > 60)
    with stand_in(scene) as url:
        page.open(url)
        page.wait_state("loading")
        looks(page, "loading")
        scene.health = "ready"
        page.wait_state("ready")
        looks(page, "ready")
        page.click("#mute")
        page.click("#half-duplex")
        page.click("#talk")
        page.wait_state("listening")
        page.wait("document.querySelectorAll('.turn').length === 2")
        looks(page, "listening")
        page.wait_state("speaking")
        looks(page, "speaking")
        page.evaluate("window.scrollTo(0, 0)")
        page.click("#stop")
        page.wait_state("ready")
        looks(page, "saving")
        scene.busy = True
        page.click("#talk")
        page.wait_state("busy")
        looks(page, "busy")
        scene.busy, scene.status = False, 403
        page.click("#talk")
        page.wait_state("lost")
        looks(page, "lost")
        page.open(url.replace("127.0.0.1", "voice.example"))
        page.wait_state("microphone")
        looks(page, "insecure")


# With the server itself, and the demonstration model


FREE = "fetch('/health').then((answer) => answer.json()).then(({ status }) => status === 'ready')"


def test_the_model_answers_the_question_and_its_server_is_killed(page: Page) -> None:
    with serve_process("--model", "tiny") as server:
        talk(page, f"{server.url}/")
        page.wait("document.getElementById('captions').textContent.includes('The capital of France is Paris.')")
        assert captions(page)[0] == ["You", "What is the capital of France?"]
        page.wait_state("speaking")
        page.wait_state("listening")
        samples, rate = played(page)
        loud = np.abs(samples) > 0.02
        assert loud.sum() > 0.2 * rate  # it is heard, not only read

        page.click("#stop")
        page.wait_state("ready")
        page.wait(FREE)
        with connect(server.ws_url) as other:  # somebody else takes the only place
            other.recv(10)
            other.send(json.dumps({"type": "session.update", "session": {}}))
            assert json.loads(other.recv(10))["type"] == "session.updated"
            page.click("#talk")
            page.wait_state("busy")
            assert "Somebody is talking with the model" in page.words()
        page.wait(FREE)
        page.click("#talk")
        page.wait_state("listening")
        assert page.complaints == []
        server.process.kill()
        page.wait_state("lost")
        assert "The connection broke" in page.words()


def test_a_key_is_asked_for_and_sent(page: Page) -> None:
    with running_server(FakeModel(), api_key="sk-1") as server:
        talk(page, f"{server.url}/")
        page.wait_state("lost")
        assert "asks for an API key" in page.words()
        for key, states in (("sk-2", ["lost"]), ("sk-1", ["listening", "speaking"])):
            page.evaluate(f"document.getElementById('key').value = '{key}'")
            page.click("#talk")
            page.wait_state(*states)
        page.click("#stop")
        page.wait_state("ready")
        assert "sk-1" not in page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
