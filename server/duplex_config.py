"""What a duplex session is configured to be: OpenAI's settings, rates of its own, overlap and playback policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .items import CommitPolicy
from .json_messages import is_integer, named
from .messages import Owner
from .openai_config import SessionConfig
from .openai_events import Wrong
from .wire_audio import RATES_HZ

LISTEN_ONLY, BARGE_IN = "listen_only", "barge_in_on_speech"
COMMIT_POLICIES: tuple[CommitPolicy, ...] = ("commit_all_on_done", "ack_only")
NUMBERS = {  # settings that are numbers: least and most
    "overlap_short_ack_ms": (0, 60_000),
    "overlap_barge_in_ms": (0, 60_000),
    "overlap_silence_rms": (0, 1),
    "idle_timeout_s": (1, 86_400),
}
VENDOR_KEYS = frozenset({"overlap_policy", "playback_commit_policy", "extra_body", "sample_rate_hz", *NUMBERS})


@dataclass(frozen=True)
class DuplexConfig(SessionConfig):
    """A duplex session's settings."""

    overlap_policy: str = LISTEN_ONLY
    overlap_short_ack_ms: float = 700
    overlap_barge_in_ms: float = 1200
    overlap_silence_rms: float = 0.003
    playback_commit_policy: CommitPolicy = "commit_all_on_done"
    idle_timeout_s: float | None = None

    @property
    def owner(self) -> Owner:
        """The model owns the turns of a duplex session."""
        return "model"

    def updated(self, session: Mapping[str, Any]) -> DuplexConfig:
        """These settings with a `session.update`'s changes. Raises Wrong."""
        shared = {key: value for key, value in session.items() if key not in VENDOR_KEYS}
        rate = session.get("sample_rate_hz")
        if rate is not None:
            if rate not in RATES_HZ:
                raise Wrong("unsupported_audio_format", f"sample_rate_hz must be one of {RATES_HZ}.", "sample_rate_hz")
            audio = shared.get("audio") or {}
            inside = (audio.get("input") if isinstance(audio, dict) else None) or {}
            shared["audio"] = {**audio, "input": {"sample_rate_hz": rate, **inside}}
        extra = session.get("extra_body") or {}
        if not isinstance(extra, dict):
            raise Wrong(
                "invalid_event", f"session.extra_body must be an object, not {named(extra)}.", "session.extra_body"
            )
        if extra.get("realtime_tools") is not None:
            shared["tools"] = extra["realtime_tools"]
        turn = shared.get("turn_detection")
        if isinstance(turn, dict) and turn.get("interrupt_response") is False:
            message = "turn_detection.interrupt_response=false is not supported; null leaves the turns to the model."
            raise Wrong("unsupported_turn_detection", message, "turn_detection")
        config = super().updated(shared)
        assert isinstance(config, DuplexConfig)
        changes = _vendor(session)
        if config.turn_detection is not None and self.turn_detection is None and "overlap_policy" not in changes:
            changes["overlap_policy"] = BARGE_IN
        if "extra_body" in session:
            changes["echoed"] = {**config.echoed, "extra_body": extra}
        return replace(config, **changes)


def _vendor(session: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for key, known in (("overlap_policy", (LISTEN_ONLY, BARGE_IN)), ("playback_commit_policy", COMMIT_POLICIES)):
        value = session.get(key)
        if value is None:
            continue
        if value not in known:
            raise Wrong("invalid_event", f"session.{key} must be {' or '.join(known)}, not {named(value)}.", key)
        changes[key] = value
    for key, (least, most) in NUMBERS.items():
        value = session.get(key)
        if value is None:
            continue
        if not (is_integer(value) or isinstance(value, float)) or not least <= value <= most:
            raise Wrong("invalid_event", f"session.{key} must be a number from {least} to {most}.", key)
        changes[key] = value
    return changes
