"""Random sequences of messages, legal and not, on a clock that jumps: the order of events holds whatever comes."""

import asyncio
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.openai_caller import said
from tests.support.turn_model import TurnModel
from tests.support.virtual import Client, VirtualEngine, quick_detector, run

__all__ = ["quick_detector"]
pytestmark = pytest.mark.usefixtures("quick_detector")

TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
TURNS: list[Any] = [
    None,
    {"type": "server_vad"},
    {"type": "semantic_vad"},
    {"type": "server_vad", "create_response": False},
    {"type": "server_vad", "interrupt_response": False},
]
IDS = st.sampled_from(["a", "b", "$item", "$response", "$call", "none", 3, None])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def message(kind: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


ITEMS = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "role": st.sampled_from(["user", "assistant", "system", "cat"]),
            "content": st.just([{"type": "input_text", "text": "Hello there."}]),
        },
        optional={"id": st.sampled_from(["a", "b"])},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call_output"),
            "call_id": IDS,
            "output": st.sampled_from(["sunny", '"{}"', "x" * 600, "x" * 20_000]),
        }
    ),
    JSON,
)
SAID = st.one_of(
    st.sampled_from([0.02, 0.1, 0.3, 1.0]).map(lambda seconds: said(seconds)),
    st.sampled_from([0.1, 0.5, 2.0]).map(lambda seconds: said(seconds, loud=False)),
)
SHARED = [
    message("input_audio_buffer.append", audio=st.sampled_from(["AAA", "AA==", "", "!", 3])),
    message("input_audio_buffer.commit"),
    message("input_audio_buffer.clear"),
    message("response.create", response=st.sampled_from([None, {}, {"metadata": {"a": "b"}}, {"metadata": 1}, 2])),
    message("response.cancel", response_id=st.sampled_from([None, "$response", "none"])),
    message("output_audio_buffer.clear"),
    message("conversation.item.create", item=ITEMS, previous_item_id=IDS),
    message("conversation.item.retrieve", item_id=IDS),
    message("conversation.item.delete", item_id=IDS),
    message(
        "conversation.item.truncate",
        item_id=IDS,
        content_index=st.just(0),
        audio_end_ms=st.sampled_from([0, 80, 1e9, -1]),
    ),
    message("session.update", session=st.sampled_from(TURNS).map(lambda turn: {"turn_detection": turn})),
    message("session.update", session=st.sampled_from([{"tools": [TOOL]}, {"tools": []}, {"instructions": "New."}])),
    message("session.update", session=st.sampled_from([{"output_modalities": ["text"]}, {"max_output_tokens": 2}])),
    message("session.update", session=JSON),
    message("no.such.type"),
    st.sampled_from(["", "[", "3", "{}"]),
]
VENDOR = [
    message("session.heartbeat"),
    message("session.event_ack", server_event_seq=st.integers(-1, 200)),
    message("input_audio_buffer.commit", is_speech=st.booleans(), response_create=st.booleans()),
    message("input.cancel"),
    message("barge_in"),
    message("turn.signal", event=st.sampled_from(["barge_in", "none", 1])),
    message("playback.ack", response_id=IDS, played_ms=st.integers(-1, 5000), truncate=st.booleans()),
    st.booleans().map(lambda speech: {**said(0.3, rate_hz=16_000), "is_speech": speech}),
]
BEGINNINGS = st.sampled_from(
    [
        {"type": "session.update", "session": {"tools": tools, "turn_detection": turn}}
        for tools in ([], [TOOL])
        for turn in TURNS
    ]
)
PAUSE = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.5])


def steps(*others: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[Any, float]]]:
    """Messages and the pauses after them; as much speech as of all else together."""
    either = st.booleans().flatmap(lambda speech: SAID if speech else st.one_of(*others))
    rest = st.lists(st.tuples(either, PAUSE), max_size=20)
    return st.builds(lambda first, others: [(first, 0.0), *others], BEGINNINGS, rest)


def filled(value: Any, names: dict[str, str]) -> Any:
    """A message with the ids of things that are there."""
    if isinstance(value, dict):
        return {key: filled(one, names) for key, one in value.items()}
    return names.get(value, value) if isinstance(value, str) else value


def names(client: Client) -> dict[str, str]:
    """The newest item, response and call."""
    known = {}
    for event in client.events:
        if event["type"] == "response.output_item.added":
            known["$item"] = event["item"]["id"]
            known["$call"] = event["item"].get("call_id", known.get("$call", "none"))
        elif event["type"] == "response.created":
            known["$response"] = event["response"]["id"]
    return known


def converse(sequence: list[tuple[Any, float]], duplex: bool, beta: bool = False) -> Client:
    async def main() -> Client:
        engine = VirtualEngine(TurnModel())
        client = Client(engine, duplex, beta)
        for sent, pause in sequence:
            client.send(filled(sent, names(client)))
            await asyncio.sleep(pause)
        for call in [call for call, result in client.session.calls.items() if result is None]:
            output = {"type": "function_call_output", "call_id": call, "output": "sunny"}
            client.send({"type": "conversation.item.create", "item": output})
        await asyncio.sleep(12)
        assert client.session.response is None, "a response that does not end"
        assert not client.session.turn_due, "a turn that was asked for and did not come"
        assert not client.session.answer_due, "an answer that did not come"
        client.order.end()
        errors = [event["error"] for event in client.of("error") if event["error"]["type"] == "server_error"]
        assert not errors, errors
        assert not any(client.session.calls.values()), "results that were not given"
        client.session.end()
        client.session.end()
        return client

    result: Client = run(main)
    return result


EXAMPLES = int(os.environ.get("MLX_VOICECHAT_SEQUENCES", "60"))  # of each; more for a longer search
RULES = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@RULES
@given(steps(*SHARED))
def test_openai(sequence: list[tuple[Any, float]]) -> None:
    client = converse(sequence, duplex=False)
    assert len({event["event_id"] for event in client.events}) == len(client.events)


@RULES
@given(steps(*SHARED, *VENDOR))
def test_duplex(sequence: list[tuple[Any, float]]) -> None:
    converse(sequence, duplex=True)


@RULES
@given(steps(*SHARED))
def test_beta(sequence: list[tuple[Any, float]]) -> None:
    converse(sequence, duplex=False, beta=True)
