"""Wire formats: names, G.711's tables, streams cut anywhere, ten minutes to the sample, alias lines."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.server.wire_audio import (
    LAWS,
    Decoder,
    Encoder,
    Encoding,
    UnsupportedFormat,
    WireFormat,
    WrongAudio,
    decoded,
    encoded,
    wire_format,
)

PCM24, PCM16K, PCM22 = (WireFormat("audio/pcm", rate) for rate in (24_000, 16_000, 22_050))
F32 = WireFormat("pcm_f32le", 16_000)
MU, A = WireFormat("audio/pcmu", 8_000), WireFormat("audio/pcma", 8_000)
MODEL_IN, MODEL_OUT = 16_000, 22_050
TEN_MINUTES = 600


@pytest.mark.parametrize(
    ("value", "rate", "expected"),
    [
        ("pcm16", None, PCM24),
        ("pcm_s16le", 16_000, PCM16K),
        ({"type": "audio/pcm", "rate": 24_000}, None, PCM24),
        ({"type": "audio/pcm"}, None, PCM24),
        ({"type": "audio/pcm", "sample_rate_hz": 22_050}, None, PCM22),
        ({"type": "audio/pcm", "rate": 24_000}, 16_000, PCM16K),
        ("pcm_f32le", 16_000, F32),
        ("g711_ulaw", None, MU),
        ({"type": "audio/pcma", "rate": 8_000}, None, A),
    ],
)
def test_a_format_as_clients_write_it(value: object, rate: object, expected: WireFormat) -> None:
    assert wire_format(value, rate) == expected


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        *[(value, None) for value in ("opus", 7, None, {}, {"type": []}, {"type": "audio/pcma", "rate": 24_000})],
        *[("pcm16", rate) for rate in (44_000, True, 24_000.0, "24000")],
        ("g711_ulaw", 16_000),
    ],
)
def test_a_format_that_is_not_offered_is_named(value: object, rate: object) -> None:
    with pytest.raises(UnsupportedFormat, match="must be one of"):
        wire_format(value, rate)


def test_formats_as_a_session_shows_them() -> None:
    assert PCM24.as_json() == {"type": "audio/pcm", "rate": 24_000}
    assert MU.as_json() == {"type": "audio/pcmu"}
    assert [PCM24.beta_name, MU.beta_name, A.beta_name] == ["pcm16", "g711_ulaw", "g711_alaw"]
    assert (PCM24.milliseconds(4800), MU.milliseconds(800), F32.milliseconds(6400)) == (100, 100, 100)


# Values of ITU-T G.711 tables 1a, 1b, 2a, 2b in 16-bit units: code word -> value at the decoder's output.
MU_LAW = {0xFF: 0, 0xFE: 8, 0xF0: 120, 0xEF: 132, 0xE0: 372, 0xDF: 396, 0x80: 32124, 0x00: -32124, 0x7F: 0, 0x70: -120}
A_LAW = {0xD5: 8, 0xD4: 24, 0xC5: 264, 0xF5: 528, 0xAA: 32256, 0x55: -8, 0x54: -24, 0x2A: -32256}


@pytest.mark.parametrize(("encoding", "table"), [("audio/pcmu", MU_LAW), ("audio/pcma", A_LAW)])
def test_code_words_of_the_recommendation(encoding: Encoding, table: dict[int, int]) -> None:
    values = decoded(bytes(table), encoding) * 32768
    np.testing.assert_array_equal(values, list(table.values()))


@pytest.mark.parametrize("encoding", ["audio/pcmu", "audio/pcma"])
def test_every_code_word_comes_back_and_the_nearest_interval_is_chosen(encoding: Encoding) -> None:
    words = bytes(range(256))
    assert encoded(decoded(words, encoding), encoding) == words
    samples = np.linspace(-1.2, 1.2, 50_001).astype(np.float32)
    back = decoded(encoded(samples, encoding), encoding)
    assert np.all(np.diff(back) >= 0)
    inside = np.abs(samples) < np.abs(LAWS[encoding].values).max()
    error = np.abs(back - samples)[inside]
    assert np.all(error <= np.maximum(1.001 / 4096, (np.abs(samples[inside]) + 33 / 8192) / 32))  # half an interval
    np.testing.assert_array_equal(back[[0, -1]], [LAWS[encoding].values.min(), LAWS[encoding].values.max()])


def test_silence_is_silence_in_every_format() -> None:
    assert encoded(np.zeros(2, np.float32), "audio/pcmu") == b"\xff\xff"
    assert encoded(np.zeros(2, np.float32), "audio/pcma") == b"\xd5\xd5"
    assert encoded(np.zeros(2, np.float32), "audio/pcm") == bytes(4)
    assert encoded(np.zeros(2, np.float32), "pcm_f32le") == bytes(8)


def test_loud_samples_are_clipped() -> None:
    assert np.frombuffer(encoded(np.array([2, -2, 1, -1], np.float32), "audio/pcm"), "<i2").tolist() == [
        32767,
        -32767,
        32767,
        -32767,
    ]


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"\x00", "audio/pcm"),
        (bytes(6), "pcm_f32le"),
        *[(np.array([value], "<f4").tobytes(), "pcm_f32le") for value in (np.nan, np.inf, -np.inf, 101.0, -3e38)],
    ],
)
def test_what_is_no_audio_is_refused_and_the_stream_goes_on(data: bytes, encoding: Encoding) -> None:
    decoder = Decoder(WireFormat(encoding, 16_000), MODEL_IN)
    with pytest.raises(WrongAudio):
        decoder.push(data)
    assert len(decoder.push(bytes(4))) + len(decoder.finish()) == 4 // decoder.format.sample_bytes


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([PCM24, PCM16K, PCM22, F32, MU, A]), st.lists(st.integers(0, 4000), max_size=8), st.integers(0))
def test_pieces_of_any_size_give_what_one_gives(form: WireFormat, sizes: list[int], seed: int) -> None:
    samples = (np.random.default_rng(seed).standard_normal(sum(sizes)) * 0.1).astype(np.float32)
    edges = np.cumsum([0, *sizes])
    data = encoded(samples, form.encoding)
    whole, pieces = Decoder(form, MODEL_IN), Decoder(form, MODEL_IN)
    step = form.sample_bytes
    parts = [pieces.push(data[a * step : b * step]) for a, b in pairwise(edges)]
    heard = np.concatenate([*parts, pieces.finish()])
    np.testing.assert_array_equal(heard, np.concatenate([whole.push(data), whole.finish()]))
    assert len(heard) == _rounded(len(samples), form.rate_hz, MODEL_IN)
    all_out, cut = Encoder(form, MODEL_OUT), Encoder(form, MODEL_OUT)
    spoken = b"".join(cut.push(samples[a:b]) for a, b in pairwise(edges)) + cut.finish()
    assert spoken == all_out.push(samples) + all_out.finish()
    assert len(spoken) == _rounded(len(samples), MODEL_OUT, form.rate_hz) * step


def _rounded(count: int, source_hz: int, target_hz: int) -> int:
    return math.floor(count * target_hz / source_hz + 0.5)


@pytest.mark.parametrize("form", [PCM24, PCM16K, PCM22, MU], ids=str)
def test_ten_minutes_are_ten_minutes_to_the_sample(form: WireFormat) -> None:
    decoder, encoder = Decoder(form, MODEL_IN), Encoder(form, MODEL_OUT)
    second = bytes(form.rate_hz * form.sample_bytes)
    frame = np.zeros(MODEL_OUT * 80 // 1000, np.float32)
    heard = sum(len(decoder.push(second)) for _ in range(TEN_MINUTES)) + len(decoder.finish())
    frames = TEN_MINUTES * 1000 // 80
    spoken = sum(len(encoder.push(frame)) for _ in range(frames)) + len(encoder.finish())
    assert heard == TEN_MINUTES * MODEL_IN
    assert spoken == TEN_MINUTES * form.rate_hz * form.sample_bytes


def _level(samples: np.ndarray, rate_hz: int, around_hz: float) -> float:
    """dB of full scale of the strongest line within 40 Hz, past the ends of the signal."""
    middle = samples[len(samples) // 8 : -len(samples) // 8].astype(np.float64)
    window = np.blackman(len(middle))
    spectrum = np.abs(np.fft.rfft(middle * window)) * 2 / window.sum()
    frequencies = np.fft.rfftfreq(len(middle), 1 / rate_hz)
    return 20 * math.log10(spectrum[np.abs(frequencies - around_hz) <= 40].max() + 1e-12)


def _tone(hz: float, rate_hz: int, seconds: float = 4.0) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(int(rate_hz * seconds)) / rate_hz).astype(np.float32)


def _streamed(samples: np.ndarray, source_hz: int, target_hz: int) -> np.ndarray:
    """Through the stream in odd pieces, as float32: before companding."""
    decoder = Decoder(WireFormat("pcm_f32le", source_hz), target_hz)
    pieces = [decoder.push(samples[at : at + 977].astype("<f4").tobytes()) for at in range(0, len(samples), 977)]
    return np.concatenate([*pieces, decoder.finish()])


@pytest.mark.parametrize(
    ("source_hz", "target_hz", "tone_hz", "alias_hz"),
    [
        (24_000, 16_000, 9_000, 7_000),  # in: above the model's band, folded down
        (24_000, 16_000, 11_500, 4_500),
        (8_000, 16_000, 3_000, 5_000),  # in: the image of a telephone's tone
        (22_050, 8_000, 5_000, 3_000),  # out: above a telephone's band
        (22_050, 16_000, 9_500, 6_500),
        (22_050, 24_000, 9_000, 22_050 - 9_000),  # out: the image, folded into what 24 kHz holds
    ],
)
def test_alias_lines_are_below_60_db(source_hz: int, target_hz: int, tone_hz: int, alias_hz: int) -> None:
    out = _streamed(_tone(tone_hz, source_hz), source_hz, target_hz)
    where = alias_hz if alias_hz <= target_hz / 2 else target_hz - alias_hz
    assert _level(out, target_hz, where) < -60


@pytest.mark.parametrize(
    ("source_hz", "target_hz"), [(24_000, 16_000), (8_000, 16_000), (22_050, 24_000), (22_050, 8_000)]
)
def test_a_tone_in_the_band_keeps_its_level_and_place(source_hz: int, target_hz: int) -> None:
    out = _streamed(_tone(1_000, source_hz), source_hz, target_hz)
    assert abs(_level(out, target_hz, 1_000)) < 0.05
    middle = slice(target_hz, 2 * target_hz)
    np.testing.assert_allclose(out[middle], _tone(1_000, target_hz)[middle], atol=2e-3)
