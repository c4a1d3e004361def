"""`--tools FILE`: what it may hold, and the words for every fault."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_voicechat.cli.tool_files import read_tools
from mlx_voicechat.errors import InputError
from mlx_voicechat.tools import Tool

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather in a city.", "parameters": SCHEMA}
NO_PARAMETERS = {"type": "object", "properties": {}}


def written(folder: Path, content: Any) -> Path:
    path = folder / "tools.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_flat_and_wrapped(tmp_path: Path) -> None:
    expected = Tool("get_weather", "Weather in a city.", SCHEMA)
    forms: list[dict[str, Any]] = [
        WEATHER,
        {"type": "function", **WEATHER, "strict": True},
        {"type": "function", "function": WEATHER},
        {"function": WEATHER},
    ]
    for form in forms:
        assert read_tools(written(tmp_path, [form])) == [expected]


def test_what_may_be_left_out(tmp_path: Path) -> None:
    entries = [{"name": "a"}, {"name": "b-c", "parameters": None, "on_hold": "One moment."}]
    assert read_tools(written(tmp_path, entries)) == [
        Tool("a", "", NO_PARAMETERS),
        Tool("b-c", "", NO_PARAMETERS, on_hold="One moment."),
    ]


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + json.dumps([WEATHER]).encode()
    assert read_tools(written(tmp_path, content))[0].name == "get_weather"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not JSON: Expecting value, line 1 column 1."),
        (b'[{"name": "a",}]', "is not JSON: "),
        (b'[{"name": NaN}]', "is not JSON: NaN is no JSON number."),
        (b"[" * 100_000, "is nested too deeply."),
        (b'["\xff"]', "is not UTF-8 at byte 2."),
        (b" " * (2**20 + 1), "is larger than 1,048,576 bytes."),
        (WEATHER, "holds an object. Write a JSON list"),
        ("get_weather", "holds no list."),
        ([], "holds an empty list."),
        ([{"name": f"t{n}"} for n in range(33)], "lists 33 tools, the model takes at most 32."),
        ([WEATHER, 3], ", entry 2 is no object."),
        ([{"function": 3}], ", entry 1 has a function that is no object."),
        ([{"type": "retrieval", "name": "a"}], ', entry 1 has the type "retrieval", expected function.'),
        ([{"description": "x"}], ", entry 1 has no name."),
        ([{"name": ""}], ", entry 1 has no name."),
        ([{"name": 3}], ", entry 1 has a name that is no text."),
        ([{"name": "9 lives"}], ", entry 1 (9 lives): A tool cannot be named '9 lives'. A name is a letter or _"),
        ([{"name": "x" * 129}], ": A tool cannot be named"),
        ([{**WEATHER, "description": ["x"]}], ", entry 1 (get_weather) has a description that is no text."),
        ([{**WEATHER, "parameters": "city"}], ", entry 1 (get_weather) has parameters that are no object"),
        ([{**WEATHER, "parameters": {"type": "string"}}], " has parameters whose type is not object."),
        ([{**WEATHER, "paramters": {}}], " has an unknown key 'paramters'; known are name, description"),
        ([{"type": "function", "function": {**WEATHER, "shape": 1}}], " has an unknown key 'shape'"),
        ([{"name": "get-time"}, WEATHER, {"name": "get_time"}], ": get-time and get_time are one name to the model."),
        ([WEATHER, WEATHER], ": get_weather and get_weather are one name to the model."),
    ],
)
def test_faults_name_the_entry(content: Any, fault: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InputError, match=re.escape(fault)) as raised:
        read_tools(path)
    assert str(raised.value).startswith(f"--tools {path}")
    assert raised.value.exit_code == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=re.escape(f"--tools {path} cannot be read: {why}.")):
            read_tools(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "type", "function"]), inner),
    max_leaves=8,
)


@given(content=JSON)
def test_any_json_is_read_or_refused(content: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.getbasetemp(), content)
    tools = None
    with suppress(InputError):
        tools = read_tools(path)
    assert tools is None or len(tools) == len(content)
