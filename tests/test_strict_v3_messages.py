"""strict-v3: what a client may send, message by message: what is refused, with which code."""

import base64
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_voicechat.server.strict_v3_codes import FATES, FATES_LATER, MOST_PACKET_BYTES, Refused
from mlx_voicechat.server.strict_v3_messages import (
    KEEP,
    Append,
    Commit,
    Item,
    Stop,
    TextRequest,
    TurnStart,
    parsed,
    result_of,
    understood,
    update_of,
)

AUDIO = base64.b64encode(bytes(640)).decode()
APPEND = {
    "type": "input_audio_buffer.append",
    "encoding": "pcm16",
    "sample_rate": 16000,
    "channels": 1,
    "audio": AUDIO,
}
START = {"type": "input_audio_buffer.turn_start", "event_id": "e", "client_turn_id": 1}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}


def code(call: Any, *arguments: Any) -> str:
    with pytest.raises(Refused) as refused:
        call(*arguments)
    assert refused.value.message.strip()
    return refused.value.code


def update(first: bool = True, negotiated: str | None = None, **session: Any) -> Any:
    return update_of({"session": {"protocol_version": 3, **session}}, not first, negotiated)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ({"bytes": b"\0\0"}, "binary_audio_unsupported"),
        ({"text": "no json"}, "invalid_json"),
        ({"text": ""}, "invalid_json"),
        ({"text": '{"type": NaN}'}, "invalid_event"),
        ({"text": "[" * 100_000}, "invalid_json"),
        ({"text": "[]"}, "invalid_event"),
        ({"text": "{}"}, "invalid_event"),
        ({"text": '{"type": 3}'}, "invalid_event"),
    ],
)
def test_what_is_no_message(frame: dict[str, Any], expected: str) -> None:
    assert code(parsed, frame) == expected


@given(
    st.text()
    | st.recursive(st.none() | st.floats() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)).map(
        json.dumps
    )
)
def test_any_text_is_a_message_or_refused(text: str) -> None:
    with suppress(Refused):
        assert isinstance(parsed({"text": text})["type"], str)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=8), some, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "session",
    "event_id",
    "client_turn_id",
    "encoding",
    "sample_rate",
    "channels",
    "audio",
    "item",
    "text",
    "job_id",
)
KINDS = (
    "session.update",
    "session.stop",
    "input_audio_buffer.append",
    "input_audio_buffer.turn_start",
    "input_audio_buffer.commit",
    "input_text.request",
    "conversation.item.create",
)


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), JSON), st.booleans())
def test_any_field_is_understood_or_refused(kind: str, fields: dict[str, Any], configured: bool) -> None:
    message = {**fields, "type": kind}
    with suppress(Refused):  # whose code is in the table, or making it raises
        update_of(message, configured, None) if kind == "session.update" else understood(message, configured)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"type": "response.create"}, "unsupported_event"),
        ({"type": "response.cancel"}, "unsupported_event"),
        ({"type": ""}, "unsupported_event"),
        ({**APPEND, "encoding": "f32"}, "unsupported_audio_encoding"),
        ({"type": APPEND["type"]}, "unsupported_audio_encoding"),
        ({**APPEND, "sample_rate": 24000}, "unsupported_sample_rate"),
        ({**APPEND, "sample_rate": 16000.0}, "unsupported_sample_rate"),
        ({**APPEND, "channels": 2}, "unsupported_channel_count"),
        ({**APPEND, "channels": True}, "unsupported_channel_count"),
        ({**APPEND, "audio": ""}, "empty_audio"),
        ({**APPEND, "audio": None}, "invalid_audio"),
        ({**APPEND, "audio": "AAA"}, "invalid_audio"),
        ({**APPEND, "audio": "AA=="}, "invalid_audio"),  # one byte
        ({**APPEND, "audio": "AAB="}, "invalid_audio"),  # bits that mean nothing
        ({**APPEND, "audio": "AAAA\n"}, "invalid_audio"),
        ({**APPEND, "audio": base64.b64encode(bytes(MOST_PACKET_BYTES + 2)).decode()}, "audio_packet_too_large"),
        ({**START, "event_id": ""}, "invalid_event_id"),
        ({**START, "event_id": 5}, "invalid_event_id"),
        ({**START, "event_id": "x" * 513}, "invalid_event_id"),
        ({"type": START["type"], "client_turn_id": 1}, "invalid_event_id"),
        ({**START, "client_turn_id": 0}, "invalid_client_turn_id"),
        ({**START, "client_turn_id": True}, "invalid_client_turn_id"),
        ({**START, "client_turn_id": 1.0}, "invalid_client_turn_id"),
        ({**START, "type": "input_audio_buffer.commit", "client_turn_id": -1}, "invalid_client_turn_id"),
        ({**START, "type": "input_audio_buffer.commit", "event_id": None}, "invalid_event_id"),
    ],
)
def test_what_a_message_is_refused_for(message: dict[str, Any], expected: str) -> None:
    assert code(understood, message, True) == expected


@pytest.mark.parametrize("kind", ["append", "turn_start", "commit"])
def test_before_the_update(kind: str) -> None:
    """Whatever else is wrong with it."""
    assert code(understood, {"type": f"input_audio_buffer.{kind}"}, False) == "session_not_configured"
    assert code(understood, {"type": "conversation.item.create"}, False) == "session_not_configured"


def test_what_is_understood() -> None:
    assert understood({**APPEND, "event_id": "a"}, True) == Append(bytes(640), "a")
    largest = base64.b64encode(bytes(MOST_PACKET_BYTES)).decode()
    assert understood({**APPEND, "audio": largest}, True) == Append(bytes(MOST_PACKET_BYTES), None)
    assert understood(START, True) == TurnStart(1, "e")
    commit = {**START, "type": "input_audio_buffer.commit", "diagnostics": {"schema": 1, "rtt_ms": 3.5}}
    assert understood(commit, True) == Commit(1, "e")
    assert understood({"type": "input_text.request", "job_id": "j", "text": "t"}, False) == TextRequest("j", "t", None)
    assert understood({"type": "conversation.item.create", "item": {}}, True) == Item({}, None)
    assert understood({"type": "session.stop", "event_id": 7}, False) == Stop(None)


@pytest.mark.parametrize(
    ("session", "expected"),
    [
        (None, "invalid_session_update"),
        ([], "invalid_session_update"),
        ({}, "unsupported_protocol_version"),
        ({"protocol_version": 2}, "unsupported_protocol_version"),
        ({"protocol_version": "3"}, "unsupported_protocol_version"),
        ({"protocol_version": 3.0}, "unsupported_protocol_version"),
        ({"protocol_version": 3, "instructions": 5}, "invalid_session_update"),
        ({"protocol_version": 3, "instructions": "\ud800"}, "invalid_session_update"),
        ({"protocol_version": 3, "instructions": "x" * 40_000}, "invalid_session_update"),
        ({"protocol_version": 3, "capabilities": []}, "invalid_session_capabilities"),
        ({"protocol_version": 3, "capabilities": {"other": 1}}, "unsupported_session_capability"),
        (
            {"protocol_version": 3, "capabilities": {"function_output_model_output": "v2"}},
            "unsupported_session_capability",
        ),
        ({"protocol_version": 3, "tools": {}}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [5]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{"type": "web", **TOOL}]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{"function": 5}]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{"name": "1"}]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{"name": "f\n"}]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{**TOOL, "description": 1}]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{**TOOL, "parameters": []}]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{**TOOL, "name": "a-b"}, {**TOOL, "name": "a_b"}]}, "invalid_tools"),
        ({"protocol_version": 3, "tools": [{"name": f"f{n}"} for n in range(33)]}, "invalid_tools"),
    ],
)
def test_what_an_update_is_refused_for(session: Any, expected: str) -> None:
    assert code(update_of, {"session": session}, False, None) == expected


def test_a_version_is_fatal_in_the_first_update_alone() -> None:
    for first, fatal in ((True, True), (False, False)):
        with pytest.raises(Refused) as refused:
            update(first, protocol_version=4)
        assert refused.value.fate.fatal is fatal
    assert FATES_LATER["unsupported_protocol_version"].close_code == 1002
    assert update_of({"session": {}}, True, None).tools is KEEP  # once configured it may be left out


def test_an_update() -> None:
    wrapped = {"type": "function", "function": TOOL}
    got = update(instructions="Be brief.", tools=[{"type": "function", **TOOL, "strict": True}, {"name": "g"}])
    assert got.instructions == "Be brief."
    assert got.tools == (TOOL, {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}})
    assert update(tools=[wrapped]).tools == (TOOL,)
    assert update(tools=None).tools == update(tools=[]).tools == ()
    assert (update().tools, update().instructions, update(instructions=None).instructions) == (KEEP, KEEP, None)
    assert len(update(tools=[{"name": f"f{n}"} for n in range(32)]).tools) == 32


def test_capabilities_do_not_change() -> None:
    authored = {"function_output_model_output": "client_authored_v1"}
    assert update(capabilities=authored).model_output == "client_authored_v1"
    assert update(False, "client_authored_v1", capabilities=authored).model_output == "client_authored_v1"
    assert code(lambda: update(False, "client_authored_v1")) == "settings_locked"
    assert code(lambda: update(False, None, capabilities=authored)) == "settings_locked"
    assert update(False, None, capabilities={}).model_output is None


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (None, "invalid_conversation_item"),
        ({"type": "message"}, "invalid_conversation_item"),
        ({"type": "function_call_output"}, "invalid_function_call_output"),
        ({"type": "function_call_output", "call_id": "c"}, "invalid_function_call_output"),
        ({"type": "function_call_output", "call_id": 1, "output": ""}, "invalid_function_call_output"),
        ({"type": "function_call_output", "call_id": "c", "output": {}}, "invalid_function_call_output"),
        ({"type": "function_call_output", "call_id": "c", "output": "\udc00"}, "invalid_function_call_output"),
        ({"type": "function_call_output", "call_id": "c", "output": "ä" * 8193}, "invalid_function_call_output"),
        (
            {"type": "function_call_output", "call_id": "c", "output": "", "model_output": 5},
            "invalid_function_call_output",
        ),
    ],
)
def test_what_a_result_is_refused_for(item: Any, expected: str) -> None:
    assert code(result_of, item, True) == expected


def test_a_result() -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": "o" * 16_384}
    assert result_of(item, False) == ("c", "o" * 16_384)
    authored = {**item, "output": "o" * 20_000, "model_output": "short"}
    assert result_of(authored, True) == ("c", "short")  # that alone is measured
    assert code(result_of, authored, False) == "invalid_function_call_output"
    assert result_of({**item, "model_output": None}, False)[0] == "c"


def test_the_table_of_codes() -> None:
    """As the protocol's document has it: fatal or not, closing code, with session.closed or without."""
    fatal = {name: (fate.close_code, fate.announced) for name, fate in FATES.items() if fate.fatal}
    assert fatal == {
        **dict.fromkeys(
            ("invalid_event_id", "invalid_client_turn_id", "input_turn_conflict", "deferred_input_overflow"),
            (1002, False),
        ),
        "server_busy": (1013, False),
        "session_position_limit": (1000, True),
        "function_call_loop_limit": (1011, True),
        "internal_error": (1011, True),
        **dict.fromkeys(
            (
                "response_cancel_timeout",
                "function_output_apply_timeout",
                "function_cycle_mismatch",
                "function_call_output_timeout",
                "input_turn_settle_timeout",
                "pre_eou_function_activity",
                "missing_terminal_bos",
                "missing_post_fc_terminal_bos",
                "deferred_input_lifecycle_failure",
            ),
            (1011, False),
        ),
    }
    later = {name: (fate.close_code, fate.announced) for name, fate in FATES_LATER.items()}
    assert later == {"unsupported_protocol_version": (1002, True), "typed_input_failed": (1011, False)}
    assert sum(not fate.fatal for fate in FATES.values()) == 21
