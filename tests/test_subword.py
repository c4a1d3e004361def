"""Subword encoder: the oracle's conditioning of every id, the flags, batching, and grouped heads."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import GOLDEN
from support.speech import DISTINCT, ORACLE, close, golden_characters, golden_config, golden_tts, random_tts

from mlx_voicechat.networks import subword
from mlx_voicechat.networks.subword import CharacterAttention, SubwordEncoder

EXPECTED = dict(np.load(GOLDEN / "expected" / "tts.npz"))


def test_table_is_the_oracles() -> None:
    table = golden_tts().embed_subword.table(golden_characters())
    close(table, ORACLE["subword_embeds"])
    close(table, ORACLE["subword_embeds_batched"])
    close(table, EXPECTED["subword_table"])


def test_masked_positions_keep_their_flags() -> None:
    ids = mx.arange(golden_config().llm.vocab_size)
    unmasked = golden_tts().embed_subword.unmasked(ids)
    close(unmasked, EXPECTED["subword_unmasked"])
    close(unmasked[1::2], ORACLE["subword_embeds_even_mask"][1::2])


def test_ids_past_the_vocabulary_use_the_pad_flags() -> None:
    encoder, config = golden_tts().embed_subword, golden_config()
    flags = encoder.unmasked(mx.array([384, 385, 400]))
    close(flags[1:], ORACLE["subword_embeds_oov_384_385_400"][1:])
    padding = mx.array([[config.tts.characters.char_vocab_size - 1]])
    close(flags[:1] + encoder.encode(padding), ORACLE["subword_embeds_oov_384_385_400"][:1])


def test_table_does_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, characters = golden_tts().embed_subword, golden_characters()
    whole = np.array(encoder.table(characters))
    monkeypatch.setattr(subword, "BATCH_CHARACTERS", 7)
    close(encoder.table(characters), whole)


def test_a_token_without_characters_has_its_flags_only() -> None:
    encoder = random_tts().embed_subword
    table = encoder.table([[], [3, 1], []])
    close(table[0::2], np.array(encoder.unmasked(mx.array([0, 2]))))
    assert not np.allclose(np.array(table[1]), np.array(encoder.unmasked(mx.array([1]))[0]))


def test_finish_is_applied_to_every_row() -> None:
    encoder, characters = golden_tts().embed_subword, golden_characters()[:40]
    close(encoder.table(characters, lambda rows: 2 * rows), 2 * np.array(encoder.table(characters)))


def test_grouped_heads_equal_repeated_ones() -> None:
    config = DISTINCT.characters
    grouped = CharacterAttention(config)
    full = CharacterAttention(replace(config, num_key_value_heads=config.num_attention_heads))
    queries, keys, values = mx.split(
        grouped.qkv_proj.weight.reshape(-1, config.head_dim, config.hidden_size),
        [config.num_attention_heads, config.num_attention_heads + config.num_key_value_heads],
    )
    repeats = config.num_attention_heads // config.num_key_value_heads
    stacked = mx.concatenate([queries, mx.repeat(keys, repeats, axis=0), mx.repeat(values, repeats, axis=0)])
    full.qkv_proj.weight = stacked.reshape(-1, config.hidden_size)
    full.o_proj.weight = grouped.o_proj.weight
    x = mx.random.normal((2, 5, config.hidden_size), key=mx.random.key(0))
    close(grouped(x), np.array(full(x)))


def test_character_and_output_widths_may_differ() -> None:
    encoder = SubwordEncoder(DISTINCT, 31)
    shapes = {name: tensor.shape for name, tensor in dict(tree_flatten(encoder.parameters())).items()}
    assert shapes["proj_embedding.weight"] == (DISTINCT.hidden_size, DISTINCT.characters.hidden_size)
    assert shapes["subword_flag_emb.is_continuation"] == (32,)
    assert encoder.table([[1], [2, 3]]).shape == (2, DISTINCT.hidden_size)
