"""Files that `generate` writes: checked before the model loads, put in place whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlx_voicechat.errors import InputError, VoiceChatError

from .profiling import FRAMES_VARIABLE

if TYPE_CHECKING:
    import numpy as np

    from mlx_voicechat import Event
    from mlx_voicechat.sound.resampler import Resampler
    from mlx_voicechat.sound.wav import WavWriter


class Timeline(Protocol):
    """What the files need to know of a model, or of a server."""

    @property
    def input_rate_hz(self) -> int: ...

    @property
    def output_rate_hz(self) -> int: ...

    @property
    def frame_seconds(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Targets:
    """The files that were asked for."""

    output_audio: Path | None = None
    both_sides: Path | None = None
    events: Path | None = None
    profile_json: Path | None = None
    profile_frames: Path | None = None

    def __bool__(self) -> bool:
        return any(path is not None for _, path in self.named())

    def named(self) -> Iterator[tuple[str, Path | None]]:
        """(option or variable, path) of each."""
        for field in dataclasses.fields(self):
            option = "--" + field.name.replace("_", "-")
            yield FRAMES_VARIABLE if field.name == "profile_frames" else option, getattr(self, field.name)

    def check(self, recording: str, named: str = "--audio") -> None:
        """Raise InputError or AudioError if one cannot be written, or is the recording, or is asked for twice.

        `named` is the recording's own option.
        """
        from mlx_voicechat.sound.wav import WavWriter

        taken = {} if recording == "-" else {os.path.realpath(recording): named}
        for option, path in self.named():
            if path is None:
                continue
            place = os.path.realpath(path)
            if place in taken:
                raise InputError(f"{option} and {taken[place]} are both {path}.", "Name another file.")
            taken[place] = option
            if str(path) == "-":
                raise InputError(f"{option} cannot be -: standard output is for the text.", "Name a file.")
            try:
                os.stat(path)
            except FileNotFoundError:
                pass
            except OSError as fault:  # a name too long, a file where a folder should be
                raise InputError(f"{option} cannot be {path}: {fault.strerror}.") from None
            if path in (self.output_audio, self.both_sides):
                WavWriter(path, rate_hz=1).abort()
            else:
                _check_text(option, path)


def _check_text(option: str, path: Path) -> None:
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        raise InputError(f"{option} cannot be {path}: it is a folder.", "Name a file in it.")
    if not path.exists() and not folder.is_dir():
        raise InputError(f"{option} cannot be {path}: there is no folder {folder}.", "Make it first.")
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{option} cannot be {path}: permission denied.")
    if path.exists() and not path.is_file():
        return
    part = _part(path)
    try:
        part.touch(exist_ok=False)
        part.unlink()
    except OSError as fault:
        raise InputError(f"{option} cannot be {path}: in its folder, {fault.strerror}.") from None


def _part(path: Path) -> Path:
    """A new name beside what `path` is, or links to."""
    return Path(os.path.realpath(path)).with_name(f".{secrets.token_hex(8)}.part")


class TextFile:
    """A text file that takes the place of `path` when its block ends well and vanishes when it raised.

    The file that was there lends its permissions. What is no regular file (a pipe, /dev/stderr) is written as it
    stands. Raises VoiceChatError, naming `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part: Path | None = None
        with self._naming():
            if path.exists() and not path.is_file():
                self._file = path.open("w", encoding="utf-8")
                return
            self._part = _part(path)
            self._file = self._part.open("x", encoding="utf-8")
            with suppress(OSError):
                os.chmod(self._part, stat.S_IMODE(path.stat().st_mode))

    def __enter__(self) -> TextFile:
        return self

    def write(self, text: str) -> None:
        """Append."""
        with self._naming():
            self._file.write(text)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._naming() if kind is None else suppress(OSError):
                self._file.close()
                if kind is None and self._part:
                    self._part.replace(os.path.realpath(self.path))
        finally:
            if self._part:
                self._part.unlink(missing_ok=True)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            raise VoiceChatError(f"Cannot write {self.path}: {fault.strerror}.") from None


class EventLog:
    """Events as JSON lines: `time_seconds` on the timeline, `wall_seconds` since the conversation began."""

    def __init__(self, file: TextFile, frame_seconds: float) -> None:
        self._file = file
        self._frame_seconds = frame_seconds
        self._started = time.perf_counter()

    def take(self, event: Event) -> None:
        """Add one event; an audio frame without its samples."""
        line: dict[str, Any] = {
            "event": re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower(),
            "time_seconds": round(event.frame_index * self._frame_seconds, 6),
            "wall_seconds": round(time.perf_counter() - self._started, 6),
        }
        line |= {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        line.pop("samples", None)
        if not line.get("cancelled"):  # said where it is so
            line.pop("cancelled", None)
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")


class BothSides:
    """Stereo at the output rate: the user left, the assistant right, and as long as the assistant's side.

    The user's side goes through a resampler that keeps its state, so either side may be ahead for a while.
    """

    def __init__(self, writer: WavWriter, resampler: Resampler) -> None:
        import numpy as np

        self._writer = writer
        self._resampler = resampler
        self._user = self._assistant = np.zeros(0, np.float32)

    def hear(self, samples: np.ndarray) -> None:
        """Add what the user said: (S,) at the input rate."""
        self._add(self._resampler.push(samples), self._assistant[:0])

    def speak(self, samples: np.ndarray) -> None:
        """Add what the assistant said: (S,) at the output rate."""
        self._add(self._user[:0], samples)

    def finish(self) -> None:
        """Write the rest of the user's side, cut or filled with silence to the length of the assistant's."""
        self._add(self._resampler.finish(), self._assistant[:0])
        self._add(self._assistant * 0, self._assistant[:0])

    def _add(self, user: np.ndarray, assistant: np.ndarray) -> None:
        import numpy as np

        self._user = np.concatenate([self._user, user])
        self._assistant = np.concatenate([self._assistant, assistant])
        if ready := min(len(self._user), len(self._assistant)):
            self._writer.write(np.stack([self._user[:ready], self._assistant[:ready]], axis=1))
            self._user, self._assistant = self._user[ready:], self._assistant[ready:]


class Outputs:
    """The files of one conversation, open; `files` puts them in place, or drops them when its block raised.

    When one cannot be written, all are dropped and the conversation goes on without; `fault` is raised at its end.
    """

    def __init__(self, files: ExitStack, targets: Targets, config: Timeline) -> None:
        from mlx_voicechat.sound.resampler import Resampler
        from mlx_voicechat.sound.wav import WavWriter

        rate_hz = config.output_rate_hz
        self.fault: VoiceChatError | None = None
        self._files = files = files.enter_context(ExitStack())
        self._speech: WavWriter | None = None
        self._sides: BothSides | None = None
        self._log: EventLog | None = None
        if targets.output_audio:
            self._speech = files.enter_context(WavWriter(targets.output_audio, rate_hz))
        if targets.both_sides:
            stereo = files.enter_context(WavWriter(targets.both_sides, rate_hz, channels=2))
            self._sides = BothSides(stereo, Resampler(config.input_rate_hz, rate_hz))
        if targets.events:
            self._log = EventLog(files.enter_context(TextFile(targets.events)), config.frame_seconds)

    def hearing(self, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The same blocks, noted as the user's side."""
        for block in blocks:
            if self._sides and not self.fault:
                self._sides.hear(block)
            yield block

    def take(self, event: Event) -> None:
        """Write what one event brings."""
        if self.fault:
            return
        try:
            self._take(event)
        except VoiceChatError as fault:
            self.fault = fault
            self._files.__exit__(type(fault), fault, fault.__traceback__)

    def _take(self, event: Event) -> None:
        from mlx_voicechat import AudioFrame

        if self._log:
            self._log.take(event)
        if isinstance(event, AudioFrame):
            if self._speech:
                self._speech.write(event.samples)
            if self._sides:
                self._sides.speak(event.samples)

    def finish(self) -> None:
        """Bring both sides to one length; after the last event."""
        if self._sides and not self.fault:
            self._sides.finish()
