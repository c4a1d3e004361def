"""One response: what the agent says in one turn, or the calls of one cycle, from response.created to response.done."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np

from .items import Item, Items, answer, call, new_id
from .openai_config import SessionConfig
from .openai_events import Emit, usage
from .wire_audio import Encoder

Outcome = Literal["completed", "cancelled", "incomplete", "failed"]

QUIET_DBFS = -60.0  # a frame at or below it is silence
WAIT_FRAMES = 8  # of silence without text, after which the message is opened all the same
FUNCTION_ARGUMENTS = "response.function_call_arguments"


class Response:
    """A response that is open, or has ended: then nothing more of it is said.

    The message is opened with its first word or sound, so that a turn that turns out to be a call has none; the
    silence before is kept, and the audio of an item is the model's, frame by frame.
    """

    def __init__(
        self,
        emit: Emit,
        items: Items,
        config: SessionConfig,
        output_rate_hz: int,
        frame_ms: int,
        conversation_id: str,
        metadata: dict[str, Any] | None,
        beta: bool,
    ) -> None:
        self.id = new_id("resp")
        self.item: Item | None = None
        self.outputs: list[Item] = []
        self.open = True
        self.heard_frames = 0  # set by the session: what the model heard for this response
        self.text_tokens = 0
        self._emit = emit
        self._items = items
        self._config = config
        self._frame_ms = frame_ms
        self._conversation_id = conversation_id
        self._metadata = metadata
        self._beta = beta
        self._encoder = Encoder(config.output_format, output_rate_hz)
        self._silence: list[np.ndarray] = []
        self._frames = 0
        self._spoken = config.modalities == ("audio",)
        emit("response.created", response=self.as_json("in_progress"))

    @property
    def spoken_ms(self) -> int:
        """Audio of the item so far."""
        return self._frames * self._frame_ms

    # -- what the model says -------------------------------------------------------------------------------------

    def text(self, delta: str) -> None:
        """A piece of text, in the frame whose audio comes next."""
        self.text_tokens += 1
        item = self._opened()
        item.say(delta, (self._frames + 1) * self._frame_ms)
        if delta and self._spoken:
            self._emit("response.output_audio_transcript.delta", **self._place(item), delta=delta)
        elif delta:
            self._emit("response.output_text.delta", **self._place(item), delta=delta)

    def audio(self, samples: np.ndarray) -> None:
        """A frame (S,)."""
        if self.item is not None:
            self._say(samples)
            return
        self._silence.append(samples)
        if loud(samples) or len(self._silence) >= WAIT_FRAMES:
            self._opened()

    def call(self, name: str, call_id: str, arguments: str) -> Item:
        """A call, whole."""
        item = call(new_id("item"), name, call_id, "")
        item.status = "in_progress"
        self._add(item)
        item.fields["arguments"] = arguments
        place = {"response_id": self.id, "item_id": item.id, "output_index": len(self.outputs) - 1, "call_id": call_id}
        self._emit(f"{FUNCTION_ARGUMENTS}.delta", **place, delta=arguments)
        self._emit(f"{FUNCTION_ARGUMENTS}.done", **place, name=name, arguments=arguments)
        self._items.finish(item, "completed")
        self._finished(item)
        return item

    def end(self, outcome: Outcome, reason: str | None = None) -> None:
        """Close what is open, and the response."""
        if not self.open:
            return
        item = self.item
        if item is not None:
            self._close_message(item, outcome)
        self.open = False
        details: dict[str, Any] | None = None if outcome == "completed" else {"type": outcome, "reason": reason}
        if outcome == "failed":
            details = {"type": "failed", "error": {"type": "server_error", "code": reason}}
        self._emit("response.done", response=self.as_json(outcome, details))
        self._emit("rate_limits.updated", rate_limits=[])

    # -- events --------------------------------------------------------------------------------------------------

    def _opened(self) -> Item:
        if self.item is None:
            self.item = answer(new_id("item"), "audio" if self._spoken else "text")
            self._add(self.item)
            part = {"type": "audio", "transcript": ""} if self._spoken else {"type": "text", "text": ""}
            self._emit("response.content_part.added", **self._place(self.item), part=part)
            silence, self._silence = self._silence, []
            for samples in silence:
                self._say(samples)
        return self.item

    def _add(self, item: Item) -> None:
        placed = self._items.add(item)
        self.outputs.append(item)
        index = len(self.outputs) - 1
        shown: dict[str, Any] = item.as_json(self._beta)
        if item.kind == "message":
            shown["content"] = []
        self._emit("response.output_item.added", response_id=self.id, output_index=index, item=shown)
        self._emit("conversation.item.added", previous_item_id=placed.previous_item_id, item=shown)
        for dropped in placed.dropped:
            self._emit("conversation.item.deleted", item_id=dropped)

    def _say(self, samples: np.ndarray) -> None:
        assert self.item is not None
        self._frames += 1
        if not self._spoken:
            return
        self.item.playback.generate(self._frame_ms)
        self.item.playback.send(self._frame_ms)
        self._deliver(self.item, self._encoder.push(samples))

    def _deliver(self, item: Item, data: bytes) -> None:
        if data:
            delta = base64.b64encode(data).decode("ascii")
            self._emit("response.output_audio.delta", **self._place(item), delta=delta)

    def _close_message(self, item: Item, outcome: Outcome) -> None:
        text = item.text
        if self._spoken:
            if outcome == "completed":
                self._deliver(item, self._encoder.finish())
            self._emit("response.output_audio.done", **self._place(item))
            self._emit("response.output_audio_transcript.done", **self._place(item), transcript=text)
            part: dict[str, Any] = {"type": "audio", "transcript": text}
        else:
            self._emit("response.output_text.done", **self._place(item), text=text)
            part = {"type": "text", "text": text}
        self._emit("response.content_part.done", **self._place(item), part=part)
        self._items.finish(item, "completed" if outcome == "completed" else "incomplete")
        self._finished(item)

    def _finished(self, item: Item) -> None:
        shown = item.as_json(self._beta)
        index = self.outputs.index(item)
        self._emit("response.output_item.done", response_id=self.id, output_index=index, item=shown)
        ids = [known.id for known in self._items]
        at = ids.index(item.id) if item.id in ids else 0
        self._emit("conversation.item.done", previous_item_id=ids[at - 1] if at else None, item=shown)

    def _place(self, item: Item) -> dict[str, Any]:
        index = self.outputs.index(item)
        return {"response_id": self.id, "item_id": item.id, "output_index": index, "content_index": 0}

    def as_json(self, status: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response object."""
        done = status != "in_progress"
        config = self._config
        shown: dict[str, Any] = {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [item.as_json(self._beta) for item in self.outputs] if done else [],
            "conversation_id": self._conversation_id,
            "metadata": self._metadata,
            "usage": usage(self.heard_frames, self._frames, self.text_tokens) if done else None,
            "max_output_tokens": config.max_output_tokens,
        }
        if self._beta:
            modalities = ["audio", "text"] if self._spoken else ["text"]
            form = config.output_format.beta_name
            return shown | {"modalities": modalities, "voice": config.voice, "output_audio_format": form}
        audio = {"output": {"format": config.output_format.as_json(), "voice": config.voice}}
        return shown | {"output_modalities": list(config.modalities), "audio": audio}


def loud(samples: np.ndarray) -> bool:
    """Whether a frame (S,) is more than silence."""
    power = float(np.mean(np.square(samples, dtype=np.float64))) if len(samples) else 0.0
    return power > 10 ** (QUIET_DBFS / 10)
