"""Files a command writes: checked before the model loads, replaced only by complete ones."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlx_voicechat.errors import InputError

if TYPE_CHECKING:
    from mlx_voicechat import Event


def check_targets(targets: Mapping[str, Path | None], recording: str) -> None:
    """Refuse, with InputError, targets (option -> path) that cannot be written or are one file named twice.

    `recording` is the input, which is never overwritten.
    """
    taken = {} if recording == "-" else {os.path.realpath(recording): "--audio"}
    for option, path in targets.items():
        if path is None:
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise InputError(f"{option}: {path} is also the file of {taken[place]}.", "Name another one.")
        taken[place] = option
        if not os.path.isdir(os.path.dirname(place)):
            raise InputError(f"{option}: the folder {path.parent} does not exist.", "Create it first.")
        if os.path.isdir(place):
            raise InputError(f"{option}: {path} is a folder.", "Name a file in it.")
        if os.path.exists(place) and not os.path.isfile(place):
            continue  # a device or a pipe: written as it stands
        try:
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(place), prefix=os.path.basename(place)):
                pass
        except OSError as error:
            raise InputError(f"{option}: {path} cannot be written: {error.strerror}.") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends well, and vanishes when it does not."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as file:
            yield file
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            yield file
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class EventLog:
    """Events as JSON lines: `time_seconds` on the timeline, `wall_seconds` since the conversation began."""

    def __init__(self, file: TextIO, frame_seconds: float) -> None:
        self._file = file
        self._frame_seconds = frame_seconds
        self._started = time.perf_counter()

    def take(self, event: Event) -> None:
        """Add one event; audio frames without their samples."""
        line: dict[str, Any] = {
            "event": re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower(),
            "time_seconds": round(event.frame_index * self._frame_seconds, 6),
            "wall_seconds": round(time.perf_counter() - self._started, 6),
        }
        line |= {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name != "samples"}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")


class Speech:
    """The assistant's side: every audio frame's samples, one channel."""

    def __init__(self, writer: WavWriter) -> None:
        self._writer = writer

    def take(self, event: Event) -> None:
        """Add one event; only audio frames have something to write."""
        from mlx_voicechat import AudioFrame

        if isinstance(event, AudioFrame):
            self._writer.write(event.samples)


class BothSides:
    """Stereo at the output rate: the user left, the assistant right, as long as what the assistant gave.

    The user's side goes through a resampler that keeps its state, so either side may be ahead for a while.
    """

    def __init__(self, writer: WavWriter, resampler: Resampler) -> None:
        import numpy as np

        self._writer = writer
        self._resampler = resampler
        self._sides = [np.zeros(0, np.float32), np.zeros(0, np.float32)]

    def hear(self, samples: np.ndarray) -> None:
        """Add what the user said: float32 mono at the input rate."""
        self._add(0, self._resampler.push(samples))

    def take(self, event: Event) -> None:
        """Add one event; only audio frames have something to write."""
        from mlx_voicechat import AudioFrame

        if isinstance(event, AudioFrame):
            self._add(1, event.samples)

    def finish(self) -> None:
        """Bring the user's side to the length of the assistant's: flushed, then cut or padded with silence."""
        import numpy as np

        self._add(0, self._resampler.flush())
        self._add(0, np.zeros(len(self._sides[1]), np.float32))

    def _add(self, side: int, samples: np.ndarray) -> None:
        import numpy as np

        self._sides[side] = np.concatenate([self._sides[side], samples])
        ready = min(map(len, self._sides))
        if ready:
            self._writer.write(np.stack([part[:ready] for part in self._sides], axis=1))
            self._sides = [part[ready:] for part in self._sides]
