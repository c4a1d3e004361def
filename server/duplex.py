"""A duplex session: OpenAI's vocabulary with the vendor events, and a life beyond its socket.

Every event has a number and is kept until the client acknowledges it. A session whose socket dropped stands still and
waits to be resumed; then it is at its end.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlx_voicechat.events import FunctionFailed

from . import messages
from .connection import NORMAL
from .detector import Activity
from .duplex_config import BARGE_IN, DuplexConfig
from .duplex_events import EXTRAS, session_fields
from .duplex_overlap import Overlap
from .engine import Engine
from .items import Item
from .journal import Attachment, Entry, Journal
from .json_messages import is_integer
from .openai import OpenAISession
from .openai_config import SessionConfig
from .openai_events import ServerEvent, Wrong, server_event
from .openai_responses import Response
from .settings import ServerSettings
from .typed_voice import TypedVoice
from .wire_audio import WireFormat

MOST_RESPONSES = 1_000  # whose items a playback.ack may still name


class DuplexSession(OpenAISession):
    """See above. `forget` is called once it has ended."""

    vendor = True
    config: DuplexConfig

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        voice: TypedVoice | None,
        send: Callable[[ServerEvent], None],
        close: Callable[[int], None],
        forget: Callable[[DuplexSession], None],
    ) -> None:
        self.epoch = self.turn_id = self.last_client_event_seq = 0
        self.attachment = Attachment(settings.disconnect_grace_seconds)
        self.journal = Journal()
        self.overlap = Overlap()
        self.frame_ms = round(engine.config.frame_seconds * 1000)
        self.spoken: OrderedDict[str, Item] = OrderedDict()  # the items of responses, by their ids
        self._hinted = False
        self._forget = forget
        super().__init__(engine, settings, voice, False, send, close)
        self.id = f"duplex-{uuid.uuid4()}"

    def _first_config(self) -> DuplexConfig:
        sent, heard = WireFormat("audio/pcm", 24_000), WireFormat("audio/pcm", 16_000)
        return DuplexConfig(self.settings.model_id, heard, sent)

    # -- life ----------------------------------------------------------------------------------------------------

    def attach(self, send: Callable[[ServerEvent], None], close: Callable[[int], None], last_received: int) -> None:
        """Another socket has the session from now on: it gets what the client has not. Raises JournalLost."""
        entries = self.journal.after(last_received)
        if not self.attachment.detached:
            fields = {"session_id": self.id, "attachment_generation": self.attachment.generation}
            self._send(ServerEvent("session.replaced", fields))
            self._close(NORMAL)
        token = self.attachment.attach()
        self._send, self._close = send, close
        fields = {
            "session_id": self.id,
            "session": self.session_object(),
            "attachment_generation": self.attachment.generation,
            "resume_token": token,
            "last_client_event_seq": self.last_client_event_seq,
        }
        send(ServerEvent("session.resumed", fields))
        for entry in entries:
            send(replayed(entry))
        self.put(messages.Pause(False))

    def detach(self) -> None:
        """The socket is gone; the model stands still."""
        self.attachment.detach()
        self._send, self._close = lambda event: self.frames_left(event.frames), lambda code: None
        self.put(messages.Pause(True))

    def expire(self, reason: str) -> None:
        """Nobody came back in time, or said anything."""
        self.emit("session.expired", session_id=self.id, reason=reason)
        self._close(NORMAL)
        self.end()

    def close_session(self, reason: str) -> None:
        """The client has closed it."""
        if self.response is not None:
            self.interrupt("client_cancelled")
        fields = {"session_id": self.id, "epoch": self.epoch, "reason": reason}
        self.emit("session.closed", **fields, event={"type": "session.closed", "reason": reason})
        self._close(NORMAL)
        self.end()

    def owned_by(self, send: Callable[[ServerEvent], None]) -> bool:
        """Whether this socket's queue is where its events go."""
        return self._send == send

    def end(self) -> None:
        if not self.ended:
            super().end()
            self._forget(self)

    def is_new(self, message: dict[str, Any]) -> bool:
        """A client may number its messages (`client_event_seq`), to send again what did not arrive."""
        number = message.get("client_event_seq")
        if not is_integer(number):
            return True
        new = number > self.last_client_event_seq
        self.last_client_event_seq = max(self.last_client_event_seq, number)
        return new

    # -- events --------------------------------------------------------------------------------------------------

    def emit(self, name: str, /, **fields: Any) -> None:
        """Say a server event, with a number and what the vendor adds; the journal keeps it."""
        frames = 0
        if name == "response.output_audio.delta" and not self._delta_sent:
            frames, self._delta_sent = 1, True
        if name in EXTRAS:
            fields |= EXTRAS[name](self, fields)
        event = server_event(name, fields, frames, False, True)
        assert event is not None
        number = self.journal.number()
        fields |= {"event_id": f"event_{secrets.token_hex(8)}", "server_event_seq": number}
        self.journal.write(number, json.dumps({"type": name, **fields}))
        self._send(event)
        if name == "response.content_part.added":
            self._spoken(fields["response_id"], fields["item_id"])
            place = {key: fields[key] for key in ("response_id", "item_id", "output_index", "content_index")}
            metadata = {"session_id": self.id, "epoch": self.epoch, "model_speak": True}
            self.emit("response.speak", **place, metadata=metadata)

    def _spoken(self, response_id: str, item_id: str) -> None:
        self.spoken[response_id] = self.items.get(item_id)
        while len(self.spoken) > MOST_RESPONSES:
            self.spoken.popitem(last=False)

    def stamp(self, kind: str) -> dict[str, Any]:
        """The head of a vendor's own event inside another."""
        return {"type": kind, "session_id": self.id, "epoch": self.epoch}

    def session_object(self) -> dict[str, Any]:
        shown = super().session_object()
        audio = shown["audio"]
        audio["input"]["sample_rate_hz"] = self.config.input_format.rate_hz
        audio["output"]["sample_rate_hz"] = self.config.output_format.rate_hz
        return shown | session_fields(self)

    @property
    def turn_state(self) -> str:
        """Who speaks."""
        if self.response is not None:
            return "speaking"
        return "idle" if self.utterances.current is None else "listening"

    def playback(self, response_id: str | None = None) -> dict[str, int]:
        """The ledger of a response's item, by default of the last."""
        item = self.spoken.get(response_id or self.last_response_id or "")
        if item is None:
            return {"generated_ms": 0, "sent_ms": 0, "played_ms": 0, "committed_ms": 0}
        return item.playback.as_json()

    def listen(self, reason: str) -> None:
        """The model goes on listening."""
        event = self.stamp("response.listen") | {"reason": reason}
        response = {"object": "realtime.response", "status": "listening", "metadata": event}
        self.emit("response.listen", session_id=self.id, epoch=self.epoch, response=response)

    # -- turns ---------------------------------------------------------------------------------------------------

    def preview(self, session: dict[str, Any]) -> None:
        """What the first update will say, for `session.created`, which comes before its answer."""
        with suppress(Wrong):
            self.config = self.config.updated(session)
            self.ear.configure(self.config.turn_detection)

    def hinted(self, is_speech: bool) -> None:
        """The client says whether the user speaks."""
        if is_speech != self._hinted:
            self._hinted = is_speech
            at_ms = round(self.input_ms)
            (self.utterances.start if is_speech else self.utterances.stop)(at_ms)

    def configure(self, config: SessionConfig) -> None:
        super().configure(config)
        self.items.commit_policy = self.config.playback_commit_policy

    def interrupt(self, reason: str) -> None:
        self.epoch += 1
        super().interrupt(reason)

    def _respond(self) -> Response:
        response = super()._respond()
        self.overlap.begin()
        return response

    def _activity(self, activity: Activity) -> None:
        if activity.kind == "started" and self.response is not None and self.config.overlap_policy == BARGE_IN:
            self.decide("barge_in", "server_vad_utterance_active", 0.0)
        super()._activity(activity)

    def decide(self, action: str, reason: str, overlap_ms: float) -> None:
        """Say how speech over the agent's is handled."""
        fields = {"session_id": self.id, "epoch": self.epoch, "policy": self.config.overlap_policy}
        metadata = {"overlap_ms": round(overlap_ms)}
        self.emit("overlap.decision", **fields, action=action, reason=reason, metadata=metadata)

    def _unanswered(self) -> None:
        self.listen("model_listen")

    # -- the engine's events -------------------------------------------------------------------------------------

    def deliver(self, event: Any) -> None:
        if isinstance(event, FunctionFailed) and not self.ended and not self.prompt.operators:
            failed = self.stamp("function_call.done") | {"call_id": event.call_id or None, "name": None}
            self.emit("duplex.function_call.done", event=failed | {"arguments": event.raw, "reason": event.reason})
            return
        super().deliver(event)


def replayed(entry: Entry) -> ServerEvent:
    """An event of the journal, as it was."""
    fields = json.loads(entry.text)
    return ServerEvent(fields.pop("type"), fields)
