"""Which dialect a connection speaks, and what the routes say of it."""

import json
import urllib.request
from collections.abc import Mapping

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from mlx_voicechat.server.dialects import PATHS, Dialect, UnknownProtocol, chosen
from mlx_voicechat.server.settings import PROTOCOLS
from tests.support.fake_model import FakeModel
from tests.support.server import running_server

BETA = {"openai-beta": "realtime=v1"}


def of(
    path: str = "/v1/realtime",
    query: Mapping[str, str] = {},
    headers: Mapping[str, str] = {},
    subprotocols: tuple[str, ...] = (),
    default: str = "mlxcel",
) -> Dialect:
    return chosen(path, query, headers, subprotocols, default)


@pytest.mark.parametrize("default", PROTOCOLS)
def test_a_bare_connection_speaks_the_servers_dialect(default: str) -> None:
    assert of(default=default) == Dialect(default)
    assert of(query={"voice": "x", "duplex": "0"}, headers={"x": "y"}, default=default) == Dialect(default)


@pytest.mark.parametrize("value", ["1", "true", "on", "TRUE"])
def test_duplex_by_query(value: str) -> None:
    assert of(query={"duplex": value, "model": "any"}) == Dialect("duplex")


@pytest.mark.parametrize("value", ["0", "false", "off", "", "2"])
def test_no_duplex_by_query(value: str) -> None:
    assert of(query={"duplex": value}) == Dialect("mlxcel")
    assert of(query={"duplex": value, "model": ""}) == Dialect("openai")


def test_openai_by_what_its_clients_send() -> None:
    assert of(query={"model": "gpt-realtime"}) == Dialect("openai")
    assert of(headers=BETA) == Dialect("openai", beta=True)
    assert of(headers={"openai-beta": "other=1, realtime=v1"}) == Dialect("openai", beta=True)
    assert of(headers={"openai-beta": "realtime=v2"}) == Dialect("mlxcel")
    assert of(subprotocols=("realtime", "openai-beta.realtime-v1")) == Dialect("openai", beta=True)


def test_precedence() -> None:
    asked = {"protocol": "strict-v3", "duplex": "1", "model": "m"}
    assert of("/v1/duplex", asked, BETA) == Dialect("duplex")
    assert of("/v1/realtime/v3", {"protocol": "mlxcel"}) == Dialect("strict-v3")
    assert of(query=asked, headers=BETA) == Dialect("strict-v3")
    assert of(query={"duplex": "1"}, headers=BETA) == Dialect("duplex")
    assert of(query={"protocol": "openai"}, headers=BETA) == Dialect("openai", beta=True)
    assert set(PATHS) == {"/v1/realtime", "/v1/duplex", "/v1/realtime/v3"}


@pytest.mark.parametrize("name", ["webrtc", "MLXCEL", "openai "])
def test_an_unknown_protocol(name: str) -> None:
    with pytest.raises(UnknownProtocol):
        of(query={"protocol": name})


def test_routes_name_the_dialects() -> None:
    with running_server(FakeModel()) as server:
        health, models = (json.load(urllib.request.urlopen(server.url + path)) for path in ("/health", "/v1/models"))
        assert health["protocols"] == models["data"][0]["protocols"]
        assert set(health["protocols"]) <= set(PROTOCOLS)
        with pytest.raises(InvalidStatus) as refused, connect(server.ws_url + "?protocol=nothing"):
            pass
        assert refused.value.response.status_code == 400
        assert json.loads(refused.value.response.body or b"")["error"]["code"] == "unknown_protocol"
        for name in health["protocols"]:
            with connect(f"{server.ws_url}?protocol={name}"):
                pass
