"""Client events of OpenAI's Realtime vocabulary: what each asks a session for, and what is wrong with it.

What belongs to the audio (commits, items, requests for a response) keeps its place behind it; the rest is done at once.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mlx_voicechat.errors import VoiceChatError

from . import messages
from .items import ItemError, item_from_json
from .json_messages import Malformed, client_event_id, decoded, is_integer, named, parsed
from .openai import OpenAISession
from .openai_events import Wrong
from .wire_audio import WireFormat, WrongAudio

LEAST_COMMIT_MS = 100  # of audio, as OpenAI's server has it
RESULT_BYTES = 16 * 1024
TYPED_CHARACTERS = 4_000

Handler = Callable[[Any, dict[str, Any], "str | None"], None]


def take(session: OpenAISession, handlers: Mapping[str, Handler], frame: Mapping[str, Any]) -> None:
    """Do what a WebSocket message asks for, or say an error that names it."""
    event_id = None
    try:
        message = parsed(frame)
        event_id = client_event_id(message)
        if not session.is_new(message):
            return
        kind = message.get("type")
        handler = handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            shown = "missing" if "type" not in message else named(kind)
            raise Wrong("invalid_event", f"The type of the message is {shown}: there is no such type.", "type")
        handler(session, message, event_id)
    except Malformed as fault:
        session.error("invalid_event" if fault.is_json else "invalid_json", fault.message)
    except Wrong as wrong:
        session.error(wrong.code, wrong.message, wrong.param, event_id)


def in_order(session: OpenAISession, event_id: str | None, work: Callable[[], Awaitable[None]]) -> None:
    """Do something behind the audio so far."""

    async def guarded() -> None:
        if session.ended:
            return
        try:
            await work()
        except Wrong as wrong:
            session.error(wrong.code, wrong.message, wrong.param, event_id)

    session.ear.behind(guarded)


# -- the session and its audio -----------------------------------------------------------------------------------------


def session_update(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    given = message.get("session")
    if not isinstance(given, dict):
        raise Wrong("invalid_event", f"session must be an object, not {named(given)}.", "session")
    config = session.config.updated(given)
    if session.prompt.is_fixed and config.prompt != session.config.prompt:
        raise Wrong(
            "unsupported_capability",
            "This server changes neither instructions nor tools in a conversation that has begun. Open a new session.",
            "session.instructions" if config.prompt[0] != session.config.prompt[0] else "session.tools",
        )
    session.configure(config)


def audio_bytes(message: dict[str, Any]) -> bytes:
    """The audio of an append. Raises Wrong."""
    audio = message.get("audio")
    if not isinstance(audio, str):
        raise Wrong("invalid_audio", f"audio must be base64, not {named(audio)}.", "audio")
    try:
        return decoded(audio)
    except ValueError as fault:
        raise Wrong("invalid_audio", f"audio must be base64: {fault}.", "audio") from None


def append(
    session: OpenAISession, message: dict[str, Any], event_id: str | None, form: WireFormat | None = None
) -> None:
    try:
        session.hear(audio_bytes(message), form)
    except WrongAudio as fault:
        raise Wrong("invalid_audio", str(fault), "audio") from None


def commit(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    async def work() -> None:
        committed(session)

    in_order(session, event_id, work)


def committed(session: OpenAISession) -> None:
    """Seal what was said since the last commit. Raises Wrong."""
    if session.uncommitted_ms < LEAST_COMMIT_MS:
        message = f"The buffer has {session.uncommitted_ms:.0f} ms of audio, a commit needs {LEAST_COMMIT_MS} ms."
        raise Wrong("input_audio_buffer_commit_empty", message)
    detector, seconds = session.ear.detector, session.uncommitted_ms / 1000
    session.uncommitted_ms = 0.0
    utterances = session.utterances
    if utterances.current is not None and utterances.current.sealed:
        utterances.complete()
    if detector is not None and utterances.current is not None and utterances.current.started_ms is not None:
        session.ear.forget()
        utterances.stop(session.ear.heard_ms)
        return
    utterances.seal(seconds)
    session.put(messages.Quiet())


def clear(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    session.ear.clear()
    session.ear.forget()
    session.uncommitted_ms = 0.0
    session.utterances.drop(session.ear.heard_ms)
    session.put(messages.Clear())
    session.emit("input_audio_buffer.cleared")


# -- items -------------------------------------------------------------------------------------------------------------


def item_create(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    try:
        item = item_from_json(message.get("item"))
    except ItemError as fault:
        raise Wrong(fault.code, fault.message, fault.param) from None
    previous = message.get("previous_item_id")

    async def work() -> None:
        call_id = item.fields.get("call_id", "") if item.kind == "function_call_output" else None
        if call_id is not None:
            _check_result(session, call_id, item.fields["output"])
        try:
            placed = session.items.add(item, previous)
        except ItemError as fault:
            raise Wrong(fault.code, fault.message, fault.param) from None
        shown = placed.item.as_json(session.beta)
        session.emit("conversation.item.added", previous_item_id=placed.previous_item_id, item=shown)
        session.emit("conversation.item.done", previous_item_id=placed.previous_item_id, item=shown)
        for dropped in placed.dropped:
            session.emit("conversation.item.deleted", item_id=dropped)
        if placed.repeated:
            return
        if call_id is not None:
            session.calls[call_id] = unwrapped(item.fields["output"])
            session.results_wait()
        elif item.role == "user":
            text = " ".join(part["text"] for part in item.parts if part.get("type") == "input_text" and "text" in part)
            if text.strip():
                session.typed.append(text[:TYPED_CHARACTERS])

    in_order(session, event_id, work)


def unwrapped(output: str) -> str:
    """A result without the quotes of clients that write every result as JSON, also one that is text of JSON already."""
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return output
    return value if isinstance(value, str) else output


def _check_result(session: OpenAISession, call_id: str, output: str) -> None:
    if call_id not in session.calls or session.calls[call_id] is not None:
        why = f"There is no open call {call_id[:50]!r}."
        raise Wrong("invalid_function_call_output", why, "item.call_id")
    if len(output.encode(errors="replace")) > RESULT_BYTES:
        message = f"The result of a call has at most {RESULT_BYTES:,} bytes."
        raise Wrong("invalid_function_call_output", message, "item.output")


def item_retrieve(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    item = _found(session, message)
    session.emit("conversation.item.retrieved", item=item.as_json(session.beta))


def item_delete(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    item = _found(session, message)
    session.items.delete(item.id)
    session.emit("conversation.item.deleted", item_id=item.id)


def item_truncate(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    item = _found(session, message)
    end_ms, index = message.get("audio_end_ms"), message.get("content_index", 0)
    if not (is_integer(end_ms) or isinstance(end_ms, float)) or not end_ms >= 0:
        raise Wrong(
            "invalid_event", f"audio_end_ms must be a number of at least 0, not {named(end_ms)}.", "audio_end_ms"
        )
    if session.response is not None and session.response.item is item:
        session.interrupt("client_cancelled")
    try:
        really = session.items.truncate(item.id, int(min(end_ms, 10**9)), index)
    except ItemError as fault:
        raise Wrong(fault.code, fault.message, fault.param) from None
    session.emit("conversation.item.truncated", item_id=item.id, content_index=0, audio_end_ms=really)


def _found(session: OpenAISession, message: dict[str, Any]) -> Any:
    item_id = message.get("item_id")
    if not isinstance(item_id, str):
        raise Wrong("invalid_event", f"item_id must be a string, not {named(item_id)}.", "item_id")
    try:
        return session.items.get(item_id)
    except ItemError as fault:
        raise Wrong(fault.code, fault.message, fault.param) from None


# -- responses ---------------------------------------------------------------------------------------------------------


def response_create(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    given = message.get("response")
    if given is not None and not isinstance(given, dict):
        raise Wrong("invalid_event", f"response must be an object, not {named(given)}.", "response")
    metadata = (given or {}).get("metadata")
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise Wrong("invalid_event", "response.metadata must be a map of strings.", "response.metadata")

    async def work() -> None:
        await asked(session, metadata)

    in_order(session, event_id, work)


async def asked(session: OpenAISession, metadata: dict[str, Any] | None) -> None:
    """A response is asked for: one that is due already is that one. Raises Wrong."""
    if session.calls or session.answer_due:
        session.wanted = metadata
        if any(result is not None for result in session.calls.values()):
            session.give_results()
        return
    if session.turn_due or (session.response is not None and session.asked):
        message = f"There is a response already{f', {session.response.id}' if session.response else ''}."
        raise Wrong("conversation_already_has_active_response", message)
    if session.response is not None:  # the model began by itself to give it
        session.asked = True
        return
    try:
        await session.ask(metadata)
    except VoiceChatError as fault:
        session.turn_due = False
        raise Wrong("typed_voice_failed", str(fault)) from None


def response_cancel(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    response_id, response = message.get("response_id"), session.response
    if response_id is not None and (response is None or response.id != response_id):
        raise Wrong(
            "response_cancel_not_active", "That response has ended, or there is none of that id.", "response_id"
        )
    session.interrupt("client_cancelled")


def output_clear(session: OpenAISession, message: dict[str, Any], event_id: str | None) -> None:
    response_id = session.response.id if session.response is not None else session.last_response_id
    session.interrupt("client_cancelled")
    session.emit("output_audio_buffer.cleared", response_id=response_id)


HANDLERS: dict[str, Handler] = {
    "session.update": session_update,
    "input_audio_buffer.append": append,
    "input_audio_buffer.commit": commit,
    "input_audio_buffer.clear": clear,
    "conversation.item.create": item_create,
    "conversation.item.retrieve": item_retrieve,
    "conversation.item.delete": item_delete,
    "conversation.item.truncate": item_truncate,
    "response.create": response_create,
    "response.cancel": response_cancel,
    "output_audio_buffer.clear": output_clear,
}
