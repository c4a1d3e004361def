"""Microphones and loudspeakers through `sounddevice`, an optional package: listed, chosen, opened. No MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mlx_voicechat.errors import DeviceError, InputError

from .diagnosis import TALK

OTHER_RATES_HZ = (48_000, 44_100, 32_000, 24_000, 16_000)  # where a device refuses its own
MOST_INPUTS = 32  # opened at once: some systems name more that are no more than copies
KINDS = {"input": "microphone", "output": "loudspeaker"}


@dataclass(frozen=True)
class Device:
    """A device in one direction, `kind` input or output, with a rate and channels that it takes.

    `number`: the input that is heard, from 1; None for the one with sound.
    """

    index: int
    name: str
    kind: str
    rate_hz: int
    channels: int
    number: int | None = None


class Devices:
    """The devices of this machine. Raises InputError where sounddevice cannot be imported."""

    def __init__(self) -> None:
        try:
            import sounddevice
        except ImportError:
            raise InputError("The microphone needs the package sounddevice.", TALK) from None
        except OSError:  # on Linux the wheel comes without the library
            raise InputError("sounddevice does not find PortAudio.", "apt install libportaudio2") from None
        self._library: Any = sounddevice

    def listing(self) -> list[str]:
        """A line for each device. Raises DeviceError when there is none."""
        defaults = {kind: self._default(kind) for kind in KINDS}
        lines = []
        for device in self._all():
            ways = [
                f"{channels} {kind}{' (default)' if device['index'] == defaults[kind] else ''}"
                for kind in KINDS
                if (channels := device[f"max_{kind}_channels"])
            ]
            lines.append(f"{device['index']:>3}  {device['name']}: {', '.join(ways)}, {_rate(device)} Hz")
        if not lines:
            raise DeviceError("This machine has no audio devices.")
        return lines

    def choose(self, wanted: str | None, kind: str, number: int | None = None) -> Device:
        """The device of this number, or whose name holds this; the default if None. `number`: its input that is heard.

        Raises InputError for one that is not there or not the only one, DeviceError when there is none of this kind or
        it takes no rate.
        """
        found = [device for device in self._all() if device[f"max_{kind}_channels"]]
        if not found:
            raise DeviceError(f"This machine has no {kind} device: no {KINDS[kind]}.")
        listed = "; ".join(f"{device['index']} {device['name']}" for device in found)
        if wanted is None:
            default = self._default(kind)
            fitting = [device for device in found if device["index"] == default]
            if not fitting:
                raise DeviceError(f"No {kind} device is the default.", f"Name one with --{kind}-device: {listed}")
        else:
            fitting = _named(found, wanted)
            if len(fitting) != 1:
                many = f"More than one {kind} device is named" if fitting else f"There is no {kind} device"
                raise InputError(f"{many} {wanted!r}.", f"The {kind} devices: {listed}")
        most = int(fitting[0][f"max_{kind}_channels"])
        if number is not None and number > most:
            raise InputError(f"{fitting[0]['name']} has no input {number}: --input-channel is at most {most}.")
        return self._checked(fitting[0], kind, listed, number)

    def again(self, device: Device) -> Device:
        """A device that was there before, looked for anew. Raises DeviceError when it is not; no stream may be open."""
        with self.naming(device):
            self._library._terminate()  # the list of devices is made once, at the start of the library
            self._library._initialize()
        for found in self._all():
            if found["name"] == device.name and found[f"max_{device.kind}_channels"] >= device.channels:
                return replace(device, index=int(found["index"]))
        raise DeviceError(f"The {KINDS[device.kind]} {device.name} is not there.")

    def open(self, device: Device, callback: Callable[..., None]) -> Any:
        """Its stream of float32 blocks (frames, channels), not started. Raises DeviceError."""
        make = self._library.InputStream if device.kind == "input" else self._library.OutputStream
        with self.naming(device):
            return make(**_settings(device), callback=callback)

    def naming(self, device: Device) -> _Naming:
        """A block in which what the system refuses becomes a DeviceError."""
        return _Naming(self._library.PortAudioError, device)

    def _all(self) -> list[Any]:
        try:
            return list(self._library.query_devices())
        except self._library.PortAudioError as fault:
            raise DeviceError(f"The audio devices cannot be listed: {_reason(fault)}.") from None

    def _default(self, kind: str) -> int:
        """Index of the default device, -1 if there is none."""
        return int(self._library.default.device[list(KINDS).index(kind)])

    def _checked(self, found: Any, kind: str, listed: str, number: int | None) -> Device:
        check = getattr(self._library, f"check_{kind}_settings")
        most = int(found[f"max_{kind}_channels"])
        channels = dict.fromkeys((1, min(2, most)))
        if kind == "input":  # all, since nobody knows on which a microphone is
            few = (1, min(2, most)) if number is None else (number,)
            channels = dict.fromkeys((min(most, max(MOST_INPUTS, number or 1)), *few))
        refusals = []
        for rate_hz in dict.fromkeys((_rate(found), *OTHER_RATES_HZ)):
            for count in channels:
                device = Device(int(found["index"]), str(found["name"]), kind, rate_hz, count, number)
                try:
                    check(**_settings(device))
                except self._library.PortAudioError as fault:
                    refusals.append(fault)
                else:
                    return device
        raise DeviceError(
            f"The {KINDS[kind]} {found['name']} cannot be used: {_reason(refusals[0])}.",
            f"Choose another with --{kind}-device: {listed}",
        )


class _Naming:
    def __init__(self, fault: type[Exception], device: Device) -> None:
        self._fault, self._device = fault, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, fault: BaseException | None, _: object) -> None:
        if isinstance(fault, self._fault):
            message = f"The {KINDS[self._device.kind]} {self._device.name} cannot be opened: {_reason(fault)}."
            remedy = "Is it in use, or unplugged? Choose another: mlx-voicechat talk --list-devices"
            raise DeviceError(message, remedy) from None


def _named(found: list[Any], wanted: str) -> list[Any]:
    """Those of this number, else of this name, else whose name holds it."""
    if wanted.strip().isdecimal():
        return [device for device in found if device["index"] == int(wanted)]
    low = wanted.lower()
    return [d for d in found if d["name"].lower() == low] or [d for d in found if low in d["name"].lower()]


def _settings(device: Device) -> dict[str, Any]:
    return {
        "device": device.index,
        "samplerate": device.rate_hz,
        "channels": device.channels,
        "dtype": "float32",
    }


def _rate(device: Any) -> int:
    return round(device["default_samplerate"])


def _reason(fault: Exception) -> str:
    return " ".join(str(fault.args[0] if fault.args else fault).split()).rstrip(".")
