"""Mixture-of-Gaussians head of EAR-TTS and the code generation around it (NeMo `RVQEARTTSModel`).

Shapes: B conversations, G rows of guidance (1 without, 2 with), W width, Q codebooks of K rows, Z latent,
C mixture components of rank R.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from ..config import RMS_EPS, TtsConfig
from .activations import gated_gelu
from .linear import Linear, Product, product

GUMBEL_GUARD = 1e-8  # NeMo MoGHead: added inside both logarithms


class GatedMlp(nn.Module):
    """`down(gelu_tanh(gate(x)) * up(x))`, (..., W) -> (..., W); gate and up are one stacked projection."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * intermediate, bias=False)
        self.down_proj = Linear(intermediate, width, bias=False)

    def __call__(self, x: mx.array, multiply: Product = product) -> mx.array:
        return multiply(self.down_proj, gated_gelu(*mx.split(multiply(self.gate_up_proj, x), 2, axis=-1)))


class MogLayer(nn.Module):
    """`x + post_norm(mlp(pre_norm(x)))`, (..., W) -> (..., W)."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.pre_norm = nn.RMSNorm(width, RMS_EPS)
        self.mlp = GatedMlp(width, intermediate)
        self.post_norm = nn.RMSNorm(width, RMS_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.post_norm(self.mlp(self.pre_norm(x)))


def sampling_controls(guidance_scale: float, top_p: float, noise_scale: float, batch: int = 1) -> mx.array:
    """(B, 3): guidance scale, top-p (unbounded from 1 on: rounding must drop nothing) and noise scale.

    One array, so that a compiled trace serves every session's settings.
    """
    return mx.array([[guidance_scale, top_p if top_p < 1 else math.inf, noise_scale]] * batch, mx.float32)


def gumbel_noise(uniform: mx.array) -> mx.array:
    """Uniform draws in [0, 1) -> Gumbel noise, any shape."""
    return -mx.log(-mx.log(uniform + GUMBEL_GUARD) + GUMBEL_GUARD)


def keep_ranked(ranked: mx.array, top_p: mx.array) -> mx.array:
    """Logits in ascending order (B, C), top_p (B, 1) -> which ones top-p keeps, bool (B, C); always the last.

    Summed from above: the sum from below rounds differently from the reference where a mass meets `top_p` exactly.
    """
    above = mx.cumsum(mx.softmax(ranked, axis=-1), axis=-1, reverse=True, inclusive=False)
    return above < top_p


def component_product(x: mx.array, matrices: mx.array, component: mx.array) -> mx.array:
    """x (B, 1, I) times the transposed matrix (O, I) that `component` (B,) picks of (C, O, I) -> (B, 1, O)."""
    if matrices.dtype != x.dtype:  # widen the few rows in use, never all C matrices
        return x @ mx.take(matrices, component, axis=0).astype(x.dtype).swapaxes(-1, -2)
    return mx.gather_mm(x, matrices.swapaxes(-1, -2), lhs_indices=_each(x), rhs_indices=component)


def _each(x: mx.array) -> mx.array:
    """0 .. B-1 as a constant: left to itself, a gathered product launches a kernel to make it."""
    return mx.array(list(range(x.shape[0])), mx.uint32)


class MogHead(nn.Module):
    """One pass: hidden rows (G*B, W) -> a latent (B, Z)."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        mog, width, latent = config.mog, config.hidden_size, config.latent_size
        layers = [MogLayer(width, mog.intermediate_size) for _ in range(mog.num_layers)]
        self.mlp_stack = [*layers, nn.RMSNorm(width, RMS_EPS)]
        self.proj_logits = Linear(width, mog.num_predictions, bias=False)
        self.proj_mus = nn.Linear(width, mog.num_predictions * mog.low_rank, bias=False)
        self.proj_logs = Linear(width, 1, bias=False)
        self.proj_else = Linear(width, latent, bias=False)
        self.low_mat = mx.zeros((mog.num_predictions, latent, mog.low_rank))
        self._min_log_std = mog.min_log_std
        self._rank = mog.low_rank

    def __call__(self, x: mx.array, gumbel: mx.array, normal: mx.array, controls: mx.array) -> mx.array:
        """x (G*B, W), gumbel (B, C), normal (B, Z), controls (B, 3) -> z (B, Z)."""
        mean, log_std = self.distribution(x, gumbel, controls)
        return mean + mx.exp(log_std) * controls[:, 2:] * normal

    def distribution(self, x: mx.array, gumbel: mx.array, controls: mx.array) -> tuple[mx.array, mx.array]:
        """Mean (B, Z) and log standard deviation (B, 1) of the component that is drawn; arguments as in a call."""
        for layer in self.mlp_stack:
            x = layer(x)
        x = guided(x, controls)
        component = self._draw(self.proj_logits(x), gumbel, controls[:, 1:2])
        mu = component_product(self._low_rank(x[:, None], component), self.low_mat, component).squeeze(1)
        log_std = mx.maximum(self.proj_logs(x), self._min_log_std)
        return mu * mx.exp(log_std) + self.proj_else(x), log_std

    def _draw(self, logits: mx.array, gumbel: mx.array, top_p: mx.array) -> mx.array:
        """One component among those that top-p keeps, by Gumbel-max: (B, C) -> (B,).

        Equal logits rank by index (a stable sort); the log-softmax of the rule only shifts all scores.
        """
        order = mx.argsort(logits, axis=-1)
        ranked = mx.take_along_axis(logits, order, axis=-1)
        scores = ranked + mx.take_along_axis(gumbel, order, axis=-1)
        scores = mx.where(keep_ranked(ranked, top_p), scores, -mx.inf)
        pick = mx.argmax(scores, axis=-1, keepdims=True)
        return mx.take_along_axis(order, pick, axis=-1).squeeze(-1)

    def _low_rank(self, x: mx.array, component: mx.array) -> mx.array:
        """The picked component's rows of `proj_mus`: (B, 1, W) -> (B, 1, R). Never the full C*R product."""
        proj = self.proj_mus
        if not isinstance(proj, nn.QuantizedLinear):
            return component_product(x, proj.weight.reshape(-1, self._rank, proj.weight.shape[-1]), component)
        packed, scales = (a.reshape(-1, self._rank, a.shape[-1]) for a in (proj.weight, proj.scales))
        biases = proj.get("biases")  # affine modes only
        return mx.gather_qmm(
            x,
            packed,
            scales,
            None if biases is None else biases.reshape(scales.shape),
            lhs_indices=_each(x),
            rhs_indices=component,
            group_size=proj.group_size,
            bits=proj.bits,
            mode=proj.mode,
        )


def guided(x: mx.array, controls: mx.array) -> mx.array:
    """Classifier-free guidance `c + scale (c - u)`: (2B, W) -> (B, W); without a second row x itself."""
    batch = controls.shape[0]
    if x.shape[0] == batch:
        return x
    conditioned, free = mx.split(x, 2)
    return conditioned + controls[:, :1] * (conditioned - free)


class Codebooks:
    """The residual codebooks (Q, K, Z) and their row norms, float32, evaluated at once; not a module."""

    def __init__(self, rvq_embs: mx.array) -> None:
        count = rvq_embs.shape[0]
        self._flat = rvq_embs.reshape(-1, rvq_embs.shape[-1])
        self._size = rvq_embs.shape[1]
        # A split shares the memory of the whole, an integer index would copy it.
        self.books = [book.squeeze(0).astype(mx.float32) for book in mx.split(rvq_embs, count)]
        self.columns = [book.T for book in self.books]
        self.norms = [mx.sum(book * book, axis=-1)[None] for book in self.books]
        self.slots = [mx.arange(count) == q for q in range(count)]
        mx.eval(self.books, self.columns, self.norms, self.slots)

    def embed(self, codes: mx.array) -> mx.array:
        """Codes (..., Q) -> the sum of their rows (..., Z); a code of K or above adds nothing."""
        known = codes < self._size
        rows = mx.where(known, codes, 0) + mx.arange(codes.shape[-1]) * self._size
        return mx.sum(mx.where(known[..., None], self._flat[rows].astype(mx.float32), 0), axis=-2)

    def nearest(self, q: int, residual: mx.array) -> tuple[mx.array, mx.array]:
        """The row of codebook q nearest to `residual` (B, Z): its code (B, 1) and itself (B, Z)."""
        distance = mx.addmm(self.norms[q], residual, self.columns[q], alpha=-2.0)
        code = mx.argmin(distance, axis=-1, keepdims=True)
        return code, mx.take_along_axis(self.books[q], code, axis=0)

    def as_row(self, codes: list[mx.array]) -> mx.array:
        """Q codes (B, 1) -> (B, Q). Selects fuse into a few kernels; a concatenation would launch one per code."""
        row = codes[0]
        for slot, code in zip(self.slots[1:], codes[1:], strict=True):
            row = mx.where(slot, code, row)
        return row


class CodeGenerator:
    """All codes of one frame by masked generation: a pure function of arrays around `MogHead`, to be compiled."""

    def __init__(self, head: MogHead, embed_code: nn.Module, books: Codebooks, pass_counts: tuple[int, ...]) -> None:
        self.head, self.embed_code, self.books, self.pass_counts = head, embed_code, books, pass_counts

    def __call__(
        self, hidden: mx.array, uniform: mx.array, normal: mx.array, controls: mx.array
    ) -> tuple[mx.array, mx.array]:
        """hidden (G*B, 1, W) and draws -> codes (B, Q), latent (B, Z).

        Draws: `uniform` (B, passes, C), `normal` (B, passes, Z); `controls` (B, 3). Conditioned rows come first.
        `latent` is the sum of the chosen rows, from which the next frame is embedded.
        """
        batch, width = uniform.shape[0], hidden.shape[-1]
        hidden = hidden.reshape(-1, batch, width)
        gumbel = gumbel_noise(uniform)
        codes: list[mx.array] = []
        latent: mx.array | None = None
        for i, count in enumerate(self.pass_counts):
            x = hidden if latent is None else hidden + self.embed_code(latent)
            residual = self.head(x.reshape(-1, width), gumbel[:, i], normal[:, i], controls)
            for _ in range(count):
                code, row = self.books.nearest(len(codes), residual)
                codes.append(code)
                residual = residual - row
                latent = row if latent is None else latent + row
        assert latent is not None
        return self.books.as_row(codes), latent
