"""Log-mel front end: the oracle's rows; any length; streamed rows equal whole ones; sizes from the config."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import GOLDEN

from mlx_voicechat.config import MelConfig
from mlx_voicechat.networks.mel import LogMel
from mlx_voicechat.weights.config_file import read_config

ORACLE = dict(np.load(GOLDEN / "oracle" / "mel.npz"))
TOLERANCE = 3e-4  # oracle README: quiet bins amplify FFT noise
SMALL = MelConfig(
    sample_rate=8000,
    features=20,
    n_fft=256,
    window_samples=200,
    hop_samples=70,
    preemphasis=0.9,
    log_guard=1e-5,
)


@cache
def golden() -> LogMel:
    config = read_config(GOLDEN / "tiny-f32")
    mel = LogMel(config.mel, config.encoder.subsampling_factor)
    mel.prepare()
    return mel


@cache
def small() -> LogMel:
    mel = LogMel(SMALL, frame_rows=4)
    mel.prepare()
    return mel


def question() -> np.ndarray:
    return sf.read(GOLDEN / "audio" / "question.wav", dtype="float32")[0]


def noise(samples: int, batch: int = 1, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 0.1, (batch, samples)).astype(np.float32))


def streamed(mel: LogMel, samples: mx.array, frames: list[int]) -> np.ndarray:
    """All rows of pushes of so many frames, the ones before row 0 left out."""
    state, at, rows = mel.init_state(samples.shape[0]), 0, []
    for count in frames:
        piece = samples[:, at : at + count * mel.frame_samples]
        new, state = mel.step(piece, state)
        rows.append(new)
        at += piece.shape[1]
    frame_rows = mel.frame_samples // mel.config.hop_samples
    return np.array(mx.concatenate(rows, axis=1))[:, frame_rows - 1 :]


def test_window_and_filters_are_the_oracles() -> None:
    mel = golden()
    pad = (mel.config.n_fft - mel.config.window_samples) // 2
    np.testing.assert_allclose(np.array(mel._window)[pad:-pad], ORACLE["window"], atol=3e-7)
    np.testing.assert_allclose(np.array(mel._filters).T, ORACLE["fb"], atol=1e-8)
    assert not np.array(mel._window)[:pad].any()
    assert not np.array(mel._window)[-pad:].any()


@pytest.mark.parametrize(
    ("samples", "reference"),
    [
        (question(), "mel_question"),
        (question()[:12800], "mel_12800"),
        (ORACLE["noise_3000"], "mel_noise_3000"),
    ],
)
def test_whole_signal_is_the_oracles(samples: np.ndarray, reference: str) -> None:
    rows = np.array(golden().whole(mx.array(samples)[None]))[0]
    valid = int(ORACLE[f"{reference}_len"][0])  # NeMo overwrites the row after these
    assert rows.shape == ORACLE[reference].shape
    np.testing.assert_allclose(rows[:valid], ORACLE[reference][:valid], atol=TOLERANCE, rtol=0)


def test_last_row_stands_too() -> None:
    expected = dict(np.load(GOLDEN / "expected" / "perception.npz"))
    rows = np.array(golden().whole(mx.array(expected["audio"])[None]))[0]
    np.testing.assert_allclose(rows, expected["mel"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("samples", "frames"), [(int(r[0]), int(r[1])) for r in ORACLE["lengths"] if r[0] > 0])
def test_any_length_gives_the_oracles_number_of_rows(samples: int, frames: int) -> None:
    rows = np.array(golden().whole(noise(samples)))
    assert rows.shape[1] == frames
    assert np.isfinite(rows).all()


def test_silence_is_the_log_of_the_guard() -> None:
    np.testing.assert_allclose(np.array(golden().whole(mx.zeros((1, 1280)))), np.log(2.0**-24), rtol=1e-6)


@pytest.mark.parametrize("piece", [1, 3, 7, 27])
def test_streamed_rows_equal_whole_ones(piece: int) -> None:
    frames = 27
    samples = mx.array(np.pad(question(), (0, frames * 1280 - len(question()))))[None]
    pieces = [min(piece, frames - at) for at in range(0, frames, piece)]
    rows = streamed(golden(), samples, pieces)
    assert rows.shape[1] == 8 * (frames - 1) + 1
    np.testing.assert_allclose(rows, np.array(golden().whole(samples))[:, : rows.shape[1]], atol=1e-5, rtol=0)


@settings(max_examples=20, deadline=None)
@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_pieces_do_not_matter(pieces: list[int]) -> None:
    mel = small()
    samples = noise(sum(pieces) * mel.frame_samples, batch=2, seed=1)
    rows = streamed(mel, samples, pieces)
    np.testing.assert_allclose(rows, np.array(mel.whole(samples))[:, : rows.shape[1]], atol=1e-5, rtol=0)


def test_sizes_come_from_the_config() -> None:
    """The small front end against the definition, in float64."""
    samples = noise(5 * small().frame_samples + 17, seed=2)
    x = np.array(samples)[0].astype(np.float64)
    emphasised = np.pad(np.append(x[:1], x[1:] - SMALL.preemphasis * x[:-1]), SMALL.n_fft // 2)
    window = np.pad(np.hanning(SMALL.window_samples), (SMALL.n_fft - SMALL.window_samples) // 2)
    starts = range(0, len(x) + 1, SMALL.hop_samples)
    frames = np.stack([emphasised[at : at + SMALL.n_fft] * window for at in starts])
    power = np.abs(np.fft.rfft(frames)) ** 2
    reference = np.log(power @ np.array(small()._filters) + SMALL.log_guard)
    np.testing.assert_allclose(np.array(small().whole(samples))[0], reference, atol=TOLERANCE, rtol=0)


def test_step_leaves_its_state_alone() -> None:
    mel, samples = small(), noise(small().frame_samples)
    _, state = mel.step(samples, mel.init_state())
    before = np.array(state)
    first, second = mel.step(samples, state)[0], mel.step(samples, state)[0]
    np.testing.assert_array_equal(np.array(first), np.array(second))
    np.testing.assert_array_equal(np.array(state), before)
    assert state.shape == mel.init_state().shape


READ_ONLY = """
import os, sys
from numba.core import caching
from mlx_voicechat.networks.mel import _filter_bank

def refuses(self):
    raise OSError("read-only")

for name in ("InTreeCacheLocator", "_InTreeCacheLocator"):
    if hasattr(caching, name):
        getattr(caching, name).ensure_cache_path = refuses
try:
    import librosa.filters
    librosa.filters.mel
except RuntimeError as fault:
    assert "cannot cache" in str(fault), fault
else:
    raise AssertionError("this numba finds another place: the test has to be told of it")
for name in [name for name in sys.modules if name.startswith("librosa")]:
    del sys.modules[name]
print(_filter_bank()(sr=16000, n_fft=512, n_mels=80).shape)
"""


def test_it_starts_where_packages_and_home_are_read_only(tmp_path: Path) -> None:
    """numba, which librosa compiles with, then finds no place for its cache, and the import fails."""
    environment = {**os.environ, "HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", READ_ONLY], env=environment, capture_output=True, text=True)
    assert done.stdout == "(80, 257)\n", done.stderr
    assert not list(tmp_path.iterdir())
