"""Perception: the oracle's encoder; steps of any size equal the whole; a config whose widths all differ."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.checkpoints import GOLDEN

from mlx_voicechat.config import EncoderConfig, MelConfig
from mlx_voicechat.networks.conformer import Perception, PerceptionState, RelativeAttention, _sinusoids
from mlx_voicechat.weights.config_file import read_config
from mlx_voicechat.weights.layout import assemble

ORACLE = dict(np.load(GOLDEN / "oracle" / "encoder.npz"))
EXPECTED = dict(np.load(GOLDEN / "expected" / "perception.npz"))
MEL = MelConfig(
    sample_rate=8000,
    features=20,
    n_fft=256,
    window_samples=200,
    hop_samples=70,
    preemphasis=0.97,
    log_guard=2.0**-24,
)
DISTINCT = EncoderConfig(
    features=20,
    n_layers=2,
    d_model=48,
    n_heads=3,
    ff_expansion_factor=5,
    subsampling_factor=8,
    subsampling_channels=10,
    conv_kernel_size=6,
    left_frames=11,
    output_dim=56,
)
FRAMES = 64  # more than the attention window of either checkpoint, three times over


@cache
def tensors(name: str) -> dict[str, mx.array]:
    raw: dict[str, Any] = {}
    for shard in sorted((GOLDEN / name).glob("*.safetensors")):
        raw.update(mx.load(str(shard)))  # type: ignore[arg-type]
    return assemble(raw, torch_layout=True)


def golden_unprepared(name: str = "tiny-f32") -> Perception:
    config = read_config(GOLDEN / name)
    perception = Perception(config.mel, config.encoder)
    prefix = "stt_model.perception."
    weights = [(path.removeprefix(prefix), t) for path, t in tensors(name).items() if path.startswith(prefix)]
    perception.load_weights(weights, strict=True)
    return perception


@cache
def golden() -> Perception:
    perception = golden_unprepared()
    perception.prepare()
    return perception


def random_weights(module: nn.Module, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def draw(a: mx.array) -> mx.array:
        if a.ndim < 2:
            return mx.array(rng.normal(0.5, 0.3, a.shape).astype(np.float32))
        return mx.array(rng.normal(0, np.prod(a.shape[1:]) ** -0.5, a.shape).astype(np.float32))

    module.update(tree_map(draw, module.parameters()))


@cache
def distinct() -> Perception:
    perception = Perception(MEL, DISTINCT)
    random_weights(perception, seed=0)
    perception.prepare()
    return perception


def noise(perception: Perception, frames: int, batch: int = 1, seed: int = 0) -> mx.array:
    shape = (batch, frames * perception.frame_samples)
    return mx.array(np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32))


def leaves(tree: Any) -> dict[str, mx.array]:
    flat: Any = tree_flatten(tree)
    return dict(flat)


def streamed(
    perception: Perception, samples: mx.array, pieces: list[int], step: Callable[..., Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encoded and projected frames of pushes of so many frames, the list repeated to the end of the samples."""
    step, state, at = step or perception.step, perception.init_state(samples.shape[0]), 0
    out: list[tuple[mx.array, mx.array]] = []
    total = samples.shape[1] // perception.frame_samples
    while at < total:
        count = min(pieces[len(out) % len(pieces)], total - at)
        piece = samples[:, at * perception.frame_samples : (at + count) * perception.frame_samples]
        encoded, projected, state = step(piece, state)
        mx.eval(encoded, projected, state)
        out.append((encoded, projected))
        at += count
    encoded, projected = (np.array(mx.concatenate(list(arrays), axis=1)) for arrays in zip(*out, strict=True))
    return encoded, projected


def assert_close(actual: mx.array | np.ndarray, reference: np.ndarray) -> None:
    """The oracle's tolerance: 1e-5 times the largest absolute reference, at least 1."""
    assert actual.shape == reference.shape
    tolerance = 1e-5 * max(1.0, float(np.abs(reference).max()))
    np.testing.assert_allclose(np.array(actual), reference, atol=tolerance, rtol=0)


def test_offline_encoder_is_the_oracles() -> None:
    perception, mel = golden(), mx.array(ORACLE["mel_question"])[None, :215]
    assert_close(perception.encoder.pre_encode.whole(mel)[0], ORACLE["offline_pre_encode"])
    encoded = perception.encoder.whole(mel)
    assert_close(encoded[0], ORACLE["offline_encoder"])
    assert_close(perception.proj(encoded)[0], ORACLE["offline_projected"])


@pytest.mark.parametrize("piece", [1, 3, 7, 60])
@pytest.mark.parametrize(
    ("mel", "reference"), [("mel_tiled60", "online_encoder_60"), ("mel_question", "online_encoder_27")]
)
def test_streamed_encoder_is_the_oracles(piece: int, mel: str, reference: str) -> None:
    encoder, frames = golden().encoder, len(ORACLE[reference])
    # What stands before row 0 must not matter.
    rows = np.concatenate([np.full((7, 128), 9, np.float32), ORACLE[mel][: 8 * frames - 7]])
    state, out = encoder.init_state(), []
    for at in range(0, len(rows), 8 * piece):
        encoded, state = encoder.step(mx.array(rows[None, at : at + 8 * piece]), state)
        out.append(encoded)
    assert_close(mx.concatenate(out, axis=1)[0], ORACLE[reference])


@pytest.mark.parametrize("pieces", [[1], [3], [7], [40], [1, 3, 7], [7, 1]])
def test_streamed_samples_give_the_expected_frames(pieces: list[int]) -> None:
    encoded, projected = streamed(golden(), mx.array(EXPECTED["audio"])[None], pieces)
    assert_close(encoded[0], EXPECTED["encoded"][:40])
    assert_close(projected[0], EXPECTED["projected"][:40])


def test_whole_samples_give_the_expected_frames() -> None:
    encoded, projected = golden().whole(mx.array(EXPECTED["audio"])[None, :-1000])  # padded back
    assert_close(encoded[0], EXPECTED["encoded"][:40])
    assert_close(projected[0], EXPECTED["projected"][:40])


@pytest.mark.parametrize("pieces", [[1], [3], [7], [FRAMES], [1, 3, 7], [20, 1, 1]])
def test_steps_equal_the_whole_with_distinct_widths(pieces: list[int]) -> None:
    perception = distinct()
    samples = noise(perception, FRAMES, batch=2)
    encoded, projected = perception.whole(samples)
    assert encoded.shape == (2, FRAMES, DISTINCT.d_model)
    assert projected.shape == (2, FRAMES, DISTINCT.output_dim)
    actual = streamed(perception, samples, pieces)
    assert_close(actual[0], np.array(encoded))
    assert_close(actual[1], np.array(projected))


@pytest.mark.parametrize("steps", [1, 30])
def test_attention_is_the_definition(steps: int) -> None:
    """Each query over itself and the frames before it, score by score, in float64."""
    attention, left, width = RelativeAttention(DISTINCT), DISTINCT.left_frames, DISTINCT.d_model
    random_weights(attention, seed=3)
    bias = attention.prepare(_sinusoids(left, width))
    rng = np.random.default_rng(4)
    x, past = (rng.normal(size=(1, n, w)).astype(np.float32) for n, w in ((steps, width), (left, 2 * width)))
    out, _ = attention(mx.array(x), mx.array(past), mx.broadcast_to(bias, (1, DISTINCT.n_heads, steps, left + 1)))
    weight = {name: np.array(value, np.float64) for name, value in leaves(attention.parameters()).items()}
    q, k, v = np.split(x[0] @ weight["linear_qkv.weight"].T, 3, axis=-1)
    k, v = np.concatenate([past[0, :, :width], k]), np.concatenate([past[0, :, width:], v])
    mixed, size = np.zeros((steps, width)), DISTINCT.head_dim
    for t in range(steps):
        for head in range(DISTINCT.n_heads):
            part = slice(head * size, (head + 1) * size)
            scores = []
            for distance in range(left + 1):
                angles = distance * 10000.0 ** (-2 * np.arange(width // 2) / width)
                table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(-1)
                p = (weight["linear_pos.weight"] @ table)[part]
                content = (q[t, part] + weight["pos_bias_u"][head]) @ k[t + left - distance, part]
                scores.append((content + (q[t, part] + weight["pos_bias_v"][head]) @ p) / np.sqrt(size))
            share = np.exp(scores) / np.exp(scores).sum()
            mixed[t, part] = sum(s * v[t + left - distance, part] for distance, s in enumerate(share))
    assert_close(out[0], mixed @ weight["linear_out.weight"].T)


def test_conversations_of_different_age_step_together() -> None:
    perception = distinct()
    older, younger = noise(perception, 30, seed=1), noise(perception, 25, seed=2)
    state = perception.init_state()
    for at in range(5):
        _, _, state = perception.step(older[:, at * perception.frame_samples :][:, : perception.frame_samples], state)
    pair: PerceptionState = tree_map(lambda a, b: mx.concatenate([a, b]), state, perception.init_state())
    samples = mx.concatenate([older[:, 5 * perception.frame_samples :], younger])
    out = []
    for at in range(25):
        piece = samples[:, at * perception.frame_samples :][:, : perception.frame_samples]
        encoded, _, pair = perception.step(piece, pair)
        out.append(encoded)
    together = np.array(mx.concatenate(out, axis=1))
    assert_close(together[0], np.array(perception.whole(older)[0])[0, 5:])
    assert_close(together[1], np.array(perception.whole(younger)[0])[0])


def test_shapes_of_the_state_never_change() -> None:
    perception = distinct()
    state = perception.init_state(2)
    shapes = [a.shape for a in leaves(state).values()]
    for count in (1, 1, 4, 30, 1):
        _, _, state = perception.step(noise(perception, count, batch=2), state)
        assert [a.shape for a in leaves(state).values()] == shapes


def test_one_compiled_trace_serves_every_frame() -> None:
    perception, traces = golden(), []

    def step(samples: mx.array, state: PerceptionState) -> tuple[mx.array, mx.array, PerceptionState]:
        traces.append(samples.shape)
        return perception.step(samples, state)

    encoded, projected = streamed(perception, mx.array(EXPECTED["audio"])[None], [1], mx.compile(step))
    assert traces == [(1, perception.frame_samples)]
    assert_close(encoded[0], EXPECTED["encoded"][:40])
    assert_close(projected[0], EXPECTED["projected"][:40])


def test_step_leaves_its_state_alone() -> None:
    perception = distinct()
    samples = noise(perception, 4)
    _, _, state = perception.step(samples, perception.init_state())
    before = [np.array(a) for a in leaves(state).values()]
    first, second = perception.step(samples, state)[0], perception.step(samples, state)[0]
    np.testing.assert_array_equal(np.array(first), np.array(second))
    for after, kept in zip(leaves(state).values(), before, strict=True):
        np.testing.assert_array_equal(np.array(after), kept)


def test_narrow_and_quantised_weights_leave_the_stream_float32() -> None:
    perception = golden_unprepared("tiny-bf16")
    perception.update(tree_map(lambda a: a.astype(mx.float32) if a.ndim == 1 else a, perception.parameters()))
    nn.quantize(
        perception,
        group_size=32,
        bits=8,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )
    perception.prepare()
    assert isinstance(perception.encoder.layers[0].self_attn.linear_qkv, nn.QuantizedLinear)
    audio = mx.array(EXPECTED["audio"])[None]
    encoded, projected, state = perception.step(audio, perception.init_state())
    assert {a.dtype for a in leaves(state).values()} == {mx.float32, mx.int32}
    assert encoded.dtype == projected.dtype == mx.float32
    one_by_one = streamed(perception, audio, [1])
    assert_close(one_by_one[0], np.array(encoded))
    assert_close(one_by_one[1], np.array(projected))
    np.testing.assert_allclose(np.array(encoded)[0], EXPECTED["encoded"][:40], atol=0.2)


def test_bfloat16_throughout_but_for_the_samples() -> None:
    """Norms in bfloat16 make the stream bfloat16; steps give what blocks of frames give, and both are near float32."""
    perception = golden_unprepared("tiny-bf16")
    perception.prepare()
    audio = mx.array(EXPECTED["audio"])[None]
    encoded, projected, state = perception.step(audio, perception.init_state())
    assert encoded.dtype == projected.dtype == mx.bfloat16
    assert state.mel.dtype == mx.float32
    assert {a.dtype for a in leaves(state.encoder).values()} == {mx.bfloat16, mx.int32}

    def step(samples: mx.array, state: PerceptionState) -> tuple[mx.array, mx.array, PerceptionState]:
        encoded, projected, state = perception.step(samples, state)
        return encoded.astype(mx.float32), projected.astype(mx.float32), state

    one_by_one = streamed(perception, audio, [1], step)
    np.testing.assert_allclose(one_by_one[0], np.array(encoded.astype(mx.float32)), atol=0.1)
    np.testing.assert_allclose(np.array(encoded.astype(mx.float32))[0], EXPECTED["encoded"][:40], atol=0.2)


def test_weights_alone_are_parameters() -> None:
    names = set(leaves(golden().parameters()))
    prefix = "stt_model.perception."
    assert names == {path.removeprefix(prefix) for path in tensors("tiny-f32") if path.startswith(prefix)}
