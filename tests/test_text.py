"""Tokenizer, incremental decoding, character vocabulary and transcript pieces."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import GOLDEN, tensors_of

from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.text import (
    IncrementalDecoder,
    Tokenizer,
    TranscriptText,
    byte_alphabet,
    character_table,
    continuation_flags,
    mismatching_flags,
)

VOCABULARY = 384
BYTE_IDS = range(20, 276)  # the one-letter tokens of the tiny tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(GOLDEN / "tiny-f32")


@cache
def with_odd_tokens() -> Tokenizer:
    """Added tokens outside the byte alphabet, inside it but broken as UTF-8, and special."""
    odd = Tokenizer(GOLDEN / "tiny-f32")
    odd.backend.add_tokens(["a é b", "é", "\u2581x"])
    odd.backend.add_special_tokens(["<x y>", "<z>"])
    return odd


@cache
def byte_ids() -> dict[int, int]:
    """Byte -> id of its one-letter token."""
    numbers = {piece: token for token, piece in enumerate(tokenizer().pieces)}
    return {byte: numbers[letter] for letter, byte in byte_alphabet().items()}


@cache
def unfinished_sequences() -> set[bytes]:
    """Every proper prefix of a UTF-8 sequence; the last byte of four takes 64 values, hence the step."""
    points = [*range(0x80, 0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x110000, 64)]
    return {chr(point).encode()[:size] for point in points for size in range(1, len(chr(point).encode()))}


def is_unfinished(stream: bytes) -> bool:
    return any(stream[-size:] in unfinished_sequences() for size in (1, 2, 3) if len(stream) >= size)


def pushed(decoder_of: Tokenizer, ids: list[int]) -> IncrementalDecoder:
    decoder, deltas = IncrementalDecoder(decoder_of), ""
    for token in ids:
        deltas += decoder.push(token)
        assert decoder.text == deltas
    return decoder


def test_encode_adds_no_special_tokens_and_decode_gives_the_text_back() -> None:
    ids = tokenizer().encode("What is the capital of France? ☃")
    assert not {0, 1, 2} & set(ids)
    assert tokenizer().decode(ids) == "What is the capital of France? ☃"
    assert tokenizer().encode("<s>hi</s>")[0] == 1


def test_vocabulary_counts_added_tokens() -> None:
    assert tokenizer().vocab_size == VOCABULARY == len(tokenizer().pieces)
    assert with_odd_tokens().vocab_size == VOCABULARY + 4  # é had an id already
    assert tokenizer().pieces[286] == tokenizer().id_to_token(286) == "Ġthe"
    assert tokenizer().id_to_token(10**6) is None


def test_byte_alphabet_is_the_tokenizer_s() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert sorted(byte_ids().values()) == list(BYTE_IDS)


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from(BYTE_IDS), st.integers(0, VOCABULARY + 9)), max_size=40))
def test_incremental_decoding_equals_decoding_everything(ids: list[int]) -> None:
    for each in (tokenizer(), with_odd_tokens()):
        decoder = pushed(each, ids)
        waiting = is_unfinished(b"".join(map(each.token_bytes, ids)))
        assert decoder.text + "\ufffd" * waiting == each.decode(ids)


@settings(deadline=None)
@given(st.text(max_size=30), st.data())
def test_text_cut_into_bytes_comes_back_without_replacements(text: str, data: st.DataObject) -> None:
    stream = text.encode()
    cut = data.draw(st.integers(0, len(stream)))
    decoder = pushed(tokenizer(), [byte_ids()[byte] for byte in stream[:cut]])
    assert decoder.text == stream[:cut].decode(errors="ignore")
    for byte in stream[cut:]:
        decoder.push(byte_ids()[byte])
    assert decoder.text == text


def test_nothing_said_is_no_text() -> None:
    assert IncrementalDecoder(tokenizer()).text == ""
    assert TranscriptText(["a"]).text == ""


@pytest.mark.parametrize("case", ["plain", "prompted"])
@pytest.mark.parametrize("channel", ["text", "function"])
def test_texts_of_the_recorded_runs(case: str, channel: str) -> None:
    expected = json.loads((GOLDEN / "expected" / "streams.json").read_text(encoding="utf-8"))[case]
    ids = np.load(GOLDEN / "expected" / f"stream_{case}.npz")[f"{channel}_ids"][expected["prompt_positions"] :]
    decoder, said = IncrementalDecoder(tokenizer()), []
    for token, frame in zip(ids.tolist(), expected["frames_text"], strict=True):
        quiet = token in (1, 2, 11, 12)
        assert quiet == (frame[channel] is None)
        if quiet:
            continue
        decoder.push(token)
        said.append(token)
        waiting = is_unfinished(b"".join(map(tokenizer().token_bytes, said)))
        assert decoder.text + "\ufffd" * waiting == frame[channel]


def test_transcript_pieces() -> None:
    pieces = ["<unk>", "<pad>", "<s>", "</s>", "<en-US>", "<zh>", "▁", "▁hello", "▁wor", "ld", "<3", "<b1>", "."]
    transcript = TranscriptText(pieces)
    assert transcript.push([0, 4]) == ""
    assert transcript.push([6, 7, 6]) == "hello"
    assert transcript.push([]) == ""
    assert transcript.push([2]) == ""
    assert transcript.push([8, 9]) == "  wor" + "ld"
    assert transcript.push([12, 1, 3, 5]) == "."
    assert transcript.push([10, 11]) == "<3<b1>"
    assert transcript.text == "hello  world.<3<b1>"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), max_size=4), max_size=12))
def test_transcript_is_the_joined_and_stripped_text(frames: list[list[int]]) -> None:
    pieces = ["▁", "▁a", "b", "<unk>", "c▁", "<de-DE>", " ", "é"]
    transcript, deltas, so_far = TranscriptText(pieces), "", ""
    for symbols in frames:
        deltas += transcript.push(symbols)
        so_far += "".join(pieces[s].replace("▁", " ") for s in symbols if s not in (3, 5))
        assert transcript.text == deltas == so_far.strip()


def test_characters_of_every_token_equal_the_oracle() -> None:
    oracle = np.load(GOLDEN / "oracle" / "tts.npz")
    expected = [row[row >= 0].tolist() for row in oracle["subword_char_ids"]]
    table = character_table(tokenizer())
    assert table == expected
    assert [len(row) for row in table] == oracle["subword_char_lengths"].tolist()


def test_characters_without_a_token_of_their_own_are_left_out() -> None:
    odd = with_odd_tokens()
    table = character_table(odd)
    assert table[:VOCABULARY] == character_table(tokenizer())
    a, e, b = (table[odd.pieces.index(letter)][0] for letter in "aéb")
    assert table[VOCABULARY] == [a, e, b]


@pytest.mark.parametrize("name", ["tiny-f32", "tiny-4bit"])
def test_flags_of_the_checkpoint_agree_with_the_tokenizer(name: str) -> None:
    tensors = tensors_of(GOLDEN / name)
    prefix = "tts_model.tts_model.embed_subword."
    continues = np.array(tensors[prefix + "subword_flag_emb.is_continuation"])
    special = np.array(tensors[prefix + "bos_eos_emb.special_flags"])
    assert continuation_flags(tokenizer()) == continues[:-1].tolist()
    assert mismatching_flags(tokenizer(), continues.tolist(), special.tolist(), 1, 2) == {}
    continues[[5, 300]] ^= 1
    special[7] = 1
    found = mismatching_flags(tokenizer(), continues.tolist(), special.tolist(), 1, 2)
    assert found == {"is_continuation": [5, 300], "special_flags": [7]}


def write(folder: Path, content: str) -> Path:
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    return folder


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"model": {"type": "BPE"',
        "[]",
        "{}",
        '{"model": "BPE", "decoder": null}',
        '{"model": {"type": "BPE", "vocab": 3}, "decoder": {"type": "ByteLevel"}}',
        "[" * 100_000,
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(write(tmp_path, content))


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    raw = json.loads((GOLDEN / "tiny-f32" / "tokenizer.json").read_text(encoding="utf-8"))
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer(write(tmp_path, json.dumps(raw)))
