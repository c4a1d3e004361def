"""What a duplex session adds to OpenAI's events, event by event: beside their own fields, which stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Fields: TypeAlias = dict[str, Any]
DuplexSession: TypeAlias = Any  # of the module that stands on this one


def capabilities(max_sessions: int, frame_ms: int) -> Fields:
    """What this server can do with this model."""
    return {
        "implementation_level": "model_native_duplex",
        "supports_input_append": True,
        "supports_barge_in": True,
        "supports_audio_truncate": True,
        "supports_session_resume": True,
        "supports_session_lease": True,
        "supports_multi_session": max_sessions > 1,
        "chunk_period_ms": frame_ms,
        "input_modes": ["append_audio_chunk"],
        "signal_sources": ["model_native", "client_event", "server_policy"],
        "target_barge_in_latency_ms": None,
    }


def session_fields(session: DuplexSession) -> Fields:
    """The vendor keys of the session object."""
    config, response = session.config, session.response
    return {
        "state": "open",
        "turn_state": session.turn_state,
        "epoch": session.epoch,
        "turn_id": session.turn_id,
        "active_request_id": None,
        "active_response_id": response.id if response else None,
        "active_response_turn_id": session.turn_id if response else None,
        "modalities": ["audio", "text"] if config.modalities == ("audio",) else ["text"],
        "voice": config.voice,
        "response_format": config.output_format.beta_name,
        "input_audio_format": config.input_format.beta_name,
        "output_audio_format": config.output_format.beta_name,
        "idle_timeout_s": config.idle_timeout_s,
        "overlap_policy": config.overlap_policy,
        "overlap_short_ack_ms": config.overlap_short_ack_ms,
        "overlap_barge_in_ms": config.overlap_barge_in_ms,
        "overlap_silence_rms": config.overlap_silence_rms,
        "playback_commit_policy": config.playback_commit_policy,
        "turn_detection": None if config.turn_detection is None else dict(config.turn_detection),
        "input_audio_transcription": config.transcription,
        "playback": session.playback(),
        "capabilities": capabilities(session.settings.max_sessions, session.frame_ms),
    }


def _created(session: DuplexSession, fields: Fields) -> Fields:
    return {"attachment_generation": session.attachment.generation, "resume_token": session.attachment.token}


def _committed(session: DuplexSession, fields: Fields) -> Fields:
    session.turn_id += 1
    event = session.stamp("input.committed") | {
        "turn_id": session.turn_id,
        "history_len": len(session.items) + 1,
        "realtime_item_id": fields["item_id"],
        "response_create_deferred": session.response is not None,
    }
    return {"event": event}


def _echo(name: str) -> Callable[[DuplexSession, Fields], Fields]:
    def echo(session: DuplexSession, fields: Fields) -> Fields:
        return {
            "event": session.stamp(name) | {key: fields[key] for key in ("item_id", "audio_end_ms") if key in fields}
        }

    return echo


def _response_created(session: DuplexSession, fields: Fields) -> Fields:
    response_id = fields["response"]["id"]
    event = session.stamp("response.created") | {"response_id": response_id, "turn_id": session.turn_id}
    return {"response_id": response_id, "duplex_event": event}


def _response_done(session: DuplexSession, fields: Fields) -> Fields:
    response = fields["response"]
    committed = session.config.playback_commit_policy == "commit_all_on_done"
    event = session.stamp("response.done") | {
        "response_id": response["id"],
        "committed": committed,
        "playback": session.playback(response["id"]),
    }
    return {"response_id": response["id"], "duplex_event": event}


def _audio_delta(session: DuplexSession, fields: Fields) -> Fields:
    form, item = session.config.output_format, session.spoken[fields["response_id"]]  # a client may delete it meanwhile
    marks = [] if item.speech is None else item.speech.marks[-1:]
    return {
        "format": form.beta_name,
        "sample_rate_hz": form.rate_hz,
        "metadata": {
            "session_id": session.id,
            "epoch": session.epoch,
            "model_speak": True,
            "end_of_turn": False,
            "audio_duration_ms": item.playback.generated_ms,
            "audio_text_marks": [{"text_chars": characters, "audio_end_ms": ms} for characters, ms in marks],
            "playback": item.playback.as_json(),
        },
    }


EXTRAS: dict[str, Callable[[DuplexSession, Fields], Fields]] = {
    "session.created": _created,
    "input_audio_buffer.committed": _committed,
    "conversation.item.added": _echo("conversation.item.added"),
    "conversation.item.done": _echo("conversation.item.done"),
    "conversation.item.deleted": _echo("conversation.item.deleted"),
    "conversation.item.truncated": _echo("conversation.item.truncated"),
    "response.created": _response_created,
    "response.done": _response_done,
    "response.output_audio.delta": _audio_delta,
}
