"""Mamba-2 mixer: one position as a recurrence, many by products of matrices.

Dao and Gu 2024, arXiv 2405.21060. N = SSM state size, G = groups, R = heads per group, P = Mamba head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config import LlmConfig
from .activations import silu, silu_of_rows
from .causal_conv import causal_conv, taps_of
from .linear import Linear, Product, product

# Whether a head's exponentials are computed again for each of its P N states: a GPU then starts one kernel less.
ONE_KERNEL = mx.default_device().type == mx.gpu
# Positions of one block of the scan: on a GPU few passes over the state count, on a CPU the work in its square part.
CHUNK = 64 if mx.default_device().type == mx.gpu else 16


class MambaState(NamedTuple):
    """`conv`: the last k - 1 convolution inputs, oldest first, each (B, 1, channels) in the LLM's type (apart, so that
    a step moves none of them); `ssm` (B, heads, P, N) float32."""

    conv: tuple[mx.array, ...]
    ssm: mx.array


class MambaMixer(nn.Module):
    """Mamba-2 with gated group RMS norm; convolution, dt, state and gating in float32 (HF NemotronHMamba2Mixer)."""

    def __init__(self, config: LlmConfig) -> None:
        super().__init__()
        self._config = config
        inner, channels, heads = config.mamba_inner, config.conv_dim, config.mamba_num_heads
        bias = config.use_bias or config.mamba_proj_bias
        self.in_proj = Linear(config.hidden_size, inner + channels + heads, bias=bias)
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels, bias=config.use_conv_bias)
        self.dt_bias = mx.zeros((heads,))
        self.A_log = mx.zeros((heads,))
        self.D = mx.zeros((heads,))
        self.norm = nn.RMSNorm(inner, config.norm_eps)
        self.out_proj = Linear(inner, config.hidden_size, bias=bias)

    def prepare(self) -> None:
        """Build the float32 constants that no step should compute again."""
        grouped, head = (self._config.n_groups, -1), self._config.mamba_head_dim
        wide = [a.astype(mx.float32) for a in (self.A_log, self.dt_bias, self.D, self.norm.weight)]
        self._rate, self._dt_bias = -mx.exp(wide[0]), wide[1]
        by_head = (self._config.n_groups, -1, 1, 1)
        self._by_head = self._dt_bias.reshape(by_head), self._rate.reshape(by_head)
        self._skip = mx.repeat(wide[2], head).reshape(grouped)
        self._gain = wide[3].reshape(grouped)
        self._taps = taps_of(self.conv1d.weight)
        bias = self.conv1d.bias if "bias" in self.conv1d else mx.zeros(self.conv1d.weight.shape[:1])
        self._conv_bias = bias.astype(mx.float32)
        mx.eval(self._rate, self._dt_bias, self._skip, self._gain, self._taps, self._conv_bias, *self._by_head)

    def init_state(self, batch: int, dtype: mx.Dtype) -> MambaState:
        c = self._config
        conv = tuple(mx.zeros((batch, 1, c.conv_dim), dtype) for _ in range(c.conv_kernel - 1))
        return MambaState(conv, mx.zeros((batch, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size)))

    def step(self, x: mx.array, state: MambaState) -> tuple[mx.array, MambaState]:
        """x (B, T, H) or, as rows, (B T, H) -> the same shape, and the state after the last position."""
        mixed, state = self.mix(x, state)
        return self.out_proj(mixed), state

    def mix(self, x: mx.array, state: MambaState, multiply: Product = product) -> tuple[mx.array, MambaState]:
        """A step without its last projection."""
        c = self._config
        batch, inner, size = state.ssm.shape[0], c.mamba_inner, c.n_groups * c.ssm_state_size
        projected = multiply(self.in_proj, x).reshape(batch, -1, inner + c.conv_dim + c.mamba_num_heads)
        gate, channels, dt = mx.split(projected, [inner, inner + c.conv_dim], axis=-1)
        mixed, conv = causal_conv(channels, state.conv, self._taps, self._conv_bias)
        one = channels.shape[1] == 1
        scan, activate = (_scan_one, silu) if one else (_scan_many, silu_of_rows)
        times = self._one_time_step(dt) if one else self._time_steps(dt, self._dt_bias, self._rate)
        value, key, query = mx.split(activate(mixed), [inner, inner + size], axis=-1)
        read, ssm = scan(value, key, query, *times, state.ssm, c.n_groups)
        gate, value = gate.reshape(read.shape).astype(mx.float32), value.reshape(read.shape)
        out = (read + self._skip * value) * activate(gate)
        out = (mx.fast.rms_norm(out, None, c.norm_eps) * self._gain).astype(x.dtype)
        return out.reshape(*x.shape[:-1], inner), MambaState(conv, ssm)

    def _one_time_step(self, dt: mx.array) -> tuple[mx.array, mx.array]:
        """dt (B, 1, heads) -> the step and the decay itself, each (B, G, R, 1, 1)."""
        by_head = (dt.shape[0], *self._by_head[0].shape)
        if ONE_KERNEL:
            dt, log_decay = self._time_steps(dt.reshape(by_head), *self._by_head)
            return dt, mx.exp(log_decay)
        # Both from one kernel, which the views after it keep apart from the update.
        dt, log_decay = self._time_steps(dt, self._dt_bias, self._rate)
        both = mx.where(mx.array([True, False]).reshape(2, 1, 1, 1), dt, mx.exp(log_decay))
        dt, decay = (part.reshape(by_head) for part in mx.split(both, 2))
        return dt, decay

    def _time_steps(self, dt: mx.array, bias: mx.array, rate: mx.array) -> tuple[mx.array, mx.array]:
        """dt as projected, one a head -> the steps, positive and within the limit, and the logarithm of the decay."""
        dt = mx.logaddexp(dt.astype(mx.float32) + bias, 0.0)
        low, high = self._config.time_step_limit or (0.0, math.inf)
        if low > 0:
            dt = mx.maximum(dt, low)
        if high < math.inf:
            dt = mx.minimum(dt, high)
        return dt, dt * rate


def _scan_one(
    value: mx.array, key: mx.array, query: mx.array, dt: mx.array, decay: mx.array, ssm: mx.array, groups: int
) -> tuple[mx.array, mx.array]:
    """One position of the recurrence `s = decay s + dt value key`; shapes as in `_scan_many`, T = 1.

    But for dt and decay (B, G, R, 1, 1).
    """
    batch, heads, width, size = ssm.shape
    by_group, one = (batch, groups, heads // groups), (batch, groups, 1, 1)
    new = decay * ssm.reshape(*by_group, width, size)
    new = new + dt * value.reshape(*by_group, width, 1) * key.reshape(*one, size)
    read = new.reshape(batch, groups, -1, size) @ query.reshape(batch, groups, size, 1)
    return read.reshape(batch, 1, groups, -1), new.reshape(ssm.shape)


def _scan_many(
    value: mx.array, key: mx.array, query: mx.array, dt: mx.array, log_decay: mx.array, ssm: mx.array, groups: int
) -> tuple[mx.array, mx.array]:
    """value (B, T, heads P), key and query (B, T, G N), dt and log_decay (B, T, heads), ssm (B, heads, P, N)
    -> what the queries read (B, T, G, R P), state; equal to `_scan_one` position by position.

    Mamba-2's state space duality: matrix products inside K chunks of L positions, the recurrence only across chunks.
    """
    (batch, total, _), (_, _, width, size) = value.shape, ssm.shape
    value = value.reshape(batch, total, groups, -1, width)
    key, query = (a.reshape(batch, total, groups, size) for a in (key, query))
    dt, log_decay = (a.reshape(batch, total, groups, -1) for a in (dt, log_decay))
    heads = value.shape[3]
    ssm = ssm.reshape(batch, groups, heads, width, size)
    count = -(-total // CHUNK)
    length = -(-total // count)

    def chunked(a: mx.array, *order: int) -> mx.array:
        """(B, T, ...) -> (B, K, L, ...) permuted; padding neither decays (0 = log 1) nor adds to the state."""
        padding = [(0, 0), (0, count * length - total)] + [(0, 0)] * (a.ndim - 2)
        return mx.pad(a, padding).reshape(batch, count, length, *a.shape[2:]).transpose(0, 1, *order)

    value = chunked(dt[..., None] * value, 3, 4, 2, 5)  # (B, K, G, R, L, P)
    key, query = chunked(key, 3, 2, 4), chunked(query, 3, 2, 4)  # (B, K, G, L, N)
    steps = chunked(log_decay, 3, 4, 2)  # (B, K, G, R, L)
    # decay from position s to t: sums of their own, since differences of running sums would lose digits
    spans = mx.cumsum(steps[..., None] * mx.tri(length, length, -1), axis=-2)  # (B, K, G, R, t, s)
    decay = mx.exp(spans) * mx.tri(length, length)
    # Transposes are laid out: MLX's reference BLAS on Linux takes half the time for it.
    reads = (query @ mx.contiguous(key.swapaxes(-1, -2)))[:, :, :, None] * decay @ value  # (B, K, G, R, L, P)
    left = (value * decay[..., -1, :, None]).swapaxes(-1, -2).reshape(batch, count, groups, heads * width, length) @ key
    left = left.reshape(batch, count, *ssm.shape[1:])  # (B, K, G, R, P, N): what a chunk adds to the state
    since = mx.exp(mx.cumsum(steps, axis=-1))[..., None]  # (B, K, G, R, L, 1): decay since the chunk's start
    states = [ssm]
    for chunk in range(count):
        states.append(since[:, chunk, :, :, -1:] * states[-1] + left[:, chunk])
    old = mx.stack(states[:-1], axis=1).reshape(batch, count, groups, heads * width, -1)
    old = (query @ mx.contiguous(old.swapaxes(-1, -2))).reshape(batch, count, groups, length, heads, width)
    reads = (reads + since * old.swapaxes(3, 4)).transpose(0, 1, 4, 2, 3, 5)  # (B, K, L, G, R, P)
    reads = reads.reshape(batch, count * length, groups, heads * width)[:, :total]
    return reads, states[-1].reshape(batch, -1, width, size)
