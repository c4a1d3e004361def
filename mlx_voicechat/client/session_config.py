"""What a session is asked to be, and how long a client tries to get it back."""

from __future__ import annotations

import base64
import random
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_voicechat.errors import AudioError, InputError

SAMPLE_BYTES = {"pcm16": 2, "pcm_s16le": 2, "s16le": 2, "pcm_f32le": 4, "g711_ulaw": 1, "g711_alaw": 1}
G711_TYPES = {"g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}


@dataclass(frozen=True)
class AudioFormat:
    """One direction's mono audio: a format of SAMPLE_BYTES and its rate."""

    format: str = "pcm16"
    sample_rate_hz: int = 16_000

    def __post_init__(self) -> None:
        if self.format not in SAMPLE_BYTES:
            known = ", ".join(SAMPLE_BYTES)
            raise InputError(f"The audio format must be one of {known}, not {self.format!r}.")

    @property
    def sample_bytes(self) -> int:
        return SAMPLE_BYTES[self.format]

    def byte_count(self, milliseconds: float) -> int:
        """Bytes of so much audio, whole samples."""
        return round(milliseconds * self.sample_rate_hz / 1000) * self.sample_bytes

    def milliseconds(self, byte_count: int) -> float:
        """How long so many bytes last."""
        return byte_count / self.sample_bytes / self.sample_rate_hz * 1000

    def as_json(self) -> dict[str, Any]:
        """The format object of the wire."""
        if self.format in G711_TYPES:
            return {"type": G711_TYPES[self.format]}
        kind = "pcm_f32le" if self.format == "pcm_f32le" else "audio/pcm"
        return {"type": kind, "rate": self.sample_rate_hz}


@dataclass(frozen=True)
class SessionConfig:
    """The session object of a `session.update`; None: the server's own. `turn_detection` None says so on the wire.

    `extra_body` holds what this has no field for; `tools` are flat function definitions.
    """

    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    modalities: Sequence[str] = ("audio", "text")
    input_audio: AudioFormat = field(default_factory=AudioFormat)
    output_audio: AudioFormat = field(default_factory=lambda: AudioFormat("pcm16", 24_000))
    turn_detection: Mapping[str, Any] | None = None
    overlap_policy: str | None = None
    playback_commit_policy: str | None = None
    voice: str | None = None
    ref_audio: str | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None
    idle_timeout_s: float | None = None
    auto_response: bool | None = None
    force_listen_count: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self, model: str = "") -> dict[str, Any]:
        """The session object."""
        extra = {**self.extra_body, **_given(self, ("auto_response", "force_listen_count"))}
        names = ("instructions", "overlap_policy", "playback_commit_policy", "voice", "ref_audio", "temperature")
        session: dict[str, Any] = {
            "modalities": list(self.modalities),
            "input_audio_format": self.input_audio.format,
            "output_audio_format": self.output_audio.format,
            "audio": {
                "input": {"format": self.input_audio.as_json(), "sample_rate_hz": self.input_audio.sample_rate_hz},
                "output": {"format": self.output_audio.as_json(), "sample_rate_hz": self.output_audio.sample_rate_hz},
            },
            "turn_detection": None if self.turn_detection is None else dict(self.turn_detection),
            **_given(self, (*names, "max_output_tokens", "idle_timeout_s")),
        }
        if model:
            session["model"] = model
        if self.tools is not None:
            session["tools"] = [dict(tool) for tool in self.tools]
        return session | ({"extra_body": extra} if extra else {})


def _given(config: SessionConfig, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def create_duplex_session_config(**overrides: Any) -> SessionConfig:
    """The preset for this model: float32 in at the rate it hears, PCM16 out at the rate it speaks, nothing resampled.

    What was heard is history only as far as it is acknowledged. Keywords replace fields of SessionConfig.
    """
    preset = SessionConfig(
        input_audio=AudioFormat("pcm_f32le", 16_000),
        output_audio=AudioFormat("pcm16", 22_050),
        overlap_policy="listen_only",
        playback_commit_policy="ack_only",
    )
    return replace(preset, **overrides)


@dataclass(frozen=True)
class ReconnectPolicy:
    """How often a lost connection is made again, and how long is waited before each time."""

    attempts: int = 5
    first_delay_s: float = 0.25
    most_delay_s: float = 4.0

    def delay(self, attempt: int) -> float:
        """Seconds before `attempt` (from 0): doubled each time, less up to half of it by chance."""
        return min(self.first_delay_s * 2**attempt, self.most_delay_s) * random.uniform(0.5, 1)


def audio_data_url(path: Path | str) -> str:
    """A recording as the data URL that `ref_audio` takes."""
    return "data:audio/wav;base64," + base64.b64encode(Path(path).read_bytes()).decode()


def read_pcm16_wav(path: Path | str, sample_rate_hz: int | None = 16_000) -> bytes:
    """The samples of a mono PCM16 WAV of this rate (None: any). Raises AudioError."""
    try:
        with wave.open(str(path), "rb") as file:
            form = (file.getnchannels(), file.getsampwidth())
            rate = file.getframerate()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as fault:
        raise AudioError(f"Cannot read {path}: {getattr(fault, 'strerror', None) or fault}.") from None
    if form != (1, 2) or (sample_rate_hz is not None and rate != sample_rate_hz):
        wanted = f"{sample_rate_hz} Hz" if sample_rate_hz else "any rate"
        remedy = "Convert it first."
        raise AudioError(
            f"{path} must be mono, 16 bits, {wanted}; it has {form[0]} x {form[1] * 8} bits, {rate} Hz.", remedy
        )
    return data
