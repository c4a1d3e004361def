"""Which tools of MCP servers are offered, under which names, and what is made of their results."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_voicechat.cli.mcp_tools import allowed_name, choose, cut, result_text
from mlx_voicechat.cli.tool_files import one_name
from mlx_voicechat.errors import InputError, ToolError
from mlx_voicechat.tools.tool import NAME


def tool(name: str, description: str | None = "Does it.", **schema: Any) -> Any:
    return SimpleNamespace(name=name, description=description, input_schema={"type": "object", **schema})


def given_back(*texts: str, is_error: bool = False, structured: object = None) -> Any:
    blocks = [SimpleNamespace(type="text", text=text) for text in texts]
    return SimpleNamespace(content=blocks, structured_content=structured, is_error=is_error)


def listed(*names: str, server: str = "s") -> list[tuple[str, Any]]:
    return [(server, tool(name)) for name in names]


def always(_: str) -> bool:
    return True


def test_a_few_tools_are_all_offered_in_silence() -> None:
    said: list[str] = []
    chosen = choose(listed("get_time", "get-weather"), [], [], True, said.append)
    assert [each.offered.name for each in chosen] == ["get_time", "get-weather"]
    assert said == []


def test_of_sixty_five_are_offered_and_it_is_told() -> None:
    said: list[str] = []
    chosen = choose(listed(*(f"tool_{n}" for n in range(60))), [], [], True, said.append)
    assert [each.name for each in chosen] == [f"tool_{n}" for n in range(5)]
    assert said == [
        "60 MCP tools are listed and 5 offered to the model: tool_0, tool_1, tool_2, tool_3, tool_4. "
        "Pick others with --mcp-tools."
    ]


def test_picked_by_either_name() -> None:
    said: list[str] = []
    tools = listed("a.b/c", *(f"tool_{n}" for n in range(60)))
    chosen = choose(tools, ["a.b/c", "tool_7", "tool_59"], [], True, said.append)
    assert [(each.offered.name, each.name) for each in chosen] == [
        ("a_b_c", "a.b/c"),
        ("tool_7", "tool_7"),
        ("tool_59", "tool_59"),
    ]
    assert choose(tools, ["a_b_c"], [], True, said.append) == chosen[:1]
    assert said == ["the tool 'a.b/c' of s is called a_b_c here."] * 2


def test_picked_and_not_there() -> None:
    said: list[str] = []
    fault = "--mcp-tools: no MCP server lists sing, dance; there are a, b."
    with pytest.raises(InputError, match=re.escape(fault)):
        choose(listed("a", "b"), ["a", "sing", "dance"], [], True, said.append)
    assert [each.name for each in choose(listed("a", "b"), ["a", "sing", "dance"], [], False, said.append)] == ["a"]
    assert said == [fault]


def test_names_that_collide_stay_apart() -> None:
    said: list[str] = []
    tools = [*listed("a.b/c", "a_b_c", "a-b-c", server="one"), *listed("a_b_c", "9 lives", server="two")]
    chosen = choose(tools, [], ["get_time"], True, said.append)
    assert [each.offered.name for each in chosen] == ["a_b_c", "a_b_c_2", "a-b-c_3", "a_b_c_4", "_9_lives"]
    assert [each.name for each in chosen] == ["a.b/c", "a_b_c", "a-b-c", "a_b_c", "9 lives"]
    assert said[1] == "the tool 'a_b_c' of one is called a_b_c_2 here."
    assert len(said) == 5
    assert choose(listed("get-time"), [], ["get_time"], True, said.append)[0].offered.name == "get-time_2"


@given(st.lists(st.text(max_size=140), max_size=12))
def test_made_names_are_allowed_and_unique(names: list[str]) -> None:
    taken: set[str] = set()
    made = [allowed_name(name, taken) for name in names]
    assert all(NAME.fullmatch(name) for name in made)
    assert len({one_name(name) for name in made}) == len(made)
    if names and NAME.fullmatch(names[0]):
        assert made[0] == names[0]


def test_what_the_model_is_told_is_short() -> None:
    said: list[str] = []
    long = tool("long", "It does a lot. " * 100, properties={"city": {"type": "string", "title": "City"}}, title="Args")
    huge = tool("huge", None, properties={f"field_{n}": {"type": "string"} for n in range(500)})
    titled = tool("titled", properties={"title": {"type": "string", "title": "Title"}})
    chosen = choose([("s", long), ("s", huge), ("s", titled)], [], [], True, said.append)
    assert [each.name for each in chosen] == ["long", "titled"]
    assert chosen[0].offered.description == ("It does a lot. " * 33).strip()
    assert chosen[0].offered.parameters == {"type": "object", "properties": {"city": {"type": "string"}}}
    assert chosen[1].offered.parameters["properties"] == {"title": {"type": "string"}}
    assert said == ["the tool huge of s is not offered: its parameters take more than 4000 characters."]


def test_results() -> None:
    assert result_text(given_back("one", "two"), always) == "one\ntwo"
    assert result_text(given_back('{\n  "a": [1,\n 2]\n}'), always) == '{"a": [1, 2]}'
    assert result_text(given_back(structured={"a": 1}), always) == '{"a": 1}'
    assert result_text(given_back(), always) == ""
    with pytest.raises(ToolError, match="no such city"):
        result_text(given_back("no such\n city", is_error=True), always)
    with pytest.raises(ToolError, match=r"The tool failed\."):
        result_text(given_back(is_error=True), always)
    image = SimpleNamespace(type="image", data="AAAA")
    with pytest.raises(ToolError, match="no text, but image"):
        result_text(SimpleNamespace(content=[image], structured_content=None, is_error=False), always)


@pytest.mark.parametrize(
    ("text", "most", "short"),
    [
        ("It rains. It is cold! Will it stay?", 35, "It rains. It is cold! Will it stay?"),
        ("It rains. It is cold! Will it stay?", 34, "It rains. It is cold!"),
        ("It rains. It is cold! Will it stay?", 20, "It rains."),
        ("At 3.5 degrees it rains", 9, "At 3.5"),
        ('He said "no." Then he left.', 20, 'He said "no."'),
        ("first line\nsecond line", 15, "first line"),
        ("abcdefgh", 3, "abc"),
        ("abc", 0, ""),
    ],
)
def test_cut(text: str, most: int, short: str) -> None:
    assert cut(text, lambda part: len(part) <= most) == short


@given(st.text(), st.integers(0, 30))
def test_what_is_cut_fits_and_begins_the_text(text: str, most: int) -> None:
    short = cut(text, lambda part: len(part) <= most)
    assert len(short) <= most
    assert text.startswith(short)
