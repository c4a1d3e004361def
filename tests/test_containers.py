"""Recordings that are damaged, chained, behind a tag, or in what only ffmpeg reads."""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mlx_voicechat.sound.recordings import read_all, read_audio
from tests.test_audio import M4A, RATE, Pipe, copying, encoded, install, refused, tools

__all__ = ["tools"]  # a fixture

TAG = b"ID3\3\0\0\0\0\0\x0a" + bytes(10)


def of_noise(seconds: float) -> np.ndarray:
    """Sound that a codec cannot shrink to nothing."""
    return np.random.default_rng(0).normal(0, 0.1, round(seconds * RATE)).astype(np.float32)


def through_ffmpeg(path: Path, *options: str) -> Path:
    """Three seconds of sound in a format of ffmpeg's."""
    if not shutil.which("ffmpeg"):
        pytest.skip("ffmpeg is not installed")
    source = path.with_name("source.wav")
    soundfile.write(source, of_noise(3), RATE)
    command = ["ffmpeg", "-v", "error", "-y", "-i", str(source), *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        pytest.skip(f"this ffmpeg does not write it: {done.stderr.strip()[-80:]}")
    return path


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_that_was_cut_off_says_so(tmp_path: Path, subtype: str) -> None:
    content = encoded(of_noise(3), "OGG", subtype)
    (tmp_path / "x.ogg").write_bytes(content)
    with read_audio(tmp_path / "x.ogg") as reader:
        assert (reader.note, round(reader.seconds, 2)) == ("", 3.0)
    (tmp_path / "x.ogg").write_bytes(content[: len(content) // 2])
    with read_audio(tmp_path / "x.ogg") as reader:
        assert "x.ogg has no end: it was cut off" in reader.note
        assert 0.5 < reader.seconds < 2.5


@pytest.mark.parametrize("tag", [b"", TAG], ids=["", "tag"])
def test_an_mp3_that_was_cut_off_says_so(tmp_path: Path, tag: bytes) -> None:
    content = tag + encoded(of_noise(3), "MP3", "MPEG_LAYER_III")
    (tmp_path / "x.mp3").write_bytes(content)
    with read_audio(tmp_path / "x.mp3") as reader:
        assert reader.note == ""
    (tmp_path / "x.mp3").write_bytes(content[: len(content) // 2])
    with read_audio(tmp_path / "x.mp3") as reader:
        assert re.search(r"x\.mp3 ends early, at second 1\.\d+ of [23]\.\d+\.$", reader.note)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("x.m4a", ["-c:a", "aac", "-movflags", "+faststart"], r"ends early, at second 1\.\d+ of 3\.\d+"),
        ("x.mka", ["-c:a", "aac"], r"ends early, at second 1\.\d+ of 3\.\d+"),
        ("x.aac", ["-c:a", "aac"], r"is damaged, and was only partly decoded"),
        ("x.ac3", ["-c:a", "ac3"], r"is damaged, and was only partly decoded"),
        ("x.oga", ["-c:a", "flac", "-f", "ogg"], r"has no end"),
    ],
)
def test_other_containers_that_were_cut_off_say_so(tmp_path: Path, name: str, options: list[str], words: str) -> None:
    path = through_ffmpeg(tmp_path / name, *options)
    with read_audio(path) as reader:
        assert reader.note == ""
        assert reader.seconds == pytest.approx(3, abs=0.15)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 7])
    with read_audio(path) as reader:
        assert re.search(words, reader.note), reader.note


def test_a_converter_stopped_by_a_full_disk_is_no_answer(tmp_path: Path, tools: Path) -> None:
    """ffmpeg leaves with 0, and with what there was room for."""
    (tmp_path / "x.m4a").write_bytes(M4A)
    install(tools, "ffmpeg", copying(tmp_path) + "; echo 'Error writing trailer of x: No space left on device' >&2")
    said = str(refused(tmp_path / "x.m4a"))
    assert f"the temporary folder {tempfile.gettempdir()} is full" in said
    assert "TMPDIR" in said


def test_what_a_converter_says_of_the_length_is_compared(tmp_path: Path, tools: Path) -> None:
    (tmp_path / "x.m4a").write_bytes(M4A)
    install(tools, "ffmpeg", copying(tmp_path) + "; echo '  Duration: 00:01:02.50, start: 0' >&2")
    with read_audio(tmp_path / "x.m4a") as reader:
        assert reader.note.endswith("x.m4a ends early, at second 1.000 of 62.500.")


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_every_stream_of_a_chained_ogg_is_heard(tmp_path: Path, subtype: str) -> None:
    first, second = (encoded(of_noise(seconds), "OGG", subtype) for seconds in (1, 2))
    (tmp_path / "x.ogg").write_bytes(first + second)
    with read_audio(tmp_path / "x.ogg") as reader:
        assert reader.seconds == pytest.approx(3, abs=0.01)
        assert reader.note == ""
        whole = reader.read_all()
    (tmp_path / "y.ogg").write_bytes(second)
    alone = read_all(tmp_path / "y.ogg")
    np.testing.assert_allclose(whole[-len(alone) :], alone, atol=1e-6)
    long = encoded(of_noise(20), "OGG", subtype)
    (tmp_path / "x.ogg").write_bytes(first + long[: len(long) // 2])
    with read_audio(tmp_path / "x.ogg") as reader:
        assert "has no end" in reader.note
        assert 5 < reader.seconds < 15
    (tmp_path / "x.ogg").write_bytes(first + second[: len(second) // 10])
    with read_audio(tmp_path / "x.ogg") as reader:
        assert f"{tmp_path / 'x.ogg'}: part 2 of 2 cannot be read" in reader.note
        assert reader.seconds == pytest.approx(1, abs=0.01)
    (tmp_path / "x.ogg").write_bytes(first + second)
    assert "longer than the limit of 1.5 seconds" in str(refused(tmp_path / "x.ogg", max_seconds=1.5))


def test_streams_of_other_rates_in_one_chain(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, of_noise(1)[: RATE // 2], 8000, format="OGG", subtype="VORBIS")  # two seconds
    (tmp_path / "x.ogg").write_bytes(encoded(of_noise(1), "OGG", "VORBIS") + buffer.getvalue())
    with read_audio(tmp_path / "x.ogg") as reader:
        assert reader.seconds == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize(
    ("name", "options", "head"),
    [
        ("x.aac", ["-c:a", "aac"], TAG),
        ("x.mp3", ["-c:a", "libmp3lame", "-id3v2_version", "0", "-write_xing", "0"], TAG + bytes(5000)),
        ("x.oga", ["-c:a", "flac", "-f", "ogg"], b""),
        ("x.spx", ["-c:a", "libspeex"], b""),
        ("x.ac3", ["-c:a", "ac3"], b""),
        ("x.tta", ["-c:a", "tta"], b""),
    ],
    ids=["ADTS behind a tag", "MP3 with zeros behind its tag", "FLAC in Ogg", "Speex in Ogg", "AC-3", "TTA"],
)
def test_what_else_ffmpeg_reads_is_given_to_it(tmp_path: Path, name: str, options: list[str], head: bytes) -> None:
    path = through_ffmpeg(tmp_path / name, *options)
    path.write_bytes(head + path.read_bytes())
    with read_audio(path) as reader:
        assert reader.seconds == pytest.approx(3, abs=0.2)
        assert dbfs(reader.read_all()) == pytest.approx(-20, abs=3)


def dbfs(samples: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(np.square(samples))))


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (np.stack([of_noise(1), -of_noise(1)], axis=1), "cancel each other out"),
        (np.stack([of_noise(1), -0.97 * of_noise(1)], axis=1), "cancel each other out"),
        (np.stack([of_noise(1), 0 * of_noise(1)], axis=1), ""),
        (np.stack([of_noise(1), of_noise(1)[::-1]], axis=1), ""),
        (0.005 * of_noise(1), r"nearly silent: its loudest sample is at -5\d dB of full scale\."),
        (0 * of_noise(1), r"nearly silent: its loudest sample is zero\."),
        (0.1 * of_noise(1), ""),
    ],
)
def test_why_nothing_may_be_understood(tmp_path: Path, samples: np.ndarray, words: str) -> None:
    soundfile.write(tmp_path / "x.wav", samples, RATE)
    with read_audio(tmp_path / "x.wav") as reader:
        reader.read_all()
        assert re.search(words, reader.hint) if words else reader.hint == ""


def test_no_usable_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", none)
    monkeypatch.setattr(sys, "stdin", Pipe(encoded(of_noise(1), "WAV")))
    said = str(refused("-"))
    assert "Cannot read standard input: there is no usable temporary folder (No usable temporary directory" in said
    assert "TMPDIR" in said
