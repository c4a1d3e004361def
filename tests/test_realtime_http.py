"""What is answered without a conversation: HTTP routes, and who may connect at all."""

import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus

import mlx_voicechat
from mlx_voicechat.voicechat import VoiceChat
from tests.support.caller import calling, opened
from tests.support.checkpoints import GOLDEN
from tests.support.server import RunningServer, running_server

KEY = "s3cret-Key"


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load(GOLDEN / "tiny-f32")


@pytest.fixture(scope="module")
def server(model: VoiceChat) -> Iterator[RunningServer]:
    with running_server(model) as server:
        yield server


def ask(server: RunningServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers (in lower case) and body."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def error(body: str) -> dict[str, str]:
    found = json.loads(body)["error"]
    assert set(found) == {"code", "message"}
    return dict(found)


def refused(url: str, **options: Any) -> tuple[int, dict[str, str]]:
    """Status and error with which an upgrade was refused, before it was accepted."""
    with pytest.raises(InvalidStatus) as refusal, calling(url, **options):
        pass
    response = refusal.value.response
    return response.status_code, error(response.body.decode())


def accepted(url: str, **options: Any) -> str | None:
    """The subprotocol of a connection that was greeted."""
    with calling(url, **options) as caller:
        assert caller.receive()["type"] == "session.created"
        return caller.socket.subprotocol


# Routes


def test_health(server: RunningServer) -> None:
    status, headers, body = ask(server, "/health")
    found = json.loads(body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert found["uptime_seconds"] >= 0
    assert found["status"] == "ready"
    assert found["sessions"] == {"active": 0, "max": 1}
    with opened(server.ws_url):
        found = json.loads(ask(server, "/health")[2])
        assert (found["status"], found["sessions"]) == ("busy", {"active": 1, "max": 1})


def test_models(model: VoiceChat, server: RunningServer) -> None:
    found = json.loads(ask(server, "/v1/models")[2])
    (one,) = found["data"]
    assert (found["object"], one["object"], one["id"]) == ("list", "model", "tiny-f32")
    with running_server(model, alias="aria") as named, opened(named.ws_url) as caller:
        assert json.loads(ask(named, "/v1/models")[2])["data"][0]["id"] == "aria"
        assert caller.events[-1]["session"]["model"] == "aria"


def test_metrics(server: RunningServer) -> None:
    with opened(server.ws_url) as caller:
        caller.refusal("no JSON")
    status, headers, text = ask(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    for word in ("sessions", "frames", "frame_seconds_bucket", "realtime_factor", "queue", "errors"):
        assert any(word in name for name in samples), (word, sorted(samples))
    assert any("invalid_request" in name and value >= 1 for name, value in samples.items())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_what_this_model_does_not_do(server: RunningServer, path: str) -> None:
    for method in ("POST", "GET"):
        status, _, body = ask(server, path, method)
        assert status == 501
        assert "/v1/realtime" in error(body)["message"]


def test_other_requests(server: RunningServer) -> None:
    status, headers, body = ask(server, "/v1/realtime")
    assert (status, headers["upgrade"].lower()) == (426, "websocket")
    assert error(body)["code"]
    for method, path, expected in ("GET", "/v2", 404), ("POST", "/health", 405), ("GET", "/v1/realtime/more", 404):
        status, _, body = ask(server, path, method)
        assert status == expected
        assert error(body)["message"]
    assert refused(server.ws_url + "/more")[0] == 404


def test_a_prefix_stands_before_every_route(model: VoiceChat) -> None:
    with running_server(model, api_prefix="/voice") as server:
        assert server.ws_url.endswith("/voice/v1/realtime")
        assert accepted(server.ws_url) is None
        for path, expected in (
            *(("/voice/health", 200), ("/voice/v1/models", 200), ("/voice/metrics", 200)),
            *(("/voice/v1/completions", 501), ("/voice/v1/realtime", 426), ("/health", 404), ("/v1/models", 404)),
        ):
            assert ask(server, path)[0] == expected, path
        assert refused(server.ws_url.replace("/voice", ""))[0] == 404
        assert "/voice/v1/realtime" in error(ask(server, "/voice/v1/messages", "POST")[2])["message"]


def test_while_the_model_loads(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    go, warm = threading.Event(), model.warm

    def slow(*arguments: Any) -> None:
        assert go.wait(60)
        warm(*arguments)

    monkeypatch.setattr(model, "warm", slow)
    with running_server(model, wait_ready=False) as server:
        try:
            status, headers, body = ask(server, "/health")
            assert (status, json.loads(body)["status"]) in ((503, "loading"), (503, "warming"))
            assert int(headers["retry-after"]) >= 1
            assert refused(server.ws_url)[0] == 503
        finally:
            go.set()
        server.engine.wait_ready(60)
        assert ask(server, "/health")[0] == 200
        assert accepted(server.ws_url) is None


# Keys


@pytest.fixture(scope="module")
def locked(model: VoiceChat) -> Iterator[RunningServer]:
    with running_server(model, api_key=KEY) as server:
        yield server


@pytest.mark.parametrize("given", [f"Bearer {KEY}", f"bearer {KEY}"])
def test_the_right_key(locked: RunningServer, given: str) -> None:
    assert accepted(locked.ws_url, additional_headers={"Authorization": given}) is None
    assert ask(locked, "/v1/models", Authorization=given)[0] == 200


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer é"]
)
def test_a_wrong_key(locked: RunningServer, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    status, why = refused(locked.ws_url, additional_headers=headers)
    assert status == 401
    assert KEY not in why["message"]
    assert ask(locked, "/v1/models", **headers)[0] == 401


def test_the_key_as_a_subprotocol(locked: RunningServer) -> None:
    right, wrong = f"openai-insecure-api-key.{KEY}", "openai-insecure-api-key.guess"
    assert accepted(locked.ws_url, subprotocols=["realtime", right]) == "realtime"
    assert accepted(locked.ws_url, subprotocols=[right, "realtime"]) == "realtime"
    assert accepted(locked.ws_url, subprotocols=[right]) is None
    for subprotocols in (["realtime"], ["realtime", wrong], [wrong], ["openai-insecure-api-key."]):
        assert refused(locked.ws_url, subprotocols=subprotocols)[0] == 401


def test_subprotocols_without_a_key(server: RunningServer) -> None:
    assert accepted(server.ws_url, subprotocols=["realtime"]) == "realtime"
    assert accepted(server.ws_url, subprotocols=["chat", "openai-beta.realtime-v1"]) is None


def test_the_key_is_not_told(locked: RunningServer) -> None:
    assert KEY not in ask(locked, "/metrics", Authorization=f"Bearer {KEY}")[2]
    assert KEY not in ask(locked, "/health")[2]


# Origins and hosts


@pytest.mark.parametrize(
    "origin",
    [
        None,
        *("http://localhost", "http://localhost:3000", "https://127.0.0.1:8080", "http://[::1]:5", "http://127.1.2.3"),
    ],
)
def test_origins_that_may(server: RunningServer, origin: str | None) -> None:
    accepted(server.ws_url, origin=origin)


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "https://evil.example",
            "null",
            "",
            "file://",
            "http://localhost.evil.example",
            "http://evil.example/localhost",
        ),
        *(
            "http://192.168.1.5",
            "http://localhost@evil.example",
            "http://127.0.0.1.evil.example",
            "http://[::1",
            "localhost",
        ),
    ],
)
def test_origins_that_may_not(server: RunningServer, origin: str) -> None:
    assert refused(server.ws_url, additional_headers={"Origin": origin})[0] == 403


def test_allowed_origins(model: VoiceChat) -> None:
    for option in ("allowed_origins", "cors_origins"):
        with running_server(model, **{option: ("https://app.example",)}) as server:
            accepted(server.ws_url, origin="https://app.example")
            accepted(server.ws_url, origin="http://localhost:5173")
            for origin in (
                "http://app.example",
                "https://app.example:444",
                "https://app.example.evil",
                "https://x.app.example",
            ):
                assert refused(server.ws_url, origin=origin)[0] == 403
            _, headers, _ = ask(server, "/health", Origin="https://app.example")
            shared = headers.get("access-control-allow-origin")
            assert shared == ("https://app.example" if option == "cors_origins" else None)
    with running_server(model, allowed_origins=("*",)) as server:
        accepted(server.ws_url, origin="https://anything.example")


def test_patterns_of_origins(model: VoiceChat) -> None:
    patterns = ("http://*.localhost:*", "null", "https://*.app.example")
    with running_server(model, allowed_origins=patterns) as server:
        for origin in ("http://a.localhost:3000", "http://a.b.localhost", "null", "https://me.app.example"):
            accepted(server.ws_url, origin=origin)
        assert ask(server, "/health", Host="me.localhost:80")[0] == 200
        assert ask(server, "/health", Host="me.localhost.evil")[0] == 403
        for origin in ("https://a.localhost", "https://app.example", "https://me.app.example:444", "http://x.evil", ""):
            assert refused(server.ws_url, additional_headers={"Origin": origin})[0] == 403
    with running_server(model, cors_origins=patterns) as server:
        for origin, shared in (
            ("null", "null"),
            ("http://a.localhost:3", "http://a.localhost:3"),
            ("http://evil", None),
        ):
            assert ask(server, "/health", Origin=origin)[1].get("access-control-allow-origin") == shared


@pytest.mark.parametrize("head", ["HTTP/1.0", "HTTP/1.0\r\nConnection: keep-alive"])
def test_http_1_0_without_a_host(server: RunningServer, head: str) -> None:
    """What load balancers send to see whether a server lives; a browser sends HTTP/1.1, and always a Host."""
    place = urlsplit(server.url)
    with socket.create_connection((str(place.hostname), place.port or 0), 30) as client:
        client.sendall(f"GET /health {head}\r\n\r\n".encode())
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")
    with socket.create_connection((str(place.hostname), place.port or 0), 30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 400")


def test_an_origin_does_not_replace_the_key(locked: RunningServer) -> None:
    assert refused(locked.ws_url, origin="http://localhost")[0] == 401
    headers = {"Authorization": f"Bearer {KEY}", "Origin": "https://evil.example"}
    assert refused(locked.ws_url, additional_headers=headers)[0] == 403


@pytest.mark.parametrize(("host", "expected"), [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200)])
def test_hosts_that_may(server: RunningServer, host: str, expected: int) -> None:
    assert ask(server, "/health", Host=host)[0] == expected


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "", "@", "a b"])
def test_hosts_that_may_not(server: RunningServer, host: str) -> None:
    assert ask(server, "/v1/models", Host=host)[0] in (400, 403)
    assert ask(server, "/health", Host=host)[0] in (400, 403)


def test_a_rebound_name_does_not_reach_the_socket(server: RunningServer) -> None:
    headers = {"Host": "evil.example:80", "Origin": "http://evil.example:80"}
    with pytest.raises(InvalidStatus) as refusal, calling(server.ws_url, additional_headers=headers):
        pass
    assert refusal.value.response.status_code in (400, 403)
