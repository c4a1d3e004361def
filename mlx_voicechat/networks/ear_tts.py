"""EAR-TTS: text ids -> codec codes, one frame a step (NeMo `DuplexEARTTS`, `RVQEARTTSModel`).

Shapes: B conversations, G rows of guidance (conditioned first, then free), T frames, W width, Z latent, Q codebooks of
K rows, V vocabulary, P voice-prompt frames. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config import (
    GEMMA_QUERY_SCALE,
    GLOBAL_LAYER_PERIOD,
    RMS_EPS,
    ROPE_BASE_GLOBAL,
    ROPE_BASE_LOCAL,
    TtsConfig,
)
from .cache import KvCache
from .linear import Linear, Product, prepare_linears, product
from .mog import Codebooks, CodeGenerator, GatedMlp, MogHead, sampling_controls
from .subword import SubwordEncoder

# What the two halves of a head are multiplied by, each (1, T, 1, 2, head_dim / 2); of single frames at positions of
# their own (rows, 1, 1, 2, head_dim / 2).
Rotation = tuple[mx.array, mx.array]
# Queries (rows, heads, T, head_dim); keys before values (rows, 2 kv_heads, T, head_dim).
Projected = tuple[mx.array, mx.array]


class TtsState(NamedTuple):
    """One or several conversations that step together.

    `latent` (B, Z) is the sum of the rows of the last codes, `controls` (B, 3) see `sampling_controls`; the caches
    hold G*B rows and are written by a step. `guidance_rows` is G.
    """

    latent: mx.array
    controls: mx.array
    caches: tuple[KvCache, ...]
    guidance_rows: int

    def copy(self) -> TtsState:
        """A state that goes on independently."""
        return self._replace(caches=tuple(cache.copy() for cache in self.caches))

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for the evaluation at the end of a frame."""
        return [self.latent, self.controls, *(array for cache in self.caches for array in cache.arrays)]


class Attention(nn.Module):
    """Grouped-query attention with normed and rotated queries and keys."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        self._heads, self.kv_heads, self._head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        stacked = (self._heads + 2 * self.kv_heads) * self._head_dim
        self.qkv_proj = Linear(config.hidden_size, stacked, bias=False)
        self.o_proj = Linear(self._heads * self._head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self._head_dim, RMS_EPS)
        self.k_norm = nn.RMSNorm(self._head_dim, RMS_EPS)

    def prepare(self) -> None:
        """Norm weights of all heads as one (heads, 1, head_dim / 2) per half, the query scale in them, values' 0."""
        counts = (self._heads, self.kv_heads, self.kv_heads)
        weights = (self.q_norm.weight * GEMMA_QUERY_SCALE, self.k_norm.weight, mx.zeros((self._head_dim,)))
        gains = [
            mx.broadcast_to(weight, (count, self._head_dim)) for weight, count in zip(weights, counts, strict=True)
        ]
        gain = mx.concatenate(gains).reshape(-1, 2, self._head_dim // 2)
        self._gains = [mx.contiguous(half) for half in mx.split(gain, 2, axis=1)]
        self._turns = mx.arange(len(gain))[:, None, None] < self._heads + self.kv_heads
        mx.eval(self._gains, self._turns)

    def project(self, x: mx.array, rotation: Rotation, dtype: mx.Dtype) -> Projected:
        """x (rows T, W), T as in the rotation -> queries, and keys and values, all in the cache's `dtype`.

        Half-split rotary positions written as `first * near + second * far`, so that gain, rotation and type are one
        kernel; it passes values through, so that they come in one array with the keys.
        """
        (near, far), (first_gain, second_gain) = rotation, self._gains
        steps, size = near.shape[1], self._head_dim
        shape = (-1, steps, len(self._turns), 2, size // 2)
        qkv = self.qkv_proj(x).reshape(*shape[:3], size)
        first, second = mx.split(mx.fast.rms_norm(qkv, None, RMS_EPS).reshape(shape), 2, axis=-2)
        turned = first * (first_gain * near) + second * (second_gain * far)
        joint = mx.where(self._turns, turned, qkv.reshape(shape)).astype(dtype)
        queries, keys_values = mx.split(joint, [self._heads], axis=2)
        return _by_head(queries, steps, size), _by_head(keys_values, steps, size)


def _by_head(x: mx.array, steps: int, head_dim: int) -> mx.array:
    """(rows, T, heads, ...) -> (rows, heads, T, head_dim)"""
    rows, _, heads = x.shape[:3]
    if steps == 1:  # a reshape keeps the strides plain; a transpose would make matrix products copy
        return x.reshape(rows, heads, 1, head_dim)
    return x.reshape(rows, steps, heads, head_dim).swapaxes(1, 2)


def attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    """Queries (rows, heads, T, head_dim) over the cache -> (rows T, heads * head_dim); the scale is in the queries.

    Products are in the cache's type, in which queries come, so that no frame widens it; the softmax sums in float32.
    One frame takes three plain kernels: the released head size (72) has no fused one, and its fallback takes four.
    """
    rows, heads, steps, head_dim = queries.shape
    if steps > 1:
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask).astype(mx.float32)
        return mixed.swapaxes(1, 2).reshape(rows * steps, heads * head_dim)
    scores = queries.reshape(rows, keys.shape[1], -1, head_dim) @ keys.swapaxes(-1, -2)
    mixed = mx.softmax(scores, axis=-1, precise=True) @ values
    return mixed.astype(mx.float32).reshape(rows, heads * head_dim)


class GemmaBlock(nn.Module):
    """One Gemma-3 block, cut at its attention: `start` before the cache, `finish` after it."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)

    def start(self, x: mx.array, rotation: Rotation, dtype: mx.Dtype) -> Projected:
        """x (rows T, W) -> queries, keys and values in `dtype`."""
        return self.self_attn.project(self.input_layernorm(x), rotation, dtype)

    def finish(self, x: mx.array, attended: mx.array) -> mx.array:
        """x (rows T, W), attended (rows T, heads * head_dim) -> (rows T, W)."""
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(attended))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Backbone(nn.Module):
    """Gemma-3 text decoder over embeddings that are not scaled; every sixth layer is global, the others windowed."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        self.layers = [GemmaBlock(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, RMS_EPS)
        self._window = config.sliding_window
        self._head_dim = config.head_dim
        self.cache_dtype = mx.float32
        between = [self._between(i) for i in range(1, len(self.layers))]
        self._plain: tuple[Callable[..., Any], ...] = (self._first, *between, self._last)
        self._pieces = self._plain

    @staticmethod
    def is_global(layer: int) -> bool:
        return (layer + 1) % GLOBAL_LAYER_PERIOD == 0

    def prepare(self) -> None:
        """Build the constants; call once after the weights are loaded and quantised."""
        for layer in self.layers:
            layer.self_attn.prepare()
        half = self._head_dim // 2
        rates = [[base ** (-i / half) for i in range(half)] for base in (ROPE_BASE_LOCAL, ROPE_BASE_GLOBAL)]
        self._rates = mx.array(rates)[:, None, None, None]  # (2, 1, 1, 1, head_dim / 2), radians a frame
        self._upper = mx.array([[True], [False]])
        mx.eval(self._rates, self._upper)

    def compile(self) -> None:
        """Let single frames run as one compiled function between two attentions."""
        self._pieces = tuple(mx.compile(piece) for piece in self._plain)

    def init_caches(self) -> tuple[KvCache, ...]:
        layers = range(len(self.layers))
        return tuple(KvCache(None if self.is_global(i) else self._window, phase=i) for i in layers)

    def reserve(self, caches: Sequence[KvCache], rows: int, positions: int) -> None:
        """Room for `positions` of `rows` in fresh caches; lazy (`KvCache.reserve`)."""
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.reserve(rows, layer.self_attn.kv_heads, self._head_dim, positions, self.cache_dtype)

    def __call__(self, x: mx.array, caches: Sequence[KvCache]) -> mx.array:
        """Embeddings (rows, T, W) that follow what `caches` hold -> hidden states (rows, T, W); writes the caches."""
        shape, steps, start = x.shape, x.shape[1], caches[0].offset
        first, *between, last = self._pieces if steps == 1 else self._plain
        positions = caches[0].positions if steps == 1 else mx.arange(start, start + steps)
        x = x.reshape(-1, shape[-1])  # rows of all frames: a matrix product of two axes needs no views
        rotations, projected = first(x, positions)
        for i, (cache, piece) in enumerate(zip(caches[:-1], between, strict=True), start=1):
            x, projected = piece(x, cache.attend(self._attend, projected), rotations[self.is_global(i)])
        return last(x, caches[-1].attend(self._attend, projected)).reshape(shape)

    @staticmethod
    def _attend(projected: Projected, cache: KvCache) -> mx.array:
        queries, keys_values = projected
        return attend(queries, *cache.update(keys_values))

    def _first(self, x: mx.array, positions: mx.array) -> tuple[tuple[Rotation, Rotation], Projected]:
        """Rotations of local and global layers at `positions`, and the start of block 0.

        `positions`: (T,) for all rows, or of single frames (B, 1), which each guidance row of a conversation shares.
        """
        apart = positions.ndim == 2
        if apart:
            positions = mx.concatenate([positions] * (x.shape[0] // positions.shape[0]))
        angles = positions.reshape(-1, 1, 1, 1) * self._rates
        cosine, sine = mx.cos(angles), mx.sin(angles)
        near, far = mx.where(self._upper, cosine, sine), mx.where(self._upper, -sine, cosine)
        local, wide = zip(mx.split(near, 2), mx.split(far, 2), strict=True)
        if apart:
            local, wide = ((near.swapaxes(0, 1), far.swapaxes(0, 1)) for near, far in (local, wide))
        rotations = local, wide
        return rotations, self.layers[0].start(x, rotations[self.is_global(0)], self.cache_dtype)

    def _between(self, i: int) -> Callable[[mx.array, mx.array, Rotation], tuple[mx.array, Projected]]:
        def piece(x: mx.array, attended: mx.array, rotation: Rotation) -> tuple[mx.array, Projected]:
            x = self.layers[i - 1].finish(x, attended)
            return x, self.layers[i].start(x, rotation, self.cache_dtype)

        return piece

    def _last(self, x: mx.array, attended: mx.array) -> mx.array:
        return self.norm(self.layers[-1].finish(x, attended))


class GatedFusion(nn.Module):
    """Mixes the audio and the text side of a frame, (..., W) each -> (..., W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.audio_proj = Linear(width, width)
        self.text_proj = nn.Linear(width, width)  # makes the table of text shares, no part of a frame
        self.gate = mx.zeros((width,))
        self.residual_scale = mx.zeros(())
        self.final_norm = nn.RMSNorm(width, RMS_EPS)

    def prepare(self) -> None:
        scale, gate = (mx.sigmoid(a.astype(mx.float32)) for a in (self.residual_scale, self.gate))
        self._audio_gain, self._text_gain = scale * gate, scale * (1 - gate)
        mx.eval(self._audio_gain, self._text_gain)

    def text(self, conditioning: mx.array, multiply: Product = product) -> mx.array:
        """The text side's share (..., W); it depends on the token id alone."""
        return self._text_gain * multiply(self.text_proj, conditioning)

    def __call__(self, audio: mx.array, text: mx.array) -> mx.array:
        """`audio` (..., W) is already divided by Q; `text` is what `text()` gave, of any shape that broadcasts."""
        return self.final_norm(self._audio_gain * self.audio_proj(audio) + text)


class EarTts(nn.Module):
    """The whole TTS; `vocab_size` is the text vocabulary's.

    Call `prepare` once after the weights are in place, then `use_text_rows`.
    """

    def __init__(self, config: TtsConfig, vocab_size: int) -> None:
        super().__init__()
        width, self._config = config.hidden_size, config
        self.backbone = Backbone(config)
        self.rvq_embs = mx.zeros((config.num_quantizers, config.codebook_size, config.latent_size))
        self.embed_code = Linear(config.latent_size, width, bias=False)
        self.gated_fusion_audio_text = GatedFusion(width)
        self.bos_emb = mx.zeros((width,))
        self.null_emb = mx.zeros((width,))
        self.embed_subword = SubwordEncoder(config, vocab_size)
        self.mog_head = MogHead(config)

    def text_rows(self, char_ids: Sequence[Sequence[int]], multiply: Product = product) -> mx.array:
        """Characters of ids 0 .. V-1 -> the table (V, W) of their text shares, evaluated."""
        self.gated_fusion_audio_text.prepare()
        return self.embed_subword.table(
            char_ids, lambda rows: self.gated_fusion_audio_text.text(rows, multiply), multiply
        )

    def use_text_rows(self, table: mx.array) -> None:
        """Take what `text_rows` gave, now or in an earlier process; a step needs it."""
        self._text_rows = table

    def prepare(self, silence_codes: mx.array, pad_id: int, eos_id: int) -> None:
        """Build all constants but the table of text shares; `silence_codes` (Q,): the codec's codes of silence."""
        fusion = self.gated_fusion_audio_text
        prepare_linears(self)
        self.backbone.prepare()
        fusion.prepare()
        self._pad_id, self._eos_id = pad_id, eos_id
        self._books = Codebooks(self.rvq_embs)
        self._silence = self._books.embed(silence_codes)
        self._null_row = fusion.text(self.null_emb)
        self._conditioned = mx.array([[[True]], [[False]]])
        mx.eval(self._silence, self._null_row, self._conditioned)
        self._embed = self.embed
        self._generate: Callable[..., tuple[mx.array, mx.array]] = CodeGenerator(
            self.mog_head, self.embed_code, self._books, self._config.pass_counts
        )

    def compile(self) -> None:
        """Compile all fixed-shape work of a step; call after `prepare`. Weights are captured, so load them before."""
        self.backbone.compile()
        self._embed = mx.compile(self.embed)
        self._generate = mx.compile(self._generate)

    def init_state(
        self,
        batch: int = 1,
        guidance_scale: float | None = None,
        top_p: float | None = None,
        noise_scale: float | None = None,
    ) -> TtsState:
        """Before the voice prompt; what is None comes from the config. A guidance scale of 0 halves the rows."""
        scale, top_p, noise = (
            default if given is None else given
            for given, default in (
                (guidance_scale, self._config.guidance_scale),
                (top_p, self._config.top_p),
                (noise_scale, self._config.noise_scale),
            )
        )
        return TtsState(
            latent=mx.zeros((batch, self._config.latent_size)),
            controls=sampling_controls(scale, top_p, noise, batch),
            caches=self.backbone.init_caches(),
            guidance_rows=1 if scale == 0 else 2,
        )

    def reserve(self, state: TtsState, positions: int) -> None:
        """Room for `positions`, the voice prompt's among them, in a fresh state of one conversation; lazy."""
        self.backbone.reserve(state.caches, state.guidance_rows, positions)

    def warmup(self, voice: mx.array, state: TtsState) -> TtsState:
        """Run the voice prompt, latents (1, P, W), through the backbone; `state` must be fresh.

        The first fed-back code is MASK, which adds nothing: the latent stays zero.
        """
        self.backbone(self.prompt_inputs(voice, state.latent.shape[0], state.guidance_rows), state.caches)
        return state

    def prompt_inputs(self, voice: mx.array, batch: int, guidance_rows: int) -> mx.array:
        """Backbone inputs (G*B, P, W) of the voice prompt.

        Text: PAD, EOS last, masked but for the last two. Audio: the stored latents, then the code of silence with
        `bos_emb`; the codes of all earlier positions are overwritten by the latents.
        """
        fusion, length = self.gated_fusion_audio_text, voice.shape[1]
        opening = self.embed_code(self._silence) + self.bos_emb
        audio = mx.concatenate([voice[0, :-1], opening[None]])
        masked = fusion.text(self.embed_subword.unmasked(mx.array([self._pad_id])))
        spoken = mx.take(self._text_rows, mx.array([self._pad_id, self._eos_id]), axis=0)
        text = mx.concatenate([mx.broadcast_to(masked, (length - 2, masked.shape[1])), spoken])
        sides = mx.stack([text, mx.broadcast_to(self._null_row, text.shape)][:guidance_rows])
        return mx.repeat(fusion(audio / self._config.num_quantizers, sides), batch, axis=0)

    def embed(self, text_ids: mx.array, latent: mx.array, guidance_rows: int) -> mx.array:
        """Text ids (B,) and the previous latent (B, Z) -> backbone inputs (G*B, 1, W); EOS hears silence."""
        latent = mx.where(text_ids[:, None] == self._eos_id, self._silence, latent)
        audio = self.embed_code(latent / self._config.num_quantizers)
        text = mx.take(self._text_rows, text_ids, axis=0)
        if guidance_rows == 2:
            text = mx.where(self._conditioned, text, self._null_row)
        return self.gated_fusion_audio_text(audio, text).reshape(-1, 1, audio.shape[-1])

    def step(
        self, text_ids: mx.array, state: TtsState, uniform: mx.array, normal: mx.array
    ) -> tuple[mx.array, TtsState]:
        """One frame: text ids (B,), draws uniform (B, passes, C) and normal (B, passes, Z) -> codes (B, Q), state."""
        x = self._embed(text_ids, state.latent, state.guidance_rows)
        hidden = self.backbone(x, state.caches)
        codes, latent = self._generate(hidden, uniform, normal, state.controls)
        return codes, state._replace(latent=latent)
