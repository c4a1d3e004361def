"""What a tool gave, as the model reads it: JSON text within the limits, without any special token in it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..errors import InputError
from .calls import strict_json

MAX_RESULT_BYTES = 16 * 1024  # of the released serving code
MAX_RESULT_TOKENS = 128
MAX_ERROR = 100  # letters; a token has one or more
RESPONSE, RESPONSE_END = "<TOOL_RESPONSE>", "</TOOL_RESPONSE>"


class Encoder(Protocol):
    """The part of a tokenizer that results need."""

    @property
    def added_tokens(self) -> Collection[str]: ...

    def encode(self, text: str) -> list[int]: ...


def rendered(result: Any, tokenizer: Encoder) -> str:
    """`result` as JSON: text that is JSON stands as JSON, any other text as a string, a value as itself.

    A special token that is spelled out in it is escaped, so that it stays text. Raises InputError for what is no JSON,
    and for more than 16 KiB or 128 tokens.
    """
    text = _as_json(result)
    for token in tokenizer.added_tokens:
        if len(token) > 1 and token in text:
            text = text.replace(token, f"\\u{ord(token[0]):04x}{token[1:]}")
    size = len(text.encode())
    if size > MAX_RESULT_BYTES:
        raise InputError(f"The result has {size:,} bytes, a result takes {MAX_RESULT_BYTES:,}.", "Shorten it.")
    count = len(tokenizer.encode(text))
    if count > MAX_RESULT_TOKENS:
        raise InputError(f"The result has {count:,} tokens, a result takes {MAX_RESULT_TOKENS}.", "Shorten it.")
    return text


def fits(result: Any, tokenizer: Encoder) -> bool:
    """Whether `rendered` takes it."""
    try:
        rendered(result, tokenizer)
    except InputError:
        return False
    return True


def error_result(why: str) -> str:
    """The result of a call that failed: plain ASCII and short, so that it fits with any tokenizer."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in '"\\<[' else "?" for c in why)
    return json.dumps({"error": plain if len(plain) <= MAX_ERROR else f"{plain[: MAX_ERROR - 3]}..."})


def response_ids(results: Sequence[str], tokenizer: Encoder) -> list[int]:
    """Ids of `<TOOL_RESPONSE>[result, result]</TOOL_RESPONSE>` for rendered results."""
    return tokenizer.encode(f"{RESPONSE}[{', '.join(results)}]{RESPONSE_END}")


def _as_json(result: Any) -> str:
    if isinstance(result, str) and len(result) <= MAX_RESULT_BYTES:
        with suppress(ValueError):
            result = strict_json(result)
    try:
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The result is no JSON: {error}.", "Give text, numbers, lists or objects.") from None
    return text
