"""Codec: 22.05 kHz speech <-> Q codes per 80 ms frame; causal ConvNeXt stages around a short Fourier transform.

Rules: networks.md section 6 (NeMo `RVQVAEModel`). Everything is float32. K codebook size, Z latent width, C the width
of a stage, P = S // hop the rows at the Fourier transform's rate (441 a frame).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import CODEC_MAGNITUDE_LIMIT, CODEC_NORM_EPS, CodecConfig
from ..errors import InputError
from .activations import gelu
from .causal_conv import causal_conv, taps_of
from .linear import Linear, prepare_linears

EXPANSION = 4  # NeMo ConvNeXtBlock: inner width of a block over its width


class CodecState(NamedTuple):
    """What one stream carries: per block its last inputs (B, kernel - 1, C); the last raw inverse-Fourier frames.

    `frames` (B, overlaps, slot) is what the unfinished sums and the delayed samples of the output are made of.
    """

    blocks: tuple[mx.array, ...]
    frames: mx.array


class Fourier:
    """Constants of the n_fft-point transform at hop: matrices, window, and where a frame's samples fall in the stream.

    The stream leads by `lead` zeros so that the trim of a centred transform is whole hops; here those zeros stand in
    every frame (a slot of lead + n_fft + rest samples), and the overlap-add delivers the lead by itself.
    """

    def __init__(self, config: CodecConfig) -> None:
        n_fft, hop = config.n_fft, config.hop_length
        self.hop = hop
        self.trim = (n_fft - hop) // 2
        self.lead = -self.trim % hop
        self.slot = hop * math.ceil((self.lead + n_fft) / hop)
        self.overlaps = self.slot // hop - 1
        n, k = np.arange(n_fft), np.arange(config.bins)[:, None]
        window = 0.5 - 0.5 * np.cos(2 * np.pi * n / n_fft)  # periodic Hann
        angle = 2 * np.pi * k * n / n_fft
        weight = np.where((k == 0) | (k == n_fft // 2), 1, 2) / n_fft
        inverse = np.concatenate([weight * np.cos(angle), -weight * np.sin(angle)])
        inverse[[config.bins, -1]] = 0  # imaginary parts of the first and last bin
        around = (self.lead, self.slot - self.lead - n_fft)
        # Dividing by the constant middle part of the overlap-added w^2 is folded into the second factor w.
        power = (window**2).sum() / hop
        self.forward = mx.array((window * np.concatenate([np.cos(angle), -np.sin(angle)])).T, mx.float32)
        self.inverse = mx.array(np.pad(inverse, ((0, 0), around)), mx.float32)
        self.window = mx.array(np.pad(window, around), mx.float32)
        self.windows = self.window.split(self.slot // hop)
        self.floors = [-part for part in self.windows]
        self.gains = mx.array(np.pad(window / power, around), mx.float32).split(self.slot // hop)
        self.real = mx.array([[True], [False]])  # rows of (2, bins): real, imaginary

    @property
    def arrays(self) -> list[mx.array]:
        return [self.forward, self.inverse, self.window, *self.windows, *self.floors, *self.gains, self.real]

    def analyse(self, samples: mx.array) -> mx.array:
        """samples (B, S) -> (B, P, 2 bins): real parts, then imaginary parts."""
        n_fft = self.forward.shape[0]
        padded = mx.contiguous(mx.pad(samples, [(0, 0), (self.trim, self.trim)]))
        batch, length = padded.shape
        shape = (batch, (length - n_fft) // self.hop + 1, n_fft)
        return mx.as_strided(padded, shape, (length, self.hop, 1)) @ self.forward

    def synthesise(self, polar: mx.array) -> mx.array:
        """polar (B, P, 2 bins) magnitude logits, then phases -> raw frames (B, P, slot)."""
        batch, rows, width = polar.shape
        shape = (batch, rows, 2, width // 2)
        polar = polar.reshape(shape)
        # The limited magnitude 100 exp(-softplus(log 100 - m)) is 100 sigmoid(m - log 100).
        logit = mx.broadcast_to(polar[:, :, :1], shape) - math.log(CODEC_MAGNITUDE_LIMIT)
        phase = mx.broadcast_to(polar[:, :, 1:], shape)
        magnitude = CODEC_MAGNITUDE_LIMIT * mx.sigmoid(logit)
        spectrum = magnitude * mx.where(self.real, mx.cos(phase), mx.sin(phase))
        return spectrum.reshape(batch, rows, width) @ self.inverse

    def overlap_add(self, frames: mx.array) -> mx.array:
        """raw frames (B, overlaps + P, slot) -> (B, P hop): limited, windowed, summed, over the mean envelope."""
        rows = frames.shape[1] - self.overlaps
        total: mx.array | None = None
        for age in range(self.overlaps, -1, -1):
            first, at = self.overlaps - age, age * self.hop
            part = frames[:, first : first + rows, at : at + self.hop]
            part = mx.minimum(mx.maximum(part, self.floors[age]), self.windows[age]) * self.gains[age]
            total = part if total is None else total + part
        assert total is not None
        return total.reshape(frames.shape[0], rows * self.hop)


class ConvNextBlock(nn.Module):
    """Causal ConvNeXt block: x + pwconv2(gelu(pwconv1(norm(dwconv(x))))), (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(width, width, kernel, groups=width)
        self.norm = nn.LayerNorm(width, eps=CODEC_NORM_EPS)
        self.pwconv1 = Linear(width, EXPANSION * width)
        self.pwconv2 = Linear(EXPANSION * width, width)

    def prepare(self) -> list[mx.array]:
        self._taps = taps_of(self.dwconv.weight)
        return self._taps

    def no_past(self, batch: int) -> mx.array:
        """What precedes a stream: (B, kernel - 1, C) zeros."""
        width, kernel, _ = self.dwconv.weight.shape
        return mx.zeros((batch, kernel - 1, width))

    def __call__(self, x: mx.array, past: mx.array) -> tuple[mx.array, mx.array]:
        """x (B, T, C), past (B, kernel - 1, C) -> output (B, T, C), the past of the next call."""
        y, (past,) = causal_conv(x, (past,), self._taps, self.dwconv.bias)
        y = self.norm(y.reshape(-1, y.shape[-1]))
        return x + self.pwconv2(gelu(self.pwconv1(y))).reshape(x.shape), past


class Upsample(nn.Module):
    """Transposed convolution with stride = kernel = r, no bias: (B, T, in) -> (B, r T, out); weight (out, r, in)."""

    def __init__(self, width_in: int, width_out: int, rate: int) -> None:
        super().__init__()
        self.weight = mx.zeros((width_out, rate, width_in))

    def prepare(self) -> list[mx.array]:
        # The weight becomes a view of the matrix, so that the tensor is in memory once.
        width_out, rate, width_in = self.weight.shape
        by_row = mx.contiguous(self.weight.astype(mx.float32).transpose(1, 0, 2))
        self._matrix = by_row.reshape(rate * width_out, width_in).T
        self.weight = by_row.transpose(1, 0, 2)
        return [self._matrix, self.weight]

    def __call__(self, x: mx.array) -> mx.array:
        batch, rows, width_in = x.shape
        width_out, rate, _ = self.weight.shape
        return (x.reshape(-1, width_in) @ self._matrix).reshape(batch, rows * rate, width_out)


class Downsample(nn.Module):
    """Convolution with stride = kernel = r, no bias: (B, r T, in) -> (B, T, out); weight (out, r, in)."""

    def __init__(self, width_in: int, width_out: int, rate: int) -> None:
        super().__init__()
        self.weight = mx.zeros((width_out, rate, width_in))

    def __call__(self, x: mx.array) -> mx.array:
        batch, rows, width_in = x.shape
        width_out, rate, _ = self.weight.shape
        return x.reshape(batch, rows // rate, rate * width_in) @ self.weight.reshape(width_out, -1).T


class Encoder(nn.Module):
    """spectrum (B, P, 2 bins) -> latents (B, T, Z)."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in config.channel_multipliers]
        self.layers: list[nn.Module] = [Linear(2 * config.bins, widths[0], bias=False)]
        for width, following, rate in zip(
            widths, [*widths[1:], config.latent_dim], config.downsample_rates, strict=True
        ):
            self.layers += [ConvNextBlock(width, config.block_kernel_size) for _ in range(config.blocks_per_stage)]
            self.layers.append(Downsample(width, following, rate))

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x, layer.no_past(x.shape[0]))[0] if isinstance(layer, ConvNextBlock) else layer(x)
        return x


class Decoder(nn.Module):
    """latents (B, T, Z) -> magnitude logits and phases (B, P, 2 bins): the encoder mirrored."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in reversed(config.channel_multipliers)]
        rates = config.downsample_rates[::-1]
        self.layers: list[nn.Module] = []
        for before, width, rate in zip([config.latent_dim, *widths[:-1]], widths, rates, strict=True):
            self.layers.append(Upsample(before, width, rate))
            self.layers += [ConvNextBlock(width, config.block_kernel_size) for _ in range(config.blocks_per_stage)]
        self.layers.append(Linear(widths[-1], 2 * config.bins, bias=False))

    def no_past(self, batch: int) -> tuple[mx.array, ...]:
        return tuple(layer.no_past(batch) for layer in self.layers if isinstance(layer, ConvNextBlock))

    def __call__(self, x: mx.array, past: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
        new: list[mx.array] = []
        for layer in self.layers:
            if isinstance(layer, ConvNextBlock):
                x, kept = layer(x, past[len(new)])
                new.append(kept)
            else:
                x = layer(x)
        return x, tuple(new)


class Codebooks(nn.Module):
    """Q codebooks (K, Z) of the residual quantiser."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.mus_list = [mx.zeros((config.codebook_size, config.latent_dim)) for _ in range(config.num_quantizers)]

    def prepare(self) -> list[mx.array]:
        # The codebooks become views of the table, so that they are in memory once.
        self._table = mx.stack([book.astype(mx.float32) for book in self.mus_list])
        mx.eval(self._table)
        self.mus_list = list(self._table)
        self._rows = mx.arange(len(self.mus_list), dtype=mx.uint32)
        return [self._table, *self.mus_list, self._rows]

    def lookup(self, codes: mx.array) -> mx.array:
        """codes (B, T, Q) below K -> latents (B, T, Z), the sum over the codebooks."""
        return self._table[self._rows, codes.astype(mx.uint32)].sum(axis=2)

    def nearest(self, latents: mx.array) -> mx.array:
        """latents (B, T, Z) -> codes (B, T, Q) int32: each codebook's nearest row to what is left."""
        codes, rest = [], latents
        for book in self.mus_list:
            codes.append(mx.argmin((book * book).sum(axis=1) - 2 * (rest @ book.T), axis=-1))
            rest = rest - book[codes[-1]]
        return mx.stack(codes, axis=-1).astype(mx.int32)


class Codec(nn.Module):
    """The whole codec. `encoder=False` leaves the encoder out: a conversation never needs it.

    Source: networks.md section 6; NeMo `RVQVAEModel` (streaming form: its `CausalConv1dCache`, without flush).
    """

    def __init__(self, config: CodecConfig, encoder: bool = True) -> None:
        super().__init__()
        self.config = config
        if encoder:
            self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.prvq = Codebooks(config)
        self._fourier = Fourier(config)

    def prepare(self) -> None:
        """Build what is derived from weights and config; call once, after the weights are loaded."""
        prepare_linears(self)
        built = [*self._fourier.arrays, *self.prvq.prepare()]
        for module in self.modules():
            if isinstance(module, ConvNextBlock | Upsample):
                built += module.prepare()
        mx.eval(built)

    def encode(self, samples: mx.array) -> mx.array:
        """samples (B, S) float32 in whole frames -> latents (B, T, Z). InputError on a partial frame or no encoder."""
        frame = self.config.frame_samples
        if "encoder" not in self:
            raise InputError("This codec was loaded without its encoder.", "Load it with encoder=True.")
        if samples.shape[1] == 0 or samples.shape[1] % frame:
            raise InputError(f"{samples.shape[1]} samples are not whole frames of {frame}.", "Pad them with zeros.")
        return self.encoder(self._fourier.analyse(samples))

    def quantise(self, latents: mx.array) -> mx.array:
        """latents (B, T, Z) -> codes (B, T, Q) int32."""
        return self.prvq.nearest(latents)

    def dequantise(self, codes: mx.array) -> mx.array:
        """codes (B, T, Q), none of them a control code -> latents (B, T, Z)."""
        return self.prvq.lookup(codes)

    def whole(self, codes: mx.array) -> mx.array:
        """codes (B, T, Q) -> samples (B, S) of the offline decode, centred and without the stream's lag."""
        batch, fourier = codes.shape[0], self._fourier
        polar, _ = self.decoder(self.dequantise(codes), self.decoder.no_past(batch))
        frames = fourier.synthesise(polar)
        edge = mx.zeros((batch, fourier.overlaps, fourier.slot))
        total = fourier.overlap_add(mx.concatenate([edge, frames, edge], axis=1))
        # A frame equal to w stays w and is multiplied by it: the same sum gives the true envelope, edges included.
        ones = mx.broadcast_to(fourier.window, frames.shape)
        envelope = fourier.overlap_add(mx.concatenate([edge, ones, edge], axis=1))
        lag = fourier.trim + fourier.lead
        end = lag + frames.shape[1] * fourier.hop
        return total[:, lag:end] / envelope[:, lag:end]

    def init_state(self, batch: int = 1) -> CodecState:
        """The state before the first frame of `batch` streams."""
        frames = mx.zeros((batch, self._fourier.overlaps, self._fourier.slot))
        return CodecState(self.decoder.no_past(batch), frames)

    def step(self, codes: mx.array, state: CodecState) -> tuple[mx.array, CodecState]:
        """codes (B, T, Q), any T >= 1, none of them a control code -> samples (B, T frame_samples), next state.

        The stream lags `whole` by trim + lead (8) samples; it is divided by the envelope's constant middle part.
        """
        fourier = self._fourier
        polar, blocks = self.decoder(self.dequantise(codes), state.blocks)
        frames = mx.concatenate([state.frames, fourier.synthesise(polar)], axis=1)
        samples = fourier.overlap_add(frames)
        last = frames[:, -fourier.overlaps :]
        if codes.shape[1] > 1:  # views of one frame are small; those of many would keep large buffers alive
            blocks, last = tuple(mx.contiguous(part) for part in blocks), mx.contiguous(last)
        return samples, CodecState(blocks, last)
