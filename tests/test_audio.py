"""Recordings in any form a phone or a pipe gives them, one line for what is none, output whole or not at all."""

from __future__ import annotations

import io
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_voicechat.errors import AudioError, InputError
from mlx_voicechat.sound import recordings, wav
from mlx_voicechat.sound.pcm import pcm16
from mlx_voicechat.sound.recordings import AudioReader, read_all, read_audio
from mlx_voicechat.sound.resampler import Resampler
from mlx_voicechat.sound.wav import WavWriter, write_wav

RATE = 16_000


def tone(frames: int = RATE, channels: int = 1, rate_hz: int = RATE) -> np.ndarray:
    """(S,) or (S, channels): another pitch in every channel, exactly representable in 8 bits."""
    time = np.arange(frames)[:, None] / rate_hz
    waves = np.rint(100 * np.sin(2 * np.pi * time * (220 + 110 * np.arange(channels)))) / 128
    return waves.astype(np.float32)[:, 0] if channels == 1 else waves.astype(np.float32)


def wav_bytes(pcm: bytes, riff: int | None = None, data: int | None = None, after: bytes = b"") -> bytes:
    """A 16 kHz mono PCM16 WAV; `riff` and `data` are the sizes its header claims."""
    data = len(pcm) if data is None else data
    riff = 36 + data + len(after) if riff is None else riff
    head = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", riff, b"WAVEfmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16, b"data", data)
    return head + pcm + after


def encoded(samples: np.ndarray, container: str, subtype: str | None = None, **how: object) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format=container, subtype=subtype, **how)
    return buffer.getvalue()


def refused(path: Path | str, **limits: float) -> AudioError:
    with pytest.raises(AudioError) as caught:
        read_audio(path, **limits)  # type: ignore[arg-type]
    error = caught.value
    assert error.exit_code == 2
    assert "\n" not in str(error)
    return error


class Pipe:
    """Standard input that cannot seek."""

    def __init__(self, content: bytes, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(content)
        self.buffer.seekable = lambda: False  # type: ignore[method-assign]
        self.isatty = lambda: terminal


# PCM


@given(st.lists(st.integers(-32768, 32767), max_size=50))
def test_pcm16_round_trip(values: list[int]) -> None:
    pcm = np.array(values, np.int16)
    np.testing.assert_array_equal(pcm16(pcm.astype(np.float32) / 32768), pcm)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20), st.sampled_from([32767, 32768]))
@example([float("inf"), float("-inf"), 1.0, -1.0, 3e38], 32768)
def test_pcm16_clips_and_never_wraps(values: list[float], scale: int) -> None:
    x = np.array(values, np.float32)
    pcm = pcm16(x, scale)
    assert pcm.dtype == np.dtype("<i2")
    exact = np.clip(np.clip(x.astype(np.float64), -1, 1) * scale, -32768, 32767)
    assert np.all(np.abs(pcm - exact) <= 0.5 + 1e-3)


def test_pcm16_rounds_and_differs_by_at_most_one_step_between_file_and_wire() -> None:
    assert pcm16([1.0, -1.0, 0.0, 0.6 / 32768, -0.6 / 32768]).tolist() == [32767, -32768, 0, 1, -1]
    assert pcm16(np.array([1.0, -1.0]), 32767).tolist() == [32767, -32767]
    x = np.linspace(-1, 1, 10_001)
    assert np.abs(pcm16(x).astype(int) - pcm16(x, 32767)).max() == 1


def test_pcm16_refuses_nan_and_integers() -> None:
    with pytest.raises(AudioError, match="NaN"):
        pcm16(np.array([0.0, np.nan]))
    with pytest.raises(InputError, match="int16"):
        pcm16(np.array([1], np.int16))


# The resampler


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000]),
    st.sampled_from([16_000, 22_050, 48_000]),
    st.lists(st.integers(0, 700), max_size=12),
)
@example(48_000, 16_000, [128] * 40)
def test_pieces_of_any_size_equal_one_call(source_hz: int, target_hz: int, sizes: list[int]) -> None:
    x = np.random.default_rng(0).normal(0, 0.2, sum(sizes)).astype(np.float32)
    resampler = Resampler(source_hz, target_hz)
    pieces = [resampler.push(piece) for piece in np.split(x, np.cumsum(sizes))]
    out = np.concatenate([*pieces, resampler.finish()])
    assert out.dtype == np.float32
    expected = soxr.resample(x, source_hz, target_hz) if len(x) else x
    np.testing.assert_array_equal(out, expected)
    assert abs(len(out) - len(x) * target_hz / source_hz) <= 1


def test_a_resampler_may_have_nothing_ready_and_hands_out_copies() -> None:
    assert len(Resampler(48_000, 16_000).push(np.zeros(1, np.float32))) == 0
    live = np.ones(4, np.float32)
    out = Resampler(16_000, 16_000).push(live)
    live[:] = 0
    assert out.tolist() == [1, 1, 1, 1]


def test_a_resampler_refuses_what_it_cannot_take() -> None:
    resampler = Resampler(8_000, 16_000)
    with pytest.raises(InputError, match=r"\(2, 2\)"):
        resampler.push(np.zeros((2, 2), np.float32))
    with pytest.raises(InputError, match="int16"):
        resampler.push(np.zeros(2, np.int16))
    resampler.finish()
    with pytest.raises(InputError, match="finished"):
        resampler.push(np.zeros(2, np.float32))


# Formats


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize(
    ("container", "subtype"),
    [
        *[("WAV", s) for s in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")],
        *[("WAVEX", s) for s in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")],
        *[("FLAC", s) for s in ("PCM_S8", "PCM_16", "PCM_24")],
        ("AIFF", "PCM_16"),
        ("CAF", "PCM_24"),
        ("RF64", "PCM_16"),
        ("AU", "FLOAT"),
    ],
)
def test_lossless_formats_decode_exactly(tmp_path: Path, container: str, subtype: str, channels: int) -> None:
    path = tmp_path / "recording.raw"  # the name's ending means nothing
    samples = tone(channels=channels)
    path.write_bytes(encoded(samples, container, subtype))
    with read_audio(path) as reader:
        assert (reader.seconds, reader.source_rate_hz, reader.channels, reader.note) == (1.0, RATE, channels, "")
        decoded = reader.read_all()
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, samples if channels == 1 else samples.mean(axis=1), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("container", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")])
def test_lossy_formats(tmp_path: Path, container: str, subtype: str) -> None:
    if subtype not in soundfile.available_subtypes(container):
        pytest.skip(f"this libsndfile lacks {subtype}")
    path, samples = tmp_path / "x", tone(2 * RATE, channels=2)
    path.write_bytes(encoded(samples, container, subtype))
    with read_audio(path) as reader:
        first, again = reader.read_all(), reader.read_all()
        assert reader.seconds == len(first) / RATE == 2.0
    np.testing.assert_array_equal(first, again)
    assert np.corrcoef(first, samples.mean(axis=1))[0, 1] > 0.9


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000, 192_000])
def test_any_rate_becomes_sixteen_kilohertz(tmp_path: Path, rate_hz: int) -> None:
    samples = tone(3 * rate_hz + 17, rate_hz=rate_hz)
    soundfile.write(tmp_path / "x.wav", samples, rate_hz, subtype="FLOAT")
    with read_audio(tmp_path / "x.wav") as reader:
        blocks = list(reader)
        assert reader.seconds == pytest.approx(len(samples) / rate_hz)
    assert all(len(block) and block.dtype == np.float32 and block.ndim == 1 for block in blocks)
    assert max(map(len, blocks)) <= 2 * RATE  # memory is flat in length
    np.testing.assert_array_equal(np.concatenate(blocks), soxr.resample(samples, rate_hz, RATE))
    np.testing.assert_array_equal(read_all(tmp_path / "x.wav", rate_hz), samples)


def test_silence_is_ordinary_and_loud_floats_stay_as_they_are(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", np.zeros(RATE), RATE)
    assert not read_all(tmp_path / "x.wav").any()
    soundfile.write(tmp_path / "x.wav", np.array([2.5, -3.0]), RATE, subtype="FLOAT")
    assert read_all(tmp_path / "x.wav").tolist() == [2.5, -3.0]


def test_a_single_sample(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", np.array([0.5]), RATE)
    assert read_all(tmp_path / "x.wav").tolist() == [0.5]
    soundfile.write(tmp_path / "x.wav", np.array([0.5]), 192_000)
    assert len(read_all(tmp_path / "x.wav")) <= 1


# Headers that lie


PCM = pcm16(tone(1000)).tobytes()
LIST = b"LIST" + struct.pack("<I", 4) + b"INFO"


@pytest.mark.parametrize(
    ("riff", "data"),
    [(0, 0), (36, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0), (0x7FFFF024, 0x7FFFF000), (0, 2000), (436, 400)],
)
@pytest.mark.parametrize("piped", [False, True])
def test_wav_sizes_that_lie_are_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, riff: int, data: int, piped: bool
) -> None:
    content = wav_bytes(PCM, riff, data)
    (tmp_path / "x.wav").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", Pipe(content))
    with read_audio("-" if piped else tmp_path / "x.wav") as reader:
        assert reader.seconds == 1000 / RATE
        np.testing.assert_array_equal(reader.read_all(), tone(1000))
        assert reader.note == ""


def test_chunks_after_the_sound_are_no_sound(tmp_path: Path) -> None:
    for after in (LIST, LIST + LIST, b"\0\0", b"id3 " + struct.pack("<I", 8) + b"\0" * 8):
        (tmp_path / "x.wav").write_bytes(wav_bytes(PCM, after=after))
        np.testing.assert_array_equal(read_all(tmp_path / "x.wav"), tone(1000))


RANDOM = np.random.default_rng(0).bytes(40_000)
BEHIND = {
    "an ID3 tag of version 1": b"TAG" + b"A song of mine".ljust(125, b"\0"),
    "an ID3 tag of version 2": b"ID3\3\0\0\0\0\x1f\x76" + RANDOM[:4086],
    "an APE tag": b"APETAGEX" + RANDOM[:300],
    "a list of a wrong size": b"LIST" + struct.pack("<I", 1 << 20) + b"INFOISFT" + RANDOM[:20],
    "words": b"This file was made by a recorder that likes to say so. " * 40,
    "a picture": RANDOM,
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("after", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT"])
@pytest.mark.parametrize("counted", [False, True], ids=["", "in the size of the file"])
def test_what_stands_behind_the_sound_of_a_good_wav_is_not_heard(
    tmp_path: Path, after: bytes, subtype: str, counted: bool
) -> None:
    content = encoded(tone(2000) / 4, "WAV", subtype)
    if subtype == "FLOAT":  # soundfile's PEAK chunk is before the sound
        assert b"PEAK" in content[:64]
    whole = content + after
    if counted:
        whole = whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:]
    (tmp_path / "x.wav").write_bytes(whole)
    with read_audio(tmp_path / "x.wav") as reader:
        assert reader.seconds == 2000 / RATE
        np.testing.assert_allclose(reader.read_all(), tone(2000) / 4, atol=1 / 128)


def test_chunks_before_the_sound_are_skipped(tmp_path: Path) -> None:
    whole = wav_bytes(PCM, 0, 0)
    (tmp_path / "x.wav").write_bytes(whole[:12] + b"JUNK" + struct.pack("<I", 3) + b"data" + LIST + whole[12:])
    np.testing.assert_array_equal(read_all(tmp_path / "x.wav"), tone(1000))


def test_a_wav_that_is_cut_short_gives_what_is_there_and_a_note(tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(wav_bytes(PCM[:-1], data=4000))
    with read_audio(tmp_path / "x.wav") as reader:
        np.testing.assert_array_equal(reader.read_all(), tone(1000)[:999])
        assert "is cut short: 1999 of 4000 bytes" in reader.note


def test_a_flac_of_unknown_length_is_read_to_its_end(tmp_path: Path) -> None:
    content = bytearray(encoded(tone(2 * RATE + 5), "FLAC"))
    content[21] &= 0xF0  # the 36 bits of STREAMINFO's total
    content[22:26] = bytes(4)
    (tmp_path / "x.flac").write_bytes(content)
    with read_audio(tmp_path / "x.flac") as reader:
        assert reader.seconds == (2 * RATE + 5) / RATE
        np.testing.assert_array_equal(reader.read_all(), tone(2 * RATE + 5))
    assert "longer than the limit of 1.5 seconds" in str(refused(tmp_path / "x.flac", max_seconds=1.5))


def test_the_length_of_an_mp3_without_its_index_is_counted(tmp_path: Path) -> None:
    if "MP3" not in soundfile.available_formats():
        pytest.skip("this libsndfile lacks MP3")
    noise = np.random.default_rng(0).normal(0, 0.2, 20 * RATE) * np.linspace(0, 1, 20 * RATE)
    content = encoded(noise, "MP3", bitrate_mode="VARIABLE", compression_level=0.9)
    (tmp_path / "x.mp3").write_bytes(content[content.index(content[:2], 2) :])
    with read_audio(tmp_path / "x.mp3") as reader:
        assert reader.seconds == pytest.approx(20, abs=0.2)
        assert reader.seconds == len(reader.read_all()) / RATE


# Standard input and pipes


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for container in ("WAV", "FLAC", "OGG"):
        monkeypatch.setattr(sys, "stdin", Pipe(encoded(tone(), container)))
        with read_audio("-") as reader:
            assert len(reader.read_all()) == len(reader.read_all()) == RATE
            folder = reader._path.parent
            assert folder.exists()
        assert not folder.exists()


def test_standard_input_that_is_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin, why in (
        (Pipe(b""), "standard input: it is empty"),
        (Pipe(b"hello\n"), "standard input: it is a text file"),
        (Pipe(b"", terminal=True), "standard input: it is a terminal"),
        (None, "it is a terminal"),
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert why in str(refused("-"))


def test_a_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(wav_bytes(PCM, 0, 0),))
    writer.start()
    np.testing.assert_array_equal(read_all(tmp_path / "pipe"), tone(1000))
    writer.join()


# What is no recording


def test_one_line_for_each_thing_that_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "none.wav").write_bytes(wav_bytes(b""))
    (tmp_path / "page.wav").write_text("<html>Größe: not found</html>\n" * 40, encoding="utf-8")
    (tmp_path / "noise.wav").write_bytes(np.random.default_rng(0).bytes(4000))
    (tmp_path / "header.wav").write_bytes(wav_bytes(PCM)[:30])
    (tmp_path / "two\nlines.wav").write_bytes(b"")
    for name, why in {
        "missing.wav": "no such file",
        "": "it is a directory",
        "empty.wav": "it is empty",
        "none.wav": "it holds no samples",
        "page.wav": "it is a text file",
        "noise.wav": "libsndfile says: Format not recognised. Convert it first: ffmpeg -i",
        "header.wav": "No 'data' chunk marker",
        "two\nlines.wav": "it is empty",
        "n" * 300: "name too long",
        "empty.wav/x": "Not a directory",
        "zero\0byte": "null",
    }.items():
        error = refused(tmp_path / name)
        assert why.lower() in str(error).lower()
        assert name.split("\n")[0].split("\0")[0] in error.message
    assert "it is a device" in str(refused("/dev/null"))


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wav(tmp_path / "x.wav", tone(), RATE)
    if os.geteuid():
        (tmp_path / "x.wav").chmod(0)
    else:  # root may read anything

        def denied(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(recordings, "open", denied, raising=False)
    assert "permission denied" in str(refused(tmp_path / "x.wav"))


@pytest.mark.parametrize("value", [1e18, -101.0])
def test_samples_far_beyond_full_scale_are_refused(tmp_path: Path, value: float) -> None:
    samples = np.zeros(2 * RATE, np.float32)
    samples[RATE : RATE + 5] = 1.5  # clipping is no fault
    samples[20_000] = value
    soundfile.write(tmp_path / "x.wav", samples, RATE, subtype="FLOAT")
    assert f"holds {value:g} at second 1.250, and full scale is 1" in str(refused(tmp_path / "x.wav"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("channels", [1, 2])
def test_nan_and_infinity_are_found_before_work_starts(tmp_path: Path, value: float, channels: int) -> None:
    samples = tone(3 * RATE, channels).astype(np.float64)
    samples[RATE + 4000] = value
    soundfile.write(tmp_path / "x.wav", samples, RATE, subtype="DOUBLE")
    assert "holds NaN or infinity at second 1.250" in str(refused(tmp_path / "x.wav"))


def test_a_damaged_flac_says_where(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 8 * RATE)
    soundfile.write(tmp_path / "x.flac", noise, RATE)
    content = (tmp_path / "x.flac").read_bytes()
    (tmp_path / "x.flac").write_bytes(content[: len(content) // 2])
    assert "it is damaged after second 3.000 (flac decoder lost sync)" in str(refused(tmp_path / "x.flac"))


def test_a_limit_is_refused_from_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.wav", "x.flac"):
        soundfile.write(tmp_path / name, tone(2 * RATE), RATE)
        with read_audio(tmp_path / name, max_seconds=2.0) as reader:
            assert len(reader.read_all()) == 2 * RATE
    monkeypatch.setattr(AudioReader, "_mono", lambda self: pytest.fail("decoded"))
    for name in ("x.wav", "x.flac"):
        assert "longer than the limit of 1.9 seconds. Cut it" in str(refused(tmp_path / name, max_seconds=1.9))


def test_a_rate_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for rate_hz in (100, 2_000_000):
        soundfile.write(tmp_path / "x.wav", tone(), rate_hz)
        assert f"it claims {rate_hz} samples a second" in str(refused(tmp_path / "x.wav"))


# Formats that need a converter

M4A = b"\0\0\0\x20ftypM4A \0\0\0\0" + bytes(200)


def install(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the search path; its converters copy `tmp_path/made.wav` to their last argument."""
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    soundfile.write(tmp_path / "made.wav", tone(44_100, channels=2, rate_hz=44_100), 44_100, subtype="FLOAT")
    return tmp_path / "tools"


def copying(tmp_path: Path) -> str:
    return f'echo "$0 $@" > {tmp_path}/called; for last; do :; done; /bin/cat {tmp_path}/made.wav > "$last"'


@pytest.mark.parametrize("tool", ["afconvert", "ffmpeg"])
@pytest.mark.parametrize("head", [M4A, b"\xff\xf1" + bytes(100), b"\x1aE\xdf\xa3" + bytes(100)])
def test_aac_goes_through_a_converter(tmp_path: Path, tools: Path, tool: str, head: bytes) -> None:
    install(tools, tool, copying(tmp_path))
    (tmp_path / "my memo.m4a").write_bytes(head)
    with read_audio(tmp_path / "my memo.m4a", max_seconds=10) as reader:
        assert (reader.seconds, reader.channels) == (1.0, 2)
        np.testing.assert_array_equal(reader.read_all(), read_all(tmp_path / "made.wav"))
        folder = reader._path.parent
    assert not folder.exists()
    called = (tmp_path / "called").read_text()
    assert str(tmp_path / "my memo.m4a") in called
    assert ("-t 11" in called) == (tool == "ffmpeg")


def test_aac_without_a_converter_names_format_and_command(tmp_path: Path, tools: Path) -> None:
    (tmp_path / "my memo.m4a").write_bytes(M4A)
    said = str(refused(tmp_path / "my memo.m4a"))
    assert "MPEG-4 audio (AAC or ALAC, m4a)" in said
    assert f"ffmpeg -i '{tmp_path / 'my memo.m4a'}' recording.wav" in said


def test_aac_on_standard_input(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(M4A))
    assert "ffmpeg -i INPUT recording.wav" in str(refused("-"))
    install(tools, "ffmpeg", copying(tmp_path))
    monkeypatch.setattr(sys, "stdin", Pipe(M4A))
    assert len(read_all("-")) == RATE


def test_the_second_converter_is_tried_and_all_failures_are_told(tmp_path: Path, tools: Path) -> None:
    (tmp_path / "x.m4a").write_bytes(M4A)
    install(tools, "afconvert", "echo first >&2; echo no audio track >&2; exit 1")
    assert "(afconvert: no audio track)" in str(refused(tmp_path / "x.m4a"))
    install(tools, "ffmpeg", "exit 3")
    assert "(afconvert: no audio track; ffmpeg: failed)" in str(refused(tmp_path / "x.m4a"))
    install(tools, "ffmpeg", 'for last; do :; done; echo nothing > "$last"')
    assert "what was converted from it is broken" in str(refused(tmp_path / "x.m4a"))
    install(tools, "ffmpeg", copying(tmp_path))
    assert len(read_all(tmp_path / "x.m4a")) == RATE


# Writing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_samples_come_back(tmp_path: Path) -> None:
    write_wav(tmp_path / "x.wav", np.concatenate([tone(), [2.0, -2.0]]), 22_050)
    pcm, rate_hz = soundfile.read(tmp_path / "x.wav", dtype="int16")
    assert rate_hz == 22_050
    np.testing.assert_array_equal(pcm, np.concatenate([pcm16(tone()), [32767, -32768]]))
    assert soundfile.info(tmp_path / "x.wav").subtype == "PCM_16"
    assert names(tmp_path) == ["x.wav"]


def test_writing_in_pieces_and_channels(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "x.wav", RATE, channels=2) as writer:
        for piece in np.array_split(tone(channels=2), 7):
            writer.write(piece)
        with pytest.raises(InputError, match=r"\(5,\) do not go into 2"):
            writer.write(np.zeros(5))
    np.testing.assert_array_equal(soundfile.read(tmp_path / "x.wav", dtype="float32")[0], tone(channels=2))
    write_wav(tmp_path / "y.wav", tone(channels=2), RATE)
    assert (tmp_path / "x.wav").read_bytes() == (tmp_path / "y.wav").read_bytes()


def interrupted(path: Path, error: type[BaseException]) -> None:
    with WavWriter(path, RATE) as writer:
        writer.write(tone())
        raise error


def test_nothing_is_there_before_commit_and_the_old_file_stays(tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_text("old")
    writer = WavWriter(tmp_path / "x.wav", RATE)
    writer.write(tone())
    assert (tmp_path / "x.wav").read_text() == "old"
    writer.commit()
    writer.commit()
    writer.abort()
    assert soundfile.info(tmp_path / "x.wav").frames == RATE
    assert names(tmp_path) == ["x.wav"]
    with pytest.raises(InputError, match="closed"):
        writer.write(tone())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_aborted_file_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "old.wav").write_text("old")
    for name in ("old.wav", "new.wav"):
        with pytest.raises(error):
            interrupted(tmp_path / name, error)
    WavWriter(tmp_path / "new.wav", RATE).abort()
    assert names(tmp_path) == ["old.wav"]
    assert (tmp_path / "old.wav").read_text() == "old"


def test_an_empty_file_is_a_whole_one(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "x.wav", RATE):
        pass
    assert soundfile.info(tmp_path / "x.wav").frames == 0


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AudioError, match="No space left on device"):
        write_wav(tmp_path / "x.wav", tone(), RATE)
    assert names(tmp_path) == []


def test_places_that_cannot_be_written_to_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name, why in {
        "missing/x.wav": f"there is no folder {tmp_path / 'missing'}. Make it first: mkdir -p",
        "file/x.wav": "there is no folder",
        "folder": "it is a directory",
        "": "it is a directory",
        "n" * 300: "name too long",
        "zero\0byte": "null",
    }.items():
        with pytest.raises(AudioError) as caught:
            WavWriter(tmp_path / name, RATE)
        assert why.lower() in str(caught.value).lower()
        assert caught.value.exit_code == 2
    with pytest.raises(AudioError, match="it is a device"):
        WavWriter("/dev/null", RATE)
    assert names(tmp_path) == ["file", "folder"]


def test_folders_and_files_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept.wav").write_text("old")
    (tmp_path / "kept.wav").chmod(0o444)
    if os.geteuid():
        tmp_path.chmod(0o500)
    else:  # root may write anywhere

        def denied(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(wav, "open", denied, raising=False)
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(AudioError, match="write-protected"):
        WavWriter(tmp_path / "kept.wav", RATE)
    with pytest.raises(AudioError, match="permission denied"):
        WavWriter(tmp_path / "new.wav", RATE)
    tmp_path.chmod(0o700)


def test_permissions_follow_the_umask_or_the_file_that_was_there(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_wav(tmp_path / "new.wav", tone(), RATE)
        (tmp_path / "old.wav").write_text("old")
        (tmp_path / "old.wav").chmod(0o604)
        write_wav(tmp_path / "old.wav", tone(), RATE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.wav").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "old.wav").stat().st_mode) == 0o604


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("there", "dangling"):
        (tmp_path / name).symlink_to(tmp_path / "folder" / name)
    (tmp_path / "folder" / "there").write_text("old")
    for name in ("there", "dangling"):
        write_wav(tmp_path / name, tone(), RATE)
        assert (tmp_path / name).is_symlink()
        assert soundfile.info(tmp_path / "folder" / name).frames == RATE
    assert names(tmp_path / "folder") == ["dangling", "there"]


def test_a_recording_can_be_replaced_by_its_own_answer(tmp_path: Path) -> None:
    write_wav(tmp_path / "x.wav", tone(2 * RATE), RATE)
    with read_audio(tmp_path / "x.wav") as reader, WavWriter(tmp_path / "x.wav", RATE) as writer:
        for block in reader:
            writer.write(-block)
    np.testing.assert_array_equal(read_all(tmp_path / "x.wav"), -tone(2 * RATE))


def test_importing_the_module_is_cheap() -> None:
    code = "import sys, mlx_voicechat.sound.recordings, mlx_voicechat.sound.wav; "
    code += "print({'soundfile', 'soxr', 'mlx', 'librosa', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
