"""Codec: the oracle's latents, codes and samples; streamed equals whole; a config whose widths all differ."""

import math
from functools import cache
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.checkpoints import GOLDEN

from mlx_voicechat.config import CodecConfig
from mlx_voicechat.errors import InputError
from mlx_voicechat.networks.codec import Codec, CodecState
from mlx_voicechat.weights.config_file import read_config
from mlx_voicechat.weights.layout import assemble

ORACLE = dict(np.load(GOLDEN / "oracle" / "codec.npz"))
EXPECTED = dict(np.load(GOLDEN / "expected" / "codec.npz"))
LAG = 8
DISTINCT = CodecConfig(
    sample_rate=22050,
    base_channels=6,
    channel_multipliers=(1, 3, 4),
    downsample_rates=(2, 3, 5),
    blocks_per_stage=3,
    block_kernel_size=7,
    latent_dim=11,
    n_fft=16,
    hop_length=4,
    num_quantizers=5,
    codebook_size=13,
)


@cache
def tensors() -> dict[str, mx.array]:
    raw: dict[str, mx.array] = {}
    for shard in sorted((GOLDEN / "tiny-f32").glob("*.safetensors")):
        loaded = mx.load(str(shard))
        assert isinstance(loaded, dict)
        raw.update(loaded)
    return assemble(raw, torch_layout=True)


def parameters() -> list[tuple[str, mx.array]]:
    prefix = "tts_model.audio_codec."
    return [(name.removeprefix(prefix), t) for name, t in tensors().items() if name.startswith(prefix)]


@cache
def golden() -> Codec:
    codec = Codec(read_config(GOLDEN / "tiny-f32").codec)
    codec.load_weights(parameters(), strict=True)
    codec.prepare()
    return codec


@cache
def distinct() -> Codec:
    codec = Codec(DISTINCT)
    rng = np.random.default_rng(7)
    codec.load_weights([(name, mx.array(rng.normal(0, 0.2, p.shape), mx.float32)) for name, p in flat(codec)])
    codec.prepare()
    return codec


def flat(codec: Codec) -> list[tuple[str, mx.array]]:
    return tree_flatten(codec.parameters())  # type: ignore[return-value]


def codes_for(codec: Codec, frames: int, batch: int = 1, seed: int = 0) -> mx.array:
    shape = (batch, frames, codec.config.num_quantizers)
    return mx.array(np.random.default_rng(seed).integers(0, codec.config.codebook_size, shape), mx.int32)


def streamed(codec: Codec, codes: mx.array, piece: int) -> np.ndarray:
    state, out = codec.init_state(codes.shape[0]), []
    for at in range(0, codes.shape[1], piece):
        samples, state = codec.step(codes[:, at : at + piece], state)
        out.append(np.array(samples))
    return np.concatenate(out, axis=1)


def assert_near(actual: mx.array | np.ndarray, reference: np.ndarray) -> None:
    actual = np.array(actual)
    assert actual.shape == reference.shape
    assert np.abs(actual - reference).max() <= 1e-5 * max(1.0, np.abs(reference).max())


# The oracle


@pytest.mark.parametrize("name", ["zeros13", "audio"])
def test_encoding_gives_the_oracles_latents_and_codes(name: str) -> None:
    samples = ORACLE["audio_22k"] if name == "audio" else np.zeros(13 * 1764, np.float32)
    latents = golden().encode(mx.array(samples)[None])
    assert_near(latents[0], ORACLE[f"{name}_latents"])
    codes = golden().quantise(latents)
    assert codes.dtype == mx.int32
    np.testing.assert_array_equal(codes[0], ORACLE[f"{name}_codes"])


def test_a_tone_gives_the_expected_codes() -> None:
    codes = golden().quantise(golden().encode(mx.array(EXPECTED["tone"])[None]))
    np.testing.assert_array_equal(codes[0], EXPECTED["tone_codes"])


def test_codes_of_silence_are_the_checkpoints() -> None:
    codes = np.array(golden().quantise(golden().encode(mx.zeros((1, 125 * 1764))))[0])
    rows, counts = np.unique(codes, axis=0, return_counts=True)
    np.testing.assert_array_equal(rows[counts.argmax()], ORACLE["silence_frame"])
    np.testing.assert_array_equal(ORACLE["silence_frame"], tensors()["tts_model.codec_silence_tokens"])


def test_dequantising_sums_the_codebooks() -> None:
    assert_near(golden().dequantise(mx.array(ORACLE["dec_codes"])[None])[0], ORACLE["dec_latents"])


def test_offline_decode() -> None:
    assert_near(golden().whole(mx.array(ORACLE["dec_codes"])[None])[0], ORACLE["dec_offline"])
    assert_near(golden().whole(mx.array(EXPECTED["codes"])[None])[0], EXPECTED["decoded"])


@pytest.mark.parametrize("piece", [1, 3, 7, 12])
def test_streamed_decode(piece: int) -> None:
    assert_near(streamed(golden(), mx.array(ORACLE["dec_codes"])[None], piece)[0], ORACLE["dec_stream_noflush"])
    assert_near(streamed(golden(), mx.array(EXPECTED["codes"])[None], piece)[0], EXPECTED["streamed"].reshape(-1))


# Streaming


@pytest.mark.parametrize("codec", [golden, distinct])
def test_pieces_of_any_size_give_the_same_stream(codec) -> None:  # type: ignore[no-untyped-def]
    codes = codes_for(codec(), 9)
    whole = streamed(codec(), codes, 9)
    for piece in (1, 3, 7):
        np.testing.assert_allclose(streamed(codec(), codes, piece), whole, rtol=0, atol=3e-6)


@pytest.mark.parametrize("codec", [golden, distinct])
def test_stream_lags_the_offline_decode_by_eight_samples(codec) -> None:  # type: ignore[no-untyped-def]
    codes = codes_for(codec(), 5)
    stream, whole = streamed(codec(), codes, 1)[0], np.array(codec().whole(codes))[0]
    assert stream.shape == whole.shape == (5 * codec().config.frame_samples,)
    assert not stream[:2].any()
    differing = 6  # the window envelope of the very first samples
    np.testing.assert_allclose(stream[LAG + differing :], whole[differing:-LAG], rtol=0, atol=3e-6)


def test_step_leaves_its_input_state_alone() -> None:
    codec, codes = golden(), codes_for(golden(), 3)
    _, state = codec.step(codes[:, :1], codec.init_state())
    before = [np.array(part) for part in (*state.blocks, state.frames)]
    first, _ = codec.step(codes[:, 1:2], state)
    codec.step(codes[:, 2:], state)
    again, _ = codec.step(codes[:, 1:2], state)
    np.testing.assert_array_equal(first, again)
    for kept, part in zip(before, (*state.blocks, state.frames), strict=True):
        np.testing.assert_array_equal(kept, part)


def test_a_batch_gives_what_each_stream_gives_alone() -> None:
    codes = codes_for(distinct(), 4, batch=3)
    together = streamed(distinct(), codes, 1)
    for row in range(3):
        np.testing.assert_allclose(together[row : row + 1], streamed(distinct(), codes[row : row + 1], 1), atol=3e-6)


def test_state_has_one_size_whatever_was_decoded() -> None:
    codec = distinct()
    start = codec.init_state(2)
    _, state = codec.step(codes_for(codec, 4, batch=2), start)
    assert isinstance(state, CodecState)
    assert [p.shape for p in state.blocks] == [p.shape for p in start.blocks]
    assert state.frames.shape == start.frames.shape
    assert all(p.dtype == mx.float32 for p in (*state.blocks, state.frames))


def test_a_compiled_step_equals_the_plain_one() -> None:
    codec, codes = distinct(), codes_for(distinct(), 3)
    compiled, state = mx.compile(codec.step), codec.init_state()
    for at in range(3):
        plain, _ = codec.step(codes[:, at : at + 1], state)
        samples, state = compiled(codes[:, at : at + 1], state)
        assert isinstance(state, CodecState)
        np.testing.assert_allclose(samples, plain, rtol=0, atol=3e-6)


# Construction


def test_the_encoder_can_be_left_out() -> None:
    codec = Codec(golden().config, encoder=False)
    codec.load_weights([p for p in parameters() if not p[0].startswith("encoder.")], strict=True)
    codec.prepare()
    codes = codes_for(codec, 2)
    np.testing.assert_array_equal(codec.whole(codes), golden().whole(codes))
    with pytest.raises(InputError, match="without its encoder"):
        codec.encode(mx.zeros((1, 1764)))


def test_partial_frames_are_refused() -> None:
    for samples in (0, 1, 1763, 1765):
        with pytest.raises(InputError, match=f"{samples} samples are not whole frames of 1764"):
            golden().encode(mx.zeros((1, samples)))


def test_preparing_keeps_every_parameter() -> None:
    codec = Codec(golden().config)
    codec.load_weights(parameters(), strict=True)
    codec.prepare()
    codec.prepare()
    loaded = dict(parameters())
    for name, tensor in flat(codec):
        np.testing.assert_array_equal(tensor, loaded.pop(name))
    assert not loaded


# A reference in numpy, from the rules alone, on widths that all differ


def block(x: np.ndarray, layer: dict) -> np.ndarray:
    kernel = layer["dwconv"]["weight"][:, :, 0]
    padded = np.pad(x, ((kernel.shape[1] - 1, 0), (0, 0)))
    y = np.stack([(padded[t : t + kernel.shape[1]] * kernel.T).sum(0) for t in range(len(x))]) + layer["dwconv"]["bias"]
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-6)
    y = y * layer["norm"]["weight"] + layer["norm"]["bias"]
    y = y @ layer["pwconv1"]["weight"].T + layer["pwconv1"]["bias"]
    y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
    return x + y @ layer["pwconv2"]["weight"].T + layer["pwconv2"]["bias"]


def reference_decode(weights: dict, codes: np.ndarray) -> np.ndarray:
    x = sum(weights["prvq"]["mus_list"][q][codes[:, q]] for q in range(codes.shape[1]))
    for layer in weights["decoder"]["layers"][:-1]:
        if "dwconv" in layer:
            x = block(x, layer)
        else:
            x = np.einsum("ti,oki->tko", x, layer["weight"]).reshape(-1, layer["weight"].shape[0])
    out = x @ weights["decoder"]["layers"][-1]["weight"].T
    magnitude = 100 * np.exp(-np.logaddexp(0, math.log(100) - out[:, :9]))
    spectrum = magnitude * np.exp(1j * out[:, 9:])
    spectrum[:, [0, 8]] = spectrum[:, [0, 8]].real
    w = np.sin(np.pi * np.arange(16) / 16) ** 2
    total, envelope = np.zeros((2, 4 * len(x) + 12))
    for t, frame in enumerate(np.fft.irfft(spectrum)):
        total[4 * t : 4 * t + 16] += np.clip(frame, -w, w) * w
        envelope[4 * t : 4 * t + 16] += w * w
    return total[6:-6] / envelope[6:-6]


def reference_encode(weights: dict, samples: np.ndarray) -> np.ndarray:
    padded = np.pad(samples, 6)
    w = np.sin(np.pi * np.arange(16) / 16) ** 2
    spectrum = np.fft.rfft([padded[t : t + 16] * w for t in range(0, len(samples), 4)])
    x = np.concatenate([spectrum.real, spectrum.imag], axis=1) @ weights["encoder"]["layers"][0]["weight"].T
    for layer in weights["encoder"]["layers"][1:]:
        if "dwconv" in layer:
            x = block(x, layer)
        else:
            rate = layer["weight"].shape[1]
            x = np.einsum("tki,oki->to", x.reshape(-1, rate, x.shape[1]), layer["weight"])
    return x


def test_distinct_widths_follow_the_rules() -> None:
    weights = tree_map(lambda p: np.array(p, np.float64), distinct().parameters())
    codes = codes_for(distinct(), 6)
    assert_near(distinct().whole(codes)[0], reference_decode(weights, np.array(codes[0])))
    samples = np.random.default_rng(3).normal(0, 0.3, 6 * DISTINCT.frame_samples).astype(np.float32)
    latents = distinct().encode(mx.array(samples)[None])
    assert latents.shape == (1, 6, DISTINCT.latent_dim)
    assert_near(latents[0], reference_encode(weights, samples.astype(np.float64)))


def test_quantising_takes_the_nearest_row_of_what_is_left() -> None:
    books = [np.array(book, np.float64) for book in distinct().prvq.mus_list]
    latents = np.random.default_rng(4).normal(size=(2, 7, DISTINCT.latent_dim))
    codes = np.array(distinct().quantise(mx.array(latents, mx.float32)))
    for index in np.ndindex(2, 7):
        rest = latents[index]
        for q, book in enumerate(books):
            assert codes[index][q] == ((rest - book) ** 2).sum(axis=1).argmin()
            rest = rest - book[codes[index][q]]


def test_distinct_widths_are_distinct() -> None:
    c = DISTINCT
    widths = sorted(
        [*(c.base_channels * m for m in c.channel_multipliers), c.latent_dim, c.num_quantizers, c.codebook_size]
    )
    assert all(a < b for a, b in pairwise(widths))
