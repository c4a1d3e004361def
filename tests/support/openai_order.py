"""The legal order of the server events of OpenAI's vocabulary; every trace of a test goes through it.

`Order().take(event)` raises AssertionError at the first event that is out of place. GA, beta and duplex names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FROM_BETA = {
    "conversation.item.created": "conversation.item.added",
    "response.audio.delta": "response.output_audio.delta",
    "response.audio.done": "response.output_audio.done",
    "response.audio_transcript.delta": "response.output_audio_transcript.delta",
    "response.audio_transcript.done": "response.output_audio_transcript.done",
    "response.text.delta": "response.output_text.delta",
    "response.text.done": "response.output_text.done",
}
UTTERANCE = ["started", "stopped", "committed", "added", "done", "completed"]


@dataclass
class Part:
    """One output item of a response, and how far it is."""

    item: dict[str, Any]
    stage: str = "added"  # added, in conversation, part, audio done, texts done, part done, item done, all done
    text: str = ""
    marks: list[str] = field(default_factory=list)


class Order:
    """One connection's events so far."""

    def __init__(self, beta: bool = False) -> None:
        self.beta = beta
        self.event_ids: set[str] = set()
        self.response: str | None = None
        self.responses: dict[str, str] = {}  # id -> status
        self.parts: dict[str, Part] = {}  # of the open response
        self.items: set[str] = set()
        self.utterance: dict[str, list[str]] = {}
        self.rate_limits_due = False
        self.sequence = 0
        self.created = False

    def take(self, event: dict[str, Any]) -> None:
        name = FROM_BETA.get(event["type"], event["type"])
        if self.beta:
            assert event["type"] not in FROM_BETA.values(), f"{event['type']} is no beta name"
        assert isinstance(event["event_id"], str)
        assert event["event_id"] not in self.event_ids, "an event_id was used twice"
        self.event_ids.add(event["event_id"])
        if "server_event_seq" in event:
            assert event["server_event_seq"] > self.sequence
            self.sequence = event["server_event_seq"]
        if self.rate_limits_due:
            assert name == "rate_limits.updated", f"{name} between response.done and rate_limits.updated"
        if not self.created and name != "error":
            assert name in ("session.created", "session.resumed"), f"{name} before session.created"
        self.created = True
        check = getattr(self, "on_" + name.replace(".", "_"), None)
        if check is not None:
            check(event)

    def end(self) -> None:
        """Nothing more comes."""
        assert self.response is None, f"{self.response} was not ended"
        assert not self.rate_limits_due

    # -- utterances

    def _step(self, item_id: str, step: str) -> None:
        seen = self.utterance.setdefault(item_id, [])
        assert step not in seen, f"{step} twice for {item_id}"
        assert all(UTTERANCE.index(one) < UTTERANCE.index(step) for one in seen), f"{step} after {seen}"
        if step == "stopped":
            assert seen == ["started"], "speech_stopped without speech_started"
        if step == "committed" and "started" in seen:
            assert "stopped" in seen, "committed before speech_stopped"
        if step == "completed":
            done = "added" if self.beta else "done"
            assert done in seen, "a transcript of an item that is not in the conversation"
        seen.append(step)

    def on_input_audio_buffer_speech_started(self, event: dict[str, Any]) -> None:
        assert all("completed" in seen for seen in self.utterance.values()), "speech_started within an utterance"
        assert isinstance(event["audio_start_ms"], int)
        self._step(event["item_id"], "started")

    def on_input_audio_buffer_speech_stopped(self, event: dict[str, Any]) -> None:
        assert isinstance(event["audio_end_ms"], int)
        self._step(event["item_id"], "stopped")

    def on_input_audio_buffer_committed(self, event: dict[str, Any]) -> None:
        assert "previous_item_id" in event
        self._step(event["item_id"], "committed")

    def on_input_audio_buffer_cleared(self, event: dict[str, Any]) -> None:
        """What was cleared never was an utterance."""
        for item_id, seen in list(self.utterance.items()):
            assert seen != ["started"], "cleared within speech that was not stopped"
            if seen == ["started", "stopped"]:
                del self.utterance[item_id]

    on_response_listen = on_input_audio_buffer_cleared

    def on_conversation_item_input_audio_transcription_delta(self, event: dict[str, Any]) -> None:
        seen = self.utterance[event["item_id"]]
        assert "added" in seen
        assert "completed" not in seen, "a delta of a transcript that is completed"

    def on_conversation_item_input_audio_transcription_completed(self, event: dict[str, Any]) -> None:
        assert isinstance(event["transcript"], str)
        assert event["usage"]["seconds"] >= 0
        self._step(event["item_id"], "completed")

    # -- items

    def on_conversation_item_added(self, event: dict[str, Any]) -> None:
        item = event["item"]
        if item["id"] in self.utterance:
            self._step(item["id"], "added")
            assert item["content"] == [{"type": "input_audio", "transcript": None}]
        elif item["id"] in self.parts:
            assert self.parts[item["id"]].stage == "added"
            self.parts[item["id"]].stage = "in conversation"
        self.items.add(item["id"])

    def on_conversation_item_done(self, event: dict[str, Any]) -> None:
        item = event["item"]
        assert item["id"] in self.items
        if item["id"] in self.utterance:
            self._step(item["id"], "done")
        elif item["id"] in self.parts:
            assert self.parts[item["id"]].stage == "item done"
            self.parts[item["id"]].stage = "all done"

    # -- responses

    def _open(self, event: dict[str, Any]) -> None:
        assert event["response_id"] == self.response, f"{event['type']} of a response that is not open"

    def _part(self, event: dict[str, Any], *stages: str) -> Part:
        self._open(event)
        part = self.parts[event["item_id"]]
        assert part.stage in stages, f"{event['type']} when the item is {part.stage}"
        assert event["output_index"] == list(self.parts).index(event["item_id"])
        return part

    def on_response_created(self, event: dict[str, Any]) -> None:
        response = event["response"]
        assert self.response is None, "a response within a response"
        assert response["id"] not in self.responses, "a response's id was used twice"
        assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
        unfinished = [item for item, seen in self.utterance.items() if "completed" not in seen]
        assert not unfinished, f"an answer before the events of its question {unfinished}"
        self.response, self.parts = response["id"], {}
        self.responses[response["id"]] = "in_progress"

    def on_response_output_item_added(self, event: dict[str, Any]) -> None:
        self._open(event)
        item = event["item"]
        assert item["id"] not in self.items, "an item's id was used twice"
        assert item["status"] == "in_progress"
        assert event["output_index"] == len(self.parts)
        if item["type"] == "function_call":
            assert item["arguments"] == ""
            assert len(item["call_id"]) <= 32
        self.parts[item["id"]] = Part(item)

    def on_response_content_part_added(self, event: dict[str, Any]) -> None:
        self._part(event, "in conversation").stage = "part"

    def on_response_output_audio_delta(self, event: dict[str, Any]) -> None:
        assert event["delta"]
        self._part(event, "part")

    def on_response_output_audio_transcript_delta(self, event: dict[str, Any]) -> None:
        self._part(event, "part").text += event["delta"]

    on_response_output_text_delta = on_response_output_audio_transcript_delta

    def on_response_output_audio_done(self, event: dict[str, Any]) -> None:
        self._part(event, "part").stage = "audio done"

    def on_response_output_audio_transcript_done(self, event: dict[str, Any]) -> None:
        part = self._part(event, "audio done")
        assert event["transcript"] == part.text
        part.stage = "texts done"

    def on_response_output_text_done(self, event: dict[str, Any]) -> None:
        part = self._part(event, "part")
        assert event["text"] == part.text
        part.stage = "texts done"

    def on_response_content_part_done(self, event: dict[str, Any]) -> None:
        self._part(event, "texts done").stage = "part done"

    def on_response_function_call_arguments_delta(self, event: dict[str, Any]) -> None:
        part = self._part(event, "in conversation")
        assert event["call_id"] == part.item["call_id"]
        part.text += event["delta"]

    def on_response_function_call_arguments_done(self, event: dict[str, Any]) -> None:
        part = self._part(event, "in conversation")
        assert event["arguments"] == part.text
        assert event["name"] == part.item["name"]
        part.stage = "part done"

    def on_response_output_item_done(self, event: dict[str, Any]) -> None:
        self._open(event)
        part = self.parts[event["item"]["id"]]
        assert part.stage == "part done"
        assert event["item"]["status"] in ("completed", "incomplete")
        part.stage = "all done" if self.beta else "item done"

    def on_response_done(self, event: dict[str, Any]) -> None:
        response = event["response"]
        assert response["id"] == self.response, "response.done of a response that is not open"
        assert response["status"] in ("completed", "cancelled", "incomplete", "failed")
        assert [item["id"] for item in response["output"]] == list(self.parts)
        assert all(part.stage == "all done" for part in self.parts.values()), "response.done before its items"
        assert all(isinstance(response["usage"][key], int) for key in ("input_tokens", "output_tokens", "total_tokens"))
        self.responses[response["id"]] = response["status"]
        self.response, self.rate_limits_due = None, True

    def on_rate_limits_updated(self, event: dict[str, Any]) -> None:
        assert self.rate_limits_due
        assert event["rate_limits"] == []
        self.rate_limits_due = False
