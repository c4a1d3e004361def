"""The loudspeaker taken out of what the microphone hears: WebRTC's echo canceller, and a gate on what it leaves.

The canceller is WebRTC's AEC3, from the optional package `livekit`. Before it has converged it leaves enough for a
model to answer; while the loudspeaker sounds, the gate passes only what is louder than such remains.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from ..audio import Resampler, Samples, pcm16
from ..errors import InputError

RATE_HZ = 16_000
BLOCK_MS = 10  # what the library takes at a time
BLOCK_SAMPLES = RATE_HZ * BLOCK_MS // 1000
PCM_SCALE = 32768
MOST_DELAY_MS = 500  # that the library believes

TAPS, CUTOFF = 63, 0.9  # of the far side's low-pass (1.4 ms at 22.05 kHz), in parts of 8 kHz

WINDOW_BLOCKS = 8  # of a level: over less, peaks of the remains would pass
HANG_MS = 240  # after the far side, in which the room still sounds
SOUNDING_DBFS = -50.0  # a far side below it is not heard in the room
START_DBFS, LEAST_DBFS, MOST_DBFS = -40.0, -46.0, -30.0  # of the threshold
MARGIN_DB = 6.0  # of the threshold over the remains
TAKEN_DB = 12.0  # that the canceller takes where little but the echo is heard
RISE_DB, FALL_DB = 0.04, 0.01  # of the threshold in a block: it settles over the loudest fifth of the remains

WAITING_BLOCKS = 6000  # of either side
STEADY_DBFS = -35.0  # a far side above it goes on
SETTLE_MS = 120  # for which it must have: a room's path and its first reflections
SILENT_DBFS = -95.0  # a near side below it is switched off, and tells nothing
ABSENT_DB = 40.0  # that the near side is below the far side where there is no echo
ABSENT_BLOCKS = 100  # of a far side that goes on

SURPLUS_BLOCKS = 500  # of near sound (5 s) through which far sound always waited: then it waits needlessly


class EchoPath:
    """Tells whether the microphone hears the loudspeaker at all. With headphones it does not, and must not be touched:
    a canceller that finds no echo takes the near speaker for one.

    No echo is what a near side shows that stays 40 dB below a far side that goes on; it counts for a second of such.
    """

    def __init__(self, delay_ms: int = 0) -> None:
        count = WINDOW_BLOCKS + (SETTLE_MS + delay_ms) // BLOCK_MS
        self._far: deque[float] = deque([0.0] * count, count)
        self._near = _Window()
        self._absent_blocks = 0

    def audible(self, far: Samples, near: Samples) -> bool:
        """far and near (S,), the same 10 ms of each -> whether an echo has to be expected."""
        self._far.append(_energy(far))
        near_dbfs = self._near.level_dbfs(near)
        far_dbfs = _dbfs(min(self._far))
        if far_dbfs > STEADY_DBFS:
            absent = SILENT_DBFS < near_dbfs < far_dbfs - ABSENT_DB
            self._absent_blocks = ABSENT_BLOCKS if absent else max(self._absent_blocks - 1, 0)
        return not self._absent_blocks


class EchoGate:
    """Tells which blocks of the cancelled near side are passed on: not those that hold an echo's remains alone.

    While the far side sounds, and 240 ms and the delay longer, a block passes when the level over the last 80 ms is at
    least `threshold_dbfs`. That follows the remains, seen where the canceller has taken most of the near side.
    """

    def __init__(self, delay_ms: int = 0) -> None:
        self._hang_blocks = (HANG_MS + delay_ms) // BLOCK_MS
        self._since_far = self._hang_blocks
        self._near, self._left = _Window(), _Window()
        self.threshold_dbfs = START_DBFS

    def passes(self, far: Samples, near: Samples, left: Samples) -> bool:
        """far, near and cancelled near (S,), the same 10 ms of each -> whether the last is passed on."""
        self._since_far = 0 if _dbfs(_energy(far)) > SOUNDING_DBFS else self._since_far + 1
        heard, level = self._near.level_dbfs(near), self._left.level_dbfs(left)
        if self._since_far > self._hang_blocks:
            return True
        if not self._since_far and heard - level >= TAKEN_DB:
            step = RISE_DB if level + MARGIN_DB > self.threshold_dbfs else -FALL_DB
            self.threshold_dbfs = min(max(self.threshold_dbfs + step, LEAST_DBFS), MOST_DBFS)
        return level >= self.threshold_dbfs


class EchoCanceller:
    """Takes the far side (what the loudspeaker plays) out of the near side (what the microphone hears).

    Give `far` what is played when it is played, silence included or left out, and `near` what was heard; blocks of
    float samples (S,) of any size, full scale 1. Far sound is matched with near sound block by block as they come.

    near_rate_hz, far_rate_hz: of either side. delay_ms: from `far` to the same sound in `near`, as the devices report
    their latencies. noise_suppression, auto_gain: WebRTC's, off since the model was trained on raw speech.
    Raises InputError where the package livekit is missing, or for rates that are none.
    """

    def __init__(
        self,
        near_rate_hz: int = RATE_HZ,
        far_rate_hz: int = 22_050,
        delay_ms: int = 0,
        *,
        noise_suppression: bool = False,
        auto_gain: bool = False,
    ) -> None:
        try:
            from livekit import rtc
        except (ImportError, OSError):  # OSError: its library does not load here
            raise InputError("Echo cancellation needs the package livekit.", "pip install livekit") from None
        if min(near_rate_hz, far_rate_hz) <= 0:
            raise InputError(f"Rates are positive, not {near_rate_hz} and {far_rate_hz} Hz.")
        self._delay_ms = min(max(delay_ms, 0), MOST_DELAY_MS)
        self._path, self._gate = EchoPath(self._delay_ms), EchoGate(self._delay_ms)
        self._frame: Any = rtc.AudioFrame
        self._module: Any = rtc.AudioProcessingModule(
            echo_cancellation=True,
            high_pass_filter=True,
            noise_suppression=noise_suppression,
            auto_gain_control=auto_gain,
        )
        self._far_in, self._near_in = _PromptResampler(far_rate_hz), Resampler(near_rate_hz, RATE_HZ)
        self._near_out = Resampler(RATE_HZ, near_rate_hz)
        self._far = _Blocks()
        self._near = _Blocks()
        self._seen_blocks, self._least_waiting = 0, SURPLUS_BLOCKS

    def far(self, samples: npt.ArrayLike) -> None:
        """Samples (S,) that the loudspeaker plays."""
        self._far.push(self._far_in.push(samples))

    def near(self, samples: npt.ArrayLike) -> Samples:
        """Samples (S,) that the microphone heard -> what of them is not echo (S',): whole blocks of 10 ms."""
        self._near.push(self._near_in.push(samples))
        return self._near_out.push(self._cancelled())

    def finish(self) -> Samples:
        """The rest (S',), less than a block and what resampling held; after it nothing may be given."""
        self._near.push(self._near_in.finish())
        padding = -len(self._near.rest) % BLOCK_SAMPLES
        self._near.push(np.zeros(padding, np.float32))
        cancelled = self._cancelled()
        kept = self._near_out.push(cancelled[: len(cancelled) - padding])
        return np.concatenate([kept, self._near_out.finish()])

    def _cancelled(self) -> Samples:
        done = [np.zeros(0, np.float32)]
        while self._near:
            near = self._near.popleft()
            far = self._far.popleft() if self._far else np.zeros(BLOCK_SAMPLES, np.float32)
            if not self._path.audible(far, near):
                far = np.zeros_like(far)
            self._through(self._module.process_reverse_stream, far)
            self._module.set_stream_delay_ms(self._delay_ms)
            left = self._through(self._module.process_stream, near)
            done.append(left if self._gate.passes(far, near, left) else np.zeros_like(left))
            self._seen_blocks += 1
        if len(done) > 1:
            self._catch_up()
        return np.concatenate(done)

    def _catch_up(self) -> None:
        """Where far sound always waited, its clock is the faster one: what waits needlessly would come too late."""
        self._least_waiting = min(self._least_waiting, len(self._far))
        if self._seen_blocks < SURPLUS_BLOCKS:
            return
        for _ in range(self._least_waiting - 1):
            self._through(self._module.process_reverse_stream, self._far.popleft())
        self._seen_blocks, self._least_waiting = 0, SURPLUS_BLOCKS

    def _through(self, process: Any, block: Samples) -> Samples:
        frame = self._frame(bytearray(pcm16(block, PCM_SCALE).tobytes()), RATE_HZ, 1, BLOCK_SAMPLES)
        process(frame)
        return np.frombuffer(frame.data, np.int16).astype(np.float32) / PCM_SCALE


class _Window:
    """The level over the last 80 ms."""

    def __init__(self) -> None:
        self._energies: deque[float] = deque([0.0] * WINDOW_BLOCKS, WINDOW_BLOCKS)

    def level_dbfs(self, block: Samples) -> float:
        """With this block (S,) the last."""
        self._energies.append(_energy(block))
        return _dbfs(sum(self._energies) / WINDOW_BLOCKS)


class _PromptResampler:
    """Samples at any rate -> 16 kHz, at once: what a better filter holds back, its echo would overtake."""

    def __init__(self, rate_hz: int) -> None:
        import soxr

        cutoff = min(CUTOFF * RATE_HZ / rate_hz, 1.0)
        at = np.arange(TAPS) - (TAPS - 1) / 2
        self._taps = (cutoff * np.sinc(cutoff * at) * np.hamming(TAPS)).astype(np.float32)
        self._tail = np.zeros(TAPS - 1, np.float32)
        self._stream: Any = soxr.ResampleStream(rate_hz, RATE_HZ, 1, dtype="float32", quality="QQ")

    def push(self, samples: npt.ArrayLike) -> Samples:
        """samples (S,) -> what is ready (S',)."""
        heard = np.concatenate([self._tail, np.asarray(samples, np.float32)])
        self._tail = heard[len(heard) - len(self._tail) :]
        return np.asarray(self._stream.resample_chunk(np.convolve(heard, self._taps, "valid")))


class _Blocks(deque[Samples]):
    """Samples of any number -> blocks (160,) of 10 ms, in a queue; of more than a minute the oldest are dropped."""

    def __init__(self) -> None:
        super().__init__(maxlen=WAITING_BLOCKS)
        self.rest = np.zeros(0, np.float32)  # less than a block

    def push(self, samples: Samples) -> None:
        whole = np.concatenate([self.rest, samples])
        count = len(whole) // BLOCK_SAMPLES
        self.extend(whole[: count * BLOCK_SAMPLES].reshape(count, BLOCK_SAMPLES))
        self.rest = whole[count * BLOCK_SAMPLES :]


def _energy(samples: Samples) -> float:
    return float(np.mean(np.square(samples)))


def _dbfs(energy: float) -> float:
    return 10 * float(np.log10(energy + 1e-12))
