"""Simulated rooms: what a microphone hears of a loudspeaker, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RATE_HZ = 16_000


@dataclass(frozen=True)
class Room:
    """A loudspeaker heard at `loudness` of its own level, after `path_ms`, with `reverberation_ms` to -60 dB.

    The response is a direct sound and a tail of noise that decays, half the energy each.
    """

    loudness: float
    path_ms: float
    reverberation_ms: float
    seed: int

    def response(self, rate_hz: int = RATE_HZ) -> np.ndarray:
        """Impulse response (S,), of energy loudness squared."""
        random = np.random.default_rng(self.seed)
        start, length = (round(ms * rate_hz / 1000) for ms in (self.path_ms, self.reverberation_ms))
        tail = random.normal(size=length) * 10 ** (-3 * np.arange(length) / length)
        response = np.zeros(start + length)
        response[start:] = tail / np.sqrt(2 * np.sum(tail**2))
        response[start] += np.sqrt(0.5)
        return (self.loudness * response / np.sqrt(np.sum(response**2))).astype(np.float32)

    def echo(self, rate_hz: int = RATE_HZ) -> Echo:
        return Echo(self.response(rate_hz))


class Echo:
    """What comes back of what is played: `hear` gives as much as it gets, and keeps the tail for later."""

    def __init__(self, response: np.ndarray) -> None:
        self._response = response
        self._tail = np.zeros(len(response) - 1, np.float32)

    def hear(self, played: np.ndarray) -> np.ndarray:
        """played (S,) -> echo (S,)."""
        if not len(played):
            return np.zeros(0, np.float32)
        size = len(played) + len(self._response) - 1
        spectrum = np.fft.rfft(played, size) * np.fft.rfft(self._response, size)
        whole = np.fft.irfft(spectrum, size).astype(np.float32)
        whole[: len(self._tail)] += self._tail
        self._tail = whole[len(played) :]
        return whole[: len(played)]


def nine(seed: int) -> list[Room]:
    """Rooms of 30, 60 and 100 % loudness, with 100 to 250 ms of reverberation, drawn at 5 to 50 ms."""
    random = np.random.default_rng(seed)
    return [
        Room(loudness, float(path), reverberation, int(random.integers(1 << 31)))
        for loudness, paths in zip((0.3, 0.6, 1.0), np.split(random.uniform(5, 50, 9), 3), strict=True)
        for path, reverberation in zip(paths, (100, 175, 250), strict=True)
    ]
