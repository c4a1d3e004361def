"""WAV files out: a file appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shlex
import stat
import struct
import wave
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import AudioError, InputError
from .pcm import pcm16, shown


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
        return AudioError(f"Cannot write {shown(self.path)}: {why}.", remedy)

    def _broken(self, why: str) -> AudioError:
        """What fails while working is nobody's bad use."""
        fault = self._fail(why)
        fault.exit_code = 1
        return fault

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
            raise InputError(f"{shown(self.path)} is closed.")
        try:
            self._wave.writeframesraw(pcm.tobytes())
        except OSError as fault:
            raise self._broken(fault.strerror or str(fault)) from None

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
            raise self._broken(fault.strerror or str(fault)) from None
        except struct.error:
            raise self._broken("it is longer than a WAV file can be (4 GiB)") from None
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
