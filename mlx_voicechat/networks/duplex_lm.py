"""Duplex LLM: Nemotron-H on summed text, audio and function channels, two heads on one hidden state.

Nemotron-H (arXiv 2504.03624), Mamba-2 (Dao and Gu 2024, arXiv 2405.21060); channels and heads as in NeMo speechlm2.
N = SSM state size, G = groups, R = heads per group, P = Mamba head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from threadpoolctl import threadpool_limits

from ..config import LlmConfig
from .activations import relu, silu, silu_of_rows
from .cache import BLOCK, KvCache
from .causal_conv import causal_conv, taps_of
from .linear import Linear, Product, add_product, numpy_is_faster, numpy_product, prepare_linears, product

ONE_MASK = mx.default_device().type == mx.gpu  # whose kernels know a causal mask, and pass over what it hides
QUERY_BLOCK = 64  # else positions that attend at once: keys after the last of them are never looked at
# Positions of one block of the scan: on a GPU few passes over the state count, on a CPU the work in its square part.
CHUNK = 64 if mx.default_device().type == mx.gpu else 16


class MambaState(NamedTuple):
    """`conv`: the last k - 1 convolution inputs, oldest first, each (B, 1, channels) in the LLM's type (apart, so that
    a step moves none of them); `ssm` (B, heads, P, N) float32."""

    conv: tuple[mx.array, ...]
    ssm: mx.array


class LlmState(NamedTuple):
    """One conversation: a MambaState per Mamba layer (never changed in place), a KvCache per attention layer (is).

    Or several that step together: B rows in the one, `CacheRows` for the other.
    """

    mamba: tuple[MambaState, ...]
    caches: tuple[KvCache, ...]

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that a frame's evaluation must cover."""
        mamba = [array for state in self.mamba for array in (*state.conv, state.ssm)]
        return mamba + [array for cache in self.caches for array in cache.arrays]

    def copy(self) -> LlmState:
        """A state that goes on independently of this one."""
        return LlmState(self.mamba, tuple(cache.copy() for cache in self.caches))


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
        by_head = (self._config.n_groups, -1, 1, 1)  # as `_scan_one` has them: all of it is then one kernel
        self._one = self._dt_bias.reshape(by_head), self._rate.reshape(by_head)
        self._skip = mx.repeat(wide[2], head).reshape(grouped)
        self._gain = wide[3].reshape(grouped)
        self._taps = taps_of(self.conv1d.weight)
        bias = self.conv1d.bias if "bias" in self.conv1d else mx.zeros(self.conv1d.weight.shape[:1])
        self._conv_bias = bias.astype(mx.float32)
        mx.eval(self._rate, self._dt_bias, self._skip, self._gain, self._taps, self._conv_bias, *self._one)

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
        scan, activate, constants = _scan_many, silu_of_rows, (self._dt_bias, self._rate)
        if channels.shape[1] == 1:
            scan, activate, constants = _scan_one, silu, self._one
            dt = dt.reshape(batch, c.n_groups, -1, 1, 1)
        value, key, query = mx.split(activate(mixed), [inner, inner + size], axis=-1)
        read, ssm = scan(value, key, query, *self._time_steps(dt, *constants), state.ssm, c.n_groups)
        gate, value = gate.astype(mx.float32).reshape(read.shape), value.reshape(read.shape)
        out = (read + self._skip * value) * activate(gate)
        out = mx.fast.rms_norm(out, None, c.norm_eps) * self._gain
        return out.reshape(*x.shape[:-1], inner).astype(x.dtype), MambaState(conv, ssm)

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
    value: mx.array, key: mx.array, query: mx.array, dt: mx.array, log_decay: mx.array, ssm: mx.array, groups: int
) -> tuple[mx.array, mx.array]:
    """One position of the recurrence `s = exp(log_decay) s + dt value key`; shapes as in `_scan_many`, T = 1.

    But for dt and log_decay (B, G, R, 1, 1).
    """
    batch, heads, width, size = ssm.shape
    by_group, one = (batch, groups, heads // groups), (batch, groups, 1, 1)
    new = mx.exp(log_decay) * ssm.reshape(*by_group, width, size)
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


class Attention(nn.Module):
    """Grouped-query attention without positions (HF NemotronHAttention)."""

    def __init__(self, config: LlmConfig) -> None:
        super().__init__()
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = Linear(hidden, queries, bias=bias)
        self.k_proj = Linear(hidden, keys, bias=bias)
        self.v_proj = Linear(hidden, keys, bias=bias)
        self.o_proj = Linear(queries, hidden, bias=bias)

    def project(self, x: mx.array, batch: int, multiply: Product = product) -> tuple[mx.array, ...]:
        """x (B T, H) -> queries, keys, values, each (B, heads, T, head_dim)."""
        steps = x.shape[0] // batch
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(self._by_head(multiply(layer, x), batch, steps) for layer in layers)

    def _by_head(self, x: mx.array, batch: int, steps: int) -> mx.array:
        if steps == 1:
            return x.reshape(batch, -1, 1, self.head_dim)
        return x.reshape(batch, steps, -1, self.head_dim).swapaxes(1, 2)

    def attend(self, projected: tuple[mx.array, ...], cache: KvCache) -> mx.array:
        """What `project` gave -> (B, heads, T, head_dim); the only part of the stack whose shapes grow with time."""
        queries, keys, values = projected
        keys, values, mask = cache.update(keys, values)
        scale = self.head_dim**-0.5
        if mask is None or ONE_MASK:
            causal = None if mask is None else "causal"  # aligned with the last key
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=causal)
        before, parts = keys.shape[2] - queries.shape[2], []
        for start in range(0, queries.shape[2], QUERY_BLOCK):
            block = slice(start, start + QUERY_BLOCK)
            seen = slice(before + start + QUERY_BLOCK)
            shown = (queries[:, :, block], keys[:, :, seen], values[:, :, seen])
            parts.append(mx.fast.scaled_dot_product_attention(*shown, scale=scale, mask=mask[block, seen]))
        return mx.concatenate(parts, axis=2)

    def output(self, x: mx.array, attended: mx.array, multiply: Product = product) -> mx.array:
        """The residual x (B T, H) and (B, heads, T, head_dim) -> (B T, H)."""
        if attended.shape[2] > 1:
            attended = attended.swapaxes(1, 2)
        return add_product(x, self.o_proj, attended.reshape(x.shape[0], -1), multiply=multiply)


class Mlp(nn.Module):
    """MLP with squared ReLU (So et al. 2021, arXiv 2109.08668)."""

    def __init__(self, config: LlmConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, x: mx.array, normed: mx.array, multiply: Product = product) -> mx.array:
        """The residual x and normed x (B T, H) -> (B T, H)"""
        return add_product(x, self.down_proj, mx.square(relu(multiply(self.up_proj, normed))), multiply=multiply)


MIXERS: dict[str, Callable[[LlmConfig], Any]] = {"M": MambaMixer, "*": Attention, "-": Mlp}


class Block(nn.Module):
    """`x + mixer(norm(x))`."""

    def __init__(self, config: LlmConfig, kind: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = MIXERS[kind](config)


Segment: TypeAlias = Callable[
    [mx.array, tuple[mx.array, ...], Sequence[MambaState]],
    tuple[mx.array, tuple[mx.array, ...], list[MambaState]],
]


def make_segment(
    before: Block | None, blocks: Sequence[Block], after: Block | None, norm_f: nn.Module, multiply: Product = product
) -> Segment:
    """The way from one attention to the next as a pure function of arrays, so that it can be compiled.

    It takes the residual stream, what the attention of `before` gave and the states of its Mamba blocks; it returns
    the stream, queries, keys and values of `after` (the last segment: the normed stream and nothing), and new states.
    """

    def run(
        x: mx.array, attended: tuple[mx.array, ...], states: Sequence[MambaState]
    ) -> tuple[mx.array, tuple[mx.array, ...], list[MambaState]]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])  # rows of all positions: a matrix product of two axes needs no views
        if before is not None:
            x = before.mixer.output(x, *attended, multiply)
        old, new = iter(states), []
        for block in blocks:
            normed = block.norm(x)
            if isinstance(block.mixer, MambaMixer):
                mixed, state = block.mixer.mix(normed, MambaState(*next(old)), multiply)
                x = add_product(x, block.mixer.out_proj, mixed, multiply=multiply)
                new.append(state)
            else:
                x = block.mixer(x, normed, multiply)
        if after is None:
            return norm_f(x).reshape(shape), (), new
        return x.reshape(shape), after.mixer.project(after.norm(x), shape[0], multiply), new

    return run


class NemotronH(nn.Module):
    """The stack of blocks and the final norm (HF NemotronHModel without its embedding)."""

    def __init__(self, config: LlmConfig) -> None:
        super().__init__()
        self.layers = [Block(config, kind) for kind in config.pattern]
        self.norm_f = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self._segments: list[Segment] = []
        self._by_numpy: list[Segment] = []  # the same for many positions, where numpy multiplies faster
        self._compiled: list[Segment] = []

    @property
    def attentions(self) -> list[Attention]:
        """Those that have a cache, in order."""
        return [block.mixer for block in self.layers if isinstance(block.mixer, Attention)]

    @property
    def dtype(self) -> mx.Dtype:
        """What the LLM computes in, to which loading has brought its norms (`checkpoint.llm_is_float32`)."""
        return self.norm_f.weight.dtype

    def prepare(self) -> None:
        before: Block | None = None
        blocks: list[Block] = []
        self._attentions = self.attentions
        self._segments, self._by_numpy, self._counts = [], [], []
        for block in [*self.layers, None]:
            if block is not None and not isinstance(block.mixer, Attention):
                if isinstance(block.mixer, MambaMixer):
                    block.mixer.prepare()
                blocks.append(block)
                continue
            self._segments.append(make_segment(before, blocks, block, self.norm_f))
            self._by_numpy.append(make_segment(before, blocks, block, self.norm_f, numpy_product))
            self._counts.append(sum(isinstance(b.mixer, MambaMixer) for b in blocks))
            before, blocks = block, []
        self._compiled = []

    def compile(self) -> None:
        """Fuse each segment (`mx.compile`) for single positions; weights must stay as they are."""
        self._compiled = [mx.compile(segment) for segment in self._segments]

    def init_state(self, batch: int = 1) -> LlmState:
        mixers = [block.mixer for block in self.layers if isinstance(block.mixer, MambaMixer)]
        count = len(self.attentions)
        caches = tuple(KvCache(phase=index * BLOCK // count) for index in range(count))
        return LlmState(tuple(mixer.init_state(batch, self.dtype) for mixer in mixers), caches)

    def reserve(self, state: LlmState, positions: int) -> None:
        """Room for `positions` in the caches of a fresh state of one conversation; lazy (`KvCache.reserve`)."""
        for attention, cache in zip(self.attentions, state.caches, strict=True):
            cache.reserve(1, attention.kv_heads, attention.head_dim, positions, self.dtype)

    def step(self, x: mx.array, state: LlmState) -> tuple[mx.array, LlmState]:
        """x (B, T, H) -> hidden states after the final norm (B, T, H), state; lazy for one position."""
        if x.shape[1] == 1:
            return self._run(self._compiled or self._segments, x, state)
        if not numpy_is_faster():
            return self._run(self._segments, x, state)
        # products of a layer are too short for several threads, which wait for each other on a busy machine
        with threadpool_limits(1):
            return self._run(self._by_numpy, x, state)

    def _run(self, segments: Sequence[Segment], x: mx.array, state: LlmState) -> tuple[mx.array, LlmState]:
        mamba: list[MambaState] = []
        attended: tuple[mx.array, ...] = ()
        for index, (segment, count) in enumerate(zip(segments, self._counts, strict=True)):
            x, projected, new = segment(x, attended, state.mamba[len(mamba) : len(mamba) + count])
            mamba += [MambaState(*each) for each in new]
            if projected:
                attended = (state.caches[index].attend(self._attentions[index].attend, projected),)
        return x, LlmState(tuple(mamba), state.caches)


class DuplexLm(nn.Module):
    """Embedding, stack and heads of `stt_model`; one fused input and two token ids per position (NeMo speechlm2).

    `boosts` maps token ids to what is added to their text logits before the choice. Call `prepare` after loading.
    """

    def __init__(
        self,
        config: LlmConfig,
        *,
        text_weight: float,
        user_weight: float,
        function_weight: float,
        boosts: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.llm = NemotronH(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.function_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._weights = (text_weight, user_weight, function_weight)
        self._boosts = {token: boost for token, boost in (boosts or {}).items() if boost}
        self._boost: mx.array | None = None
        self._vocab_size = config.vocab_size
        self._fuse: Callable[..., mx.array] = self._fused
        self._choose: Callable[[mx.array], tuple[mx.array, mx.array]] = self._chosen

    def prepare(self) -> None:
        """Build constants and segments; call it after loading and quantising."""
        prepare_linears(self)
        self.llm.prepare()
        if self._boosts:
            boost = mx.zeros((self._vocab_size,))
            boost[mx.array(list(self._boosts))] = mx.array(list(self._boosts.values()))
            self._boost = boost
            mx.eval(boost)
        self._fuse, self._choose = self._fused, self._chosen

    def compile(self) -> None:
        """Fuse what a frame runs; call it after `prepare`, weights must stay as they are from then on."""
        self.llm.compile()
        self._fuse, self._choose = mx.compile(self._fused), mx.compile(self._chosen)

    def init_state(self, batch: int = 1) -> LlmState:
        return self.llm.init_state(batch)

    def reserve(self, state: LlmState, positions: int) -> None:
        """See `NemotronH.reserve`."""
        self.llm.reserve(state, positions)

    def embed(self, ids: mx.array) -> mx.array:
        """ids (B, T) -> (B, T, H); a system prompt's ids so embedded stand in for its audio."""
        return self.embed_tokens(ids)

    def fuse(self, text_ids: mx.array, audio: mx.array, function_ids: mx.array) -> mx.array:
        """Previous ids (B, T) or, for one position, (B,); audio (B, T, H) -> input (B, T, H) in the LLM's type."""
        fuse = self._fuse if audio.shape[1] == 1 else self._fused  # compiled for single positions alone
        return fuse(text_ids, audio, function_ids)

    def step(self, fused: mx.array, state: LlmState) -> tuple[mx.array, LlmState]:
        """fused (B, T, H) -> hidden (B, T, H), state. T = 1 is the compiled path, any T gives the same values."""
        return self.llm.step(fused, state)

    def logits(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """hidden (B, T, H) -> text logits, boosted, and function logits, each (B, T, V)."""
        text = self.lm_head(hidden)
        return text if self._boost is None else text + self._boost, self.function_head(hidden)

    def choose(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """hidden (B, T, H) -> text ids and function ids (B,) of the last position; plain argmax."""
        return self._choose(hidden[:, -1:])

    def _fused(self, text_ids: mx.array, audio: mx.array, function_ids: mx.array) -> mx.array:
        shape = audio.shape[:2]
        rows = self.embed(mx.stack([text_ids.reshape(shape), function_ids.reshape(shape)]))
        channels = zip((rows[0], audio, rows[1]), self._weights, strict=True)
        terms = [a.astype(mx.float32) if weight == 1 else weight * a.astype(mx.float32) for a, weight in channels]
        return (terms[0] + terms[1] + terms[2]).astype(self.llm.dtype)

    def _chosen(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        text, function = self.logits(hidden[:, -1])
        return mx.argmax(text, axis=-1), mx.argmax(function, axis=-1)
