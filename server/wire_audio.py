"""Audio as the wire has it: PCM16, float32 and G.711 bytes in, float32 samples out, and back; resampled with state.

Formats and their names are those of OpenAI's Realtime vocabulary, GA and beta. G.711 follows ITU-T Recommendation
G.711 (11/88), tables 1 and 2: decision values and the values midway between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlx_voicechat.sound.pcm import MAX_AMPLITUDE, Samples, pcm16
from mlx_voicechat.sound.resampler import Resampler

Encoding = Literal["audio/pcm", "pcm_f32le", "audio/pcmu", "audio/pcma"]

RATES_HZ = (8_000, 16_000, 22_050, 24_000, 48_000)  # of PCM; G.711 has one
G711_RATE_HZ = 8_000
FULL_SCALE = 32768  # of PCM that comes in, as files have it
PCM_SCALE = 32767  # of PCM that goes out
NAMES: dict[str, Encoding] = {
    "audio/pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "pcm_s16le": "audio/pcm",
    "s16le": "audio/pcm",
    "pcm_f32le": "pcm_f32le",
    "audio/pcmu": "audio/pcmu",
    "g711_ulaw": "audio/pcmu",
    "audio/pcma": "audio/pcma",
    "g711_alaw": "audio/pcma",
}
BETA_NAMES = {"audio/pcm": "pcm16", "pcm_f32le": "pcm_f32le", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw"}
SAMPLE_BYTES = {"audio/pcm": 2, "pcm_f32le": 4, "audio/pcmu": 1, "audio/pcma": 1}


class UnsupportedFormat(ValueError):
    """A format or a rate that is not offered."""


class WrongAudio(ValueError):
    """Bytes that are no audio of the format: half a sample, NaN, another scale."""


@dataclass(frozen=True)
class WireFormat:
    """One mono stream's encoding and rate."""

    encoding: Encoding
    rate_hz: int

    @property
    def sample_bytes(self) -> int:
        return SAMPLE_BYTES[self.encoding]

    @property
    def beta_name(self) -> str:
        """Its name in a beta session, where a format is a string."""
        return BETA_NAMES[self.encoding]

    def as_json(self) -> dict[str, Any]:
        """The format object of a GA session: G.711 has no rate there."""
        rate = {"rate": self.rate_hz} if self.encoding in ("audio/pcm", "pcm_f32le") else {}
        return {"type": self.encoding, **rate}

    def milliseconds(self, byte_count: int) -> float:
        """How long this many bytes last."""
        return byte_count / self.sample_bytes / self.rate_hz * 1000


def wire_format(value: object, rate_hz: object = None, default_rate_hz: int = 24_000) -> WireFormat:
    """A format as clients write it: a name, or {"type": name, "rate" or "sample_rate_hz": Hz}.

    `rate_hz` given beside it wins; absent, PCM has `default_rate_hz`. Raises UnsupportedFormat.
    """
    if isinstance(value, dict):
        inside = value.get("rate") if value.get("rate") is not None else value.get("sample_rate_hz")
        rate_hz = inside if rate_hz is None else rate_hz
        value = value.get("type")
    encoding = NAMES.get(value) if isinstance(value, str) else None
    if encoding is None:
        raise UnsupportedFormat(f"The audio format must be one of {', '.join(NAMES)}, not {str(value)[:50]!r}.")
    rates = RATES_HZ if encoding in ("audio/pcm", "pcm_f32le") else (G711_RATE_HZ,)
    if rate_hz is None:
        rate_hz = default_rate_hz if len(rates) > 1 else G711_RATE_HZ
    if isinstance(rate_hz, bool) or not isinstance(rate_hz, int) or rate_hz not in rates:
        offered = ", ".join(map(str, rates))
        raise UnsupportedFormat(f"The sample rate of {value} must be one of {offered} Hz, not {str(rate_hz)[:50]!r}.")
    return WireFormat(encoding, rate_hz)


class Decoder:
    """One client's stream of bytes -> float32 mono at `rate_hz`; pieces of any size give what one call would give."""

    def __init__(self, source: WireFormat, rate_hz: int) -> None:
        self.format = source
        self._resampler = Resampler(source.rate_hz, rate_hz)

    def push(self, data: bytes) -> Samples:
        """Bytes of whole samples -> what is ready (S,), possibly empty. Raises WrongAudio, and takes nothing then."""
        return self._resampler.push(decoded(data, self.format.encoding))

    def finish(self) -> Samples:
        """The rest (S,); after it nothing may be pushed. All together has the length of the input, rounded."""
        return self._resampler.finish()


class Encoder:
    """Float32 mono at `rate_hz` -> one client's stream of bytes."""

    def __init__(self, target: WireFormat, rate_hz: int) -> None:
        self.format = target
        self._resampler = Resampler(rate_hz, target.rate_hz)

    def push(self, samples: npt.ArrayLike) -> bytes:
        """Samples (S,) -> what is ready, possibly nothing."""
        return encoded(self._resampler.push(samples), self.format.encoding)

    def finish(self) -> bytes:
        """The rest; after it nothing may be pushed."""
        return encoded(self._resampler.finish(), self.format.encoding)


def decoded(data: bytes, encoding: Encoding) -> Samples:
    """Bytes -> float32 samples (S,) at the rate they have. Raises WrongAudio."""
    if len(data) % SAMPLE_BYTES[encoding]:
        raise WrongAudio(f"{len(data)} bytes of {encoding} are no whole number of samples.")
    if encoding == "audio/pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(FULL_SCALE)
    if encoding == "pcm_f32le":
        samples = np.frombuffer(data, "<f4").astype(np.float32)
        if not np.isfinite(samples).all() or np.abs(samples, dtype=np.float32).max(initial=0) > MAX_AMPLITUDE:
            raise WrongAudio("The samples must be finite numbers in -1..1.")
        return samples
    return LAWS[encoding].values[np.frombuffer(data, np.uint8)]


def encoded(samples: Samples, encoding: Encoding) -> bytes:
    """Float32 samples (S,) -> bytes; clipped, nothing wraps."""
    if encoding == "audio/pcm":
        return pcm16(samples, PCM_SCALE).tobytes()
    if encoding == "pcm_f32le":
        return samples.astype("<f4").tobytes()
    law = LAWS[encoding]
    magnitudes = np.searchsorted(law.decisions, np.abs(samples), side="right")
    return np.where(np.signbit(samples), law.negative[magnitudes], law.positive[magnitudes]).tobytes()


@dataclass(frozen=True, eq=False)
class Law:
    """One of G.711's laws: `values` (256,) of the bytes, `decisions` (127,) between magnitudes, a magnitude's bytes."""

    values: Samples
    decisions: Samples
    positive: npt.NDArray[np.uint8]
    negative: npt.NDArray[np.uint8]


def _law(steps: list[int], first: int, full: int, midway: bool, positive_bits: int) -> Law:
    """A law of eight segments of 16 intervals, of `steps` in units of 1/`full`; the first interval ends at `first`.

    `midway`: whether the first value lies midway in its interval, or is zero.
    """
    widths = np.repeat(steps, 16)
    widths[0] = first
    edges = np.concatenate([[0], np.cumsum(widths)]).astype(np.float64)
    magnitudes = (edges[:-1] + edges[1:]) / 2
    magnitudes[0] = magnitudes[0] if midway else 0
    positive = (np.arange(128) ^ positive_bits).astype(np.uint8)
    negative = positive ^ np.uint8(0x80)
    values = np.zeros(256, np.float32)
    values[positive], values[negative] = magnitudes / full, -magnitudes / full
    return Law(values, (edges[1:128] / full).astype(np.float32), positive, negative)


LAWS = {
    "audio/pcmu": _law([2, 4, 8, 16, 32, 64, 128, 256], 1, 8192, midway=False, positive_bits=0xFF),
    "audio/pcma": _law([2, 2, 4, 8, 16, 32, 64, 128], 2, 4096, midway=True, positive_bits=0xD5),
}
