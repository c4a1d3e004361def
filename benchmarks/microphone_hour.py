"""An hour of a 440 Hz tone through `talk`'s resamplers, both ways, in blocks as devices have them: length and purity.

python benchmarks/microphone_hour.py [SECONDS]
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

from mlx_voicechat.cli.buffers import Capture, Playback

FINE = SimpleNamespace(input_overflow=False, output_underflow=False)
MODEL_IN, MODEL_OUT, FRAME = 16000, 22050, 1764


class Tone:
    """The error of a tone against the ideal one, taken in as it comes; its first and last tenth of a second ring."""

    def __init__(self, rate_hz: int, samples: int) -> None:
        self.rate_hz, self.samples = rate_hz, samples
        self.length, self.error = 0, 0.0

    def take(self, found: np.ndarray) -> None:
        at = np.arange(self.length, self.length + len(found))
        self.length += len(found)
        inner = (at > self.rate_hz / 10) & (at < self.samples - self.rate_hz / 10)
        wrong = np.abs(found - tone(at, self.rate_hz))[inner]
        self.error = max(self.error, float(wrong.max(initial=0)))

    def report(self, name: str) -> None:
        decibel = 20 * np.log10(self.error / 0.5)
        print(f"{name}: {self.length - self.samples:+d} samples of {self.samples}, error {decibel:.1f} dB", flush=True)


def tone(at: np.ndarray, rate_hz: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 / rate_hz * at)).astype(np.float32)


def microphone(device_hz: int, block: int, seconds: int) -> None:
    capture, found, total = Capture(device_hz, MODEL_IN), Tone(MODEL_IN, seconds * MODEL_IN), seconds * device_hz
    for index, start in enumerate(range(0, total, block)):
        samples = tone(np.arange(start, min(start + block, total)), device_hz)
        capture.hear(samples[:, None], len(samples), None, FINE)
        if index % 3 == 0:
            found.take(capture.take())
    found.take(capture.take())
    found.take(capture.finish())
    found.report(f"microphone {device_hz} Hz, blocks of {block}")


def loudspeaker(device_hz: int, block: int, seconds: int) -> None:
    playback, found = Playback(MODEL_OUT, device_hz, FRAME / MODEL_OUT), Tone(device_hz, seconds * device_hz)
    out = np.zeros((block, 1), np.float32)
    for index in range(seconds * MODEL_OUT // FRAME):
        playback.push(tone(np.arange(index * FRAME, (index + 1) * FRAME), MODEL_OUT))
        while playback.waiting_seconds > 0.24:
            playback.fill(out, block, None, FINE)
            found.take(out[:, 0])
    playback.finish()
    while left := round(playback.waiting_seconds * device_hz):
        playback.fill(out, block, None, FINE)
        found.take(out[: min(left, block), 0])
    found.report(f"loudspeaker {device_hz} Hz, blocks of {block}")


if __name__ == "__main__":
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 3600
    for rate in (44100, 48000):
        for size in (128, 441, 1024):
            microphone(rate, size, length)
            loudspeaker(rate, size, length - length % 2)
