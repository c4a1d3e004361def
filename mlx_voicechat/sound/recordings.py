"""Recordings in: any file, decoded to float32 mono while it is read.

soundfile is imported where it is used, so that importing this module is cheap.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import AudioError
from .foreign import PatchedFile, converted, wav_repair
from .pcm import MAX_AMPLITUDE, Samples, shown
from .resampler import Resampler

STDIN = "-"
INPUT_RATE_HZ = 16_000  # what the recogniser of every released checkpoint hears
RATES_HZ = range(4_000, 768_001)  # 8..192 kHz and an octave or two on both sides; the rest are broken headers
PCM_SUBTYPES = {"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "ULAW", "ALAW"}


class AudioReader:
    """A recording as float32 mono blocks at `rate_hz`, decoded while it is read: memory is flat in its length.

    Every iteration starts at the beginning and gives blocks of about a second, none empty (a recording shorter than
    one output sample gives none). What is wrong is found out here, before work starts: all but integer PCM is decoded
    once for it, so `seconds` is the length in truth, not the header's word. `note` is a line on what is odd, or empty.
    Raises AudioError with one line on anything that is no usable recording.
    """

    def __init__(self, path: str | Path, rate_hz: int = INPUT_RATE_HZ, max_seconds: float | None = None) -> None:
        self.name = "standard input" if str(path) == STDIN else shown(path)
        self.rate_hz = rate_hz
        self.max_seconds = max_seconds
        self.note = ""
        self._patches: dict[int, bytes] = {}
        self._temporary = ExitStack()
        try:
            self._path = self._local_file(path)
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> AudioReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove temporary files; the reader is of no use afterwards."""
        self._temporary.close()

    def __iter__(self) -> Iterator[Samples]:
        resampler = Resampler(self.source_rate_hz, self.rate_hz)
        for block in self._mono():
            if len(ready := resampler.push(block)):
                yield ready
        if len(ready := resampler.finish()):
            yield ready

    def read_all(self) -> Samples:
        """The whole recording (S,)."""
        return np.concatenate([np.zeros(0, np.float32), *self])

    def _fail(self, why: str, remedy: str = "") -> AudioError:
        return AudioError(f"Cannot read {self.name}: {why}.", remedy)

    def _local_file(self, path: str | Path) -> Path:
        """A regular file to decode: the recording itself, or a temporary copy of a pipe."""
        try:
            if str(path) == STDIN:
                if sys.stdin is None or sys.stdin.isatty():
                    raise self._fail("it is a terminal", "Pipe a recording into it.")
                return self._spooled(sys.stdin.buffer)
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise self._fail("it is a directory")
            if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
                raise self._fail("it is a device")
            with open(path, "rb") as file:
                return self._spooled(file) if stat.S_ISFIFO(mode) else Path(path)
        except FileNotFoundError:
            raise self._fail("no such file") from None
        except PermissionError:
            raise self._fail("permission denied") from None
        except (OSError, ValueError) as fault:  # ValueError: a zero byte in the name
            raise self._fail(getattr(fault, "strerror", None) or str(fault)) from None

    def _temporary_folder(self) -> Path:
        return Path(self._temporary.enter_context(tempfile.TemporaryDirectory(prefix="mlx-voicechat-")))

    def _spooled(self, source: BinaryIO) -> Path:
        copy = self._temporary_folder() / "input"
        with open(copy, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return copy

    def _open(self) -> None:
        import soundfile

        if not self._path.stat().st_size:
            raise self._fail("it is empty")
        self._patches, self.note = wav_repair(self._path, self.name)
        try:
            frames = self._probe()
        except soundfile.SoundFileError as fault:
            folder = self._temporary_folder()
            self._path = converted(self._path, self.name, _detail(fault), folder, self.max_seconds)
            self._patches = {}
            try:
                frames = self._probe()
            except soundfile.SoundFileError as fault:
                raise self._fail(f"what was converted from it is broken ({_detail(fault)})") from None
        if self.source_rate_hz not in RATES_HZ:
            raise self._fail(f"it claims {self.source_rate_hz} samples a second")
        known = frames < 1 << 62 and self.format != "MP3"  # an MP3's length is a guess, a piped FLAC's unknown
        if known:
            self._check_length(frames)
        if self.subtype not in PCM_SUBTYPES or self.format == "FLAC":
            decoded = sum(map(len, self._mono()))
            if known and decoded < frames:
                self.note = f"{self.name} ends early, at second {self._second(decoded)} of {self._second(frames)}."
            frames = decoded
        if not frames:
            raise self._fail("it holds no samples")
        self.seconds = frames / self.source_rate_hz

    def _probe(self) -> int:
        """Read the header; the number of frames it tells."""
        with self._decoder() as stream:
            self.source_rate_hz, self.channels = int(stream.samplerate), int(stream.channels)
            self.format, self.subtype = str(stream.format), str(stream.subtype)
            return int(stream.frames)

    @contextmanager
    def _decoder(self) -> Iterator[Any]:
        """A soundfile stream from the start. By descriptor: soundfile would take a name's extension for the format."""
        import soundfile

        with open(self._path, "rb") as file:
            source = PatchedFile(file, self._patches) if self._patches else file.fileno()
            with soundfile.SoundFile(source, closefd=False) as stream:
                # soundfile seeks after each block, which a FLAC of unknown length refuses at its end.
                stream.seekable = lambda: False
                yield stream

    def _mono(self) -> Iterator[Samples]:
        """Blocks (S,) of one second at the recording's own rate, channels averaged, checked."""
        import soundfile

        at = 0
        with self._decoder() as stream:
            while True:
                try:
                    block = stream.read(self.source_rate_hz, dtype="float32", always_2d=True)
                except soundfile.SoundFileError as fault:
                    raise self._fail(f"it is damaged after second {self._second(at)} ({_detail(fault)})") from None
                if not len(block):
                    return
                with np.errstate(all="ignore"):
                    mono = block[:, 0] if self.channels == 1 else block.mean(axis=1)
                wrong = np.flatnonzero(~np.isfinite(mono))
                if len(wrong):
                    raise self._fail(f"it holds NaN or infinity at second {self._second(at + int(wrong[0]))}")
                loud = np.flatnonzero(np.abs(mono) > MAX_AMPLITUDE)
                if len(loud):
                    where = self._second(at + int(loud[0]))
                    raise self._fail(f"it holds {mono[loud[0]]:g} at second {where}, and full scale is 1")
                at += len(mono)
                self._check_length(at)
                yield mono

    def _check_length(self, frames: int) -> None:
        if self.max_seconds is not None and frames > self.max_seconds * self.source_rate_hz:
            remedy = "Cut it, or raise the limit."
            raise self._fail(f"it is longer than the limit of {self.max_seconds:g} seconds", remedy)

    def _second(self, frame: int) -> str:
        return f"{frame / self.source_rate_hz:.3f}"


def _detail(fault: Exception) -> str:
    """What libsndfile says, without soundfile's mention of the file object."""
    return str(fault).rpartition(": ")[2].rstrip(". ") or "unknown fault"


def read_audio(path: str | Path, rate_hz: int = INPUT_RATE_HZ, max_seconds: float | None = None) -> AudioReader:
    """Open a recording ("-": standard input); see AudioReader."""
    return AudioReader(path, rate_hz, max_seconds)


def read_all(path: str | Path, rate_hz: int = INPUT_RATE_HZ, max_seconds: float | None = None) -> Samples:
    """A whole recording as mono float32 samples (S,) at `rate_hz`. Raises AudioError."""
    with AudioReader(path, rate_hz, max_seconds) as reader:
        return reader.read_all()
