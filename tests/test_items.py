"""The conversation store: places, cuts by text marks, playback, both commit policies, bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.server.items import (
    Item,
    ItemError,
    Items,
    Playback,
    answer,
    call,
    item_from_json,
    new_id,
    user_audio,
)

SAID = [(3, "It is"), (5, " sunny,"), (9, " 24"), (9, " degrees"), (12, ".")]


def _spoken(items: Items, item_id: str = "item_a", frames: int = 15, done: bool = True) -> Item:
    item = answer(item_id)
    items.add(item)
    for frame in range(frames):
        item.playback.generate(80)
        item.playback.send(80)
        for at, delta in SAID:
            if at == frame:
                item.say(delta, (frame + 1) * 80)
    if done:
        items.finish(item, "completed")
    return item


def test_ids_of_ours_are_new_and_of_at_most_32_characters() -> None:
    ids = {new_id("item") for _ in range(100)}
    assert len(ids) == 100
    assert all(len(item_id) == 29 and item_id.startswith("item_") for item_id in ids)


def test_places() -> None:
    items = Items()
    assert items.add(user_audio("a")).previous_item_id is None
    assert items.add(user_audio("b")).previous_item_id == "a"
    assert items.add(user_audio("c"), "a").previous_item_id == "a"
    assert items.add(user_audio("d"), "root").previous_item_id is None
    assert items.add(user_audio("e"), "no such").previous_item_id == "b"
    assert [item.id for item in items] == ["d", "a", "c", "b", "e"]
    assert items.delete("c").id == "c"
    assert items.last_id == "e"
    assert items.add(user_audio("f"), "a").previous_item_id == "a"


@pytest.mark.parametrize("what", ["get", "delete"])
@pytest.mark.parametrize("item_id", ["gone", None, 7, []])
def test_an_unknown_item(what: str, item_id: object) -> None:
    items = Items()
    items.add(user_audio("a"))
    with pytest.raises(ItemError) as refused:
        getattr(items, what)(item_id)
    assert (refused.value.code, refused.value.param) == ("item_not_found", "item_id")
    assert len(items) == 1


def test_the_same_item_twice_and_another_of_its_id() -> None:
    items = Items()
    text = {"id": "mine", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}
    first = items.add(item_from_json(text))
    again = items.add(item_from_json(text))
    assert (first.repeated, again.repeated, again.item, len(items)) == (False, True, first.item, 1)
    with pytest.raises(ItemError, match="another item"):
        items.add(item_from_json({**text, "role": "system"}))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
        ),
        (
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_audio", "audio": "AAAA", "transcript": None}],
            },
            {"role": "user", "content": [{"type": "input_audio", "transcript": None}]},
        ),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Yes."}], "status": "x"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        ),
        ({"type": "message", "role": "system", "content": []}, {"role": "system", "content": []}),
        (
            {"type": "function_call_output", "call_id": "call_1", "output": "{}", "extra": 1},
            {"call_id": "call_1", "output": "{}"},
        ),
        (
            {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
            {"name": "f", "call_id": "c", "arguments": "{}"},
        ),
    ],
)
def test_an_item_of_a_client(given: dict[str, Any], shown: dict[str, Any]) -> None:
    expected = {"id": "mine", "object": "realtime.item", "type": given["type"], "status": "completed", **shown}
    assert item_from_json({**given, "id": "mine"}).as_json() == expected
    assert item_from_json(given).id.startswith("item_")


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (None, "item"),
        ([], "item"),
        ({}, "item.type"),
        ({"type": "mcp_call"}, "item.type"),
        ({"type": ["message"]}, "item.type"),
        ({"type": "message", "role": "robot", "content": []}, "item.role"),
        ({"type": "message", "role": [], "content": []}, "item.role"),
        ({"type": "message", "role": "user"}, "item.content"),
        ({"type": "message", "role": "user", "content": "Hi."}, "item.content"),
        ({"type": "message", "role": "user", "content": [7]}, "item.content[0]"),
        ({"type": "message", "role": "user", "content": [{"type": 7}]}, "item.content[0]"),
        ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": 7}]}, "item.content[0].text"),
        ({"type": "function_call_output", "call_id": "c"}, "item.output"),
        ({"type": "function_call_output", "call_id": 1, "output": ""}, "item.call_id"),
        ({"type": "message", "role": "user", "content": [], "id": ""}, "item.id"),
        ({"type": "message", "role": "user", "content": [], "id": 7}, "item.id"),
        ({"type": "message", "role": "user", "content": [], "id": "x" * 257}, "item.id"),
        ({"type": "message", "role": "user", "content": [], "id": "root"}, "item.id"),
    ],
)
def test_what_is_no_item_is_named(value: object, param: str) -> None:
    with pytest.raises(ItemError) as refused:
        item_from_json(value)
    assert (refused.value.code, refused.value.param) == ("invalid_event", param)


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([]) | st.just({})
NAMES = ["type", "role", "content", "id", "call_id", "output", "name", "arguments", "text"]
WORDS = st.sampled_from(["message", "function_call", "function_call_output", "user", "input_text", "assistant"])
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES | WORDS))
ITEMS = st.tuples(FIELDS, st.lists(FIELDS, max_size=2)).map(lambda pair: {**pair[0], "content": pair[1]}) | FIELDS


@settings(max_examples=300, deadline=None)
@given(ITEMS)
def test_any_json_is_an_item_or_refused(value: dict[str, Any]) -> None:
    try:
        item = item_from_json(value)
    except ItemError as refused:
        code = refused.code
    else:
        code = "invalid_event"
        assert item_from_json(item.as_json()).as_json() == item.as_json()
    assert code == "invalid_event"


def test_the_shapes_of_an_answer() -> None:
    items = Items()
    item = _spoken(items, done=False)
    assert item.as_json()["status"] == "in_progress"
    items.finish(item, "incomplete")
    shown = item.as_json()
    assert shown["content"] == [{"type": "output_audio", "transcript": "It is sunny, 24 degrees."}]
    assert shown["status"] == "incomplete"
    assert item.as_json(beta=True)["content"][0]["type"] == "audio"
    written = answer("t", "text")
    written.say("Yes.", 0)
    assert written.as_json()["content"] == [{"type": "output_text", "text": "Yes."}]
    assert call("c", "f", "call_1", "{}").as_json()["arguments"] == "{}"


@pytest.mark.parametrize(
    ("cut_ms", "text"),
    [
        (0, ""),
        (319, ""),
        (320, "It is"),
        (479, "It is"),
        (480, "It is sunny,"),
        (799, "It is sunny,"),
        (800, "It is sunny, 24 degrees"),
        (1040, "It is sunny, 24 degrees."),
        (99_999, "It is sunny, 24 degrees."),
        (-5, ""),
    ],
)
def test_a_cut_is_exact_to_the_frame(cut_ms: int, text: str) -> None:
    items = Items()
    _spoken(items)
    assert items.truncate("item_a", cut_ms) == max(0, min(cut_ms, 1200))
    assert items.get("item_a").text == text
    assert items.history() == ([("assistant", text)] if text else [])


def test_a_cut_does_not_grow_back_and_holds_while_it_is_spoken() -> None:
    items = Items()
    item = _spoken(items, frames=6, done=False)
    assert items.truncate("item_a", 400) == 400
    item.playback.generate(80)
    item.say(" and", 560)
    assert items.truncate("item_a", 1000) == 400
    items.finish(item, "incomplete")
    assert item.text == "It is"


def test_what_is_no_audio_of_the_assistant_is_not_cut() -> None:
    items = Items()
    items.add(user_audio("u", "hello"))
    items.add(call("c", "f", "call_1", "{}"))
    items.add(answer("t", "text"))
    _spoken(items)
    for item_id, content_index in (("u", 0), ("c", 0), ("t", 0), ("item_a", 1)):
        with pytest.raises(ItemError) as refused:
            items.truncate(item_id, 100, content_index)
        assert refused.value.code == "invalid_truncation"
    with pytest.raises(ItemError) as refused:
        items.truncate("gone", 100)
    assert refused.value.code == "item_not_found"


def test_history_by_acknowledgement_is_what_was_heard() -> None:
    items = Items("ack_only")
    items.add(user_audio("u", "what is the weather"))
    item = _spoken(items)
    assert items.history() == [("user", "what is the weather")]
    assert not items.acknowledge(item, 500)
    assert items.history()[1:] == [("assistant", "It is sunny,")]
    assert not items.acknowledge(item, 900, 400)
    assert items.history()[1:] == [("assistant", "It is sunny,")]
    assert items.acknowledge(item, 5000)
    assert items.history()[1:] == [("assistant", "It is sunny, 24 degrees.")]
    assert item.playback.as_json() == {"generated_ms": 1200, "sent_ms": 1200, "played_ms": 1200, "committed_ms": 1200}


def test_an_acknowledgement_that_cuts() -> None:
    items = Items("ack_only")
    item = _spoken(items)
    assert items.acknowledge(item, 500, truncate=True)
    assert (item.truncated_ms, item.text) == (500, "It is sunny,")
    assert items.history() == [("assistant", "It is sunny,")]


def test_history_of_the_other_policy_is_what_was_said() -> None:
    items = Items("commit_all_on_done")
    item = _spoken(items)
    assert item.playback.committed_ms == 1200
    assert items.history() == [("assistant", "It is sunny, 24 degrees.")]


@given(st.lists(st.tuples(st.sampled_from(["generate", "send", "acknowledge"]), st.integers(-100, 3000))))
def test_the_ledger_keeps_its_order_and_never_goes_back(steps: list[tuple[str, int]]) -> None:
    ledger, before = Playback(), Playback()
    for what, ms in steps:
        getattr(ledger, what)(ms if what == "acknowledge" else abs(ms))
        now = ledger.as_json()
        assert now["generated_ms"] >= now["sent_ms"] >= now["played_ms"] >= now["committed_ms"] >= 0
        assert all(now[name] >= value for name, value in before.as_json().items())
        before = Playback(**now)


def test_the_oldest_make_room_and_are_told() -> None:
    items = Items(most_items=3)
    running = answer("running")
    items.add(running)
    dropped = [items.add(user_audio(name)).dropped for name in "abcd"]
    assert dropped == [(), (), ("a",), ("b",)]
    assert [item.id for item in items] == ["running", "c", "d"]


def test_bytes_are_bounded() -> None:
    items = Items(most_bytes=3000)
    for number in range(50):
        placed = items.add(user_audio(f"u{number}", "x" * 500))
        assert items.size_bytes <= 3000
    assert placed.dropped == ("u45",)
    assert placed.previous_item_id == "u48"
    with pytest.raises(ItemError, match="larger than 3,000 bytes"):
        items.add(user_audio("big", "x" * 3000))
    assert items.last_id == "u49"


OPERATIONS = st.tuples(
    st.sampled_from(["add", "delete", "truncate", "finish", "speak"]), st.integers(0, 9), st.integers(-200, 3000)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.sampled_from(["commit_all_on_done", "ack_only"]))
def test_any_order_of_operations_keeps_the_store_whole(steps: list[tuple[str, int, int]], policy: Any) -> None:
    items = Items(policy, most_items=6)
    for what, number, ms in steps:
        item_id = f"item_{number}"
        known = [item.id for item in items]
        try:
            if what == "add":
                placed = items.add(answer(item_id), f"item_{ms % 10}")
                assert (placed.item.id in known) == placed.repeated
            elif what == "delete":
                items.delete(item_id)
            elif what == "truncate":
                items.truncate(item_id, ms)
            else:
                item = items.get(item_id)
                if what == "finish":
                    items.finish(item, "completed")
                else:
                    item.playback.generate(80)
                    item.say(" word", item.playback.generated_ms)
        except ItemError:
            assert (item_id in known) == (what == "add")
        ids = [item.id for item in items]
        assert len(ids) == len(set(ids))
        assert len(ids) <= 6 or all(item.status == "in_progress" for item in list(items)[:-1])
        for item in items:
            assert item.speech is not None
            assert item.speech.text.startswith(item.text)
