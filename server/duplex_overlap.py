"""What happens to speech over the agent's: the decisions of a duplex session's overlap policy.

The model hears all of it in any case. `listen_only` leaves it to the model to stop; `barge_in_on_speech` ends the
agent's turn, at once where the detector runs, else when the overlap is long enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .duplex_config import BARGE_IN, DuplexConfig


@dataclass(frozen=True)
class Decision:
    """How an overlap is handled: drop, listen or barge_in, and why."""

    action: str
    reason: str
    overlap_ms: float


class Overlap:
    """The speech over one answer."""

    def __init__(self) -> None:
        self._speech_ms = 0.0
        self._reported: str | None = None

    def begin(self) -> None:
        """Another answer begins."""
        self._speech_ms, self._reported = 0.0, None

    def heard(self, samples: np.ndarray, ms: float, is_speech: bool | None, config: DuplexConfig) -> Decision | None:
        """Audio (S,) that came while the agent spoke; `is_speech` is what the client says of it. A new decision."""
        if is_speech is None:
            rms = float(np.sqrt(np.mean(np.square(samples)))) if len(samples) else 0.0
            is_speech = rms > config.overlap_silence_rms
        if is_speech:
            self._speech_ms += ms
        elif self._speech_ms:
            ended, self._speech_ms = self._speech_ms, 0.0
            short = ended < config.overlap_short_ack_ms and self._reported is None
            return Decision("drop", "short_ack", ended) if short else None
        return self._grown(config)

    def _grown(self, config: DuplexConfig) -> Decision | None:
        if self._speech_ms < config.overlap_short_ack_ms:
            return None
        long = self._speech_ms >= config.overlap_barge_in_ms
        reason = "long_overlap_speech" if long else "overlap_speech"
        if reason == self._reported:
            return None
        self._reported = reason
        action = "barge_in" if long and config.overlap_policy == BARGE_IN else "listen"
        return Decision(action, reason, self._speech_ms)
