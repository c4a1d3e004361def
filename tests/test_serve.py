"""The command `serve` as a process: what it says when it begins, how it ends, what it refuses."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from mlx_voicechat.cli.main import run
from mlx_voicechat.server.access import is_loopback
from tests.support.caller import greeted, opened
from tests.support.checkpoints import GOLDEN
from tests.support.faults import RawClient, audio
from tests.support.server import PROGRAM, serve_process

MODEL = str(GOLDEN / "tiny-f32")
SECONDS = 30


def failing(*arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of stderr of a server that does not come to be ready."""
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_open_sockets_in_the_middle_of_frames(number: signal.Signals) -> None:
    with serve_process("-m", MODEL) as server:
        assert server.stderr[0] == f"ready: {server.ws_url}\n"
        with greeted(server.ws_url) as idle, greeted(server.ws_url) as talking:
            talking.open()
            talking.send({"type": "input_audio_buffer.append", "audio": audio(16000 * 20)})
            talking.until("response.audio.delta")
            assert server.end(number) == 128 + number
            assert talking.closed()[0] == idle.closed()[0] == 1001
            assert talking.events[-1]["frame_index"] < 200
    said = {signal.SIGINT: "note: interrupted.\n", signal.SIGTERM: "note: ended by SIGTERM.\n"}
    assert server.stderr[1:] == [said[number]]
    assert "Traceback" not in "".join(server.stderr)


def test_a_second_signal_ends_at_once() -> None:
    with serve_process("-m", MODEL) as server:
        client = RawClient(server.ws_url).greeted()  # does not answer the closing, so that the end takes a while
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.15)
        assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
        client.socket.close()
    assert "note: ended by" not in "".join(server.stderr)


def test_a_key_and_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True, timeout=SECONDS)
    context = ssl.create_default_context(cafile=certificate)
    monkeypatch.setenv("MLX_VOICECHAT_API_KEY", "a-secret-key")
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with serve_process("-m", MODEL, *tls, "--api-prefix", "voice/", "--log-level", "debug", "--alias", "it") as server:
        assert server.ws_url.startswith("wss://127.0.0.1:")
        assert server.ws_url.endswith("/voice/v1/realtime")
        origin = server.ws_url.replace("wss", "https").removesuffix("/v1/realtime")
        with urllib.request.urlopen(f"{origin}/health", context=context) as answer:
            assert json.load(answer)["model"] == "it"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{origin}/v1/models", context=context)
        protocols: Any = ["realtime", "openai-insecure-api-key.a-secret-key"]
        with connect(server.ws_url, ssl=context, subprotocols=protocols) as page:
            assert page.subprotocol == "realtime"
        header = {"Authorization": "Bearer a-secret-key"}
        with connect(server.ws_url, ssl=context, additional_headers=header) as program:
            program.recv(SECONDS)
            program.send(json.dumps({"type": "session.update"}))
            assert json.loads(program.recv(SECONDS))["session"]["model"] == "it"
            program.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio(1280)}))
            while json.loads(program.recv(SECONDS))["type"] != "response.audio.delta":
                pass
    assert "secret" not in "".join(server.stderr)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["-m", "/no/such/folder"], "no folder /no/such/folder"), (["-m", MODEL, "--voice", "Bob"], "no voice 'Bob'")],
)
def test_a_model_that_cannot_be_loaded(arguments: list[str], word: str) -> None:
    code, lines = failing(*arguments)
    assert code == 2
    assert word in lines[-1]
    assert lines[-1].startswith("error: ")
    assert not any("ready" in line for line in lines)


def test_ended_while_loading() -> None:
    """A hub that never answers holds the engine thread; the routes answer meanwhile, and a signal ends it."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", PROGRAM, "serve", "--port", str(port), "-m", "nobody/nothing"]
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "PATH": ""}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            connection, _ = silent.accept()
            with pytest.raises(urllib.error.HTTPError) as loading:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
            assert (loading.value.code, loading.value.headers["Retry-After"]) == (503, "2")
            assert json.load(loading.value)["status"] == "loading"
            loading.value.close()
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=SECONDS)
            connection.close()
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "note: ended while the model was at work."


def test_ended_while_warming() -> None:
    """The model becomes ready while the server ends: that is not announced, and its socket is not asked for."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", str(port), "-m", MODEL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        status, deadline = "", time.monotonic() + SECONDS
        while status != "warming" and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    status = json.load(answer)["status"]
                    break  # ready already: the test sees nothing
            except urllib.error.HTTPError as loading:
                with loading:
                    status = json.load(loading)["status"]
            except urllib.error.URLError:
                time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert ("ready" in stderr) == (status == "ready")


def test_who_is_refused_is_no_fault_of_the_server() -> None:
    broken = b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nnothing\r\n"
    with serve_process("-m", MODEL, "--alias", "caf\udce9") as server:
        with pytest.raises(InvalidStatus, match="403"), connect(server.ws_url, origin=cast(Any, "http://evil.example")):
            pass
        with pytest.raises(InvalidStatus, match="404"), connect(server.ws_url + "/nothing"):
            pass
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), SECONDS) as client:
            client.sendall(broken)
            assert client.recv(100).startswith(b"HTTP/1.1 400")
            while client.recv(1000):
                pass
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert json.load(answer)["model"] == "caf?"
        server.end()
    said = "".join(server.stderr)
    assert "ERROR" not in said
    assert "Traceback" not in said


def test_an_address_that_is_not_to_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, lines = failing("--port", str(taken.getsockname()[1]), "-m", MODEL)
    assert code == 1
    assert "Address already in use" in lines[-1]
    code, (error,) = failing("--host", "192.0.2.1", "-m", MODEL)  # an address of nobody's, for examples
    assert code == 1
    assert "Cannot listen on 192.0.2.1" in error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--allowed-origins", "example.org"], "https://name"),
        (["--cors-origins", "https://a.org,https://b.org/path"], "https://b.org/path"),
        (["--cors-origins", "http://["], "http://["),
        (["--allowed-origins", "http://a.org:99999"], "http://a.org:99999"),
        (["--allowed-origins", "https://a*.org"], "https://*.name"),
        (["--allowed-origins", "http://*:3000"], "https://*.name"),
        (["--allowed-origins", "*://a.org"], "https://name"),
        (["--allowed-origins", "https://a.org,file:///x"], "allow null"),
        (["--cors-origins", "ws://a.org:8080"], "http://a.org:8080"),
        (["--api-prefix", "/{name:nothing}"], "--api-prefix"),
        (["--api-prefix", "a//b"], "--api-prefix"),
        (["--host", ""], "--host"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        (["--ssl-certfile", "no.pem"], "no.pem"),
        (["--ssl-certfile", __file__], "PEM"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "two words"], "--api-key"),
        (["--log-level", "loud"], "loud"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--max-audio-seconds", "0"], "0"),
        (["--idle-seconds", "nan"], "nan"),
        (["--max-message-bytes", "1"], "--max-message-bytes"),
        (["--port", "70000"], "--port"),
    ],
)
def test_options_that_are_refused(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "-m", MODEL, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


@pytest.mark.parametrize(
    ("key", "word"), [("s3cret-Key~", None), ("a/b=c=", "no browser sends /= with"), ("schlüssel", "sends ü with")]
)
def test_a_key_that_no_browser_can_send_gets_a_word(key: str, word: str | None) -> None:
    with serve_process("-m", MODEL, "--api-key", key) as server:
        said = [line for line in server.stderr if "--api-key" in line]
    assert len(said) == (word is not None)
    assert word is None or word in said[0]
    assert key not in "".join(server.stderr)


def test_a_server_that_stood_still_keeps_who_went_on_talking() -> None:
    """The process is stopped, as a laptop's sleep does it, for longer than a client may be silent, or slow."""
    limits = "--max-sessions", "2", "--idle-seconds", "2", "--setup-seconds", "2"
    with ExitStack() as stack:
        server = stack.enter_context(serve_process("-m", MODEL, *limits))
        caller, other = stack.enter_context(opened(server.ws_url)), stack.enter_context(greeted(server.ws_url))
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            for _ in range(8):
                time.sleep(0.5)
                caller.send({"type": "session.ping"})
                other.send({"type": "session.ping"})
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        for one in (caller, other):
            for _ in range(8):
                assert one.receive()["type"] == "session.pong"
        caller.send({"type": "input_audio_buffer.append", "audio": audio(1280)})
        caller.until("response.audio.delta")
        assert caller.closed()[0] == 1008  # silence still ends it


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
