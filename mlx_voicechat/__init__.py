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
        Done,
        Event,
        FunctionDelta,
        LimitReached,
        TextDelta,
        TranscriptDelta,
    )
    from .session import Session
    from .voicechat import load

_HOMES = {
    "VoiceChatError": "errors",
    "load": "voicechat",
    "Session": "session",
    **dict.fromkeys(
        (
            "AudioFrame",
            "Cancelled",
            "Done",
            "Event",
            "FunctionDelta",
            "LimitReached",
            "TextDelta",
            "TranscriptDelta",
        ),
        "events",
    ),
}

__all__ = [
    "AudioFrame",
    "Cancelled",
    "Done",
    "Event",
    "FunctionDelta",
    "LimitReached",
    "Session",
    "TextDelta",
    "TranscriptDelta",
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
