"""What Ogg and MP3 files tell of their own length, which libsndfile does not: links of a chain, an end, frames."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

OGG_HEADER_BYTES = 27  # RFC 3533, section 6
FIRST_PAGE, LAST_PAGE = 2, 4  # bits of its flags
XING = (b"Xing", b"Info")  # of the first frame of an MP3 whose length is told
XING_WITHIN = 8192  # bytes of sound
PADDING_FRAMES = 3  # an encoder's delay and the rest of its last frame, which decoders take away
FRAMES_TOLD = 1  # bit of its flags


class OggLayout(NamedTuple):
    """`links` are the ranges of bytes of the streams that follow each other; `ended` whether the last has an end."""

    links: list[tuple[int, int]]
    ended: bool


def ogg_layout(path: Path) -> OggLayout | None:
    """Read the headers of all pages; None for what is no Ogg from its first byte on."""
    starts: list[int] = []
    at, ended, opening = 0, False, False
    with open(path, "rb") as file:
        while len(header := file.read(OGG_HEADER_BYTES)) == OGG_HEADER_BYTES and header[:4] == b"OggS":
            sizes = file.read(header[26])
            end = at + OGG_HEADER_BYTES + len(sizes) + sum(sizes)
            first = bool(header[5] & FIRST_PAGE)
            if first and not opening:  # several may open one link: sound and pictures
                starts.append(at)
            opening = first
            ended = bool(header[5] & LAST_PAGE) or (ended and not first)
            at = end
            file.seek(at)
        size = file.seek(0, 2)
    if not starts or starts[0]:
        return None
    whole = at <= size
    return OggLayout(list(zip(starts, [*starts[1:], size], strict=True)), ended and whole)


def mp3_samples(path: Path) -> int | None:
    """Samples that an MP3's first frame claims, less the three frames that may be padding; None if it claims none."""
    with open(path, "rb") as file:
        head = file.read(10)
        if head[:3] == b"ID3":  # its size is in sevens of bits
            tag = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
            file.seek(10 + tag)
        else:
            file.seek(0)
        sound = file.read(XING_WITHIN)
    at = min((place for name in XING if (place := sound.find(name)) >= 0), default=-1)
    if at < 0 or not sound[at + 7] & FRAMES_TOLD:
        return None
    sync = sound.find(b"\xff")
    mpeg1 = len(sound) > sync + 1 and sound[sync + 1] & 0x18 == 0x18
    frames = int.from_bytes(sound[at + 8 : at + 12], "big") - PADDING_FRAMES
    return max(frames, 0) * (1152 if mpeg1 else 576)
