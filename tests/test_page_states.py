"""What the page shows and says: every state and end, with the keyboard alone, at every width, in light and dark.

Skipped where there is no Chromium. MLX_VOICECHAT_AXE names axe-core's axe.min.js, which is then run in every state;
MLX_VOICECHAT_SHOTS a folder for screenshots of each.
"""

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.chromium import ELSEWHERE, Page
from tests.support.page_checks import faults, talk
from tests.support.stand_in import Scene, stand_in

WIDTHS = {360: 740, 768: 1024, 1280: 800}
AXE = os.environ.get("MLX_VOICECHAT_AXE")
SHOTS = os.environ.get("MLX_VOICECHAT_SHOTS")
VIOLATIONS = "axe.run().then(({ violations }) => violations.map(({ id, nodes }) => [id, nodes[0].html]))"
RESERVE_FRAMES = 12  # so that a test does not starve on a busy machine

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
        page.open(f"http://{ELSEWHERE}:{port}/")
        page.wait_state("microphone")
        words = page.words()
        assert f"http://localhost:{port}/" in words
        assert "--ssl-certfile" in words
        assert f"https://{ELSEWHERE}:{port}/" in words
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
        for _ in range(9):
            page.press("Tab", 9)
            order.append(page.evaluate("document.activeElement.id"))
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(outline) == "solid", order
        assert order == ["theme", "talk", "mute", "captions", "half-duplex", "push-to-talk", "prompt", "seed", "key"]
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
            where = f"{state}-{width}-{'dark' if dark else 'light'}"
            assert faults(page) == [], where
            if AXE:
                page.evaluate(Path(AXE).read_text(encoding="utf-8"))
                assert page.evaluate(VIOLATIONS) == [], where
            if SHOTS:
                page.screenshot(Path(SHOTS) / f"{where}.png", whole=False)
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
        scene.stalled = True
        page.wait("document.getElementById('notice').textContent.includes('behind')")
        looks(page, "behind")
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
        scene.status, scene.stalled, scene.tools = 101, False, True
        page.click("#push-to-talk")
        page.click("#talk")
        page.wait("document.querySelectorAll('.turn').length === 3")
        page.evaluate("window.scrollTo(0, 0)")
        page.click("#turn")
        page.wait_state("listening")
        looks(page, "push-to-talk")
        page.click("#stop")
        page.wait_state("ready")
        page.open(url.replace("127.0.0.1", ELSEWHERE))
        page.wait_state("microphone")
        looks(page, "insecure")
