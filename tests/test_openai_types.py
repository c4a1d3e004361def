"""What the server sends against the types of OpenAI's own library: every event of whole conversations."""

import asyncio
from typing import Annotated, Any

import pytest

from mlx_voicechat.server.openai_events import SHARED
from tests.support.openai_caller import said
from tests.support.turn_model import TurnModel
from tests.support.virtual import Client, VirtualEngine, quick_detector, run

realtime = pytest.importorskip("openai.types.realtime")
pydantic = pytest.importorskip("pydantic")

__all__ = ["quick_detector"]
pytestmark = pytest.mark.usefixtures("quick_detector")

TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
VENDOR = {"response.speak", "response.listen", "overlap.decision", "playback.acknowledged", "session.heartbeat_ack"}


def conversation(duplex: bool) -> list[dict[str, Any]]:
    """A call and its answer, an interruption, items, text alone, errors."""

    async def main() -> list[dict[str, Any]]:
        engine = VirtualEngine(TurnModel())
        client = Client(engine, duplex)
        client.send({"type": "session.update", "session": {"tools": [TOOL], "instructions": "Be brief."}})
        client.send({"type": "session.update", "session": {"turn_detection": {"type": "server_vad"}}}, said(0.5))
        call = await client.until("response.function_call_arguments.done")
        await client.until("rate_limits.updated")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        client.send({"type": "conversation.item.create", "item": output}, {"type": "response.create"})
        item_id = (await client.until("response.output_audio.delta"))["item_id"]
        client.send(said(0.3))
        await client.until("response.done", len(client.events) - 1)
        for kind in ("truncate", "retrieve", "delete"):
            client.send(
                {"type": f"conversation.item.{kind}", "item_id": item_id, "audio_end_ms": 80, "content_index": 0}
            )
        client.send({"type": "input_audio_buffer.clear"}, {"type": "output_audio_buffer.clear"})
        client.send(
            {"type": "session.update", "session": {"output_modalities": ["text"], "tools": []}},
            "no JSON",
            {"type": "none"},
        )
        await asyncio.sleep(2)
        client.send({"type": "response.create", "response": {"metadata": {"key": "value"}}})
        await asyncio.sleep(5)
        client.session.end()
        return client.events

    events: list[dict[str, Any]] = run(main)
    return events


@pytest.mark.parametrize("duplex", [False, True])
def test_every_event_is_of_its_type(duplex: bool) -> None:
    union = Annotated[realtime.RealtimeServerEvent, pydantic.Field(discriminator="type")]
    adapter = pydantic.TypeAdapter(union)
    events = conversation(duplex)
    seen, refused = set(), set()
    for event in events:
        if event["type"] in VENDOR:
            assert duplex
            continue
        seen.add(event["type"])
        try:  # the library's own readers take an absent previous item for an empty one
            known = {"previous_item_id": event["previous_item_id"] or ""} if "previous_item_id" in event else {}
            adapter.validate_python({**event, **known})
        except pydantic.ValidationError as fault:
            refused |= {f"{event['type']}: {'.'.join(map(str, one['loc'][1:]))} {one['msg']}" for one in fault.errors()}
    if duplex:  # its rates are its own, where the library has 24,000 alone; no kind of session fits then
        refused = {one for one in refused if not one.startswith(("session.created: ", "session.updated: "))}
    assert refused == set()
    assert seen == SHARED
