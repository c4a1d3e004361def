"""Options of loading and of a conversation: said once, with help, and refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from mlx_voicechat.errors import InputError
from mlx_voicechat.options import LoadOptions, SessionOptions, default_of, help_of


@pytest.mark.parametrize("options", [LoadOptions, SessionOptions])
def test_every_option_has_a_help_text_and_a_default(options: type) -> None:
    made = options()
    for each in fields(options):
        assert len(help_of(options, each.name)) > 10
        assert getattr(made, each.name) == default_of(options, each.name)


@pytest.mark.parametrize(
    ("options", "given", "told"),
    [
        (LoadOptions, {"kv_cache": "q3"}, "kv_cache is 'q3', expected f32 or bf16"),
        (LoadOptions, {"speech_weights": "q4"}, "speech_weights is 'q4', expected f32 or q8"),
        (SessionOptions, {"turns": "mine"}, "turns is 'mine', expected model or application"),
        (SessionOptions, {"tool_clock": 1}, "tool_clock is 1, expected held or running"),
        (SessionOptions, {"tool_audio": "noise"}, "tool_audio is 'noise', expected silence or zero"),
        (SessionOptions, {"tool_key_order": ""}, "tool_key_order is '', expected given or sorted"),
        (SessionOptions, {"prompt_copies": 3}, "prompt_copies is 3, expected 1 or 2"),
        (SessionOptions, {"tool_timeout": 0}, "tool_timeout is 0, expected a number above 0"),
        (SessionOptions, {"longest_turn": -1}, "longest_turn is -1"),
        (SessionOptions, {"longest_turn": "long"}, "longest_turn is 'long'"),
        (SessionOptions, {"seed": True}, "seed is True"),
    ],
)
def test_refused_options(options: type, given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        options(**given)
