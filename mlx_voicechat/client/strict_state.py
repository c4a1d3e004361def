"""What a strict-v3 client knows from the events so far, and what it refuses: an event that breaks the protocol raises.

The rules are those of the protocol's public client, which ends at each of them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import deque
from collections.abc import Callable
from typing import Any

from mlx_voicechat.client.errors import StrictV3Error
from mlx_voicechat.client.strict_handles import SAMPLE_RATE_HZ, Call, StrictResponse, TypedJob
from mlx_voicechat.errors import ServerError

PROTOCOL = {"name": "voicechat.realtime", "version": 3}
CONCISE = "client_authored_v1"
AUDIO = ("pcm16", SAMPLE_RATE_HZ, 1)
KEPT = 64  # responses, calls and refusals that nobody asks for

Event = dict[str, Any]


def broken(why: str) -> StrictV3Error:
    """The server broke the protocol."""
    return StrictV3Error(f"The server broke the protocol: {why}.", code="protocol_broken")


class State:
    """One conversation as its events tell it."""

    def __init__(self) -> None:
        self.created: Event | None = None
        self.updated: Event | None = None
        self.closed: Event | None = None
        self.owed: dict[tuple[str, int, str], int] = {}  # (acknowledgement, turn, event_id) -> how often it was sent
        self.acknowledged: dict[tuple[str, int], Event] = {}
        self.refusals: dict[str, StrictV3Error] = {}  # of what was sent, by its event_id
        self.answered: set[str] = set()  # turn_ids with a response
        self.response: StrictResponse | None = None
        self.responses: deque[StrictResponse] = deque(maxlen=KEPT)
        self.call: Call | None = None
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.applied: str | None = None  # the last call_id
        self.jobs: dict[str, TypedJob] = {}  # those that are not over

    @property
    def concise(self) -> bool:
        """Whether the server offers that the client words the result for the model."""
        offered = ((self.created or {}).get("capabilities") or {}).get("function_output_model_output")
        return isinstance(offered, dict) and offered.get("mode") == CONCISE

    def expect(self, kind: str, turn: int, event_id: str) -> None:
        """A barrier goes out (once more): one acknowledgement of this kind is owed for it."""
        key = (kind, turn, event_id)
        self.owed[key] = self.owed.get(key, 0) + 1

    def take(self, event: Event) -> None:
        """The next event. Raises StrictV3Error where it must not come, and at a fatal error."""
        handle = HANDLERS.get(str(event.get("type")))
        if handle is not None:
            handle(self, event)

    def fail(self, fault: ServerError) -> None:
        """The conversation is over: so is what was under way."""
        if self.response is not None:
            self.response.fail(fault)
        for job in self.jobs.values():
            job.fail(fault)

    # -- the session -------------------------------------------------------------------------------------------------

    def _created(self, event: Event) -> None:
        protocol, capabilities = event.get("protocol"), event.get("capabilities")
        if protocol != PROTOCOL:
            raise broken(f"it speaks {protocol}, not {PROTOCOL}")
        if not isinstance(capabilities, dict):
            raise broken("session.created has no capabilities")
        if capabilities.get("input_turn_detection") != "client_smart_turn_v1":
            raise broken("the turns are not the client's: is it started with --turns server?")
        self.created = event

    def _updated(self, event: Event) -> None:
        session = event.get("session")
        if not isinstance(session, dict) or session.get("protocol_version") != 3:
            raise broken("session.updated does not confirm version 3")
        self.updated = event

    def _error(self, event: Event) -> None:
        error = event.get("error")
        if not isinstance(error, dict):
            raise broken("an error without its object")
        code, message = str(error.get("code") or "error"), str(error.get("message") or "")
        fault = StrictV3Error(message or f"The server says {code}.", code=code)
        if error.get("fatal"):
            raise fault
        if isinstance(error.get("client_event_id"), str):
            self.refusals[error["client_event_id"]] = fault
            if len(self.refusals) > KEPT:
                del self.refusals[next(iter(self.refusals))]

    def _closed(self, event: Event) -> None:
        self.closed = event
        if event.get("status") != "completed":
            reason = str(event.get("reason") or "failed")
            raise StrictV3Error(f"The server ended the conversation: {reason}.", code=reason)

    # -- turns and responses -----------------------------------------------------------------------------------------

    def _acknowledgement(self, event: Event) -> None:
        kind, turn, sent = event["type"], event.get("client_turn_id"), event.get("client_event_id")
        if not isinstance(turn, int) or not isinstance(sent, str) or not self.owed.get((kind, turn, sent)):
            raise broken(f"{kind} for turn {turn} and {sent}, which was not asked for")
        if kind.endswith("committed") and not isinstance(event.get("turn_id"), str):
            raise broken(f"{kind} without turn_id")
        self.owed[kind, turn, sent] -= 1
        self.acknowledged.setdefault((kind, turn), event)

    def _response_created(self, event: Event) -> None:
        response_id, turn_id = event.get("response_id"), event.get("turn_id")
        if not isinstance(response_id, str) or not isinstance(turn_id, str):
            raise broken("response.created without its ids")
        if self.response is not None:
            raise broken(f"response {response_id} was created while {self.response.response_id} is open")
        self.response = StrictResponse(response_id, turn_id)
        self.responses.append(self.response)
        self.answered.add(turn_id)

    def _text(self, event: Event) -> None:
        if (response := self._open(event)) is not None:
            response.text += str(event.get("delta") or "")

    def _audio(self, event: Event) -> None:
        form = (event.get("encoding"), event.get("sample_rate"), event.get("channels"))
        if form != AUDIO:
            raise broken(f"its audio is {form}, not {AUDIO}")
        try:
            chunk = base64.b64decode(event.get("delta", ""), validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise broken("its audio is no base64") from None
        if (response := self._open(event)) is not None:
            response.hear(chunk)

    def _done(self, event: Event) -> None:
        if (response := self._open(event)) is not None:
            response.end(str(event.get("status")), event.get("reason"))
            self.response, self.call = None, None

    def _open(self, event: Event) -> StrictResponse | None:
        """The response that an event is of; one of another is ignored."""
        known = self.response is not None and event.get("response_id") == self.response.response_id
        return self.response if known else None

    # -- calls and typed text ----------------------------------------------------------------------------------------

    def _called(self, event: Event) -> None:
        if (response := self._open(event)) is None:
            return
        fields = [event.get(name) for name in ("call_id", "name", "arguments")]
        if not all(isinstance(field, str) for field in fields):
            raise broken("a function call without call_id, name and arguments")
        call_id, name, text = (str(field) for field in fields)
        if self.call is not None:
            raise broken(f"call {call_id} while {self.call.call_id} is open")
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise broken(f"the arguments of call {call_id} are no object")
        self.call = Call(call_id, name, arguments, response.response_id, response.turn_id)
        self.calls.append(self.call)

    def _call_failed(self, event: Event) -> None:
        if self.call is not None and event.get("call_id") == self.call.call_id:
            self.call = None

    def _call_applied(self, event: Event) -> None:
        if self.call is None or event.get("call_id") != self.call.call_id:
            raise broken(f"the result of call {event.get('call_id')} was applied, which is not open")
        self.applied, self.call = self.call.call_id, None

    def _job(self, event: Event) -> None:
        job = self.jobs.get(str(event.get("job_id")))
        kind = str(event["type"]).removeprefix("input_text.")
        if job is None:
            raise broken(f"input_text.{kind} of an unknown job")
        if kind == "rejected":
            job.become("rejected", reason=str(event.get("reason")))
        elif kind == "accepted":
            job.become("accepted")
        elif kind == "injection_finished":
            job.become("finished", disposition=str(event.get("disposition")))
        elif job.state == "started":
            raise broken("input_text.injection_started twice")
        else:
            job.become("started")
        if job.over:
            del self.jobs[job.job_id]


HANDLERS: dict[str, Callable[[State, Event], None]] = {
    "session.created": State._created,
    "session.updated": State._updated,
    "session.closed": State._closed,
    "error": State._error,
    "input_audio_buffer.turn_started": State._acknowledgement,
    "input_audio_buffer.committed": State._acknowledgement,
    "response.created": State._response_created,
    "response.output_text.delta": State._text,
    "response.output_audio.delta": State._audio,
    "response.done": State._done,
    "response.function_call_arguments.done": State._called,
    "response.function_call.failed": State._call_failed,
    "conversation.item.function_call_output.applied": State._call_applied,
    "input_text.accepted": State._job,
    "input_text.rejected": State._job,
    "input_text.injection_started": State._job,
    "input_text.injection_finished": State._job,
}
