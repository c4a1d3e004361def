"""Recordings in: any file, decoded to float32 mono while it is read.

soundfile is imported where it is used, so that importing this module is cheap.
"""

from __future__ import annotations

import math
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
from .containers import mp3_samples, ogg_layout
from .foreign import PatchedFile, converted, wav_repair
from .pcm import MAX_AMPLITUDE, Samples, shown
from .resampler import Resampler

STDIN = "-"
INPUT_RATE_HZ = 16_000  # what the recogniser of every released checkpoint hears
RATES_HZ = range(4_000, 768_001)  # 8..192 kHz and an octave or two on both sides; the rest are broken headers
LEAST_MISSING_SECONDS, MISSING_PART = 0.1, 0.005  # below them, an encoder's padding or a rounded length
CANCELLED_PART = 1e-3  # of the channels' energy: less is left of it when they are mixed
FAINT_PEAK = 0.003  # -50 dB of full scale: too faint for a voice
PCM_SUBTYPES = {"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "ULAW", "ALAW"}


class AudioReader:
    """A recording as float32 mono blocks at `rate_hz` (None: its own), decoded while it is read, in little memory.

    Every iteration starts at the beginning and gives blocks of about a second, none empty (a recording shorter than
    one output sample gives none). What is wrong is found out here, before work starts: all but integer PCM is decoded
    once for it, so `seconds` is the length in truth, not the header's word. `note` is a line on what is odd, or empty.
    Raises AudioError with one line on anything that is no usable recording.
    """

    def __init__(
        self,
        path: str | Path,
        rate_hz: int | None = INPUT_RATE_HZ,
        max_seconds: float | None = None,
        name: str = "",
    ) -> None:
        self.name = name or ("standard input" if str(path) == STDIN else shown(path))
        self.max_seconds = max_seconds
        self.note = ""
        self._patches: dict[int, bytes] = {}
        self._temporary = ExitStack()
        try:
            self._path = self._local_file(path)
            self._open()
            self.rate_hz = rate_hz or self.source_rate_hz
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
        try:
            return Path(self._temporary.enter_context(tempfile.TemporaryDirectory(prefix="mlx-voicechat-")))
        except OSError as fault:
            why = f"there is no usable temporary folder ({fault.strerror or fault})"
            raise self._fail(why, "Set TMPDIR to a folder that can be written to.") from None

    def _spooled(self, source: BinaryIO) -> Path:
        copy = self._temporary_folder() / "input"
        with open(copy, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return copy

    def _open(self) -> None:
        import soundfile

        if not self._path.stat().st_size:
            raise self._fail("it is empty")
        layout = ogg_layout(self._path)
        if layout and len(layout.links) > 1:
            self._path = self._joined(layout.links)
        self._patches, note = wav_repair(self._path, self.name)
        self.note = self.note or note
        if layout and not layout.ended and not self.note:
            self.note = f"{self.name} has no end: it was cut off, or what recorded it was stopped."
        claimed: float | None = None
        try:
            frames = self._probe()
        except soundfile.SoundFileError as fault:
            frames, claimed = self._converted(_detail(fault))
        if self.source_rate_hz not in RATES_HZ:
            raise self._fail(f"it claims {self.source_rate_hz} samples a second")
        if self.format == "MP3" and (samples := mp3_samples(self._path)):
            claimed = samples / self.source_rate_hz
        known = frames < 1 << 62 and self.format != "MP3"  # an MP3's length is a guess, a piped FLAC's unknown
        if known:
            self._check_length(frames)
        if self.subtype not in PCM_SUBTYPES or self.format == "FLAC":
            decoded = sum(map(len, self._mono()))
            if known and decoded < frames:
                claimed = frames / self.source_rate_hz
            frames = decoded
        if not frames:
            raise self._fail("it holds no samples")
        self.seconds = frames / self.source_rate_hz
        if claimed and self.seconds < claimed - max(LEAST_MISSING_SECONDS, MISSING_PART * claimed):
            self.note = f"{self.name} ends early, at second {self.seconds:.3f} of {claimed:.3f}."

    def _converted(self, why: str) -> tuple[int, float | None]:
        """Let another program decode it; frames, and the length in seconds that it claims, if it does."""
        import soundfile

        made = converted(self._path, self.name, why, self._temporary_folder(), self.max_seconds)
        self._path, self._patches = made.path, {}
        if made.complaint:
            self.note = f"{self.name} is damaged, and was only partly decoded ({made.complaint})."
        try:
            return self._probe(), made.seconds
        except soundfile.SoundFileError as fault:
            raise self._fail(f"what was converted from it is broken ({_detail(fault)})") from None

    def _joined(self, links: list[tuple[int, int]]) -> Path:
        """A WAV of the streams of a chained Ogg, one after the other, at the rate of the first."""
        import soundfile

        folder = self._temporary_folder()
        part, whole = folder / "link", folder / "joined.wav"
        with ExitStack() as files:
            target: Any = None
            for index, (start, end) in enumerate(links):
                with open(self._path, "rb") as source, open(part, "wb") as copy:
                    source.seek(start)
                    copy.write(source.read(end - start))
                try:
                    link = AudioReader(part, target.samplerate if target else None, name=self.name)
                except AudioError as fault:
                    if target is None:
                        raise
                    self.note = f"{self.name}: part {index + 1} of {len(links)} cannot be read ({fault.message})"
                    continue
                with link:
                    if target is None:
                        form = {"format": "RF64", "subtype": "FLOAT"}
                        target = files.enter_context(soundfile.SoundFile(whole, "w", link.rate_hz, 1, **form))
                    for block in link:
                        target.write(block)
                        if self.max_seconds and target.tell() > self.max_seconds * target.samplerate:
                            return whole  # which is found to be too long
        return whole

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
        self._peak, self._energy, self._mixed_energy = 0.0, 0.0, 0.0
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
                self._peak = max(self._peak, float(np.abs(block).max()))
                self._energy += float(np.square(block).mean(axis=1).sum())
                self._mixed_energy += float(np.square(mono).sum())
                yield mono

    @property
    def hint(self) -> str:
        """Why nothing may be understood in what was read, a line, or empty: cancelled channels, or next to no sound."""
        if self._mixed_energy < CANCELLED_PART * self._energy:
            return (
                f"the channels of {self.name} cancel each other out when mixed: one is the other upside down. "
                "Give it one of them."
            )
        if self._peak < FAINT_PEAK:
            level = f"at {20 * math.log10(self._peak):.0f} dB of full scale" if self._peak else "zero"
            return f"{self.name} is nearly silent: its loudest sample is {level}."
        return ""

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
