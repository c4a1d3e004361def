"""strict-v3: the order of a connection's events, in one table that the server goes by and tests check traces with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# States of a connection. `turn` and what follows are those of a microphone turn, `spoken` is that of a typed turn or of
# one that the model found; `bare` is a turn whose boundary was a call, so that no response is there yet.
NEW, GREETED, IDLE, INJECTING = "new", "greeted", "idle", "injecting"
STARTED, TURN, COMMITTED, SPOKEN, STOPPED, BARE = "started", "turn", "committed", "spoken", "stopped", "bare"
RESPONSE, CALL, TEXT_DONE, AUDIO_DONE = "response", "call", "text_done", "audio_done"
FATAL, ANNOUNCED = "fatal", "announced"

_SPEECH, _INPUT, _TEXT = "conversation.item.input_audio_transcription", "input_audio_buffer", "input_text"
_CALL, _FAILED = "response.function_call_arguments.done", "response.function_call.failed"
_APPLIED = "conversation.item.function_call_output.applied"

_CONFIGURED = (IDLE, STARTED, TURN, COMMITTED, SPOKEN, STOPPED, BARE, RESPONSE, CALL, TEXT_DONE, AUDIO_DONE, INJECTING)
_LIVE = (NEW, GREETED, *_CONFIGURED)

# (state, event) -> state. An event's name carries `:` and what else decides: its source, its fatality, its repetition.
ORDER: dict[tuple[str, str], str] = {
    (NEW, "session.created"): GREETED,
    (GREETED, "session.updated"): IDLE,
    (IDLE, "session.updated"): IDLE,
    # a microphone turn
    (IDLE, f"{_INPUT}.speech_started:microphone"): STARTED,
    (BARE, f"{_INPUT}.speech_started:microphone"): STARTED,  # the turn that suppressed the call
    (STARTED, f"{_INPUT}.turn_started"): TURN,
    (TURN, f"{_SPEECH}.delta"): TURN,
    (TURN, f"{_INPUT}.committed"): COMMITTED,
    (COMMITTED, f"{_SPEECH}.delta"): COMMITTED,  # of the step that takes the BOS
    (COMMITTED, f"{_INPUT}.speech_stopped"): STOPPED,
    (TURN, f"{_INPUT}.speech_stopped"): STOPPED,  # cut by session.stop or by the position limit
    (STARTED, f"{_INPUT}.speech_stopped"): STOPPED,
    # a typed turn, or one that the model found
    (IDLE, f"{_TEXT}.injection_started"): INJECTING,
    (BARE, f"{_TEXT}.injection_started"): INJECTING,
    (INJECTING, f"{_INPUT}.speech_started:typed"): SPOKEN,
    (IDLE, f"{_INPUT}.speech_started:server"): SPOKEN,
    (SPOKEN, f"{_SPEECH}.delta"): SPOKEN,
    (SPOKEN, f"{_INPUT}.speech_stopped"): STOPPED,
    # the end of any turn
    (STOPPED, f"{_SPEECH}.completed"): BARE,
    (BARE, "response.created"): RESPONSE,
    # a response
    (RESPONSE, "response.output_text.delta"): RESPONSE,
    (RESPONSE, "response.output_audio.delta"): RESPONSE,
    (RESPONSE, _CALL): CALL,
    (RESPONSE, _FAILED): RESPONSE,  # of a call that could not be read
    (CALL, "response.output_text.delta"): CALL,  # on hold
    (CALL, "response.output_audio.delta"): CALL,
    (CALL, _APPLIED): RESPONSE,
    (CALL, _FAILED): RESPONSE,
    (RESPONSE, "response.output_text.done"): TEXT_DONE,
    (TEXT_DONE, "response.output_audio.done"): AUDIO_DONE,
    (AUDIO_DONE, "response.done"): IDLE,
    # at any time
    **{(state, "error:recoverable"): state for state in _LIVE},
    **{(state, "error:fatal"): FATAL for state in _LIVE},
    **{(state, "voicechat.metrics"): state for state in _CONFIGURED},
    **{(state, f"{_INPUT}.turn_started:again"): state for state in _CONFIGURED},
    **{(state, f"{_INPUT}.committed:again"): state for state in _CONFIGURED},
    **{(state, f"{_TEXT}.rejected"): state for state in _LIVE},
    **{(state, f"{_TEXT}.accepted"): state for state in _CONFIGURED},
    **{(state, f"{_TEXT}.injection_finished"): state for state in (*_CONFIGURED, FATAL)},
    # the end
    **{(state, "session.closed:completed"): ANNOUNCED for state in (NEW, GREETED, IDLE, BARE, INJECTING)},
    **{(state, "session.closed:failed"): ANNOUNCED for state in (GREETED, IDLE, BARE, INJECTING, FATAL)},
}
TURN_OPEN = frozenset({STARTED, TURN, COMMITTED, SPOKEN})
RESPONSE_OPEN = frozenset({RESPONSE, CALL, TEXT_DONE, AUDIO_DONE})

# One typed job: (state, event) -> state.
JOB_ORDER: dict[tuple[str, str], str] = {
    ("none", "rejected"): "none",
    ("none", "accepted"): "accepted",
    ("accepted", "injection_started"): "started",
    **{("accepted", f"injection_finished:{how}"): "finished" for how in ("replaced", "cancelled", "error")},
    **{("started", f"injection_finished:{how}"): "finished" for how in ("completed", "cancelled", "error")},
    ("finished", "rejected"): "finished",  # the id once more
    ("accepted", "rejected"): "accepted",
    ("started", "rejected"): "started",
}


class OutOfOrder(Exception):
    """An event that the table does not allow: a defect of the server."""


class Order:
    """Where a connection is; `take` every event in order. Raises OutOfOrder."""

    def __init__(self) -> None:
        self.state = NEW
        self._jobs: dict[str, str] = {}
        self._started: set[Any] = set()
        self._committed: set[Any] = set()

    def take(self, event: Mapping[str, Any]) -> None:
        name = self._name(event)
        state = ORDER.get((self.state, name))
        if state is None:
            raise OutOfOrder(f"{name} while {self.state}")
        kind = event["type"].removeprefix("input_text.")
        if kind != event["type"]:
            self._take_job(kind, event)
        self.state = state

    def _name(self, event: Mapping[str, Any]) -> str:
        kind: str = event["type"]
        if kind == "error":
            return "error:fatal" if event["error"]["fatal"] else "error:recoverable"
        if kind == "session.closed":
            return f"{kind}:{event['status']}"
        if kind.endswith("speech_started"):
            microphone = "server" if event["correlation"] is None else "microphone"
            return f"{kind}:{microphone if event['source'] == 'microphone' else 'typed'}"
        if kind in (f"{_INPUT}.turn_started", f"{_INPUT}.committed"):
            seen = self._started if kind.endswith("turn_started") else self._committed
            if event["turn_id"] in seen:
                return f"{kind}:again"
            seen.add(event["turn_id"])
        return kind

    def _take_job(self, kind: str, event: Mapping[str, Any]) -> None:
        job_id = event["job_id"]
        name = f"{kind}:{event['disposition']}" if kind == "injection_finished" else kind
        before = self._jobs.get(job_id, "none")
        after = JOB_ORDER.get((before, name))
        if after is None:
            raise OutOfOrder(f"{event['type']} of a job that is {before}")
        if after != "none":
            self._jobs[job_id] = after
