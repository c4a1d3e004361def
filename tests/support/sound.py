"""A stand-in for the module `sounddevice`: devices that are only described, streams driven by a clock of the test."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

TICK_SECONDS = 0.01  # of sound in a block


class PortAudioError(Exception):
    """As the library raises it: a message and a number."""

    def __str__(self) -> str:
        return f"{self.args[0]} [PaErrorCode {self.args[1]}]"


def device(index: int, name: str, inputs: int = 0, outputs: int = 0, rate_hz: float = 48000.0) -> dict[str, Any]:
    return {
        "name": name,
        "index": index,
        "hostapi": 0,
        "max_input_channels": inputs,
        "max_output_channels": outputs,
        "default_samplerate": rate_hz,
    }


@dataclass
class Sound:
    """What `import sounddevice` gives. `hears` (S,) is what the microphone brings, then zeros; `played` what is heard.

    `room` (S,) -> (S,) is what of a played block comes back to the microphone, which hears it a block later.
    `takes` tells whether a device takes (rate, channels). The clock runs `speed` times as fast as real time.
    """

    devices: list[dict[str, Any]] = field(
        default_factory=lambda: [device(0, "Built-in Microphone", inputs=1), device(1, "Built-in Output", outputs=2)]
    )
    hears: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    takes: Callable[[int, int], bool] = lambda rate_hz, channels: True
    speed: float = 10.0
    opening: str = ""  # why a stream cannot be opened
    unplugged_after: float | None = None  # seconds of sound until the microphone stops
    loudspeaker_gone_after: float | None = None  # the same of the loudspeaker
    back_after: float | None = None  # seconds until what stopped is there again, for good; None for never
    inputs: list[int] | None = None  # channels, from 0, on which the microphone's sound comes; None for all
    stopped: dict[str, float] = field(default_factory=dict)  # input or output -> when it stopped
    flags: dict[str, bool] = field(default_factory=dict)
    default_devices: tuple[int, int] = (0, 1)
    streams: list[Stream] = field(default_factory=list)
    heard: list[np.ndarray] = field(default_factory=list)
    room: Callable[[np.ndarray], np.ndarray] | None = None
    returned: list[np.ndarray] = field(default_factory=list)

    PortAudioError = PortAudioError
    __version__ = "0.5.0"

    @property
    def default(self) -> Any:
        return SimpleNamespace(device=list(self.default_devices))

    @property
    def played(self) -> np.ndarray:
        """(S,), the first channel."""
        return np.concatenate([block[:, 0] for block in self.heard])

    def query_devices(self) -> list[dict[str, Any]]:
        return [device for device in self.devices if not any(map(self._is_gone, _kinds(device)))]

    def _terminate(self) -> None:
        assert not any(stream.open for stream in self.streams)

    def _initialize(self) -> None:
        pass

    def _is_gone(self, kind: str) -> bool:
        if kind not in self.stopped:
            return False
        return self.back_after is None or time.monotonic() < self.stopped[kind] + self.back_after

    def check_input_settings(self, device: int, channels: int, dtype: str, samplerate: int) -> None:
        self._check(samplerate, channels)

    check_output_settings = check_input_settings

    def InputStream(self, **settings: Any) -> Stream:
        return self._stream("input", **settings)

    def OutputStream(self, **settings: Any) -> Stream:
        return self._stream("output", **settings)

    def _check(self, samplerate: int, channels: int) -> None:
        if not self.takes(samplerate, channels):
            raise PortAudioError("Invalid sample rate", -9997)

    def _stream(self, kind: str, device: int, samplerate: int, channels: int, dtype: str, callback: Any) -> Stream:
        self._check(samplerate, channels)
        assert self.devices[device][f"max_{kind}_channels"] >= channels
        assert dtype == "float32"
        if self._is_gone(kind):
            raise PortAudioError("Device unavailable", -9985)
        if self.opening:
            raise PortAudioError(self.opening, -9996)
        stream = Stream(self, kind, device, samplerate, channels, callback)
        self.streams.append(stream)
        return stream


class Stream:
    """One direction; a thread of its own calls back, as PortAudio's does."""

    latency = 0.01

    def __init__(self, sound: Sound, kind: str, device: int, rate_hz: int, channels: int, callback: Any) -> None:
        self.device, self.rate_hz, self.channels = device, rate_hz, channels
        self._sound, self._kind, self._callback = sound, kind, callback
        self._ending = threading.Event()
        self._offset = sum(stream.ticks for stream in sound.streams if stream._kind == kind)  # of streams before it
        self.ticks = 0
        self.open = True
        self._thread = threading.Thread(target=self._run)

    @property
    def active(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.open = False

    def _returned(self, tick: int) -> np.ndarray:
        """What the loudspeaker gave to the room a block earlier; both have one clock, however late a thread is."""
        loudspeaker = self._sound.streams[0]
        late = round((self._started - loudspeaker._started) * self._sound.speed / TICK_SECONDS)
        while len(self._sound.returned) < tick + late and loudspeaker.active:
            time.sleep(0.001)
        there = 0 < tick + late <= len(self._sound.returned)
        return self._sound.returned[tick + late - 1] if there else np.zeros(1, np.float32)

    def _run(self) -> None:
        frames, started = round(TICK_SECONDS * self.rate_hz), time.monotonic()
        self._started = started
        flags = SimpleNamespace(**({"input_overflow": False, "output_underflow": False} | self._sound.flags))
        tick = 0
        while not self._ending.wait(max(0.0, started + tick * TICK_SECONDS / self._sound.speed - time.monotonic())):
            block = np.zeros((frames, self.channels), np.float32)
            if self._kind == "input":
                heard = tick + self._offset
                part = self._sound.hears[heard * frames : (heard + 1) * frames]
                block[: len(part), self._sound.inputs or slice(None)] = part[:, None]
                if self._sound.room:
                    block += self._returned(tick)[:, None]
                self._callback(block, frames, None, flags)
                if self._stops(self._sound.unplugged_after, tick):
                    return
            else:
                self._callback(block, frames, None, flags)
                self._sound.heard.append(block)
                if self._sound.room:
                    self._sound.returned.append(self._sound.room(block[:, 0]))
                if self._stops(self._sound.loudspeaker_gone_after, tick):
                    return
            tick += 1
            self.ticks = tick

    def _stops(self, after: float | None, tick: int) -> bool:
        """Whether the device is pulled now; once in a test."""
        if after is None or self._kind in self._sound.stopped or tick * TICK_SECONDS < after:
            return False
        self._sound.stopped[self._kind] = time.monotonic()
        return True


def _kinds(device: dict[str, Any]) -> list[str]:
    return [kind for kind in ("input", "output") if device[f"max_{kind}_channels"]]


def install(monkeypatch: Any, **how: Any) -> Sound:
    """Put a stand-in in the place of the library."""
    sound = Sound(**how)
    monkeypatch.setitem(sys.modules, "sounddevice", sound)
    return sound
