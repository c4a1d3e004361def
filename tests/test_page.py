"""The page: its files and headers, its pure parts in node, and conversations in a headless Chromium.

Those of the browser are skipped where there is none; MLX_VOICECHAT_CHROMIUM names one.
"""

import base64
import http.client
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from websockets.sync.client import connect

from tests.support.chromium import Page
from tests.support.fake_model import FakeModel
from tests.support.page_checks import captions, played, talk
from tests.support.server import running_server, serve_process
from tests.support.stand_in import AMPLITUDE, RATE_HZ, TONE_HZ, Scene, spoken, stand_in, tone

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "server" / "static"
RESERVE_FRAMES = 12  # so that a test does not starve on a busy machine
FREE = "fetch('/health').then((answer) => answer.json()).then(({ status }) => status === 'ready')"


def test_the_pure_parts_pass_in_node() -> None:
    node = shutil.which("node")
    if (
        node is None
        or subprocess.run([node, "-e", f"import('{STATIC / 'timing.js'}')"], capture_output=True).returncode
    ):
        pytest.skip("no node that reads ES modules (20.19, 22.7 or later)")
    tests = sorted(map(str, (ROOT / "tests" / "page").glob("*.test.mjs")))
    run = subprocess.run([node, "--test", *tests], capture_output=True, text=True)
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
    session = {"system_prompt": "Be brief.", "seed": 7, "extensions": True}
    assert update == {"type": "session.update", "session": session}
    appends = [m for m in scene.received if m["type"] == "input_audio_buffer.append"]
    assert {m["sample_rate"] for m in appends} == {16000}
    heard = scene.heard()
    assert len(heard) == 1280 * len(appends)
    loudest = np.abs(heard).max() / 32768
    assert loudest > 0.05  # the question came through

    saved, rate = sf.read(next(tmp_path.glob("*.wav")), dtype="int16")
    assert rate == RATE_HZ
    assert saved.shape[1] == 2
    frames, rest = divmod(len(saved), 1764)
    assert rest == 0
    assert len(appends) <= frames <= len(appends) + RESERVE_FRAMES  # the last may be unanswered when one stops
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


def test_spoken_over_where_the_model_yields_what_waits_is_dropped(page: Page) -> None:
    scene = Scene(ahead=25)  # two seconds wait to be played
    spoken_frames: list[int] = []

    def yields(index: int) -> bool:
        heard_question = len(spoken_frames) > scene.ahead and np.abs(scene.heard()).max() > 0.1 * 32768
        if not heard_question and index == len(spoken_frames):
            spoken_frames.append(index)
        return index < len(spoken_frames)

    scene.speaks = yields
    with stand_in(scene) as url:
        talk(page, url)
        page.wait_state("speaking")
        page.wait_state("listening")
        page.click("#stop")
        page.wait_state("ready")
        samples, rate = played(page)
    heard_seconds = np.count_nonzero(np.abs(samples) > 0.01) / rate
    assert 0.5 < heard_seconds < 0.08 * len(spoken_frames) - 0.5


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


def test_a_tool_is_a_line_between_the_captions(page: Page, tmp_path: Path) -> None:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    with stand_in(Scene(ahead=RESERVE_FRAMES, tools=True)) as url:
        talk(page, url)
        page.wait("document.getElementById('captions').textContent.includes('is Paris.')")
        assert captions(page) == [
            ["You", "What is the capital of France?"],
            ["Tool", 'look_up(country="France", most=1) → "Paris"'],
            ["Assistant", "The capital of France is Paris."],
        ]
        page.click("#stop")
        page.wait_state("ready")
        page.click("#save-text")
        wait_for_file(tmp_path, "txt")
    text = next(tmp_path.glob("*.txt")).read_text(encoding="utf-8")
    assert '[00:00.6] tool: look_up(country="France", most=1) → "Paris"\n' in text


def test_push_to_talk_is_heard_between_two_presses(page: Page) -> None:
    scene = Scene(ahead=RESERVE_FRAMES)
    kinds = ("turn.begin", "turn.end")
    with stand_in(scene) as url:
        page.open(url)
        page.wait_state("ready")
        page.click("#push-to-talk")
        page.evaluate("document.getElementById('talk').focus()")
        page.press("Enter", 13, "\r")
        page.wait_state("speaking")
        assert scene.received[0]["session"] == {"seed": 0, "extensions": True, "turns": "application"}
        assert page.evaluate("document.activeElement.textContent") == "Start speaking"
        assert page.evaluate("document.activeElement.getBoundingClientRect().height") >= 64
        scene.speaks = lambda index: False
        page.wait_state("waiting")
        assert not scene.heard().any()
        page.press(" ", 32, " ")  # on the button
        page.wait_state("listening")
        assert page.evaluate("document.activeElement.textContent") == "Done"
        time.sleep(2.5)
        page.evaluate("document.activeElement.blur()")
        page.press(" ", 32, " ")  # anywhere
        page.wait_state("waiting")
        page.click("#stop")
        page.wait_state("ready")
        assert page.evaluate("document.getElementById('turn').hidden")
    sent = [message["type"] for message in scene.received if message["type"] in kinds]
    assert sent == list(kinds)
    begun, done = (next(i for i, m in enumerate(scene.received) if m["type"] == kind) for kind in kinds)
    heard = [any(base64.b64decode(m.get("audio", ""))) for m in scene.received]
    assert any(heard[begun:done])
    assert not any(heard[:begun])
    assert not any(heard[done:])


# With the server itself, and the demonstration model


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


def test_faint_sound_is_not_sent_while_the_assistant_speaks(page: Page) -> None:
    """The gate: the noise after the question goes out in a pause, and not while something sounds."""
    sent = {}
    for speaking in (True, False):
        scene = Scene(ahead=RESERVE_FRAMES, speaks=lambda index, speaking=speaking: speaking)
        with stand_in(scene) as url:
            talk(page, url)
            page.wait_state("speaking" if speaking else "listening")
            page.wait("window.tapped.blocks.length * 128 > 5.5 * window.tapped.rate")
            page.click("#stop")
            page.wait_state("ready")
            sent[speaking] = scene.heard()
    rate_hz = 16000
    assert sent[False][4 * rate_hz : 5 * rate_hz].any()
    assert not sent[True][4 * rate_hz : 5 * rate_hz].any()
    assert np.abs(sent[True]).max() > 0.1 * 32768  # who is louder is heard
    assert page.complaints == []
