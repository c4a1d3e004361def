"""The conversation as a client sees it: items in order, what was heard of each, and what of it is history.

An assistant's item holds its text with exact marks: the model gives its text frame by frame beside its audio, so
cutting the audio cuts the text at a frame. Sizes are bounded; the oldest items go first, and the caller is told which.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["message", "function_call", "function_call_output"]
Role = Literal["user", "assistant", "system"]
Status = Literal["in_progress", "completed", "incomplete"]
CommitPolicy = Literal["commit_all_on_done", "ack_only"]

MOST_ITEMS = 1_000
MOST_BYTES = 1 << 20
ID_CHARACTERS = 256
ROOT = "root"  # as previous_item_id: at the very beginning
BETA_PARTS = {"output_audio": "audio", "output_text": "text"}
GA_PARTS = {beta: ga for ga, beta in BETA_PARTS.items()}
STRINGS = {"function_call": ("name", "call_id", "arguments"), "function_call_output": ("call_id", "output")}


class ItemError(ValueError):
    """What cannot be done with an item; `code` is the wire's, `param` the field at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def new_id(prefix: str) -> str:
    """An id of ours: the prefix, "_", 24 hex digits."""
    return f"{prefix}_{secrets.token_hex(12)}"


@dataclass
class Playback:
    """How far an item's audio is, in ms: made, sent, heard, and taken into history; each at most the one before it."""

    generated_ms: int = 0
    sent_ms: int = 0
    played_ms: int = 0
    committed_ms: int = 0

    def as_json(self) -> dict[str, int]:
        return dict(vars(self))

    def generate(self, ms: int) -> None:
        self.generated_ms += ms

    def send(self, ms: int) -> None:
        self.sent_ms = min(self.sent_ms + ms, self.generated_ms)

    def acknowledge(self, played_ms: float, committed_ms: float | None = None) -> None:
        """A client's cumulative report: it never goes back, nor past what was sent; committed is played if absent."""
        self.played_ms = max(self.played_ms, min(int(played_ms), self.sent_ms))
        committed = self.played_ms if committed_ms is None else int(committed_ms)
        self.committed_ms = max(self.committed_ms, min(committed, self.played_ms))


@dataclass
class Speech:
    """An assistant's text beside its audio: `marks` are (characters so far, ms of audio so far) at each piece."""

    text: str = ""
    marks: list[tuple[int, int]] = field(default_factory=list)

    def say(self, delta: str, audio_end_ms: int) -> None:
        """More text, spoken in the audio that ends at `audio_end_ms` of the item."""
        if not delta:
            return
        self.text += delta
        if self.marks and self.marks[-1][1] == audio_end_ms:
            self.marks.pop()
        self.marks.append((len(self.text), audio_end_ms))

    def until(self, audio_end_ms: int) -> str:
        """The text whose audio ends by then."""
        spoken = [characters for characters, end_ms in self.marks if end_ms <= audio_end_ms]
        return self.text[: spoken[-1]] if spoken else ""


@dataclass(eq=False)
class Item:
    """One item. A message has `parts` (an assistant's own: `speech`), a call and its output have `fields`.

    `parts` are {"type", "text" or "transcript"}, without the audio or images that a client sent.
    """

    id: str
    kind: Kind = "message"
    role: Role | None = None
    status: Status = "completed"
    parts: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    speech: Speech | None = None
    modality: Literal["audio", "text"] = "audio"
    playback: Playback = field(default_factory=Playback)
    truncated_ms: int | None = None

    @property
    def text(self) -> str:
        """What was said: of a speech no more than a truncation left."""
        if self.speech is not None:
            return self.speech.text if self.truncated_ms is None else self.speech.until(self.truncated_ms)
        texts = (part.get("text") or part.get("transcript") or "" for part in self.parts)
        return " ".join(text for text in texts if text)

    @property
    def size_bytes(self) -> int:
        marks = len(self.speech.marks) * 16 if self.speech else 0
        spoken = len(self.speech.text.encode()) if self.speech else 0
        return 100 + marks + spoken + len(json.dumps([self.id, self.parts, self.fields]))

    def content(self) -> list[dict[str, Any]]:
        """The parts of a message."""
        if self.speech is None:
            return [dict(part) for part in self.parts]
        key = "transcript" if self.modality == "audio" else "text"
        return [{"type": f"output_{self.modality}", key: self.text}]

    def as_json(self, beta: bool = False) -> dict[str, Any]:
        """The item as OpenAI's Realtime vocabulary has it; `beta` names an assistant's parts as that did."""
        shown: dict[str, Any] = {"id": self.id, "object": "realtime.item", "type": self.kind, "status": self.status}
        if self.kind != "message":
            return shown | self.fields
        content = self.content()
        if beta:
            content = [{**part, "type": BETA_PARTS.get(part["type"], part["type"])} for part in content]
        return {**shown, "role": self.role, "content": content}

    def say(self, delta: str, audio_end_ms: int) -> None:
        """A piece of the assistant's text, and where the audio of its frame ends in the item."""
        assert self.speech is not None
        self.speech.say(delta, audio_end_ms)


def user_audio(item_id: str, transcript: str | None = None) -> Item:
    """A user's utterance; `transcript` comes when the model has it."""
    return Item(item_id, role="user", parts=[{"type": "input_audio", "transcript": transcript}])


def answer(item_id: str, modality: Literal["audio", "text"] = "audio") -> Item:
    """An assistant's item that is about to be spoken."""
    return Item(item_id, role="assistant", status="in_progress", speech=Speech(), modality=modality)


def call(item_id: str, name: str, call_id: str, arguments: str) -> Item:
    """A function call of the assistant."""
    fields = {"name": name, "call_id": call_id, "arguments": arguments}
    return Item(item_id, "function_call", "assistant", fields=fields)


def item_from_json(value: object) -> Item:
    """A client's item, with its id or one of ours. Raises ItemError(invalid_event)."""
    if not isinstance(value, dict):
        raise ItemError("invalid_event", "item must be an object.", "item")
    item_id = value.get("id")
    if item_id is None:
        item_id = new_id("item")
    if not isinstance(item_id, str) or not 0 < len(item_id) <= ID_CHARACTERS or item_id == ROOT:
        raise ItemError("invalid_event", f"item.id must be a string of 1 to {ID_CHARACTERS} characters.", "item.id")
    kind = value.get("type")
    if kind == "message":
        return _message(item_id, value)
    if kind not in ("function_call", "function_call_output"):
        kinds = "message, function_call or function_call_output"
        raise ItemError("invalid_event", f"item.type must be {kinds}.", "item.type")
    fields: dict[str, str] = {}
    for name in STRINGS[kind]:
        if not isinstance(value.get(name), str):
            raise ItemError("invalid_event", f"item.{name} must be a string.", f"item.{name}")
        fields[name] = value[name]
    return Item(item_id, kind, "assistant" if kind == "function_call" else None, fields=fields)


def _message(item_id: str, value: dict[str, Any]) -> Item:
    role, content = value.get("role"), value.get("content")
    if role not in ("user", "assistant", "system"):
        raise ItemError("invalid_event", "item.role must be user, assistant or system.", "item.role")
    if not isinstance(content, list):
        raise ItemError("invalid_event", "item.content must be an array.", "item.content")
    parts = []
    for number, part in enumerate(content):
        where = f"item.content[{number}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ItemError("invalid_event", f"{where} must be an object with a type.", where)
        kept: dict[str, Any] = {"type": GA_PARTS.get(part["type"], part["type"])}
        for name in ("text", "transcript"):
            if part.get(name) is not None and not isinstance(part[name], str):
                raise ItemError("invalid_event", f"{where}.{name} must be a string.", f"{where}.{name}")
            if name in part:
                kept[name] = part[name]
        parts.append(kept)
    return Item(item_id, role=role, parts=parts)


@dataclass(frozen=True)
class Placed:
    """Where an item came to stand, and the `dropped` items that had to make room."""

    item: Item
    previous_item_id: str | None
    dropped: tuple[str, ...] = ()
    repeated: bool = False  # it was there already: the same item was sent again


class Items:
    """A conversation's items in order."""

    def __init__(
        self,
        commit_policy: CommitPolicy = "commit_all_on_done",
        most_items: int = MOST_ITEMS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.commit_policy = commit_policy
        self._most_items, self._most_bytes = most_items, most_bytes
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self._items)

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    def get(self, item_id: object) -> Item:
        """Raises ItemError(item_not_found)."""
        return self._items[self._index(item_id)]

    def add(self, item: Item, previous_item_id: object = None) -> Placed:
        """Place an item behind another ("root": first; None or unknown: last).

        A second item of the same id is the same one sent again, or ItemError(invalid_event).
        """
        for at, known in enumerate(self._items):
            if known.id == item.id:
                if known.as_json() != item.as_json():
                    raise ItemError("invalid_event", f"There is another item with the id {item.id[:50]}.", "item.id")
                return Placed(known, self._before(at), repeated=True)
        if item.size_bytes > self._most_bytes:
            raise ItemError("invalid_event", f"The item is larger than {self._most_bytes:,} bytes.", "item")
        places = {known.id: at + 1 for at, known in enumerate(self._items)}
        place = 0 if previous_item_id == ROOT else len(self._items)
        if isinstance(previous_item_id, str):
            place = places.get(previous_item_id, place)
        self._items.insert(place, item)
        dropped = self._make_room(item)
        return Placed(item, self._before(self._items.index(item)), dropped)

    def delete(self, item_id: object) -> Item:
        """Raises ItemError(item_not_found)."""
        return self._items.pop(self._index(item_id))

    def truncate(self, item_id: object, audio_end_ms: int, content_index: int = 0) -> int:
        """Cut an assistant's audio, and its text with it, to `audio_end_ms`; the ms it was really cut to.

        What is beyond the end is clamped, and a cut does not grow back. Raises ItemError (item_not_found, and
        invalid_truncation for what is no audio of the assistant).
        """
        item = self.get(item_id)
        if item.speech is None or item.modality != "audio" or content_index != 0:
            why = f"Only audio of the assistant is truncated, and {item.id[:50]} has none at that content_index."
            raise ItemError("invalid_truncation", why, "item_id")
        latest = item.playback.generated_ms if item.truncated_ms is None else item.truncated_ms
        item.truncated_ms = max(0, min(audio_end_ms, latest))
        return item.truncated_ms

    def acknowledge(
        self, item: Item, played_ms: float, committed_ms: float | None = None, truncate: bool = False
    ) -> bool:
        """A client's report of playback; whether the item's end has come into history by it.

        `truncate`: nothing after it was heard, so that the item ends there.
        """
        item.playback.acknowledge(played_ms, committed_ms)
        if truncate and item.speech is not None and item.modality == "audio":
            self.truncate(item.id, item.playback.committed_ms)
        end = item.playback.generated_ms if item.truncated_ms is None else item.truncated_ms
        return item.status != "in_progress" and item.playback.committed_ms >= end

    def finish(self, item: Item, status: Literal["completed", "incomplete"]) -> None:
        """The item's end; with `commit_all_on_done` all of it is history."""
        item.status = status
        if self.commit_policy == "commit_all_on_done":
            item.playback.committed_ms = item.playback.generated_ms

    def history(self) -> list[tuple[Role, str]]:
        """The turns so far, (role, text), none empty: of an answer what is committed, and what no truncation cut."""
        turns: list[tuple[Role, str]] = []
        for item in self._items:
            if item.kind == "message" and item.role is not None and (text := self._committed(item).strip()):
                turns.append((item.role, text))
        return turns

    def _committed(self, item: Item) -> str:
        if item.speech is None or self.commit_policy == "commit_all_on_done" or item.modality == "text":
            return item.text
        committed = item.playback.committed_ms
        if item.truncated_ms is not None:
            committed = min(committed, item.truncated_ms)
        whole = committed >= item.playback.generated_ms and item.status != "in_progress"
        return item.speech.text if whole else item.speech.until(committed)

    def _make_room(self, newest: Item) -> tuple[str, ...]:
        """Drop the oldest that are finished until both bounds hold."""
        dropped = []
        size = self.size_bytes
        for item in list(self._items):
            if len(self._items) <= self._most_items and size <= self._most_bytes:
                break
            if item is not newest and item.status != "in_progress":
                self._items.remove(item)
                size -= item.size_bytes
                dropped.append(item.id)
        return tuple(dropped)

    def _before(self, place: int) -> str | None:
        return self._items[place - 1].id if place else None

    def _index(self, item_id: object) -> int:
        for at, item in enumerate(self._items):
            if item.id == item_id:
                return at
        raise ItemError("item_not_found", f"There is no item {str(item_id)[:50]!r}.", "item_id")
