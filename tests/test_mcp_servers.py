"""MCP servers over stdio and HTTP: the example, one from the registry, and those that die, hang and flood."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the extra tools is not installed")

from mlx_voicechat.cli.mcp_config import Address, ServerEntry, servers_of
from mlx_voicechat.cli.mcp_process import Program
from mlx_voicechat.cli.mcp_servers import McpServers
from mlx_voicechat.cli.mcp_tools import result_text
from mlx_voicechat.errors import ToolError

EXAMPLE = Path(__file__).parents[1] / "examples" / "mcp_server.py"
BAD = Path(__file__).parent / "support" / "bad_mcp_server.py"
SECRET = "s3cret-value"


def bad(mode: str) -> ServerEntry:
    return ServerEntry(mode, Program([sys.executable, str(BAD), mode], {"TOKEN": SECRET}))


def call(servers: McpServers, server: str, name: str = "get_time", seconds: float = 20.0, **arguments: object) -> str:
    return result_text(servers.call(server, name, arguments, seconds), lambda text: len(text) <= 100)


@contextmanager
def connected(*entries: ServerEntry, start_seconds: float = 20.0) -> Iterator[tuple[McpServers, list[str]]]:
    said: list[str] = []
    with McpServers(list(entries), said.append, start_seconds) as servers:
        yield servers, said


def test_the_example() -> None:
    (entry,) = servers_of([f"{sys.executable} {EXAMPLE}"], None)
    with connected(entry) as (servers, said):
        assert [tool.name for _, tool in servers.listed()] == ["get_time", "get_weather"]
        assert call(servers, entry.name, "get_weather", city="Paris").startswith('{"city": "Paris", "weather": "')
        time.strptime(call(servers, entry.name), "%H:%M")
        with pytest.raises(ToolError, match="city Field required"):
            call(servers, entry.name, "get_weather")
        assert servers.all_usable
    assert said == []
    with pytest.raises(ToolError, match=r"was let go\."):
        call(servers, entry.name)


def test_one_of_the_registry() -> None:
    pytest.importorskip("mcp_server_time", reason="mcp-server-time is not installed")
    with connected(ServerEntry("time", Program([sys.executable, "-m", "mcp_server_time"]))) as (servers, said):
        assert "get_current_time" in [tool.name for _, tool in servers.listed()]
        result = servers.call("time", "get_current_time", {"timezone": "Europe/Paris"})
        assert result_text(result, lambda text: True).startswith('{"timezone": "Europe/Paris", "datetime": "20')
        with pytest.raises(ToolError, match="Nowhere"):
            call(servers, "time", "get_current_time", timezone="Nowhere")
    assert said == []


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("dies_when_listing", "ended with exit code 1: the licence has expired"),
        ("hangs_when_listing", "did not list its tools within 2 s"),
    ],
)
def test_without_tools_from_the_beginning(mode: str, fault: str) -> None:
    with connected(bad(mode), bad("good"), start_seconds=2.0) as (servers, said):
        assert said == [f"the MCP server {mode} {fault}: its tools cannot be called."]
        assert not servers.all_usable
        assert call(servers, "good") == f'["get_time", {{}}, "{SECRET}", "good"]'
        with pytest.raises(ToolError, match=fault):
            call(servers, mode)


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("dies_in_a_call", "ended with exit code 3: KeyError: no key *** here"),
        ("floods_in_a_call", "sent more than 1,000 messages in a second"),
        ("endless_line", "sent a message of more than 4,194,304 bytes"),
        ("hangs_in_a_call", "did not answer within 2 s"),
        ("not_a_result", "failed: "),
        ("says_no", f'["get_time", {{}}, "{SECRET}", "says_no"]'),
        ("image", "The tool gave no text, but image."),
    ],
)
def test_faults_of_a_call_are_of_that_server_alone(mode: str, fault: str) -> None:
    with connected(bad(mode), bad("good")) as (servers, said):
        with pytest.raises(ToolError) as raised:
            call(servers, mode, seconds=2.0 if mode.startswith("hangs") else 20.0)
        assert fault in str(raised.value)
        if mode in ("dies_in_a_call", "floods_in_a_call", "endless_line"):
            assert said == [f"the MCP server {mode} {fault}: its tools cannot be called."]
            with pytest.raises(ToolError, match=r"ended with|sent (more|a message)"):
                call(servers, mode)
        else:
            assert said == []
        assert call(servers, "good") == f'["get_time", {{}}, "{SECRET}", "good"]'


def test_a_server_that_ends_between_calls_is_told_of_at_once() -> None:
    with connected(bad("dies_when_idle")) as (_, said):
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
        assert said == ["the MCP server dies_when_idle ended with exit code 4: its tools cannot be called."]


def test_calls_of_several_threads_and_an_end_amid_them() -> None:
    texts: list[str] = []

    def repeat(servers: McpServers) -> None:
        try:
            while True:
                texts.append(call(servers, "good", of=threading.get_ident()))
                assert f'"of": {threading.get_ident()}' in texts[-1]
        except ToolError as fault:
            texts.append(str(fault))

    with connected(bad("good"), bad("hangs_in_a_call")) as (servers, said):
        callers = [threading.Thread(target=repeat, args=(servers,)) for _ in range(4)]
        stuck = threading.Thread(target=lambda: texts.append(_fault_of(servers)))
        for thread in [*callers, stuck]:
            thread.start()
        time.sleep(0.5)
    for thread in [*callers, stuck]:
        thread.join(10)
        assert not thread.is_alive()
    assert sum("let go" in text for text in texts) == 5, texts[-5:]
    assert len(texts) > 20
    assert said == []


def _fault_of(servers: McpServers) -> str:
    with pytest.raises(ToolError) as raised:
        call(servers, "hangs_in_a_call")
    return str(raised.value)


def test_a_list_that_never_ends_is_cut() -> None:
    with connected(bad("endless_list")) as (servers, _):
        assert len(servers.listed()) == 20


def test_over_http() -> None:
    import uvicorn
    from mcp.server import MCPServer

    server = MCPServer("far")
    server.tool()(double)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        app = server.streamable_http_app()
        running = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        address = Address(f"http://127.0.0.1:{port}/mcp?key={SECRET}", {"Authorization": f"Bearer {SECRET}"})
        with connected(ServerEntry("far", address)) as (servers, said):
            assert call(servers, "far", "double", number=21) == "42"
            running.should_exit = True
            thread.join(10)
            with pytest.raises(ToolError) as raised:
                call(servers, "far", "double", seconds=5, number=21)
            assert SECRET not in str(raised.value)
        assert said == ["the MCP server far could not be reached (ConnectError): its tools cannot be called."]
    with connected(ServerEntry("far", address), start_seconds=5) as (_, said):
        assert len(said) == 1
        assert said[0].startswith("the MCP server far could not be reached")
        assert SECRET not in said[0]


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number
