"""A file's tools and MCP servers' put together, as the options of commands name them."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_voicechat.cli.tool_sources import ToolOptions, ToolSources
from mlx_voicechat.errors import InputError, ToolError
from mlx_voicechat.events import FunctionCall

BAD = Path(__file__).parent / "support" / "bad_mcp_server.py"
ECHO = f"{shlex.quote(sys.executable)} -c 'import sys; print(sys.stdin.read())'"


def server(mode: str) -> str:
    return shlex.join([sys.executable, str(BAD), mode])


def tools_file(folder: Path, *names: str) -> Path:
    path = folder / "tools.json"
    path.write_text(json.dumps([{"name": name} for name in names]), encoding="utf-8")
    return path


class ByteTokenizer:
    """A token a byte."""

    added_tokens = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def called(sources: ToolSources, name: str, **arguments: object) -> str:
    """What a session gets that calls this tool."""
    tool = next(tool for tool in sources.tools if tool.name == name)
    assert tool.wants_call
    assert tool.callable is not None
    return str(tool.callable(FunctionCall(0, "call_1", name, arguments, "")))


def test_a_file_and_its_program(tmp_path: Path) -> None:
    said: list[str] = []
    options = ToolOptions.of(tools_file(tmp_path, "add", "mul"), ECHO, None, None, None, "One moment.")
    with ToolSources(options, said.append) as sources:
        assert [(tool.name, tool.on_hold) for tool in sources.tools] == [("add", "One moment."), ("mul", "One moment.")]
        call = json.loads(called(sources, "mul", a=2))
        assert call == {"name": "mul", "arguments": {"a": 2}, "call_id": "call_1"}
        sources.fit_to(SimpleNamespace(tokenizer=ByteTokenizer()))  # type: ignore[arg-type]
        with pytest.raises(ToolError, match=r"The result of add is longer than the model takes: 2\d\d characters\."):
            called(sources, "add", a="x" * 200)
    assert said == ["tools: add, mul."]


def test_with_servers(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the extra tools is not installed")
    said: list[str] = []
    mcp = [server("names"), server("dies_when_listing"), server("long")]
    options = ToolOptions.of(tools_file(tmp_path, "get-time", "a_b_c"), ECHO, mcp, None, "a.b/c,get_time", None)
    with ToolSources(options, said.append) as sources:
        names = [tool.name for tool in sources.tools]
        assert names == ["get-time", "a_b_c", "a_b_c_2", "get_time_2"]
        assert json.loads(called(sources, "a_b_c_2", x=1))[:2] == ["a.b/c", {"x": 1}]
        sources.fit_to(SimpleNamespace(tokenizer=ByteTokenizer()))  # type: ignore[arg-type]
        assert called(sources, "get_time_2") == " ".join(["It is four."] * 10)
        assert json.loads(called(sources, "get-time"))["name"] == "get-time"
    python = Path(sys.executable).name
    assert said == [
        f"the MCP server {python} bad_mcp_server.py (2) ended with exit code 1: the licence has expired: "
        "its tools cannot be called.",
        f"the tool 'a.b/c' of {python} bad_mcp_server.py is called a_b_c_2 here.",
        f"the tool 'get_time' of {python} bad_mcp_server.py (3) is called get_time_2 here.",
        "tools: get-time, a_b_c, a_b_c_2, get_time_2.",
    ]


def test_a_server_without_any_tool_left_is_no_end() -> None:
    pytest.importorskip("mcp", reason="the extra tools is not installed")
    said: list[str] = []
    with ToolSources(ToolOptions(mcp=(server("dies_when_listing"),)), said.append) as sources:
        assert sources.tools == ()
    assert said[-1] == "tools: none."


def test_sixty_tools() -> None:
    pytest.importorskip("mcp", reason="the extra tools is not installed")
    said: list[str] = []
    with ToolSources(ToolOptions(mcp=(server("sixty"),)), said.append) as sources:
        assert [tool.name for tool in sources.tools] == [f"tool_{number}" for number in range(5)]
    assert said[0].startswith("60 MCP tools are listed and 5 offered to the model: tool_0, ")
    many = tuple(f"tool_{number}" for number in range(40))
    fault = "40 tools are more than the 32 that the model takes."
    with (
        pytest.raises(InputError, match=fault),
        ToolSources(ToolOptions(mcp=(server("sixty"),), mcp_tools=many), said.append),
    ):
        pass
    with ToolSources(ToolOptions(mcp=(server("sixty"),), mcp_tools=many[:6]), said.append) as sources:
        assert len(sources.tools) == 6
    assert said[-1] == "6 tools are many for this model: 5 are recommended."


def test_without_options_there_is_nothing() -> None:
    said: list[str] = []
    with ToolSources(ToolOptions(), said.append) as sources:
        assert sources.tools == ()
    assert said == []
    assert not ToolOptions()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ((Path("x"), None, None, None, None, None), "--tools works only together with --tool-command."),
        ((None, "cat", None, None, None, None), "--tool-command works only together with --tools."),
        ((None, None, None, None, "a", None), "--mcp-tools works only together with --mcp or --mcp-config."),
        ((None, None, ["cat"], None, " , ", None), "--mcp-tools names no tool."),
        ((None, None, None, None, None, "Wait."), "--on-hold works only together with --tools, --mcp or --mcp-config."),
    ],
)
def test_options_that_lack_others(options: tuple[object, ...], fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        ToolOptions.of(*options)  # type: ignore[arg-type]
