"""Options of loading and of a conversation: said once, with help, and refused by name."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from typing import Any

import pytest

from mlx_voicechat.errors import InputError
from mlx_voicechat.options import LoadOptions, SessionOptions, described
from mlx_voicechat.server.settings import ServerSettings


@pytest.mark.parametrize("options", [LoadOptions, SessionOptions])
def test_every_option_has_a_help_text_and_a_default(options: type) -> None:
    made = options()
    for each in fields(options):
        assert len(described(options, each.name)["help"]) > 10
        assert getattr(made, each.name) == each.default


@pytest.mark.parametrize("command", ["bench", "generate", "info", "serve", "talk"])
def test_commands_take_their_defaults_from_the_options(command: str) -> None:
    """Of what `bench` differs in by design, compiling, its own default is its help's."""
    function = getattr(importlib.import_module(f"mlx_voicechat.cli.{command}"), command)
    classes = (LoadOptions, SessionOptions, *([ServerSettings] if command == "serve" else []))
    known = {each.name: each.default for options in classes for each in fields(options)}
    taken = {name: value for name, value in inspect.signature(function).parameters.items() if name in known}
    for own in ("model", "max_seconds", "profile", "tools"):  # the last: of a recording, a switch, a file of tools
        taken.pop(own, None)
    assert "speech_weights" in taken
    for name, parameter in taken.items():
        assert (parameter.default or None) == (known[name] or None), name


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
