"""A headless Chromium for tests of the page, driven over its DevTools protocol with the `websockets` library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ELSEWHERE = "voice.example"  # a name of this machine that no browser trusts
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-features=MediaRouter,OptimizationHints,AutofillServerCommunication",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
    "--remote-debugging-port=0",
    # Nothing leaves the machine, not even what the browser itself would ask.
    f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
START_SECONDS = 60
CALL_SECONDS = 30
WAIT_SECONDS = 30


def find_chromium() -> str | None:
    """The browser to test with: MLX_VOICECHAT_CHROMIUM, else the first of the usual names on the path."""
    named = os.environ.get("MLX_VOICECHAT_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `requests` are the addresses it asked for, `complaints` the warnings and errors of its console."""

    def __init__(self, socket: ClientConnection) -> None:
        self.requests: list[str] = []
        self.complaints: list[tuple[str, str]] = []  # (who said it, what)
        self.substitutes: dict[str, str] = {}  # last parts of addresses -> the script that is served instead
        self._socket = socket
        self._answers: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="test-devtools")
        self._reader.start()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def substitute(self, name: str, script: str) -> None:
        """Answer requests for a file called `name` with this script."""
        self.substitutes[name] = script
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*/{name}"} for name in self.substitutes])

    def close(self) -> None:
        self._socket.close()
        self._reader.join()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command and its result."""
        number = self._send(method, parameters)
        with self._arrived:
            done = self._arrived.wait_for(lambda: number in self._answers, CALL_SECONDS)
            assert done, f"{method} was not answered"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = WAIT_SECONDS) -> Any:
        """Wait until the expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"not so after {seconds:g} s: {expression}; the page says {self.words()}"
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def click(self, selector: str) -> None:
        """A real click of the mouse in the middle of the element."""
        box = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{ block: "center" }});
                const box = element.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2, box.width];
            }})()"""
        )
        assert box[2] > 0, f"{selector} is not shown"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def resize(self, width: int, height: int, dark: bool) -> None:
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def state(self) -> str:
        return self.evaluate("document.body?.dataset.state ?? ''")

    def words(self) -> str:
        """The state, its words and the notice, as a person reads them."""
        return self.evaluate(
            "['state', 'words', 'notice'].map((id) => document.getElementById(id)?.textContent).join(' | ')"
        )

    def wait_state(self, *states: str, seconds: float = WAIT_SECONDS) -> None:
        self.wait(f"{json.dumps(states)}.includes(document.body.dataset.state)", seconds)

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        with self._arrived:
            self._number += 1
            number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return number

    def _fulfil(self, told: dict[str, Any]) -> None:
        script = self.substitutes[told["request"]["url"].rpartition("/")[2]]
        self._send(
            "Fetch.fulfillRequest",
            {
                "requestId": told["requestId"],
                "responseCode": 200,
                "responseHeaders": [{"name": "Content-Type", "value": "text/javascript"}],
                "body": base64.b64encode(script.encode()).decode(),
            },
        )

    def _read(self) -> None:
        try:
            for data in self._socket:
                message = json.loads(data)
                with self._arrived:
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self._note(message["method"], message["params"])
                    self._arrived.notify_all()
        except ConnectionClosed:
            pass

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Fetch.requestPaused":
            self._fulfil(told)
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(told["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(("exception", json.dumps(told["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(("console", json.dumps(told["args"])))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            entry = told["entry"]
            self.complaints.append((entry["source"], f"{entry['text']} {entry.get('url', '')}"))


@contextmanager
def chromium(microphone: Path, *flags: str) -> Iterator[Page]:
    """A browser that hears `microphone`, a WAV file, once; its only tab. Ends every process that it started."""
    program = find_chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        heard = f"--use-file-for-fake-audio-capture={microphone}%noloop"
        command = [program, *FLAGS, *flags, heard, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            address = _first_tab(Path(folder), process)
            with connect(address, max_size=None, compression=None, proxy=None) as socket:
                page = Page(socket)
                try:
                    yield page
                finally:
                    page.close()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _first_tab(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """The DevTools address of the tab that the browser begins with."""
    end = time.monotonic() + START_SECONDS
    port_file = folder / "DevToolsActivePort"
    while time.monotonic() < end and process.poll() is None:
        if port_file.exists() and (lines := port_file.read_text().split()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=CALL_SECONDS) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start (exit code {process.poll()})")
