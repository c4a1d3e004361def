"""PCM, recordings in and out, the stateful resampler. Arrays are numpy float32, full scale is +-1.

Samples are decoded to float32 and never narrowed by a cast. soundfile and soxr are imported where they are used, so
that importing this module is cheap.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import stat
import struct
import sys
import tempfile
import wave
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import AudioError, InputError
from .foreign import PatchedFile, converted, wav_repair

Samples = npt.NDArray[np.float32]

STDIN = "-"
INPUT_RATE_HZ = 16_000  # what the recogniser of every released checkpoint hears
RATES_HZ = range(4_000, 768_001)  # 8..192 kHz and an octave or two on both sides; the rest are broken headers
MAX_AMPLITUDE = 100.0  # 40 dB above full scale: no clipping, but another scale; the model's state would not recover
PCM_SUBTYPES = {"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "ULAW", "ALAW"}


def pcm16(samples: npt.ArrayLike, scale: int = 32768) -> npt.NDArray[np.int16]:
    """Float samples of any shape -> little-endian int16: clipped, then scaled and rounded; nothing wraps.

    Files scale by 32768, the wire by 32767. Raises InputError on integers, AudioError on NaN.
    """
    x = _floats(samples)
    if np.isnan(x).any():
        raise AudioError("The samples to write hold NaN.")
    return np.minimum(np.rint(np.clip(x, -1, 1) * np.float32(scale)), 32767).astype("<i2")


def _floats(samples: npt.ArrayLike) -> Samples:
    x = np.asarray(samples)
    if x.dtype.kind != "f":
        raise InputError(f"Samples must be floats in -1..1, not {x.dtype}.", "Divide integers by their full scale.")
    with np.errstate(over="ignore"):
        return x.astype(np.float32, copy=False)


def _shown(path: str | Path) -> str:
    """A path in a message of one line."""
    return str(path) if str(path).isprintable() else repr(str(path))


class Resampler:
    """One mono stream from `source_hz` to `target_hz`; pieces of any size give what one call on all would give."""

    def __init__(self, source_hz: int, target_hz: int) -> None:
        self._stream: Any = None
        self._finished = False
        if source_hz != target_hz:
            import soxr

            self._stream = soxr.ResampleStream(source_hz, target_hz, 1, dtype="float32")

    def push(self, samples: npt.ArrayLike) -> Samples:
        """samples (S,) -> what is ready (S',), a new array, possibly empty."""
        return self._next(_floats(samples), last=False)

    def finish(self) -> Samples:
        """The rest of the stream (S',); after it nothing may be pushed."""
        return self._next(np.zeros(0, np.float32), last=True)

    def _next(self, samples: Samples, last: bool) -> Samples:
        if self._finished:
            raise InputError("This resampler is finished.", "Make another for another stream.")
        if samples.ndim != 1:
            raise InputError(f"A resampler takes mono samples (S,), not an array of shape {samples.shape}.")
        self._finished = last
        return samples.copy() if self._stream is None else self._stream.resample_chunk(samples, last=last)


# Reading


class AudioReader:
    """A recording as float32 mono blocks at `rate_hz`, decoded while it is read: memory is flat in its length.

    Every iteration starts at the beginning and gives blocks of about a second, none empty (a recording shorter than
    one output sample gives none). What is wrong is found out here, before work starts: all but integer PCM is decoded
    once for it, so `seconds` is the length in truth, not the header's word. `note` is a line on what is odd, or empty.
    Raises AudioError with one line on anything that is no usable recording.
    """

    def __init__(self, path: str | Path, rate_hz: int = INPUT_RATE_HZ, max_seconds: float | None = None) -> None:
        self.name = "standard input" if str(path) == STDIN else _shown(path)
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


# Writing


class WavWriter:
    """A PCM16 WAV file that appears whole or not at all: written beside its target, renamed by `commit`.

    As a context manager it commits, or aborts when the block raised. Raises AudioError, at construction already when
    the folder is missing or cannot be written to, or the target is no regular file.
    """

    def __init__(self, path: str | Path, rate_hz: int, channels: int = 1) -> None:
        self.path, self.rate_hz, self.channels = Path(path), rate_hz, channels
        self._file: BinaryIO | None = None
        try:
            self._target = Path(os.path.realpath(path))  # a link stays, what it points to is replaced
            self._part = self._target.parent / f".{secrets.token_hex(8)}.part"
            mode = self._replaced_mode()
            self._file = open(self._part, "xb")  # noqa: SIM115
        except PermissionError:
            raise self._fail("permission denied") from None
        except (OSError, ValueError) as fault:
            raise self._fail(getattr(fault, "strerror", None) or str(fault)) from None
        with suppress(OSError):
            if mode is not None:
                os.chmod(self._part, mode)
        self._wave = wave.open(self._file, "wb")  # noqa: SIM115
        self._wave.setparams((channels, 2, rate_hz, 0, "NONE", ""))

    def _fail(self, why: str, remedy: str = "") -> AudioError:
        return AudioError(f"Cannot write {_shown(self.path)}: {why}.", remedy)

    def _replaced_mode(self) -> int | None:
        """The permissions of the file that is to be replaced, None when there is none."""
        folder = self._target.parent
        if not folder.is_dir():
            raise self._fail(f"there is no folder {folder}", f"Make it first: mkdir -p {shlex.quote(str(folder))}")
        if not self._target.exists():
            return None
        if self._target.is_dir():
            raise self._fail("it is a directory", "Name a file in it.")
        if not self._target.is_file():
            raise self._fail("it is a device, and would be replaced by a file")
        if not os.access(self._target, os.W_OK):
            raise self._fail("the file there is write-protected")
        return stat.S_IMODE(self._target.stat().st_mode)

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def write(self, samples: npt.ArrayLike) -> None:
        """Append float samples (S,) or (S, channels): clipped, then rounded."""
        pcm = pcm16(samples)
        if pcm.shape[1:] != (self.channels,) and not (pcm.ndim == self.channels == 1):
            raise InputError(f"Samples of shape {pcm.shape} do not go into {self.channels} channel(s).")
        if self._file is None:
            raise InputError(f"{_shown(self.path)} is closed.")
        try:
            self._wave.writeframesraw(pcm.tobytes())
        except OSError as fault:
            raise self._fail(fault.strerror or str(fault)) from None

    def commit(self) -> None:
        """Finish the file and put it in place; nothing happens when it is already done or aborted."""
        if self._file is None:
            return
        try:
            self._wave.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._part, self._target)
            self._file = None
        except OSError as fault:
            raise self._fail(fault.strerror or str(fault)) from None
        except struct.error:
            raise self._fail("it is longer than a WAV file can be (4 GiB)") from None
        finally:
            self.abort()

    def abort(self) -> None:
        """Leave nothing behind, and what was there before untouched."""
        if self._file is None:
            return
        file, self._file = self._file, None
        for close in (self._wave.close, file.close):
            with suppress(OSError, ValueError, struct.error):
                close()
        self._part.unlink(missing_ok=True)


def write_wav(path: str | Path, samples: npt.ArrayLike, rate_hz: int) -> None:
    """Write float samples (S,) or (S, channels) as a PCM16 WAV file. Raises AudioError."""
    shape = np.shape(samples)
    with WavWriter(path, rate_hz, shape[1] if len(shape) > 1 else 1) as writer:
        writer.write(samples)
