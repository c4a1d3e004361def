"""The loudspeaker taken out of what the microphone hears: WebRTC's echo canceller, and a gate on what it leaves.

The canceller is WebRTC's AEC3, from the optional package `livekit`. Before it has converged it leaves enough for a
model to answer; while the loudspeaker sounds, the gate passes only what is louder than such remains. The far side must
reach it before its echo does: far sound that is 20 ms late leaves 30 dB more.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .echo_gate import BLOCK_MS, EchoGate, EchoPath
from .pcm import Samples, floats, pcm16
from .resampler import Resampler

RATE_HZ = 16_000
BLOCK_SAMPLES = RATE_HZ * BLOCK_MS // 1000  # what the library takes at a time
PCM_SCALE = 32768
MOST_DELAY_MS = 500  # that the library believes
TAPS, CUTOFF = 63, 0.9  # of the far side's low-pass, in parts of 8 kHz
HELD_SAMPLES = 48  # 3 ms of the near side wait: as much of the far side is still in its low-pass
WAITING_BLOCKS = 60_000  # of far sound, ten minutes, that no near sound has followed
LATE_BLOCKS = 10  # of near sound (100 ms) that wait for far sound which comes without gaps
SURPLUS_BLOCKS = 200  # of near sound (2 s) through which far sound always waited: then it waits needlessly


class EchoCanceller:
    """Takes the far side (what the loudspeaker plays) out of the near side (what the microphone hears).

    Give `far` what is played when it is played, silence included or left out, and `near` what was heard; blocks of
    float samples (S,) of any size, full scale 1. Far sound is matched with near sound block by block as they come.

    near_rate_hz, far_rate_hz: of either side. delay_ms: from `far` to the same sound in `near`, as the devices report
    their latencies. noise_suppression, auto_gain: WebRTC's, off since the model was trained on raw speech. continuous:
    no silence is left out of the far side, so that near sound can wait a moment for the far sound that belongs to it.
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
        continuous: bool = False,
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
        self._far, self._near = _Blocks(WAITING_BLOCKS), _Blocks()
        self._held = np.zeros(0, np.float32)
        self._late_blocks = LATE_BLOCKS if continuous else 0
        self._seen_blocks, self._least_waiting = 0, SURPLUS_BLOCKS

    def far(self, samples: npt.ArrayLike) -> None:
        """Samples (S,) that the loudspeaker plays."""
        self._far.push(self._far_in.push(samples))

    def near(self, samples: npt.ArrayLike) -> Samples:
        """Samples (S,) that the microphone heard -> what of them is not echo (S',), as much as is ready."""
        heard = np.concatenate([self._held, self._near_in.push(samples)])
        ready = max(len(heard) - HELD_SAMPLES, 0)
        self._near.push(heard[:ready])
        self._held = heard[ready:]
        return self._near_out.push(self._cancelled())

    def finish(self) -> Samples:
        """The rest (S',), less than a block and what resampling held; after it nothing may be given."""
        self._near.push(self._held)
        self._near.push(self._near_in.finish())
        self._late_blocks = 0
        padding = -len(self._near.rest) % BLOCK_SAMPLES
        self._near.push(np.zeros(padding, np.float32))
        cancelled = self._cancelled()
        kept = self._near_out.push(cancelled[: len(cancelled) - padding])
        return np.concatenate([kept, self._near_out.finish()])

    def _cancelled(self) -> Samples:
        done = [np.zeros(0, np.float32)]
        while len(self._near) > (0 if self._far else self._late_blocks):
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
        for _ in range(self._least_waiting):
            self._far.popleft()
        self._seen_blocks, self._least_waiting = 0, SURPLUS_BLOCKS

    def _through(self, process: Any, block: Samples) -> Samples:
        frame = self._frame(bytearray(pcm16(block, PCM_SCALE).tobytes()), RATE_HZ, 1, BLOCK_SAMPLES)
        process(frame)
        return np.frombuffer(frame.data, np.int16).astype(np.float32) / np.float32(PCM_SCALE)


class _PromptResampler:
    """Samples at any rate -> 16 kHz, at once: what a better filter holds back, its echo would overtake."""

    def __init__(self, rate_hz: int) -> None:
        import soxr

        cutoff, count = (CUTOFF * RATE_HZ / rate_hz, TAPS) if rate_hz > RATE_HZ else (1.0, 1)
        at = np.arange(count) - (count - 1) / 2
        self._taps = (cutoff * np.sinc(cutoff * at) * np.hamming(count)).astype(np.float32)
        self._tail = np.zeros(count - 1, np.float32)
        self._stream: Any = soxr.ResampleStream(rate_hz, RATE_HZ, 1, dtype="float32", quality="QQ")

    def push(self, samples: npt.ArrayLike) -> Samples:
        """samples (S,) -> what is ready (S',)."""
        x = floats(samples)
        if x.ndim != 1:
            raise InputError(f"The far side is mono samples (S,), not an array of shape {x.shape}.")
        heard = np.concatenate([self._tail, x])
        self._tail = heard[len(heard) - len(self._tail) :]
        return np.asarray(self._stream.resample_chunk(np.convolve(heard, self._taps, "valid")))


class _Blocks(deque[Samples]):
    """Samples of any number -> blocks (160,) of 10 ms, in a queue; beyond `limit` the oldest are dropped."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(maxlen=limit)
        self.rest = np.zeros(0, np.float32)  # less than a block

    def push(self, samples: Samples) -> None:
        whole = np.concatenate([self.rest, samples])
        count = len(whole) // BLOCK_SAMPLES
        self.extend(whole[: count * BLOCK_SAMPLES].reshape(count, BLOCK_SAMPLES))
        self.rest = whole[count * BLOCK_SAMPLES :]
