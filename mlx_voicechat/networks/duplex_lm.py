"""Duplex LLM: Nemotron-H on summed text, audio and function channels, two heads on one hidden state.

Nemotron-H (arXiv 2504.03624); channels and heads as in NeMo speechlm2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from threadpoolctl import threadpool_limits

from ..config import LlmConfig
from .activations import relu
from .cache import BLOCK, KvCache
from .linear import Linear, Product, add_product, numpy_is_faster, numpy_product, prepare_linears, product
from .mamba import MambaMixer, MambaState

ONE_MASK = mx.default_device().type == mx.gpu  # whose kernels know a causal mask, and pass over what it hides
QUERY_BLOCK = 64  # else positions that attend at once: keys after the last of them are never looked at


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
