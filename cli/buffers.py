"""Between the audio callbacks and the event loop: samples wait in rings, the callbacks only copy. No device, no MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_voicechat.sound.pcm import Samples

CAPTURE_SECONDS = 30.0  # that the event loop or a slow server may leave waiting; beyond it the microphone is not heard
PLAYBACK_SECONDS = 60.0  # of speech that came faster than it is played
LEAST_FRAMES, MOST_FRAMES = 2, 4  # that wait before playback begins
CALM_SECONDS = 10.0  # without starving, after which a frame less will do
SOUND_PEAK = 0.01  # -40 dB: a block above it is no noise of an open input
SOUND_SECONDS = 0.2  # of such, after which the input that is heard stays
QUIET_PEAK = 0.005  # -46 dB: a frame below it can be left out unheard
SPEAKING_PEAK = 0.01
HANG_SECONDS = 0.3  # a pause between words, and the way from the loudspeaker to the microphone
FADE_SECONDS = 0.003  # out of what is cut off, where a step would click


class Ring:
    """Samples on their way from one thread to another; one writes, one reads, neither waits for the other."""

    def __init__(self, size: int) -> None:
        import numpy as np

        self._samples = np.zeros(size, np.float32)
        self._skip_to = 0
        self._read_to = 0
        self.written = 0  # samples, in all

    @property
    def taken(self) -> int:
        """Samples read or skipped, in all."""
        return max(self._read_to, self._skip_to)

    @property
    def waiting(self) -> int:
        """Samples that can be read."""
        return self.written - self.taken

    def write(self, samples: Samples) -> int:
        """Add samples (S,), as many as there is room for; the writer's. How many."""
        count = min(len(samples), len(self._samples) - (self.written - self._read_to))
        start = self.written % len(self._samples)
        first = min(count, len(self._samples) - start)
        self._samples[start : start + first] = samples[:first]
        self._samples[: count - first] = samples[first:count]
        self.written += count
        return count

    def read_into(self, out: Samples) -> int:
        """Take samples into the beginning of `out` (S,), as many as wait; the reader's. How many."""
        at = self.taken
        count = min(len(out), self.written - at)
        start = at % len(self._samples)
        first = min(count, len(self._samples) - start)
        out[:first] = self._samples[start : start + first]
        out[first:count] = self._samples[: count - first]
        self._read_to = at + count
        return count

    def skip(self) -> None:
        """Let what waits be passed over; the writer's."""
        self._skip_to = self.written


def _drained(ring: Ring) -> Samples:
    """All that waits (S,)."""
    import numpy as np

    block = np.empty(ring.waiting, np.float32)
    return block[: ring.read_into(block)]


class Inputs:
    """Which input of a device is the microphone: `number` from 1, or None for the one with sound.

    Until 0.2 s of sound have come, it is the loudest so far; then it stays, `settled`.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number or 1
        self.settled = number is not None
        self._peaks: Any = 0.0  # (channels,), summed
        self._sound_samples = 0

    def of(self, block: Samples, rate_hz: int) -> Samples:
        """(frames, channels) -> (frames,)."""
        import numpy as np

        if not self.settled and block.shape[1] > 1 and len(block):
            peaks = np.nan_to_num(np.abs(block).max(axis=0), nan=0.0, posinf=0.0)
            self._peaks = self._peaks + peaks
            loudest = int(np.argmax(self._peaks))
            if self._peaks[loudest] > 2 * self._peaks[self.number - 1]:
                self.number = loudest + 1
            self._sound_samples += len(block) * bool(peaks.max() >= SOUND_PEAK)
            self.settled = self._sound_samples >= SOUND_SECONDS * rate_hz
        return block[:, self.number - 1]


class Capture:
    """The microphone at its own rate -> samples at the model's. `hear` is the audio callback.

    `number`: the device's input that is heard, from 1; None for the one with sound.
    """

    def __init__(self, device_hz: int, rate_hz: int, number: int | None = None) -> None:
        from mlx_voicechat.sound.resampler import Resampler

        self.inputs = Inputs(number)

        self._device_hz = device_hz
        self._ring = Ring(round(CAPTURE_SECONDS * device_hz))
        self._resampler = Resampler(device_hz, rate_hz)
        self._lost = 0
        self.overflows = 0  # times that the system had to drop samples
        self.bad = 0  # samples that were no numbers
        self.peak = 0.0  # of all that was taken

    @property
    def seconds(self) -> float:
        """Seconds that were taken."""
        return self._ring.taken / self._device_hz

    @property
    def waiting_seconds(self) -> float:
        """Seconds that wait to be taken."""
        return self._ring.waiting / self._device_hz

    @property
    def lost_seconds(self) -> float:
        """Seconds for which there was no room."""
        return self._lost / self._device_hz

    def hear(self, indata: Samples, frames: int, time: object, status: Any) -> None:
        """Keep a block (frames, channels)."""
        block = self.inputs.of(indata, self._device_hz)
        self._lost += len(block) - self._ring.write(block)
        self.overflows += bool(status.input_overflow)

    def take(self) -> Samples:
        """What has come since, resampled (S,), possibly nothing; a sample that is no number is silence."""
        import numpy as np

        block = _drained(self._ring)
        bad = ~np.isfinite(block)
        self.bad += int(bad.sum())
        block[bad] = 0
        if len(block):
            self.peak = max(self.peak, float(np.abs(block).max()))
        return self._resampler.push(block)

    def finish(self) -> Samples:
        """The rest that the resampler holds (S,); nothing is taken after it."""
        return self._resampler.finish()


class Playback:
    """The assistant's frames -> the loudspeaker at its own rate, through a jitter buffer. `fill` is the audio callback.

    It holds `target` frames (2 to 4) before it begins. Starved, it waits for one more than before; after a calm while
    it gives that back. What it holds above the target goes when the speech pauses: no word is cut.
    """

    def __init__(self, rate_hz: int, device_hz: int, frame_seconds: float) -> None:
        from mlx_voicechat.sound.resampler import Resampler

        self._device_hz = device_hz
        self._frame_samples = round(frame_seconds * device_hz)
        self._ring = Ring(round(PLAYBACK_SECONDS * device_hz))
        self._played = Ring(round(CAPTURE_SECONDS * device_hz))
        self._resampler = Resampler(rate_hz, device_hz)
        self._fade_samples = round(FADE_SECONDS * device_hz)
        self._calm_samples = 0
        self._loud_to = -device_hz  # position of the last loud sample's end
        self._quiet_before = False
        self._filling, self._ending, self._emptied = True, False, False
        self.target = LEAST_FRAMES
        self.starved = 0  # times: what was to be said was not there
        self.underflows = 0  # times that the system was not served in time
        self.lost = 0  # samples for which there was no room

    # -- on the event loop

    @property
    def speaking(self) -> bool:
        """Whether speech is heard, is about to be, or was a moment ago."""
        return self._ring.taken < self._loud_to + HANG_SECONDS * self._device_hz

    @property
    def waiting_seconds(self) -> float:
        """Seconds that wait to be played."""
        return self._ring.waiting / self._device_hz

    def push(self, samples: Samples) -> None:
        """Add a frame of speech (S,)."""
        peak = float(abs(samples).max(initial=0))
        excess = self._ring.waiting >= (self.target + 1) * self._frame_samples
        quiet, before = peak < QUIET_PEAK, self._quiet_before
        self._quiet_before = quiet
        if excess and quiet and before:  # every pause keeps a frame
            return
        self._write(self._resampler.push(samples))
        if peak > SPEAKING_PEAK:
            self._loud_to = self._ring.written

    def clear(self) -> None:
        """Drop what waits: an interruption."""
        self._ring.skip()
        self._emptied = True
        self._loud_to = -self._device_hz

    def finish(self) -> None:
        """No frame follows: what waits is played, however little."""
        self._write(self._resampler.finish())
        self._ending = True

    def take_played(self) -> Samples:
        """What was given to the loudspeaker since (S,), at its own rate: speech and silence, as it sounds."""
        return _drained(self._played)

    def _write(self, samples: Samples) -> None:
        self.lost += len(samples) - self._ring.write(samples)

    # -- on the audio thread

    def fill(self, outdata: Samples, frames: int, time: object, status: Any) -> None:
        """Fill a block (frames, channels): what waits, or silence while there is not enough."""
        self.underflows += bool(status.output_underflow)
        outdata[:] = 0
        self._fill(outdata[:, 0], frames)
        outdata[:, 1:] = outdata[:, :1]
        self._played.write(outdata[:, 0])

    def _fill(self, first: Samples, frames: int) -> None:
        if self._emptied:
            self._emptied, self._filling = False, True
        if self._filling:
            # The resampler keeps an edge of the last frame: half a frame less counts as whole.
            enough = max(frames, (self.target - 0.5) * self._frame_samples)
            if self._ring.waiting < enough and not self._ending:
                return
            self._filling = False
        count = self._ring.read_into(first)
        if count < frames and not self._ending:
            self._starve(first[:count])
        else:
            self._calm(count)

    def _starve(self, rest: Samples) -> None:
        import numpy as np

        self.starved += 1
        self.target = min(self.target + 1, MOST_FRAMES)
        self._calm_samples, self._filling = 0, True
        edge = rest[-self._fade_samples :]
        edge *= np.linspace(1, 0, len(edge), dtype=np.float32)

    def _calm(self, count: int) -> None:
        self._calm_samples += count
        if self._calm_samples > CALM_SECONDS * self._device_hz:
            self._calm_samples = 0
            self.target = max(self.target - 1, LEAST_FRAMES)
