"""NVIDIA NemotronLabs VoiceChat 11B, a full-duplex speech-to-speech model, in pure MLX.

model = mlx_voicechat.load("tiny")
session = model.session(seed=0)
events = session.push(samples, rate_hz=16000)
events += session.finish()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import VoiceChatError
    from .events import (
        AudioFrame,
        Cancelled,
        CloseReason,
        Done,
        Event,
        FailureReason,
        FunctionApplied,
        FunctionCall,
        FunctionDelta,
        FunctionFailed,
        LimitReached,
        OnHold,
        SettleTimeout,
        TextDelta,
        TranscriptDelta,
        TurnClosed,
        TurnOpened,
    )
    from .session import Session
    from .tools import Tool
    from .voicechat import load

_HOMES = {
    "VoiceChatError": "errors",
    "load": "voicechat",
    "Session": "session",
    "Tool": "tools",
    **dict.fromkeys(
        (
            "AudioFrame",
            "Cancelled",
            "CloseReason",
            "Done",
            "Event",
            "FailureReason",
            "FunctionApplied",
            "FunctionCall",
            "FunctionDelta",
            "FunctionFailed",
            "LimitReached",
            "OnHold",
            "SettleTimeout",
            "TextDelta",
            "TranscriptDelta",
            "TurnClosed",
            "TurnOpened",
        ),
        "events",
    ),
}

__all__ = [
    "AudioFrame",
    "Cancelled",
    "CloseReason",
    "Done",
    "Event",
    "FailureReason",
    "FunctionApplied",
    "FunctionCall",
    "FunctionDelta",
    "FunctionFailed",
    "LimitReached",
    "OnHold",
    "Session",
    "SettleTimeout",
    "TextDelta",
    "Tool",
    "TranscriptDelta",
    "TurnClosed",
    "TurnOpened",
    "VoiceChatError",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `import mlx_voicechat` alone must not load MLX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
