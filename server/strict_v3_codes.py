"""strict-v3: every error code, whether it ends the session, and how; every other word of a table of the protocol."""

from __future__ import annotations

from dataclasses import dataclass

NAME, VERSION = "voicechat.realtime", 3
PROTOCOL = {"name": NAME, "version": VERSION}
CLIENT_AUTHORED = "client_authored_v1"

INPUT_RATE_HZ, OUTPUT_RATE_HZ = 16_000, 22_050
FRAME_SECONDS = 0.08
FRAME_BYTES = 2560  # PCM16 of one input frame
MOST_PACKET_BYTES = 16 * FRAME_BYTES
MOST_TOOLS = 32
MOST_RESULT_BYTES, MOST_RESULT_TOKENS = 16_384, 128
MOST_TEXT_CHARACTERS, MOST_JOB_CHARACTERS = 1000, 128
MOST_CALLS = 8  # of one user turn
MOST_FRAMES = 12_000  # of one session
RECOVERY_FRAMES = 256  # between the acceptance of a result and its `applied`
BOS_FRAMES = 5  # four of the model's own, and the one where it is forced
DEFERRED_BYTES = 2**20
SIGN_SECONDS = 15.0  # without an event for a client that sends audio; it ends itself after 45

NORMAL, PROTOCOL_ERROR, INTERNAL, BUSY = 1000, 1002, 1011, 1013  # closing codes


@dataclass(frozen=True)
class Fate:
    """What an error does: fatal ones close with `close_code`, after `session.closed` where `announced`."""

    fatal: bool = False
    close_code: int = 0
    announced: bool = False


RECOVERABLE = Fate()
FATES: dict[str, Fate] = {
    **dict.fromkeys(
        (
            "invalid_json",
            "invalid_event",
            "binary_audio_unsupported",
            "unsupported_event",
            "session_not_configured",
            "settings_locked",
            "invalid_session_update",
            "invalid_session_capabilities",
            "unsupported_session_capability",
            "invalid_tools",
            "unsupported_protocol_version",
            "invalid_conversation_item",
            "tools_not_set",
            "invalid_function_call_output",
            "unsupported_audio_encoding",
            "unsupported_sample_rate",
            "unsupported_channel_count",
            "empty_audio",
            "invalid_audio",
            "audio_packet_too_large",
            "typed_input_failed",
        ),
        RECOVERABLE,
    ),
    **dict.fromkeys(
        ("invalid_event_id", "invalid_client_turn_id", "input_turn_conflict", "deferred_input_overflow"),
        Fate(True, PROTOCOL_ERROR),
    ),
    "server_busy": Fate(True, BUSY),
    "session_position_limit": Fate(True, NORMAL, announced=True),
    **dict.fromkeys(("function_call_loop_limit", "internal_error"), Fate(True, INTERNAL, announced=True)),
    **dict.fromkeys(
        (
            "response_cancel_timeout",
            "function_output_apply_timeout",
            "function_cycle_mismatch",
            "function_call_output_timeout",
            "input_turn_settle_timeout",
            "pre_eou_function_activity",
            "missing_terminal_bos",
            "missing_post_fc_terminal_bos",
            "deferred_input_lifecycle_failure",
        ),
        Fate(True, INTERNAL),
    ),
}
# Codes that are recoverable at first: a wrong version before the first update, a typed job that has begun.
FATES_LATER: dict[str, Fate] = {
    "unsupported_protocol_version": Fate(True, PROTOCOL_ERROR, announced=True),
    "typed_input_failed": Fate(True, INTERNAL),
}

REJECTIONS = (
    "session_not_configured",
    "typed_input_unavailable",
    "input_turn_active",
    "function_cycle_active",
    "invalid_job_id",
    "duplicate_job_id",
    "empty_text",
    "text_too_long",
)

# Why a response ended -> its status.
STATUSES: dict[str, str] = {
    "model_or_turn_taking": "completed",
    "decoded_silence_watchdog": "completed",
    "max_response_cap": "completed",
    "client_vad": "cancelled",
    "typed_input": "cancelled",
    "client_stop": "cancelled",
    "no_text_since_bos_watchdog": "failed",
    "no_audio_since_bos_watchdog": "failed",
    "function_repetition_watchdog": "failed",
    "session_position_limit": "failed",
    "function_call_loop_limit": "failed",
}


class Refused(Exception):
    """A message that cannot be done: the error's code and what was wrong; `final` where a later fate applies."""

    def __init__(self, code: str, message: str, event_id: str | None = None, final: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.event_id = event_id
        self.fate = FATES_LATER[code] if final else FATES[code]
