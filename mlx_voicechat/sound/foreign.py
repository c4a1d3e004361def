"""Recordings that libsndfile does not take as they are: WAV headers that lie, and formats of other programs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
from codecs import getincrementaldecoder
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import AudioError

COMPARED_BYTES = 1 << 16  # of the sound, and of what is behind it
WHITE, LOUDER = 1.0, 4.0  # roughness, and times as loud: what is no sound
NAMES = (  # of what other programs put behind the sound, also with sizes that are wrong
    *(b"LIST", b"id3 ", b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN", b"<?xpacket", b"<?xml"),
    *(b"bext", b"cue ", b"fact", b"smpl", b"inst", b"JUNK", b"junk", b"PAD ", b"iXML", b"cart", b"PEAK", b"afsp"),
    *(b"DISP", b"_PMX", b"axml", b"levl", b"umid", b"MD5 ", b"acid", b"strc", b"FLLR", b"minf", b"elm1", b"regn"),
)
STREAMED_SIZE = 0x7FFF0000  # a WAV data size from here on is a pipe's "unknown"
FOREIGN = (  # (offset, first bytes, name) of what libsndfile cannot decode and the converters can
    (4, b"ftyp", "MPEG-4 audio (AAC or ALAC, m4a)"),
    (0, b"\xff\xf1", "AAC"),
    (0, b"\xff\xf9", "AAC"),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM"),
    (0, b"0&\xb2u", "Windows Media"),
    (0, b"#!AMR", "AMR"),
    (0, b"caff", "Core Audio (CAF) in a codec of Apple's"),
    (0, b"OggS", "Ogg in a codec of another kind"),
    (0, b"\x0bw", "AC-3"),
    (0, b"ID3", "MP3 or AAC behind a tag"),
)
DISK_FULL = ("No space left on device", "Disk quota exceeded")
BROKEN = re.compile("corrupt|Invalid data|partial file|Error while decoding|Truncat|Header missing", re.IGNORECASE)
DURATION = re.compile(r"Duration: (\d+):(\d+):([\d.]+)")  # of the input, which ffmpeg tells first


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

    A pipe's header cannot know the length: it says 0 or a huge number, or what was there when it was last written.
    libsndfile believes a small one. What stands behind the data of a good WAV (tags, junk, a chunk of a wrong size) is
    told from sound that the header does not know by its name, or by how it would sound.
    """
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        head = file.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return {}, ""
        at, form = 12, b""
        while (chunk := _chunk(file, at)) and chunk[0] != b"data":
            if chunk[0] == b"fmt ":
                form = file.read(min(chunk[1], 40))
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
        if size and not _goes_on(_part(file, start, size), _part(file, start + size, held - size), form):
            return {}, ""
        sizes = (struct.pack("<I", min(n, 0xFFFFFFFF)) for n in (end - 8, held))
        return dict(zip((4, at + 4), sizes, strict=True)), ""


def _part(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(min(size, COMPARED_BYTES))


def _goes_on(sound: bytes, behind: bytes, form: bytes) -> bool:
    """Whether what is behind the sound is more of it: no name of something else, and no louder noise than it."""
    if any(behind[pad:].startswith(NAMES) for pad in (0, 1)) or _is_text(behind[:512]):
        return False
    samples = [_decoded(part, form) for part in (sound, behind)]
    if any(x is None or len(x) < 2 for x in samples):
        return len(behind) > len(sound)  # a codec: what is longer than the sound is no tag
    (level, _), (level_behind, rough) = (_character(x) for x in samples if x is not None)
    return level_behind > 0 and not (rough > WHITE and level_behind > LOUDER * level)


def _character(samples: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Level, and roughness: the difference of neighbours to the level, 1.4 in white noise, well below 1 in sound."""
    level = float(np.std(samples))
    return level, float(np.std(np.diff(samples))) / (level or 1.0)


def _decoded(data: bytes, form: bytes) -> npt.NDArray[np.float64] | None:
    """The first channel of PCM (S,), full scale 1; None for what is no PCM of 8, 16 or 32 bits."""
    if len(form) < 16:
        return None
    tag, channels, _, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if tag == 0xFFFE and len(form) >= 26:  # WAVE_FORMAT_EXTENSIBLE
        tag = int.from_bytes(form[24:26], "little")
    kind = {(1, 8): "u1", (1, 16): "<i2", (1, 32): "<i4", (3, 32): "<f4"}.get((tag, bits))
    if kind is None and (tag, bits) == (1, 24):  # without the lowest byte
        data, kind = bytes(x for i, x in enumerate(data[: len(data) // 3 * 3]) if i % 3), "<i2"
    if kind is None or not channels:
        return None
    width = np.dtype(kind).itemsize
    samples = np.frombuffer(data[: len(data) // width * width], kind)[::channels]
    scale = 1.0 if kind == "<f4" else 2.0 ** (8 * width - 1)
    with np.errstate(all="ignore"):
        return np.nan_to_num(samples.astype(np.float64) / scale, posinf=1e9, neginf=-1e9).clip(-1e9, 1e9)


def _chunk(file: BinaryIO, at: int) -> tuple[bytes, int] | None:
    """Name and size of the RIFF chunk at `at`, None at the end of the file."""
    file.seek(at)
    header = file.read(8)
    return None if len(header) < 8 else (header[:4], int.from_bytes(header[4:], "little"))


def _is_chunk(chunk: tuple[bytes, int] | None, room: int) -> bool:
    return chunk is not None and chunk[0].isascii() and chunk[0].decode().isprintable() and chunk[1] <= room


class Conversion(NamedTuple):
    """A WAV that was made: `seconds` is the length that the recording claims, `complaint` what its decoder said."""

    path: Path
    seconds: float | None
    complaint: str


def converted(path: Path, name: str, why: str, folder: Path, max_seconds: float | None) -> Conversion:
    """A WAV in `folder` that afconvert or ffmpeg makes of a recording that libsndfile refused with `why`.

    Raises AudioError when it is no recording, in no format the two know, or neither is there.
    """
    with open(path, "rb") as file:
        head = file.read(512)
    kind = next((label for at, magic, label in FOREIGN if head[at:].startswith(magic)), None)
    by_hand = f"ffmpeg -i {shlex.quote(name) if name == str(path) else 'INPUT'} recording.wav"
    if kind is None and _is_text(head):
        raise AudioError(f"Cannot read {name}: it is a text file, not a recording.")
    source, made = str(path.absolute()), folder / "converted.wav"
    limit = [] if max_seconds is None else ["-t", f"{max_seconds + 1}"]
    wav = ["-c:a", "pcm_f32le", "-rf64", "auto"]
    quiet = ["-nostdin", "-hide_banner", "-nostats"]
    commands = {
        "afconvert": ["-f", "WAVE", "-d", "LEF32", source, str(made)],
        "ffmpeg": [*quiet, "-y", "-i", source, "-vn", *limit, *wav, str(made)],
    }
    failures = []
    for tool, arguments in commands.items():
        if program := shutil.which(tool):
            done = subprocess.run(
                [program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
            )
            said = done.stderr.strip()
            if any(words in said for words in DISK_FULL):
                raise AudioError(
                    f"Cannot read {name}: the temporary folder {folder.parent} is full.",
                    "Make room, or set TMPDIR to another folder.",
                )
            complaint = next((line for line in reversed(said.splitlines()) if BROKEN.search(line)), "")
            if done.returncode == 0 and made.exists() and made.stat().st_size:
                if kind is None and complaint:  # it may be anything
                    raise AudioError(f"Cannot read {name}: it is damaged ({tool}: {complaint}).")
                return Conversion(made, _claimed(said), complaint)
            failures.append(f"{tool}: {(said or 'failed').splitlines()[-1]}")
    if failures and kind:
        raise AudioError(f"Cannot read {name}: it is {kind}, and could not be converted ({'; '.join(failures)}).")
    if kind is None:
        raise AudioError(f"Cannot read {name}: libsndfile says: {why}.", f"Convert it first: {by_hand}")
    raise AudioError(
        f"Cannot read {name}: it is {kind}, and neither afconvert (part of macOS) nor ffmpeg is installed.",
        f"Install ffmpeg, or convert it elsewhere: {by_hand}",
    )


def _claimed(said: str) -> float | None:
    """The length that ffmpeg read from the recording, None where it guessed."""
    found = None if "Estimating duration" in said else DURATION.search(said)
    return 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3]) if found else None


def _is_text(head: bytes) -> bool:
    try:
        text = getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\t\r\n\f\ufeff" for character in text)
