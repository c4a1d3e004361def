"""A server among several: when it is ready, how it drains, and the files of deploy/ (the slow one: HAProxy itself)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import plistlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mlx_voicechat.server.messages import Open
from mlx_voicechat.server.settings import ServerSettings
from tests.support.caller import append, calling, opened
from tests.support.fake_model import FakeModel
from tests.support.server import RunningServer, running_server, serve_process

DEPLOY = Path(__file__).parents[1] / "deploy"
CERTIFICATE = "/etc/haproxy/voicechat.pem"
WAIT_SECONDS = 60


def ready(url: str) -> tuple[int, str]:
    """Status and word of /ready."""
    status, headers, body = asked(f"{url}/ready")
    assert ("retry-after" in headers) == (status == 503)
    return status, json.loads(body)["status"]


def asked(url: str, context: ssl.SSLContext | None = None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (in lower case) and body of a page."""
    answer: Any
    try:
        answer = urllib.request.urlopen(url, timeout=10, context=context)
    except urllib.error.HTTPError as refused:
        answer = refused
    with answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()


def health(url: str) -> str:
    return str(json.loads(asked(f"{url}/health")[2])["status"])


def until(what: Any, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# /ready


def test_ready_when_a_conversation_can_begin() -> None:
    model, go = FakeModel(), threading.Event()
    model.warm = lambda voice=None, sessions=1: go.wait(WAIT_SECONDS)  # type: ignore[assignment, method-assign]
    with running_server(model, wait_ready=False, api_key="asked for elsewhere") as server:
        assert ready(server.url) in ((503, "loading"), (503, "warming"))
        go.set()
        server.engine.wait_ready(WAIT_SECONDS)
        assert ready(server.url) == (200, "ready")
        slot = server.loop.call_soon_threadsafe(server.engine.take_slot, lambda event: None)
        until(lambda: server.engine.busy)
        assert slot is not None
        assert (ready(server.url), health(server.url)) == ((503, "full"), "busy")
        server.engine.draining = True
        assert (ready(server.url), health(server.url)) == ((503, "draining"), "busy")


# Draining


def terminate(server: RunningServer) -> None:
    """What SIGTERM does, on the loop as a signal's handler is."""
    server.loop.call_soon_threadsafe(server.server.handle_exit, signal.SIGTERM, None)


@pytest.fixture
def draining() -> Iterator[RunningServer]:
    """A server of two sessions, with one that is open (`drain` makes it drain); its server is told of the engine."""
    with running_server(FakeModel(), max_sessions=2, drain_seconds=WAIT_SECONDS) as server:
        server.server._engine = server.engine
        yield server


def test_a_server_that_drains_ends_after_its_last_conversation(draining: RunningServer) -> None:
    with opened(draining.ws_url) as caller:
        terminate(draining)
        until(lambda: draining.engine.draining)
        assert ready(draining.url) == (503, "draining")
        with pytest.raises(InvalidStatus) as refused, calling(draining.ws_url):
            pass
        assert refused.value.response.status_code == 503
        assert json.loads(refused.value.response.body)["error"]["code"] == "draining"
        caller.send(append(np.zeros(1280, np.int16)))
        caller.frames(1)
        caller.send({"type": "input_audio_buffer.commit"})
        assert caller.until("response.done")
        assert not draining.server.should_exit
    until(lambda: draining.server.should_exit)
    assert draining.server.ended_by == signal.SIGTERM


def test_a_connection_without_a_session_yet_is_let_to_open_one(draining: RunningServer) -> None:
    with calling(draining.ws_url) as caller:
        assert caller.receive()["type"] == "session.created"
        terminate(draining)
        until(lambda: draining.engine.draining)
        caller.send({"type": "session.update", "session": {}})
        assert caller.receive()["type"] == "session.updated"


def test_a_second_signal_does_not_wait(draining: RunningServer) -> None:
    with opened(draining.ws_url) as caller:
        terminate(draining)
        until(lambda: draining.engine.draining)
        terminate(draining)
        with pytest.raises(ConnectionClosed) as closed:
            caller.until("nothing")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001


def test_the_time_to_drain_ends() -> None:
    with running_server(FakeModel(), drain_seconds=0.2) as server:
        server.server._engine = server.engine
        with opened(server.ws_url):
            terminate(server)
            until(lambda: server.server.should_exit)


def test_a_session_that_waits_to_be_resumed_is_waited_for(draining: RunningServer) -> None:
    found: list[Any] = []
    request = Open(None, 0, 1.0)
    draining.loop.call_soon_threadsafe(lambda: found.append(draining.engine.reserve(request, lambda event: None)))
    until(lambda: found)
    terminate(draining)
    until(lambda: draining.engine.draining)
    assert draining.server._in_use
    draining.loop.call_soon_threadsafe(found[0].release)
    until(lambda: draining.server.should_exit)


def test_without_drain_seconds_sigterm_ends_at_once() -> None:
    assert ServerSettings("tiny").drain_seconds == 0
    with running_server(FakeModel()) as server:
        server.server._engine = server.engine
        terminate(server)
        until(lambda: server.server.should_exit)
        assert not server.engine.draining


# The files of deploy/


@pytest.fixture(scope="module")
def haproxy() -> str:
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("no haproxy")
    return found


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True, timeout=WAIT_SECONDS)
    both = folder / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    return both


def test_the_configuration_of_haproxy_is_one(haproxy: str, certificate: Path, tmp_path: Path) -> None:
    text = (DEPLOY / "haproxy.cfg").read_text()
    assert CERTIFICATE in text
    checked = tmp_path / "haproxy.cfg"
    checked.write_text(text.replace(CERTIFICATE, str(certificate)))
    done = subprocess.run([haproxy, "-c", "-f", checked], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr


def test_launchd_starts_a_server_that_drains() -> None:
    found = plistlib.loads((DEPLOY / "mlx-voicechat.plist").read_bytes())
    arguments = found["ProgramArguments"]
    assert arguments[1] == "serve"
    drain = float(arguments[arguments.index("--drain-seconds") + 1])
    assert found["ExitTimeOut"] > drain
    assert found["KeepAlive"] is found["RunAtLoad"] is True


# HAProxy before two servers

CLIENTS, ROOM, FRAMES = 40, 40, 12


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def balanced(haproxy: str, certificate: Path, folder: Path, ports: list[int]) -> Iterator[str]:
    """deploy/haproxy.cfg before servers on these ports, its addresses replaced; gives the https address's netloc."""
    plain, public = free_port(), free_port()
    text = (DEPLOY / "haproxy.cfg").read_text().replace(CERTIFICATE, str(certificate))
    text = text.replace("bind :80", f"bind 127.0.0.1:{plain}").replace("bind :443", f"bind 127.0.0.1:{public}")
    for index, port in enumerate(ports):
        text = text.replace(f"192.168.1.1{index + 1}:8080", f"127.0.0.1:{port}")
    text = re.sub(r"maxconn 1$", f"maxconn {ROOM}", text, flags=re.MULTILINE)
    assert "192.168" not in text
    written = folder / "haproxy.cfg"
    written.write_text(text)
    with open(folder / "haproxy.log", "w") as log:
        process = subprocess.Popen([haproxy, "-db", "-f", written], stdout=log, stderr=log)
        try:
            until(lambda: listens(public))
            yield f"localhost:{public}"
        finally:
            process.terminate()
            process.wait(WAIT_SECONDS)


async def conversation(url: str, context: Any, began: list[float]) -> int:
    """A whole conversation of the dialect mlxcel in real time; how many frames were spoken before it was done."""
    async with connect(url, ssl=context, open_timeout=WAIT_SECONDS) as connection:

        async def until_kind(kind: str) -> int:
            frames = 0
            while True:
                event = json.loads(await asyncio.wait_for(connection.recv(), WAIT_SECONDS))
                assert event["type"] != "error", event
                frames += event["type"] == "response.audio.delta"
                if event["type"] == kind:
                    return frames

        await until_kind("session.created")
        await connection.send(json.dumps({"type": "session.update", "session": {}}))
        await until_kind("session.updated")
        began.append(time.monotonic())
        for _ in range(FRAMES):
            await connection.send(json.dumps(append(np.zeros(1280, np.int16))))
            await asyncio.sleep(0.08)
        await connection.send(json.dumps({"type": "input_audio_buffer.commit"}))
        return await until_kind("response.done")


def fleet_server(port: int) -> Any:
    """`serve` of the demonstration model on this port, that drains."""
    options = ("--port", str(port), "--max-sessions", str(ROOM), "--drain-seconds", str(WAIT_SECONDS))
    return serve_process("-m", "tiny", *options)


@pytest.mark.slow
def test_no_conversation_is_cut_or_refused_while_a_server_restarts(
    haproxy: str, certificate: Path, tmp_path: Path
) -> None:
    context = ssl.create_default_context(cafile=str(certificate))
    ports = [free_port(), free_port()]
    began: list[float] = []

    async def callers(address: str, server: Any, again: contextlib.ExitStack) -> list[int]:
        """All clients, one every quarter of a second; meanwhile the server drains, ends and starts again."""
        tasks = []

        def restart() -> int:
            assert began
            code = server.end(seconds=WAIT_SECONDS)
            again.enter_context(fleet_server(ports[0]))
            return int(code)

        restarted = None
        for index in range(CLIENTS):
            tasks.append(asyncio.create_task(conversation(f"wss://{address}/v1/realtime", context, began)))
            await asyncio.sleep(0.25)
            if index == CLIENTS // 4:
                restarted = asyncio.get_running_loop().run_in_executor(None, restart)
        assert restarted is not None
        assert await restarted == 128 + signal.SIGTERM
        return list(await asyncio.gather(*tasks))

    with contextlib.ExitStack() as servers:
        first, _ = (servers.enter_context(fleet_server(port)) for port in ports)
        address = servers.enter_context(balanced(haproxy, certificate, tmp_path, ports))
        until(lambda: asked(f"https://{address}/health", context)[0] == 200)
        spoken = asyncio.run(callers(address, first, servers))
        assert ready(f"http://127.0.0.1:{ports[0]}") == (200, "ready")
    assert spoken == [FRAMES] * CLIENTS
