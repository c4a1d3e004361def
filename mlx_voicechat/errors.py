"""Every error a user can meet: a code, a message that says what and where, a remedy, an exit code."""

from __future__ import annotations

from typing import Any


class VoiceChatError(Exception):
    """Base of all errors that are the user's to fix.

    `code` is a stable snake_case word for programs, `exit_code` what a command returns (1 failed while
    working, 2 bad use or bad input), `remedy` what to do about it (may be empty).
    """

    code = "voicechat_error"
    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class CheckpointError(VoiceChatError):
    """A checkpoint that cannot be opened: absent, incomplete, of another kind, or at odds with its config."""

    code = "bad_checkpoint"
    exit_code = 2


class HubError(VoiceChatError):
    """A checkpoint that could not be fetched: no network, no access, no such repository."""

    code = "hub_error"
    exit_code = 1


class AudioError(VoiceChatError):
    """A recording that cannot be read or written."""

    code = "bad_audio"
    exit_code = 2


class InputError(VoiceChatError, ValueError):
    """An argument outside what a call accepts; the object it was given to stays usable."""

    code = "bad_input"
    exit_code = 2


class LimitError(VoiceChatError):
    """A stated limit in seconds was reached."""

    code = "limit_reached"
    exit_code = 1


class SessionClosedError(VoiceChatError):
    """A call on a session that has finished or was cancelled."""

    code = "session_closed"
    exit_code = 1


class ServerError(VoiceChatError):
    """A server that cannot be reached, refuses, or ends a conversation early; `code` may be the server's own."""

    code = "server_error"
    exit_code = 1

    def __init__(self, message: str, remedy: str = "", code: str = "") -> None:
        super().__init__(message, remedy)
        self.code = code or type(self).code


class MachineLostError(VoiceChatError):
    """Of several machines that run one model, another one is gone, or does not answer."""

    code = "machine_lost"
    exit_code = 1


class DeviceError(VoiceChatError):
    """A microphone or a loudspeaker that is not there, refuses, or stops."""

    code = "device_error"
    exit_code = 1


class ToolError(VoiceChatError):
    """A tool that could not be called, failed, or gave nothing of use; the message is also the model's."""

    code = "tool_error"
    exit_code = 1


def brief(value: Any) -> str:
    """`value` in a message; Python refuses to print integers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "too long a number"
    return text if len(text) <= 50 else f"{text[:50]}..."
