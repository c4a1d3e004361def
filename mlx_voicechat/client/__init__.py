"""Clients of a server of this project, or of one that speaks as it does. Imports neither MLX nor numpy."""

from .collector import EventCollector, acknowledge_collected_playback
from .duplex import DuplexClient
from .duplex_events import (
    AudioDelta,
    ConnectionResumed,
    DuplexEvent,
    ErrorEvent,
    ListenDecision,
    ResponseCreated,
    ResponseDone,
    SessionClosed,
    SessionCreated,
    SessionExpired,
    SpeakDecision,
    TextDelta,
    TranscriptDelta,
)
from .errors import (
    DuplexClientError,
    DuplexConnectionError,
    DuplexProtocolError,
    DuplexSessionClosedError,
    StrictV3Error,
)
from .responses import ResponseHandle
from .session_config import (
    AudioFormat,
    ReconnectPolicy,
    SessionConfig,
    audio_data_url,
    create_duplex_session_config,
    read_pcm16_wav,
)

__all__ = [
    "AudioDelta",
    "AudioFormat",
    "ConnectionResumed",
    "DuplexClient",
    "DuplexClientError",
    "DuplexConnectionError",
    "DuplexEvent",
    "DuplexProtocolError",
    "DuplexSessionClosedError",
    "ErrorEvent",
    "EventCollector",
    "ListenDecision",
    "ReconnectPolicy",
    "ResponseCreated",
    "ResponseDone",
    "ResponseHandle",
    "SessionClosed",
    "SessionConfig",
    "SessionCreated",
    "SessionExpired",
    "SpeakDecision",
    "StrictV3Error",
    "TextDelta",
    "TranscriptDelta",
    "acknowledge_collected_playback",
    "audio_data_url",
    "create_duplex_session_config",
    "read_pcm16_wav",
]
