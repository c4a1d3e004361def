"""Recordings that libsndfile does not take as they are: WAV headers that lie, and formats of other programs."""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
from codecs import getincrementaldecoder
from pathlib import Path
from typing import BinaryIO

from ..errors import AudioError

STREAMED_SIZE = 0x7FFF0000  # a WAV data size from here on is a pipe's "unknown"
FOREIGN = (  # (offset, first bytes, name) of what libsndfile cannot decode and the converters can
    (4, b"ftyp", "MPEG-4 audio (AAC or ALAC, m4a)"),
    (0, b"\xff\xf1", "AAC"),
    (0, b"\xff\xf9", "AAC"),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM"),
    (0, b"0&\xb2u", "Windows Media"),
    (0, b"#!AMR", "AMR"),
    (0, b"caff", "Core Audio (CAF) in a codec of Apple's"),
)


class PatchedFile:
    """A file with some bytes replaced (by position), as soundfile reads it."""

    def __init__(self, file: BinaryIO, patches: dict[int, bytes]) -> None:
        self.seek, self.tell = file.seek, file.tell
        self._file, self._patches = file, patches

    def read(self, size: int) -> bytes:
        at = self._file.tell()
        data = bytearray(self._file.read(size))
        for start, patch in self._patches.items():
            for place, byte in enumerate(patch, start - at):
                if 0 <= place < len(data):
                    data[place] = byte
        return bytes(data)


def wav_repair(path: Path, name: str) -> tuple[dict[int, bytes], str]:
    """Bytes to replace in a WAV whose data size stops short of its data, and a note on one whose data is cut off.

    A pipe's header cannot know the length: it says 0 or a huge number. libsndfile believes the first.
    """
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        head = file.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return {}, ""
        at = 12
        while (chunk := _chunk(file, at)) and chunk[0] != b"data":
            at += 8 + chunk[1] + chunk[1] % 2
        if not chunk:
            return {}, ""  # libsndfile says what is wrong
        start, size = at + 8, chunk[1]
        held = end - start
        if size > held:
            cut = size < STREAMED_SIZE
            return {}, f"{name} is cut short: {held} of {size} bytes of sound are there." if cut else ""
        after = [_chunk(file, start + size + pad) for pad in (size % 2, 0)]
        if held - size < 8 or any(_is_chunk(chunk, held - size) for chunk in after):
            return {}, ""
        sizes = (struct.pack("<I", min(n, 0xFFFFFFFF)) for n in (end - 8, held))
        return dict(zip((4, at + 4), sizes, strict=True)), ""


def _chunk(file: BinaryIO, at: int) -> tuple[bytes, int] | None:
    """Name and size of the RIFF chunk at `at`, None at the end of the file."""
    file.seek(at)
    header = file.read(8)
    return None if len(header) < 8 else (header[:4], int.from_bytes(header[4:], "little"))


def _is_chunk(chunk: tuple[bytes, int] | None, room: int) -> bool:
    return chunk is not None and chunk[0].isascii() and chunk[0].decode().isprintable() and chunk[1] <= room


def converted(path: Path, name: str, why: str, folder: Path, max_seconds: float | None) -> Path:
    """A WAV in `folder` that afconvert or ffmpeg makes of a recording that libsndfile refused with `why`.

    Raises AudioError when it is no recording, in no format the two know, or neither is there.
    """
    with open(path, "rb") as file:
        head = file.read(512)
    kind = next((label for at, magic, label in FOREIGN if head[at:].startswith(magic)), None)
    by_hand = f"ffmpeg -i {shlex.quote(name) if name == str(path) else 'INPUT'} recording.wav"
    if kind is None and _is_text(head):
        raise AudioError(f"Cannot read {name}: it is a text file, not a recording.")
    if kind is None:
        raise AudioError(f"Cannot read {name}: libsndfile says: {why}.", f"Convert it first: {by_hand}")
    source, made = str(path.absolute()), folder / "converted.wav"
    limit = [] if max_seconds is None else ["-t", f"{max_seconds + 1}"]
    wav = ["-c:a", "pcm_f32le", "-rf64", "auto"]
    commands = {
        "afconvert": ["-f", "WAVE", "-d", "LEF32", source, str(made)],
        "ffmpeg": ["-nostdin", "-v", "error", "-y", "-i", source, "-vn", *limit, *wav, str(made)],
    }
    failures = []
    for tool, arguments in commands.items():
        if program := shutil.which(tool):
            done = subprocess.run(
                [program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
            )
            if done.returncode == 0 and made.exists() and made.stat().st_size:
                return made
            failures.append(f"{tool}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    if failures:
        raise AudioError(f"Cannot read {name}: it is {kind}, and could not be converted ({'; '.join(failures)}).")
    raise AudioError(
        f"Cannot read {name}: it is {kind}, and neither afconvert (part of macOS) nor ffmpeg is installed.",
        f"Install ffmpeg, or convert it elsewhere: {by_hand}",
    )


def _is_text(head: bytes) -> bool:
    try:
        text = getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\t\r\n\f\ufeff" for character in text)
