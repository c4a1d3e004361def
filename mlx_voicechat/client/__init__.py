"""Clients of a server of this project, or of one that speaks as it does. Imports neither MLX nor numpy."""

from mlx_voicechat.client.collector import EventCollector, acknowledge_collected_playback
from mlx_voicechat.client.duplex import DuplexClient
from mlx_voicechat.client.duplex_events import (
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
from mlx_voicechat.client.errors import (
    DuplexClientError,
    DuplexConnectionError,
    DuplexProtocolError,
    DuplexSessionClosedError,
    StrictV3Error,
)
from mlx_voicechat.client.responses import ResponseHandle
from mlx_voicechat.client.session_config import (
    AudioFormat,
    ReconnectPolicy,
    SessionConfig,
    audio_data_url,
    create_duplex_session_config,
    read_pcm16_wav,
)
from mlx_voicechat.client.strict_handles import Call, Deadlines, StrictResponse, Turn, TypedJob
from mlx_voicechat.client.strict_v3 import StrictV3Client

__all__ = [
    "AudioDelta",
    "AudioFormat",
    "Call",
    "ConnectionResumed",
    "Deadlines",
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
    "StrictResponse",
    "StrictV3Client",
    "StrictV3Error",
    "TextDelta",
    "TranscriptDelta",
    "Turn",
    "TypedJob",
    "acknowledge_collected_playback",
    "audio_data_url",
    "create_duplex_session_config",
    "read_pcm16_wav",
]
