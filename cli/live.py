"""A person's conversation: the microphone to a server, its answers to the loudspeaker. No MLX."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mlx_voicechat.errors import DeviceError

from .buffers import Capture, Playback
from .conversation import Conversation

if TYPE_CHECKING:
    from pathlib import Path

    from mlx_voicechat import AudioFrame, Event
    from mlx_voicechat.sound.echo import EchoCanceller
    from mlx_voicechat.sound.pcm import Samples

    from .client import Notice, Wire
    from .devices import Device, Devices

POLL_SECONDS = 0.02  # between two looks at what the microphone brought
HEARD_SECONDS = 1.0  # after which a microphone that brings only silence is spoken of
STOPPED_SECONDS = 3.0  # without a sample: the microphone has stopped
RETURN_SECONDS = 10.0  # that a device which has stopped is waited for
RETRY_SECONDS = 0.5  # between two looks for it
SILENT_PEAK = 3e-4  # -70 dB: less than the noise of an open microphone
BEHIND_SECONDS = 1.0  # a backlog that is spoken of, and again whenever it has doubled
STALLED_SECONDS = 2.0  # without a sample played: what is left at the end is given up


class LiveConversation(Conversation):
    """The microphone and the loudspeaker, once `opened`. Ctrl-C commits and lets the rest be played; again, it ends.

    `say` gets a line for the person; `here` tells whether the model runs in this process; `canceller` makes one for
    (near_rate_hz, far_rate_hz, delay_ms), None for a microphone that is heard as it is.
    """

    audible = True

    def __init__(
        self,
        devices: Devices,
        microphone: Device,
        loudspeaker: Device,
        say: Callable[[str], object],
        *,
        duration: float | None,
        half_duplex: bool,
        here: bool,
        canceller: Callable[[int, int, int], EchoCanceller] | None = None,
    ) -> None:
        super().__init__()
        self._devices, self._microphone, self._loudspeaker = devices, microphone, loudspeaker
        self._say, self._here = say, here
        self._make_canceller = canceller
        self._canceller: EchoCanceller | None = None
        self._duration, self._half_duplex = duration, half_duplex
        self._stopping = self._said_loss = self._said_bad = self._said_input = self._judged = False
        self._announced = BEHIND_SECONDS / 2
        self._stopped: DeviceError | None = None

    @contextmanager
    def opened(self, wire: Wire) -> Iterator[None]:
        """Open both devices for the time of the block. Raises DeviceError."""
        self._capture = Capture(self._microphone.rate_hz, wire.input_rate_hz, self._microphone.number)
        self._playback = Playback(wire.output_rate_hz, self._loudspeaker.rate_hz, wire.frame_seconds)
        self._streams: list[Any] = []
        self._model, self._input_hz = wire.model, wire.input_rate_hz
        try:
            self._start_streams()
            if self._make_canceller:
                delay_ms = round(1000 * sum(float(stream.latency) for stream in self._streams))
                self._canceller = self._make_canceller(wire.input_rate_hz, self._loudspeaker.rate_hz, delay_ms)
                self._matched = False  # whether far and near sound begin together
            self._say(f"{self._microphone.name} listens, {self._loudspeaker.name} speaks; Ctrl-C ends.")
            yield
        finally:
            self._close_streams()  # at once: what is still to be played was waited for

    def _start_streams(self) -> None:
        self._streams = []
        for device, callback in ((self._loudspeaker, self._playback.fill), (self._microphone, self._capture.hear)):
            self._streams.append(self._devices.open(device, callback))
            with self._devices.naming(device):
                self._streams[-1].start()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()

    def fail_if_cut_short(self, kept: Path | None = None) -> None:
        """As every conversation, and raise DeviceError for a device that stopped."""
        if self._stopped:
            raise DeviceError(self._stopped.message + self._ended(kept), self._stopped.remedy)
        if self._lost:
            self._interrupted = False  # that it was asked to end is not why it ended
        super().fail_if_cut_short(kept)

    def faults(self) -> list[str]:
        """What went wrong with the sound, a line each."""
        capture, playback, found = self._capture, self._playback, []
        if playback.starved:
            found.append(f"playback ran dry {_times(playback.starved)}: answers came late.")
        for count, device in ((playback.underflows, "loudspeaker"), (capture.overflows, "microphone")):
            if count:
                found.append(f"this program was {_times(count)} too late for the {device}.")
        if playback.lost:
            found.append(
                f"{playback.lost / self._loudspeaker.rate_hz:.1f} s of speech had no room and were not played."
            )
        if capture.lost_seconds:
            found.append(f"{capture.lost_seconds:.1f} s of what the microphone heard were lost.")
        if self.behind_seconds >= BEHIND_SECONDS:
            found.append(f"the model was up to {self.behind_seconds:.1f} s behind.")
        return found

    async def _send(self, wire: Wire) -> None:
        left = None if self._duration is None else round(self._duration * wire.input_rate_hz)
        self._last_sample = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            ending = self._stopping or (self._has_stopped() and not await self._taken_again())
            samples = self._hear(ending)
            if left is not None:
                samples = samples[:left]
                left -= len(samples)
                ending = ending or not left
            if self._is_off():
                samples = samples * 0
            if len(samples):
                await wire.append(samples)
            await self._between(wire)
            self._judge()
            if ending:
                await wire.commit()
                return

    def _is_off(self) -> bool:
        """Whether the microphone is off: silence is said in its place."""
        return self._half_duplex and self._playback.speaking

    async def _between(self, wire: Wire) -> None:
        """What is to be told between two pieces of sound."""

    def _hear(self, ending: bool) -> Samples:
        """What the microphone has brought, without what the loudspeaker played; `ending`: all of it."""
        samples = self._capture.take()
        if ending:
            samples = _joined(samples, self._capture.finish())
        if self._canceller is None:
            return samples
        played = self._playback.take_played()
        if not self._matched:
            # The loudspeaker began earlier: what it played before would keep the rest from being there in time.
            count = round(len(samples) * self._loudspeaker.rate_hz / self._input_hz)
            played = played[max(len(played) - count, 0) :]
            self._matched = len(samples) > 0
        self._canceller.far(played)
        samples = self._canceller.near(samples)
        return _joined(samples, self._canceller.finish()) if ending else samples

    async def _listen(self, wire: Wire, take: Callable[[Event], bool]) -> None:
        await super()._listen(wire, take)
        self._playback.finish()
        clock, loudspeaker = asyncio.get_running_loop().time, self._streams[0]
        moved, before = clock(), self._playback.waiting_seconds
        while (left := self._playback.waiting_seconds) and loudspeaker.active and clock() - moved < STALLED_SECONDS:
            if left != before:
                moved, before = clock(), left
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(min(float(loudspeaker.latency), 1.0))  # what the system holds

    def _count(self, frame: AudioFrame) -> None:
        self._playback.push(frame.samples)

    def _press(self, wire: Wire, sender: asyncio.Task[None], listener: asyncio.Task[None]) -> bool:
        if self._stopping:
            wire.abort()
            sender.cancel()
            listener.cancel()
            return True
        self._stopping = True
        self._say("the microphone is closed; what is left is played. Ctrl-C again ends at once.")
        return False

    def _notice(self, notice: Notice) -> None:
        from .client import Interrupted, Lagging

        if isinstance(notice, Interrupted):
            self._playback.clear()
        elif isinstance(notice, Lagging):
            behind = notice.seconds + self._capture.waiting_seconds
            self.behind_seconds = max(self.behind_seconds, behind)
            if behind >= 2 * self._announced:
                first, self._announced = self._announced < BEHIND_SECONDS, behind
                more = f" {smaller_checkpoint(self._model, self._here)}" if first else ""
                self._say(f"the model is {behind:.1f} s behind: answers come that much later.{more}")

    async def _taken_again(self) -> bool:
        """Wait for a device that has stopped, and open both anew; False when it does not come back."""
        assert self._stopped
        clock = asyncio.get_running_loop().time
        until = clock() + RETURN_SECONDS
        self._say(f"{self._stopped.message} It is waited for; Ctrl-C ends.")
        self._close_streams()
        while clock() < until and not self._stopping:
            await asyncio.sleep(min(RETRY_SECONDS, RETURN_SECONDS))
            with suppress(DeviceError):
                self._microphone, self._loudspeaker = map(self._devices.again, (self._microphone, self._loudspeaker))
                try:
                    self._start_streams()
                except DeviceError:
                    self._close_streams()
                    raise
                self._last_sample, self._matched, self._stopped = clock(), False, None
                self._say(f"{self._microphone.name} listens again, {self._loudspeaker.name} speaks.")
                return True
        return False

    def _has_stopped(self) -> bool:
        """Whether the microphone or the loudspeaker has stopped: unplugged, say."""
        now = asyncio.get_running_loop().time()
        if self._capture.waiting_seconds:
            self._last_sample = now
        loudspeaker, microphone = self._streams
        if not loudspeaker.active:
            which = f"loudspeaker {self._loudspeaker.name}"
        elif not microphone.active or now - self._last_sample >= STOPPED_SECONDS:
            which = f"microphone {self._microphone.name}"
        else:
            return False
        self._stopped = DeviceError(f"The {which} has stopped.", "Was it unplugged, or taken by another?")
        return True

    def _judge(self) -> None:
        """Say what is wrong with the microphone: once it was heard for a second, and when there was no room."""
        if not self._said_loss and self._capture.lost_seconds:
            self._said_loss = True
            self._say("the model is so far behind that the microphone is not heard for now.")
        if not self._said_bad and self._capture.bad:
            self._said_bad = True
            self._say(f"{self._microphone.name} brings samples that are no numbers: they are heard as silence.")
        inputs, count = self._capture.inputs, self._microphone.channels
        if not self._said_input and inputs.settled and self._microphone.number is None:
            self._said_input = True
            if inputs.number > 1 or count > 2:
                which = f"{self._microphone.name}: input {inputs.number} of {count} is heard"
                self._say(f"{which}; --input-channel takes another.")
        if self._judged or self._capture.seconds < HEARD_SECONDS:
            return
        self._judged = True
        name = self._microphone.name
        if not self._capture.peak and sys.platform == "darwin":
            self._say(
                f"{name} brings nothing but zeros: permission is missing. Allow your terminal application in System "
                "Settings > Privacy & Security > Microphone, and start it anew."
            )
        elif not self._capture.peak:
            self._say(f"{name} brings nothing but zeros: is it muted, or the wrong one? See --list-devices.")
        elif self._capture.peak < SILENT_PEAK:
            self._say(f"{name} is silent: is its level turned down, or is it the wrong one? See --list-devices.")


def smaller_checkpoint(model: str, here: bool) -> str:
    """What to run in place of this model on a machine that is too slow for it; `here` if this command chose it."""
    from mlx_voicechat.weights.hub_cache import PUBLISHED

    sizes = list(PUBLISHED)  # ascending
    at = next((index for index, size in enumerate(sizes) if model.lower().endswith(size)), None)
    if at is None:
        return "Close other programs, or use a smaller checkpoint."
    if at == 0:
        return f"{sizes[0]} is the smallest checkpoint: close other programs, or use a faster machine."
    names = " or ".join(PUBLISHED[size] for size in sizes[:at])
    return f"A smaller checkpoint would help: {'--model' if here else 'a server of'} {names}."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _joined(first: Samples, second: Samples) -> Samples:
    import numpy as np

    return np.concatenate([first, second])
