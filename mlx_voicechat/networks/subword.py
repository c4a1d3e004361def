"""Characters of a token -> its conditioning for EAR-TTS (NeMo `CharAwareSubwordEncoder`, T5-Gemma encoder).

It depends on the token id alone, so a conversation only ever looks rows up in a table built once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..config import GEMMA_QUERY_SCALE, GEMMA_SOFT_CAP, RMS_EPS, ROPE_BASE_LOCAL, CharacterEncoderConfig, TtsConfig
from .linear import Product, product
from .mog import GatedMlp

BATCH_CHARACTERS = 4096  # characters encoded at once while the table is built: bounds memory, fills a GPU


class CharacterAttention(nn.Module):
    """Bidirectional self-attention with capped scores, (B, T, W) -> (B, T, W)."""

    def __init__(self, config: CharacterEncoderConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.head_dim
        stacked = (self._heads + 2 * self._kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, stacked, bias=False)
        self.o_proj = nn.Linear(self._heads * config.head_dim, config.hidden_size, bias=False)

    def __call__(self, x: mx.array, multiply: Product = product) -> mx.array:
        batch, steps, _ = x.shape
        qkv = multiply(self.qkv_proj, x).reshape(batch, steps, -1, self._head_dim).swapaxes(1, 2)
        rotated = mx.fast.rope(
            qkv[:, : self._heads + self._kv_heads],
            self._head_dim,
            traditional=False,
            base=ROPE_BASE_LOCAL,
            scale=1.0,
            offset=0,
        )
        queries = rotated[:, : self._heads].reshape(batch, self._kv_heads, -1, steps, self._head_dim)
        keys = rotated[:, self._heads :, None]
        values = qkv[:, self._heads + self._kv_heads :, None]
        scores = (queries * GEMMA_QUERY_SCALE) @ keys.swapaxes(-1, -2)
        scores = GEMMA_SOFT_CAP * mx.tanh(scores / GEMMA_SOFT_CAP)
        mixed = mx.softmax(scores, axis=-1) @ values
        mixed = mixed.reshape(batch, self._heads, steps, -1).swapaxes(1, 2).reshape(batch, steps, -1)
        return multiply(self.o_proj, mixed)


class CharacterBlock(nn.Module):
    """One T5-Gemma encoder block, (B, T, W) -> (B, T, W)."""

    def __init__(self, config: CharacterEncoderConfig) -> None:
        super().__init__()
        self.pre_self_attn_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)
        self.self_attn = CharacterAttention(config)
        self.post_self_attn_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, RMS_EPS)

    def __call__(self, x: mx.array, multiply: Product = product) -> mx.array:
        x = x + self.post_self_attn_layernorm(self.self_attn(self.pre_self_attn_layernorm(x), multiply))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), multiply))


class CharacterEncoder(nn.Module):
    """Embedded characters (B, T, W) -> (B, T, W), final norm included."""

    def __init__(self, config: CharacterEncoderConfig) -> None:
        super().__init__()
        self.layers = [CharacterBlock(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, RMS_EPS)

    def __call__(self, x: mx.array, multiply: Product = product) -> mx.array:
        for layer in self.layers:
            x = layer(x, multiply)
        return self.norm(x)


class _FlagEmbedding(nn.Module):
    """A flag per token id, embedded; ids past the end of the flags use the flag at `pad_tensor`."""

    pad_tensor: mx.array

    def _row(self, flags: mx.array, ids: mx.array) -> mx.array:
        return mx.take(flags, mx.where(ids < flags.shape[0], ids, self.pad_tensor))


class ContinuationEmbedding(_FlagEmbedding):
    """Does a token continue a word: ids (N,) -> (N, W)."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.pad_tensor = mx.array(vocab_size)
        self.is_continuation = mx.zeros((vocab_size + 1,), mx.int32)
        self.cont_emb = nn.Embedding(2, width)

    def __call__(self, ids: mx.array) -> mx.array:
        return self.cont_emb(self._row(self.is_continuation, ids))


class SpecialEmbedding(_FlagEmbedding):
    """Does a token open or close a turn: ids (N,) -> (N, W)."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.pad_tensor = mx.array(vocab_size - 1)
        self.special_flags = mx.zeros((vocab_size,), mx.int32)
        self.special_emb = nn.Embedding(3, width)

    def __call__(self, ids: mx.array) -> mx.array:
        return self.special_emb(self._row(self.special_flags, ids))


class SubwordEncoder(nn.Module):
    """Conditioning (W) of token ids; V = `vocab_size` of the text vocabulary."""

    def __init__(self, config: TtsConfig, vocab_size: int) -> None:
        super().__init__()
        characters, width = config.characters, config.hidden_size
        self._width = width
        self.embed_tokens = nn.Embedding(characters.char_vocab_size, characters.hidden_size)
        self.backbone = {"encoder": CharacterEncoder(characters)}
        self.proj_embedding = nn.Linear(characters.hidden_size, width, bias=False)
        self.subword_flag_emb = ContinuationEmbedding(width, vocab_size)
        self.bos_eos_emb = SpecialEmbedding(width, vocab_size)

    def unmasked(self, ids: mx.array) -> mx.array:
        """Ids (N,) -> (N, W): the two flag embeddings alone, as where the subword mask is False."""
        return self.subword_flag_emb(ids) + self.bos_eos_emb(ids)

    def encode(self, characters: mx.array, multiply: Product = product) -> mx.array:
        """Character ids (N, L) of N tokens of L >= 1 characters each -> (N, W), flags not added."""
        x = self.embed_tokens(characters)
        x = self.backbone["encoder"](x * x.shape[-1] ** 0.5, multiply)
        return multiply(self.proj_embedding, mx.mean(x, axis=1))

    def table(
        self,
        char_ids: Sequence[Sequence[int]],
        finish: Callable[[mx.array], mx.array] = lambda rows: rows,
        multiply: Product = product,
    ) -> mx.array:
        """Characters of ids 0 .. V-1 -> (V, W), evaluated. A token without characters has its flags only.

        `finish` (N, W) -> (N, W) is applied to each batch, so that what is derived needs no second table.
        Tokens of equal length share a batch: no padding, no mask, and memory stays flat for 131k ids.
        """
        by_length: dict[int, list[int]] = {}
        for token, characters in enumerate(char_ids):
            by_length.setdefault(len(characters), []).append(token)
        table = mx.zeros((len(char_ids), self._width))
        for length, tokens in sorted(by_length.items()):
            step = max(1, BATCH_CHARACTERS // max(1, length))
            for batch in (tokens[i : i + step] for i in range(0, len(tokens), step)):
                ids = mx.array(batch)
                rows = self.unmasked(ids)
                if length:
                    rows = rows + self.encode(mx.array([list(char_ids[token]) for token in batch]), multiply)
                table[ids] = finish(rows)
                mx.eval(table)
        return table
