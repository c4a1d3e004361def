"""Who is let in: too many connections, too few descriptors, clients that say nothing, and both loopbacks."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mlx_voicechat.server import listening
from mlx_voicechat.server.listening import listen
from tests.support.caller import opened
from tests.support.checkpoints import GOLDEN
from tests.support.fake_model import FakeModel
from tests.support.server import PROGRAM, RunningServer, ServerProcess, running_server, serve_process

MODEL = str(GOLDEN / "tiny-f32")
DESCRIPTORS = 96
SECONDS = 20
# The command where a process may have few descriptors.
FEW = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS})); {PROGRAM}"
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def status(url: str) -> str:
    with urllib.request.urlopen(f"{url}/health", timeout=SECONDS) as answer:
        return str(json.load(answer)["status"])


def connected(url: str, said: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    client = socket.create_connection((str(parts.hostname), parts.port or 0), SECONDS)
    client.sendall(said)
    return client


def is_closed(client: socket.socket) -> bool:
    """Whether the other side closes within SECONDS; what it says before is read."""
    client.settimeout(SECONDS)
    try:
        while client.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def warnings(server: ServerProcess) -> list[str]:
    return [line for line in server.stderr if not line.startswith(("ready", "note"))]


def processor_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@contextmanager
def few_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setattr("tests.support.server.PROGRAM", FEW)
    with serve_process("-m", MODEL) as server:
        yield server


@pytest.mark.parametrize("said", [b"", REQUEST], ids=["nothing", "half a request"])
def test_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """They are closed for those that ask; nothing is written but a line now and then, and no core burns."""
    with few_descriptors(monkeypatch) as server, ExitStack() as silent:
        for _ in range(2 * DESCRIPTORS):
            silent.enter_context(connected(server.url, said))
        before = processor_seconds(server) if sys.platform == "linux" else 0.0
        began = time.monotonic()
        for _ in range(3):
            assert status(server.url) == "ready"
        with opened(server.ws_url) as caller:
            caller.ping()
        time.sleep(1)
        if sys.platform == "linux":
            assert processor_seconds(server) - before < 0.7 * (time.monotonic() - began)
        lines = warnings(server)
        assert 1 <= len(lines) <= 2 + (time.monotonic() - began) / listening.LINE_SECONDS
        assert all(re.search(r"All \d+ connections are in use: silent ones are closed", line) for line in lines), lines


def test_no_descriptor_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound cannot help where others took the descriptors: it is said, and the server answers again."""
    taker = (
        "import resource, mlx_voicechat.server.sockets as s; s.most_connections = lambda _: 10_000; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS})); {PROGRAM}"
    )
    monkeypatch.setattr("tests.support.server.PROGRAM", taker)
    with serve_process("-m", MODEL) as server, ExitStack() as silent:
        for _ in range(2 * DESCRIPTORS):
            silent.enter_context(connected(server.url))
        assert status(server.url) == "ready"
        lines = warnings(server)
        assert 1 <= len(lines) <= 3
        assert all("No room for another connection (Too many open files)" in line for line in lines), lines


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(listening, "REQUEST_SECONDS", 0.5)
    with running_server(FakeModel(), max_sessions=2) as server:
        yield server


@pytest.mark.parametrize(
    "said",
    [
        b"",
        REQUEST,
        REQUEST + b"\r\nG",  # a whole one, then half a one on the same connection
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf",
    ],
)
def test_a_client_that_does_not_go_on_is_closed(impatient: RunningServer, said: bytes) -> None:
    with connected(impatient.url, said) as client:
        began = time.monotonic()
        assert is_closed(client)
        assert time.monotonic() - began > 0.3


def test_a_client_that_sends_a_letter_now_and_then_is_closed(impatient: RunningServer) -> None:
    with connected(impatient.url, b"GET /health HTTP/1.1\r\nHost: ") as client:
        deadline = time.monotonic() + SECONDS
        with suppress(ConnectionError):
            while time.monotonic() < deadline:
                client.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() < deadline


def test_a_conversation_is_no_silent_connection(impatient: RunningServer) -> None:
    with opened(impatient.ws_url) as caller:
        time.sleep(1.2)
        caller.ping()


def test_both_loopbacks_go_by_localhost() -> None:
    with running_server(FakeModel(), host="localhost") as server:
        port = urlsplit(server.url).port
        assert status(f"http://127.0.0.1:{port}") == "ready"
        assert status(f"http://[::1]:{port}") == "ready"


def test_a_family_that_is_not_there_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = socket.socket.bind

    def bind(self: socket.socket, address: tuple[str, int]) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(99, "Cannot assign requested address")
        plain(self, address)

    monkeypatch.setattr(socket.socket, "bind", bind)
    (one,) = listen("localhost", 0)
    with one:
        assert one.getsockname()[0] == "127.0.0.1"


def test_a_port_that_one_family_has_taken() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        command = [sys.executable, "-c", PROGRAM, "serve", "-m", MODEL, "--host", "localhost"]
        port = str(taken.getsockname()[1])
        done = subprocess.run([*command, "--port", port], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert f"Cannot listen on localhost port {port}: Address already in use" in done.stderr


def test_descriptors_for_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised where it may be; else the bound keeps below it."""
    limits = [256, 10_000]

    def raise_limit(_: int, wanted: tuple[int, int]) -> None:
        limits[0] = wanted[0]

    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(listening.resource, "setrlimit", raise_limit)
    monkeypatch.setattr(listening.os, "listdir", lambda _: ["descriptor"] * 20)  # however many tests left theirs open
    assert listening.most_connections(1) == 512
    assert 512 < limits[0] < 700
    assert listening.most_connections(1000) == 2000
    assert limits[0] > 2000
    limits[:] = [256, 256]
    assert 128 < listening.most_connections(1) < 224
