"""Client events of the duplex extensions, and what they change in those of OpenAI's vocabulary."""

from __future__ import annotations

from typing import Any

from .duplex import DuplexSession
from .items import Item, ItemError
from .json_messages import is_integer, named
from .openai_events import Wrong
from .openai_messages import (
    HANDLERS,
    Handler,
    asked,
    audio_bytes,
    clear,
    committed,
    in_order,
)
from .wire_audio import UnsupportedFormat, WrongAudio, wire_format

ALIASES = {
    "input.commit": "input_audio_buffer.commit",
    "input_text.append": "input.text.append",
    "push_text": "input.text.append",
    "signal_turn": "turn.signal",
    "audio.playback_ack": "playback.ack",
    "close_session": "session.close",
    "close": "session.close",
}


def append(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    own = session.config.input_format
    given = message.get("format") or message.get("input_audio_format") or own.encoding
    is_speech = message.get("is_speech")
    if is_speech is not None and not isinstance(is_speech, bool):
        raise Wrong("invalid_event", f"is_speech must be true or false, not {named(is_speech)}.", "is_speech")
    try:
        form = wire_format(given, message.get("sample_rate_hz"), own.rate_hz)
        data = audio_bytes(message)
        samples = session.hear(data, form)
    except UnsupportedFormat as fault:
        raise Wrong("unsupported_audio_format", str(fault), "format") from None
    except WrongAudio as fault:
        raise Wrong("invalid_audio", str(fault), "audio") from None
    if is_speech is not None and session.ear.detector is None:
        session.hinted(is_speech)
    if session.response is not None:
        decision = session.overlap.heard(samples, form.milliseconds(len(data)), is_speech, session.config)
        if decision is not None:
            session.decide(decision.action, decision.reason, decision.overlap_ms)
            if decision.action == "barge_in":
                session.interrupt("barge_in")


def commit(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    silent, create = message.get("is_speech") is False, message.get("response_create") is True

    async def work() -> None:
        if silent:
            session.uncommitted_ms = 0.0
            session.utterances.drop(round(session.input_ms))
            session.listen("silence_commit")
            return
        committed(session)
        if create:
            await asked(session, None)

    in_order(session, event_id, work)


def input_cancel(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    session.epoch += 1
    clear(session, message, event_id)


def text_append(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    raise Wrong("native_text_append_unsupported", "The model hears; send typed text as a conversation item.", "type")


def heartbeat(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    session.emit("session.heartbeat_ack", session_id=session.id, last_client_event_seq=session.last_client_event_seq)


def event_ack(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    number = message.get("server_event_seq")
    if not is_integer(number):
        raise Wrong("invalid_event", f"server_event_seq must be an integer, not {named(number)}.", "server_event_seq")
    session.journal.acknowledge(number)


def close(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    session.close_session("client_close")


def barge_in(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    _signal(session, "barge_in")


def turn_signal(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    signal = message.get("event")
    if not isinstance(signal, str):
        raise Wrong("invalid_event", f"event must be a string, not {named(signal)}.", "event")
    if signal != "barge_in":
        raise Wrong("unsupported_capability", f"There is no turn signal {named(signal)} here, only barge_in.", "event")
    _signal(session, signal)


def _signal(session: DuplexSession, signal: str) -> None:
    session.interrupt("barge_in")
    session.emit("turn.event", session_id=session.id, epoch=session.epoch, event=signal, turn_state=session.turn_state)


def playback_ack(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    item = _acknowledged(session, message)
    played, heard = message.get("played_ms"), message.get("committed_ms")
    truncate = message.get("truncate", False)
    for name, value in (("played_ms", played), ("committed_ms", heard)):
        missing = value is None and name == "committed_ms"
        if not missing and (not (is_integer(value) or isinstance(value, float)) or not 0 <= value <= 1e9):
            raise Wrong("invalid_event", f"{name} must be a number of at least 0, not {named(value)}.", name)
    if not isinstance(truncate, bool):
        raise Wrong("invalid_event", f"truncate must be true or false, not {named(truncate)}.", "truncate")
    assert played is not None
    history = session.items.acknowledge(item, played, heard, truncate)
    event = session.stamp("playback.acknowledged") | {
        "item_id": item.id,
        "played_ms": item.playback.played_ms,
        "committed_ms": item.playback.committed_ms,
        "truncate": truncate,
        "playback": item.playback.as_json(),
        "history_committed": history,
    }
    session.emit("playback.acknowledged", event=event)


def _acknowledged(session: DuplexSession, message: dict[str, Any]) -> Item:
    item_id, response_id = message.get("item_id"), message.get("response_id") or session.last_response_id
    if item_id is None and isinstance(response_id, str) and response_id in session.spoken:
        return session.spoken[response_id]
    try:
        return session.items.get(item_id)
    except ItemError as fault:
        raise Wrong(fault.code, f"{fault.message} No response {named(response_id)} either.", "item_id") from None


def resume_again(session: DuplexSession, message: dict[str, Any], event_id: str | None) -> None:
    raise Wrong("invalid_session_resume", "This connection has its session: resume on a new one.", "type")


DUPLEX_HANDLERS: dict[str, Handler] = {
    **HANDLERS,
    "session.heartbeat": heartbeat,
    "session.event_ack": event_ack,
    "session.close": close,
    "session.resume": resume_again,
    "input_audio_buffer.append": append,
    "input_audio_buffer.commit": commit,
    "input.cancel": input_cancel,
    "input.text.append": text_append,
    "barge_in": barge_in,
    "turn.signal": turn_signal,
    "playback.ack": playback_ack,
}
DUPLEX_HANDLERS |= {alias: DUPLEX_HANDLERS[name] for alias, name in ALIASES.items()}
