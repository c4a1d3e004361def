"""Perception: log-mel, the causal FastConformer encoder and the projection to the LLM's width.

Whole signals and steps run the same blocks; a step of one frame has a fixed shape from the first frame on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import ENCODER_NORM_EPS, ENCODER_POSITION_BASE, EncoderConfig, MelConfig
from .activations import relu, silu
from .causal_conv import causal_conv, taps_of
from .linear import Linear, add_product, prepare_linears
from .mel import LogMel

# NeMo ConvSubsampling, dw_striding: every stage is a 3x3 convolution of stride 2. CausalConv2D pads both
# axes by KERNEL - 1 before and STRIDE - 1 after.
KERNEL, STRIDE = 3, 2
BEFORE, AFTER = KERNEL - 1, STRIDE - 1


class EncoderState(NamedTuple):
    """What the encoder keeps of the past, in the type it computes in; heads x head_dim = D, L = left frames."""

    seen: mx.array  # (B,) frames so far
    rows: tuple[mx.array, ...]  # per strided convolution its last input row (B, 1, frequency, channels)
    keys_values: tuple[mx.array, ...]  # per block (B, L, 2 D), oldest first
    past: tuple[tuple[mx.array, ...], ...]  # per block the convolution's last kernel - 1 inputs (B, 1, D), oldest first


class PerceptionState(NamedTuple):
    """Arrays only: a whole step can be compiled."""

    mel: mx.array
    encoder: EncoderState


def _kept(view: mx.array, steps: int) -> mx.array:
    """A view for the state; of a block of frames a copy, or the whole block's buffer would live on with it."""
    return view if steps == 1 else mx.contiguous(view)


class StridedConv(nn.Module):
    """(B, T, F, channels) -> (B, T', F // 2 + 1, channels'); depthwise when the weight has one input channel."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = mx.zeros((out_channels, KERNEL, KERNEL, in_channels))
        self.bias = mx.zeros((out_channels,))

    def __call__(self, x: mx.array, before: int, after: int) -> mx.array:
        groups = x.shape[-1] // self.weight.shape[-1]
        padding = ([before, BEFORE], [after, AFTER])
        return mx.conv_general(x, self.weight, STRIDE, padding, groups=groups) + self.bias


class PreEncode(nn.Module):
    """Log-mel rows to encoder frames (NeMo ConvSubsampling, causal): frame k reads rows 8k - 14 .. 8k."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.factor, self.features = config.subsampling_factor, config.features
        self.channels, self.stages = config.subsampling_channels, int(math.log2(config.subsampling_factor))
        self.conv: list[nn.Module] = [StridedConv(1, self.channels), nn.ReLU()]
        for _ in range(self.stages - 1):
            self.conv += [StridedConv(1, self.channels), Linear(self.channels, self.channels), nn.ReLU()]
        self.out = Linear(self.channels * config.subsampled_features, config.d_model)

    def prepare(self) -> None:
        self._ramp = mx.arange(self.factor)
        mx.eval(self._ramp)

    def init_state(self, batch: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
        rows, bins, channels = [], self.features, 1
        for _ in range(self.stages):
            rows.append(mx.zeros((batch, 1, bins, channels), dtype))
            bins, channels = bins // STRIDE + 1, self.channels
        return tuple(rows)

    def step(self, mel: mx.array, rows: tuple[mx.array, ...], seen: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
        """(B, n * factor, F) -> (B, n, D). Before row 0 every convolution has zero rows of its own input."""
        rate, kept = self.factor, []
        x = self._real(mel, rate, seen)[..., None]
        for stage, row in enumerate(rows):
            if stage > 0:
                x = self._real(x, rate, seen)
            kept.append(_kept(x[:, -1:], x.shape[1] // rate))
            x = self._stage(stage, mx.concatenate([row, x], axis=1), 0, 0)
            rate //= STRIDE
        return self._flatten(x), tuple(kept)

    def whole(self, mel: mx.array) -> mx.array:
        """(B, T, F) -> (B, T', D), each stage halving T to T // 2 + 1; the last frame may be incomplete."""
        x = mel[..., None]
        for stage in range(self.stages):
            x = self._stage(stage, x, BEFORE, AFTER)
        return self._flatten(x)

    def _real(self, x: mx.array, rate: int, seen: mx.array) -> mx.array:
        """x (B, n * rate, ...), which ends at row `rate * (seen + n - 1)`: zero where that numbering is negative."""
        count, rest = x.shape[1], (1,) * (x.ndim - 2)
        ramp = self._ramp[:count] if count <= self.factor else mx.arange(count)
        first = (rate - 1) - rate * seen.reshape(-1, 1, *rest)
        return mx.where(ramp.reshape(count, *rest) >= first, x, 0.0)

    def _stage(self, stage: int, x: mx.array, before: int, after: int) -> mx.array:
        if stage == 0:
            return relu(self.conv[0](x, before, after))
        depthwise, pointwise = self.conv[3 * stage - 1], self.conv[3 * stage]
        return relu(pointwise(depthwise(x, before, after)))

    def _flatten(self, x: mx.array) -> mx.array:
        """(B, T, frequency, channels) -> (B, T, D), channel-major."""
        return self.out(x.transpose(0, 1, 3, 2).reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """x (..., D) and a normed x -> x + linear2(silu(linear1(normed))) / 2"""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        inner = config.d_model * config.ff_expansion_factor
        self.linear1 = Linear(config.d_model, inner, bias=False)
        self.linear2 = Linear(inner, config.d_model, bias=False)

    def __call__(self, x: mx.array, normed: mx.array) -> mx.array:
        return add_product(x, self.linear2, silu(self.linear1(normed)), 0.5)


class RelativeAttention(nn.Module):
    """Attention over the frame itself and the L frames before it (Dai et al. 2019; NeMo RelPositionMultiHeadAttention).

    The scores are `((q + u) . k + (q + v) . p) / sqrt(d)`. With `q' = q + u` the position part is
    `q' . p + (v - u) . p`, whose second term is a constant: `position_bias`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.scale = config.n_heads, config.head_dim, config.head_dim**-0.5
        self.linear_qkv = Linear(config.d_model, 3 * config.d_model, bias=False)
        self.linear_pos = Linear(config.d_model, config.d_model, bias=False)
        self.linear_out = Linear(config.d_model, config.d_model, bias=False)
        self.pos_bias_u = mx.zeros((self.heads, self.head_dim))
        self.pos_bias_v = mx.zeros((self.heads, self.head_dim))

    def prepare(self, table: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Distances' sinusoids (L + 1, D), furthest first -> position bias (heads, 1, L + 1); constants in `dtype`."""
        u, v = self.pos_bias_u.astype(mx.float32), self.pos_bias_v.astype(mx.float32)
        positions = self.linear_pos(table).astype(mx.float32) * self.scale
        positions = mx.contiguous(positions.reshape(-1, self.heads, self.head_dim).transpose(1, 2, 0))
        self._positions = positions.astype(dtype)
        self._content_bias = mx.pad(u.reshape(1, -1), [(0, 0), (0, 2 * u.size)]).astype(dtype)  # to the queries alone
        mx.eval(self._positions, self._content_bias)
        return ((v - u)[:, None] @ positions).astype(dtype)

    def __call__(self, x: mx.array, keys_values: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
        """x (B n, D), past (B, L, 2 D), bias (B, heads, n, L + 1) -> (B n, D), past."""
        mixed, keys_values = self.mix(x, keys_values, bias)
        return self.linear_out(mixed), keys_values

    def mix(self, x: mx.array, keys_values: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
        """A call without the last projection.

        The bias of query i and window slot r belongs to slot i + r of the L + n keys: -inf where none was seen.
        """
        batch, heads, steps, _ = bias.shape
        qkv = add_product(self._content_bias, self.linear_qkv, x)
        queries, new = mx.split(qkv, [x.shape[-1]], axis=-1)
        joint = mx.concatenate([keys_values, new.reshape(batch, steps, -1)], axis=1)
        keys, values = mx.split(joint.reshape(batch, -1, 2 * heads, self.head_dim).swapaxes(1, 2), 2, axis=1)
        queries = self._by_head(queries, batch, steps)
        mask = _skew(mx.addmm(bias, queries, self._positions))
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        if steps > 1:
            out = out.swapaxes(1, 2)
        return out.reshape(x.shape), _kept(joint[:, steps:], steps)

    def _by_head(self, x: mx.array, batch: int, steps: int) -> mx.array:
        """(B n, D) -> (B, heads, n, head_dim)"""
        if steps == 1:
            return x.reshape(batch, self.heads, 1, self.head_dim)
        return x.reshape(batch, steps, self.heads, self.head_dim).swapaxes(1, 2)


def _skew(bands: mx.array) -> mx.array:
    """(B, heads, n, window) -> (B, heads, n, window + n - 1): row i moves i places right, -inf elsewhere."""
    batch, heads, steps, window = bands.shape
    if steps == 1:
        return bands
    width = window + steps - 1
    padded = mx.pad(bands, [(0, 0), (0, 0), (0, 0), (0, steps)], constant_values=-math.inf)
    flat = padded.reshape(batch, heads, steps * (width + 1))
    return flat[..., : steps * width].reshape(batch, heads, steps, width)


class Convolution(nn.Module):
    """Pointwise to 2 D, GLU, causal depthwise convolution, LayerNorm (named `batch_norm`), SiLU, pointwise."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, self.kernel = config.d_model, config.conv_kernel_size
        self.pointwise_conv1 = Linear(width, 2 * width, bias=False)
        self.depthwise_conv = nn.Conv1d(width, width, self.kernel, groups=width, bias=False)
        self.batch_norm = nn.LayerNorm(width, eps=ENCODER_NORM_EPS)
        self.pointwise_conv2 = Linear(width, width, bias=False)

    def prepare(self) -> None:
        self._taps = taps_of(self.depthwise_conv.weight)
        mx.eval(self._taps)

    def __call__(
        self, x: mx.array, normed: mx.array, past: Sequence[mx.array]
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """x and a normed x (B n, D), the last kernel - 1 inputs (B, 1, D) -> (B n, D), those of the next call.

        Sums in float32.
        """
        batch = past[0].shape[0]
        value, gate = mx.split(self.pointwise_conv1(normed).reshape(batch, -1, 2 * x.shape[-1]), 2, axis=-1)
        mixed, past = causal_conv(value * mx.sigmoid(gate), past, self._taps)
        mixed = silu(self.batch_norm(mixed.reshape(x.shape))).astype(x.dtype)
        return add_product(x, self.pointwise_conv2, mixed), past


class ConformerLayer(nn.Module):
    """One block (Gulati et al. 2020; NeMo ConformerLayer)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        for name in ("feed_forward1", "self_att", "conv", "feed_forward2", "out"):
            self[f"norm_{name}"] = nn.LayerNorm(config.d_model, eps=ENCODER_NORM_EPS)
        self.feed_forward1 = FeedForward(config)
        self.self_attn = RelativeAttention(config)
        self.conv = Convolution(config)
        self.feed_forward2 = FeedForward(config)

    def __call__(
        self, x: mx.array, keys_values: mx.array, past: Sequence[mx.array], bias: mx.array
    ) -> tuple[mx.array, mx.array, tuple[mx.array, ...]]:
        """(B n, D) and this block's state -> (B n, D) and the state after it."""
        x = self.feed_forward1(x, self.norm_feed_forward1(x))
        mixed, keys_values = self.self_attn.mix(self.norm_self_att(x), keys_values, bias)
        x = add_product(x, self.self_attn.linear_out, mixed)
        x, after = self.conv(x, self.norm_conv(x), past)
        x = self.feed_forward2(x, self.norm_feed_forward2(x))
        return self.norm_out(x), keys_values, after


class ConformerEncoder(nn.Module):
    """Log-mel rows to encoder frames of width D, in the type of its norms (`precision.Types`); rows come in float32."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self._config = config
        self.pre_encode = PreEncode(config)
        self.layers = [ConformerLayer(config) for _ in range(config.n_layers)]

    @property
    def dtype(self) -> mx.Dtype:
        """What the encoder computes in."""
        return self.layers[0].norm_out.weight.dtype

    def prepare(self) -> None:
        """Everything that follows from weights and config alone, once."""
        self.pre_encode.prepare()
        table = _sinusoids(self._config.left_frames, self._config.d_model)
        for layer in self.layers:
            layer.conv.prepare()
        self._position_bias = mx.concatenate([layer.self_attn.prepare(table, self.dtype) for layer in self.layers])
        self._slots = mx.arange(self._config.left_frames + 1)
        mx.eval(self._position_bias, self._slots)

    def init_state(self, batch: int = 1) -> EncoderState:
        c, dtype = self._config, self.dtype
        kept = range(c.conv_kernel_size - 1)
        return EncoderState(
            seen=mx.zeros((batch,), mx.int32),
            rows=self.pre_encode.init_state(batch, dtype),
            keys_values=tuple(mx.zeros((batch, c.left_frames, 2 * c.d_model), dtype) for _ in self.layers),
            past=tuple(tuple(mx.zeros((batch, 1, c.d_model), dtype) for _ in kept) for _ in self.layers),
        )

    def step(self, mel: mx.array, state: EncoderState) -> tuple[mx.array, EncoderState]:
        """Rows (B, 8 n, F) -> (B, n, D), state; of a first push only row 7 and those after it are looked at."""
        x, rows = self.pre_encode.step(mel.astype(self.dtype), state.rows, state.seen)
        return self._blocks(x, state._replace(rows=rows))

    def whole(self, mel: mx.array) -> mx.array:
        """All rows (B, T, F) -> (B, T', D); T = 8 n - 7 gives n complete frames, otherwise the last lacks rows."""
        return self._blocks(self.pre_encode.whole(mel.astype(self.dtype)), self.init_state(mel.shape[0]))[0]

    def _blocks(self, x: mx.array, state: EncoderState) -> tuple[mx.array, EncoderState]:
        """(B, n, D) through all blocks, as rows (B n, D). What they share is computed for all of them at once."""
        steps, width = x.shape[1:]
        left, layers = self._config.left_frames, len(self.layers)
        slots = self._slots if steps == 1 else self._slots + mx.arange(steps)[:, None]
        known = slots >= left - state.seen[:, None, None, None]
        biases = mx.split(mx.where(known, self._position_bias, -math.inf), layers, axis=1)  # (B, heads, n, left + 1)
        new_keys_values, new_past = [], []
        rows = x.reshape(-1, width)
        for layer, old, kept, bias in zip(self.layers, state.keys_values, state.past, biases, strict=True):
            rows, keys_values, past = layer(rows, old, kept, bias)
            new_keys_values.append(keys_values)
            new_past.append(past)
        seen = state.seen + steps
        return rows.reshape(x.shape), EncoderState(seen, state.rows, tuple(new_keys_values), tuple(new_past))


def _sinusoids(left: int, width: int) -> mx.array:
    """(left + 1, width) for the distances left .. 0: sines on even, cosines on odd channels."""
    rates = ENCODER_POSITION_BASE ** (-np.arange(0, width, 2) / width)
    angles = np.arange(left, -1, -1)[:, None] * rates
    return mx.array(np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(left + 1, width).astype(np.float32))


class Perception(nn.Module):
    """16 kHz samples to encoder frames of width D and their projection to the LLM's width H, one per input frame."""

    def __init__(self, mel: MelConfig, encoder: EncoderConfig) -> None:
        super().__init__()
        self._mel = LogMel(mel, encoder.subsampling_factor)
        self.encoder = ConformerEncoder(encoder)
        self.proj = Linear(encoder.d_model, encoder.output_dim)

    @property
    def frame_samples(self) -> int:
        return self._mel.frame_samples

    def prepare(self) -> None:
        """Build all constants; call once after the weights are loaded (and quantised)."""
        prepare_linears(self)
        self._mel.prepare()
        self.encoder.prepare()

    def init_state(self, batch: int = 1) -> PerceptionState:
        return PerceptionState(self._mel.init_state(batch), self.encoder.init_state(batch))

    def step(self, samples: mx.array, state: PerceptionState) -> tuple[mx.array, mx.array, PerceptionState]:
        """Whole frames (B, n * frame_samples), state -> encoded (B, n, D), projected (B, n, H), state.

        A pure function of arrays; with n = 1 every shape is the same from the first frame on.
        """
        mel, tail = self._mel.step(samples, state.mel)
        encoded, encoder = self.encoder.step(mel, state.encoder)
        return encoded, self.proj(encoded), PerceptionState(tail, encoder)

    def whole(self, samples: mx.array) -> tuple[mx.array, mx.array]:
        """A whole recording (B, S), zero-padded to n whole frames -> encoded (B, n, D), projected (B, n, H)."""
        missing = -samples.shape[1] % self.frame_samples
        mel = self._mel.whole(mx.pad(samples, [(0, 0), (0, missing)]))
        encoded = self.encoder.whole(mel[:, : mel.shape[1] - self.encoder.pre_encode.factor])
        return encoded, self.proj(encoded)
