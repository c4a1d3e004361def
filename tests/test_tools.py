"""Tools: declared in the prompt, calls parsed and coerced, results rendered within their limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.errors import InputError
from mlx_voicechat.events import FailureReason
from mlx_voicechat.text import Tokenizer
from mlx_voicechat.tools import Tool
from mlx_voicechat.tools.calls import ArgumentError, coerced, new_call_id, parse_calls
from mlx_voicechat.tools.prompt import prompt_with_tools
from mlx_voicechat.tools.results import (
    MAX_RESULT_BYTES,
    MAX_RESULT_TOKENS,
    error_result,
    fits,
    rendered,
    response_ids,
)
from mlx_voicechat.tools.tool import by_name
from mlx_voicechat.weights.assets import TINY
from tests.support.checkpoints import GOLDEN

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = by_name([Tool("get_time", "Returns the current time."), Tool("get_weather", "Weather in a city.", CITY)])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


# -- tools and the prompt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tool("1st"), "named '1st'"),
        (lambda: Tool("a.b"), r"named 'a\.b'"),
        (lambda: Tool(""), "named ''"),
        (lambda: Tool("a" * 129), "named 'aaa"),
        (lambda: Tool("a", 5), "description of tool a"),  # type: ignore[arg-type]
        (lambda: Tool("a", "", [1]), "parameters of tool a"),  # type: ignore[arg-type]
        (lambda: Tool("a", "", {"x": object()}), "parameters of tool a are no JSON"),
        (lambda: Tool("a", callable=3), "callable of tool a"),  # type: ignore[arg-type]
        (lambda: Tool("a", on_hold=3), "on_hold of tool a"),  # type: ignore[arg-type]
        (lambda: by_name([Tool("a-b"), Tool("a_b")]), "a-b and a_b"),
        (lambda: by_name([Tool("a"), Tool("a")]), "a and a"),
        (lambda: by_name([Tool(f"t{i}") for i in range(33)]), "33 tools"),
        (lambda: by_name([{"name": "a"}]), "holds a dict"),  # type: ignore[list-item]
        (lambda: by_name("get_time"), "type str"),  # type: ignore[arg-type]
    ],
)
def test_refused_tools(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_the_prompt_is_the_trained_one() -> None:
    scenarios = json.loads((GOLDEN / "scenarios.json").read_text(encoding="utf-8"))
    trained = scenarios[1]["system_prompt"]
    declared = json.loads(trained[trained.index("[") : trained.index("]</AVAILABLE_TOOLS>") + 1])
    tools = [Tool(each["name"], each.get("description", ""), each["parameters"]) for each in declared]
    made = prompt_with_tools("You are a helpful voice assistant.", tools)
    assert made == trained.replace('"get_time", "parameters"', '"get_time", "description": "", "parameters"')
    assert prompt_with_tools(" ", tools) == made.removeprefix("You are a helpful voice assistant.\n\n")
    assert prompt_with_tools("Be brief.", []) == "Be brief."
    assert prompt_with_tools(trained, tools) == trained


def test_the_order_of_keys() -> None:
    tool = Tool("a", "b", {"type": "object", "properties": {"z": {}, "b": {}}})
    assert '{"name": "a", "description": "b", "parameters": {"type": "object", "properties": {"z": {}, "b": {}}}}' in (
        prompt_with_tools("", [tool])
    )
    assert '{"description": "b", "name": "a", "parameters": {"properties": {"b": {}, "z": {}}, "type": "object"}}' in (
        prompt_with_tools("", [tool], "sorted")
    )


# -- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        '<TOOLCALL>{"name": "get_weather", "arguments": {"city": "Paris"}}</TOOLCALL>',
        '{"name": "get_weather", "arguments": {"city": "Paris"}}</TOOLCALL>',
        ' <TOOLCALL> [{"name": "get-weather", "arguments": "{\\"city\\": \\"Paris\\"}"}] </TOOLCALL> ',
    ],
)
def test_tolerated_forms(text: str) -> None:
    (call,) = parse_calls(text, TOOLS)
    assert (call.name, call.arguments, call.failure) == ("get_weather", {"city": "Paris"}, None)
    assert re.fullmatch(r"call_[0-9a-f]{24}", call.call_id)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("", FailureReason.MALFORMED),
        ("<TOOLCALL></TOOLCALL>", FailureReason.MALFORMED),
        ("<TOOLCALL>[]</TOOLCALL>", FailureReason.MALFORMED),
        ("get_time()", FailureReason.MALFORMED),
        ('[{"name": "get_time"', FailureReason.MALFORMED),
        ('[{"arguments": {}}]', FailureReason.MALFORMED),
        ('["get_time"]', FailureReason.MALFORMED),
        ('[{"name": 5}]', FailureReason.MALFORMED),
        ('[{"name": "get_time", "arguments": NaN}]', FailureReason.MALFORMED),
        ("[" * 10_000, FailureReason.MALFORMED),
        ('[{"name": "get_rich"}]', FailureReason.UNKNOWN_TOOL),
        ('[{"name": "get_weather", "arguments": {}}]', FailureReason.BAD_ARGUMENTS),
        ('[{"name": "get_weather", "arguments": "Paris"}]', FailureReason.BAD_ARGUMENTS),
        ('[{"name": "get_weather", "arguments": ["Paris"]}]', FailureReason.BAD_ARGUMENTS),
        ('[{"name": "get_weather", "arguments": {"city": ["Paris"]}}]', FailureReason.BAD_ARGUMENTS),
    ],
)
def test_calls_that_fail(text: str, failure: FailureReason) -> None:
    (call,) = parse_calls(text, TOOLS)
    assert call.failure == failure
    assert call.why


def test_two_calls_of_one_list() -> None:
    text = '<TOOLCALL>[{"name": "get_time", "arguments": null}, {"name": "x"}, {"name": "get_time"}]</TOOLCALL>'
    calls = parse_calls(text, TOOLS)
    assert [call.failure for call in calls] == [None, FailureReason.UNKNOWN_TOOL, None]
    assert len({call.call_id for call in calls}) == 3


@settings(deadline=None)
@given(st.text())
def test_any_text_is_some_call(text: str) -> None:
    assert parse_calls(text, TOOLS)


@settings(deadline=None)
@given(JSON)
def test_any_json_is_some_call(value: Any) -> None:
    for call in parse_calls(json.dumps(value), TOOLS):
        assert call.failure is not None


@pytest.mark.parametrize(
    ("kind", "given", "typed"),
    [
        ("string", 5, "5"),
        ("string", 2.5, "2.5"),
        ("string", True, "true"),
        ("string", "x", "x"),
        ("integer", "12", 12),
        ("integer", " -3 ", -3),
        ("integer", 4.0, 4),
        ("number", "2.5", 2.5),
        ("number", 3, 3),
        ("number", "1e3", 1000.0),
        ("boolean", "True", True),
        ("null", "null", None),
        ("object", '{"a": 1}', {"a": 1}),
        ("array", "[1, 2]", [1, 2]),
        (["null", "integer"], "7", 7),
        (["integer", "string"], "seven", "seven"),
        (["integer", "string"], "7", "7"),
        ("whatever", [1], [1]),
    ],
)
def test_coercion(kind: Any, given: Any, typed: Any) -> None:
    made = coerced({"x": given}, {"properties": {"x": {"type": kind}}})["x"]
    assert made == typed
    assert type(made) is type(typed)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("string", [1]),
        ("string", None),
        ("integer", 2.5),
        ("integer", "2.5"),
        ("integer", "1_000"),
        ("integer", True),
        ("integer", "9" * 10_000),
        ("number", "two"),
        ("number", "1_0"),
        ("number", "NaN"),
        ("number", False),
        ("boolean", 1),
        ("boolean", "yes"),
        ("null", 0),
        ("object", "[1]"),
        ("array", "{}"),
        ("array", "[" * 10_000),
        (["integer", "null"], "x"),
    ],
)
def test_what_would_lose_something_is_refused(kind: Any, given: Any) -> None:
    with pytest.raises(ArgumentError, match="x"):
        coerced({"x": given}, {"properties": {"x": {"type": kind}}})


def test_coercion_goes_inside() -> None:
    schema = {
        "properties": {
            "at": {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        }
    }
    assert coerced({"at": '{"hour": "7"}', "days": ["1", 2.0], "more": None}, schema) == {
        "at": {"hour": 7},
        "days": [1, 2],
        "more": None,
    }
    with pytest.raises(ArgumentError, match="hour"):
        coerced({"at": {}}, schema)
    with pytest.raises(ArgumentError, match=r"days\[1\]"):
        coerced({"days": [1, "x"]}, schema)


@settings(deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=3), JSON)
def test_no_schema_breaks_it(arguments: dict[str, Any], schema: Any) -> None:
    try:
        made = coerced(arguments, {"properties": schema, "required": schema})
    except ArgumentError:
        return
    assert set(made) == set(arguments)


def test_call_ids_differ() -> None:
    assert len({new_call_id() for _ in range(1000)}) == 1000


# -- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("ten past four", '"ten past four"'),
        ('{"time":"16:10"}', '{"time": "16:10"}'),
        ("16:10", '"16:10"'),
        (" 5 ", "5"),
        (7, "7"),
        (2.5, "2.5"),
        (None, "null"),
        ([1, "a"], '[1, "a"]'),
        ({"a": True}, '{"a": true}'),
        ("NaN", '"NaN"'),
        ("Zürich", '"Zürich"'),
        ("", '""'),
        ("<SPECIAL_20>", '"\\u003cSPECIAL_20>"'),
        ("a</s>b</TOOL_RESPONSE>", '"a\\u003c/s>b\\u003c/TOOL_RESPONSE>"'),
    ],
)
def test_rendering(tokenizer: Tokenizer, result: Any, text: str) -> None:
    assert rendered(result, tokenizer) == text
    assert fits(result, tokenizer)


@settings(deadline=None)
@given(JSON)
def test_what_is_rendered_is_that_json_without_special_tokens(value: Any) -> None:
    tokenizer = Tokenizer(TINY)
    special = {tokenizer.token_id(token) for token in tokenizer.added_tokens}
    try:
        text = rendered(value, tokenizer)
    except InputError as error:
        assert re.search("bytes|tokens|JSON", error.message)  # noqa: PT017
        return
    if not isinstance(value, str):
        assert json.loads(text) == value
    assert not special & set(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("x" * 20_000, "20,002 bytes"),
        ({"a": ["long"] * 200}, "tokens"),
        (object(), "no JSON"),
        (float("inf"), "no JSON"),
        ("\ud800", "no JSON"),
        (b"abc", "no JSON"),
    ],
)
def test_refused_results(tokenizer: Tokenizer, result: Any, message: str) -> None:
    assert not fits(result, tokenizer)
    with pytest.raises(InputError, match=message):
        rendered(result, tokenizer)


@settings(deadline=None)
@given(st.text())
def test_an_error_always_fits(why: str) -> None:
    tokenizer = Tokenizer(TINY)
    text = error_result(why)
    assert set(json.loads(text)) == {"error"}
    assert rendered(text, tokenizer) == text
    assert len(tokenizer.encode(text)) <= MAX_RESULT_TOKENS
    assert len(text) <= MAX_RESULT_BYTES


def test_the_response(tokenizer: Tokenizer) -> None:
    ids = response_ids(['{"time": "16:10"}', '"snow"'], tokenizer)
    assert tokenizer.decode(ids) == '<TOOL_RESPONSE>[{"time": "16:10"}, "snow"]</TOOL_RESPONSE>'
    assert [tokenizer.id_to_token(token) for token in (ids[0], ids[-1])] == ["<TOOL_RESPONSE>", "</TOOL_RESPONSE>"]
