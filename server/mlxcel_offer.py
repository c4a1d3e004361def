"""What a `session.update` of the dialect `mlxcel` may hold: the one voice, the formats that are, and no other key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .json_messages import named

MESSAGE_KEYS = ("type", "event_id", "session")
SESSION_KEYS = (
    *("system_prompt", "seed", "max_streaming_seconds", "model", "voice"),
    *("input_audio_format", "output_audio_format", "extensions", "turns"),
)
PCM16 = "pcm16"


def check_offer(message: Mapping[str, Any], session: Mapping[str, Any], voice: str, rates_hz: tuple[int, int]) -> None:
    """Raise ValueError for what is not offered, in words; null counts as absent. `rates_hz`: heard, and spoken."""
    for key, value in message.items():
        if key not in MESSAGE_KEYS and value is not None:
            inside = f" Put it into session: session.{key}." if key in SESSION_KEYS else ""
            raise ValueError(f"session.update has no field {named(key)}.{inside}")
    for key, value in session.items():
        if key not in SESSION_KEYS and value is not None:
            raise ValueError(f"session has no field {named(key)}. Its fields: {', '.join(SESSION_KEYS)}.")
    if session.get("voice") not in (None, voice):
        raise ValueError(f"session.voice is {named(session['voice'])}: the voice of this server is {named(voice)}.")
    for key, rate_hz in zip(("input_audio_format", "output_audio_format"), rates_hz, strict=True):
        if (asked := session.get(key)) is not None:
            _check_format(f"session.{key}", asked, rate_hz)


def check_audio(message: Mapping[str, Any]) -> None:
    """Raise ValueError for an append whose audio says that it is of another form than the one that is heard."""
    for key, offered in (("format", PCM16), ("channels", 1)):
        if key in message and (message[key] != offered or isinstance(message[key], bool)):
            raise ValueError(f"{key} is {named(message[key])}, the server hears {named(offered)}.")


def _check_format(name: str, asked: Any, rate_hz: int) -> None:
    offered = {"type": PCM16, "sample_rate": rate_hz, "channels": 1}
    said = {"type": asked} if isinstance(asked, str) else asked
    if not isinstance(said, dict):
        raise ValueError(f"{name} must be an object, not {named(asked)}.")
    for key, value in said.items():
        if key not in offered:
            raise ValueError(f"{name} has no field {named(key)}. Its fields: {', '.join(offered)}.")
        if value is not None and (value != offered[key] or isinstance(value, bool)):
            raise ValueError(f"{name}.{key} is {named(value)}, offered is {named(offered[key])}.")
