"""Text: tokenizer, incremental decoding, the character vocabulary of the TTS, transcript pieces, captions."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import CheckpointError
from .events import FunctionDelta, TextDelta, TranscriptDelta

if TYPE_CHECKING:
    import tokenizers

    from .config import ModelConfig

WORD_SPACE = "\u2581"  # SentencePiece's visible space
# Pieces that advance the transducer but are not text, language tags like <en-US> among them (NeMo RNNT vocabulary).
SILENT_PIECE = re.compile(r"<(unk|pad|s|/s|[a-z]{2,3}(-[A-Za-z0-9]+)*)>")
REMEDY = "The checkpoint is incomplete or edited: get it again."
WORD_STARTS = ("Ġ", "<")  # NeMo SubwordFlagEmbedding: what else a token begins with continues a word


def byte_alphabet() -> dict[str, int]:
    """Letter -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest follows from U+0100 (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _checked_file(path: Path) -> str:
    """The file's text, once it is sure to be whole and of the one kind that the decoder below knows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no tokenizer.json.", REMEDY) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", REMEDY) from None
    parts = [raw.get(name) if isinstance(raw, dict) else None for name in ("model", "decoder")]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if kinds != ["BPE", "ByteLevel"]:
        raise CheckpointError(f"{path} is not a byte-level BPE tokenizer: its model and decoder are {kinds}.", REMEDY)
    return text


class Tokenizer:
    """The `tokenizer.json` of a checkpoint folder, as it stands: byte-level BPE.

    Raises CheckpointError when the file is absent, broken or of another kind.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend  # 50 ms, and not needed to print a help text

        path = Path(folder) / "tokenizer.json"
        text = _checked_file(path)
        try:
            self.backend: tokenizers.Tokenizer = Backend.from_str(text)
        except Exception as error:  # tokenizers raises nothing more special
            raise CheckpointError(f"{path} cannot be used: {error}.", REMEDY) from None
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """V, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def pieces(self) -> list[str]:
        """Token strings by id, in byte-level letters; empty where no token has that id."""
        return [self.id_to_token(token) or "" for token in range(self.vocab_size)]

    @property
    def added_tokens(self) -> Collection[str]:
        """The tokens that are found in a text before it is split: special ones, and any other that was added."""
        return [token.content for token in self.backend.get_added_tokens_decoder().values()]

    def token_id(self, piece: str) -> int | None:
        """The id of a token by its literal text, or None."""
        return self.backend.token_to_id(piece)

    def id_to_token(self, token: int) -> str | None:
        return self.backend.id_to_token(token)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special tokens added; special tokens written out in it become their own ids."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens shown; broken UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """What one id adds to the byte stream that `decode` reads; nothing for an unknown id.

        A token with a character outside the alphabet (only added tokens can have one) stands for its own UTF-8.
        """
        known = self._bytes.get(token)
        if known is None:
            piece = self.id_to_token(token) or ""
            alphabet = self._alphabet
            spelled = all(letter in alphabet for letter in piece)
            known = bytes(alphabet[letter] for letter in piece) if spelled else piece.encode()
            self._bytes[token] = known
        return known


class CallTokens(NamedTuple):
    """Ids that frame a tool call on the function channel: its start and end, and the end of the response to it."""

    start: int
    end: int
    response_end: int


def call_tokens(tokenizer: Tokenizer) -> CallTokens | None:
    """The ids by their literal tokens; None for a checkpoint without tools."""
    ids = [tokenizer.token_id(f"<SPECIAL_{number}>") for number in (20, 21, 22)]
    known = [token for token in ids if token is not None]
    return CallTokens(*known) if len(known) == len(ids) else None


class _Growing:
    """Text that only grows, joined when it is looked at."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Everything so far: of ids without a trailing incomplete sequence, of a transcript stripped."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class IncrementalDecoder(_Growing):
    """Text of a growing list of ids, equal to `Tokenizer.decode` of all of them at a constant cost per id.

    A trailing incomplete UTF-8 sequence is held back until it is complete or broken, so nothing is ever withdrawn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        super().__init__()

    def push(self, token: int) -> str:
        """Add one id; returns what it adds to `text`, possibly nothing."""
        delta = self._utf8.decode(self._tokenizer.token_bytes(token))
        if not _may_continue(self._utf8.getstate()[0]):  # the decoder also holds back what starts a surrogate
            delta += self._utf8.decode(b"", final=True)
            self._utf8.reset()
        if delta:
            self._parts.append(delta)
        return delta


def _may_continue(held: bytes) -> bool:
    """Whether `held` is empty or the beginning of a character's UTF-8."""
    for fill in (b"\x80", b"\xbf"):
        for missing in range(4):
            try:
                (held + missing * fill).decode()
                return True
            except UnicodeDecodeError:
                continue
    return False


class TranscriptText(_Growing):
    """What the user said, from RNNT symbols: `pieces` (SentencePiece) joined and stripped, special pieces left out."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._texts = ["" if SILENT_PIECE.fullmatch(piece) else piece.replace(WORD_SPACE, " ") for piece in pieces]
        super().__init__()
        self._space = ""  # trailing white space: not text until something follows

    def push(self, symbols: Sequence[int]) -> str:
        """Add symbols; returns what they add to `text`, possibly nothing."""
        added = self._space + "".join(self._texts[symbol] for symbol in symbols)
        if not self._parts:
            added = added.lstrip()
        delta = added.rstrip()
        self._space = added[len(delta) :]
        if delta:
            self._parts.append(delta)
        return delta


class Captions:
    """What was said so far. Ids of the quiet tokens (PAD, silence, BOS, EOS) are no text."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self._pieces, self._quiet_ids = config.rnnt.pieces, config.quiet_ids
        self._text, self._function = IncrementalDecoder(tokenizer), IncrementalDecoder(tokenizer)
        self._transcript = TranscriptText(self._pieces)
        self._turn_start = 0  # of the transcript's text

    @property
    def transcript(self) -> str:
        """What the user said."""
        return self._transcript.text

    @property
    def turn_transcript(self) -> str:
        """What the user said since `new_turn`."""
        return self._transcript.text[self._turn_start :].strip()

    @property
    def text(self) -> str:
        """What the assistant said."""
        return self._text.text

    @property
    def function(self) -> str:
        """The function channel."""
        return self._function.text

    def says(self, token: int) -> bool:
        """Whether an id is text."""
        return token not in self._quiet_ids

    def new_turn(self, forget: bool) -> None:
        """The transcript of another turn begins; `forget` drops what was before."""
        if forget:
            self._transcript = TranscriptText(self._pieces)
        self._turn_start = len(self._transcript.text)

    def heard(self, symbols: Sequence[int], frame_index: int) -> list[TranscriptDelta]:
        """Symbols of the recogniser."""
        if not symbols:
            return []
        delta = self._transcript.push(symbols)
        return [TranscriptDelta(frame_index, delta, self._transcript.text)]

    def said(self, token: int, frame_index: int) -> list[TextDelta]:
        """An id of the text channel."""
        if not self.says(token):
            return []
        delta = self._text.push(token)
        return [TextDelta(frame_index, token, delta, self._text.text)]

    def called(self, token: int, frame_index: int) -> list[FunctionDelta]:
        """An id of the function channel."""
        if not self.says(token):
            return []
        delta = self._function.push(token)
        return [FunctionDelta(frame_index, token, delta, self._function.text)]


def character_table(tokenizer: Tokenizer) -> list[list[int]]:
    """Character ids of every token, V lists: its letters that are one-character tokens, numbered in order of token id.

    Special tokens are spelled out like any other (NeMo CharAwareSubwordEncoder).
    """
    pieces = tokenizer.pieces
    number: dict[str, int] = {}
    for piece in pieces:
        if len(piece) == 1:
            number.setdefault(piece, len(number))
    return [[number[letter] for letter in piece if letter in number] for piece in pieces]


def continuation_flags(tokenizer: Tokenizer) -> list[int]:
    """1 for every token that continues a word, V flags (NeMo SubwordFlagEmbedding)."""
    return [int(not piece.startswith(WORD_STARTS)) for piece in tokenizer.pieces]


def mismatching_flags(
    tokenizer: Tokenizer, is_continuation: Sequence[int], special_flags: Sequence[int], bos_id: int, eos_id: int
) -> Mapping[str, list[int]]:
    """Ids whose flags in the checkpoint contradict the tokenizer, by buffer name; no entry for a buffer that agrees.

    `is_continuation` (V + 1: one pad entry) and `special_flags` (V; 1 for BOS, 2 for EOS) are the TTS's flag buffers.
    An id that only one of the two sides has is left out: a wrong length is the loader's to report.
    """
    special = {bos_id: 1, eos_id: 2}
    expected = {
        "is_continuation": (continuation_flags(tokenizer), is_continuation),
        "special_flags": ([special.get(token, 0) for token in range(tokenizer.vocab_size)], special_flags),
    }
    faults = {
        name: [token for token, (ours, theirs) in enumerate(zip(*sides, strict=False)) if ours != theirs]
        for name, sides in expected.items()
    }
    return {name: tokens for name, tokens in faults.items() if tokens}
