"""What a checkpoint is loaded with and a conversation opened with: each option once, with default, range and help."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .errors import InputError, brief

if TYPE_CHECKING:
    from .tools import Tool

Noise: TypeAlias = Callable[[int], tuple[Any, Any]]

MAX_SECONDS = 1e9  # 30 years: a limit beyond it is a mistake
MAX_GUIDANCE = 1e6  # logits stay finite


def option(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    """A field of an options class; `help` and `choices` are what a command shows."""
    return field(default=default, metadata={"help": help, "choices": choices})


def help_of(options: type, name: str) -> str:
    """The help text of one option of `LoadOptions` or `SessionOptions`."""
    return {each.name: each for each in fields(options)}[name].metadata["help"]


def default_of(options: type, name: str) -> Any:
    """The default of one option."""
    return {each.name: each for each in fields(options)}[name].default


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is held in memory. Raises InputError for a value that is none of its choices."""

    compile: bool | None = option(None, "fuse the kernels of a frame; by default on a GPU and not on a CPU")
    speech_weights: Any = option(
        None, "precision of the speech networks' weights; by default what the memory allows", (None, "f32", "q8")
    )
    kv_cache: str = option("f32", "precision of the speech generator's keys and values", ("f32", "bf16"))

    def __post_init__(self) -> None:
        _check_choices(self)


@dataclass(frozen=True)
class SessionOptions:
    """How a conversation is opened. Raises InputError that names the option and what it takes."""

    system_prompt: str | None = option(None, "system prompt; by default the checkpoint's own")
    seed: int = option(0, "seed of the sampler's noise, 0 or more")
    max_seconds: float | None = option(None, "end of the session, in seconds of audio heard")
    voice: str | None = option(None, "name of a voice; by default the checkpoint's own")
    guidance_scale: float | None = option(None, "classifier-free guidance of the speech; by default the checkpoint's")
    noise: Noise | None = option(None, "replaces the sampler's draws: (uniform (5, C), normal (5, Z)) of a step")
    profile: bool = option(False, "time the stages of a frame")
    tools: Sequence[Tool] = option((), "what the model may call; at most 32, five are recommended")
    tool_clock: str = option("held", "whether frames go on while a call is written and answered", ("held", "running"))
    tool_audio: str = option("silence", "what the model hears meanwhile on the held clock", ("silence", "zero"))
    tool_timeout: float = option(30.0, "seconds until a call without a result fails")
    tool_key_order: str = option("given", "order of the keys of a tool's JSON in the prompt", ("given", "sorted"))
    prompt_copies: int = option(1, "how often the system prompt stands before the conversation", (1, 2))
    drop_strays: bool = option(False, "in the agent's turn, let nothing but a call onto the function channel")
    wait_for_tools: bool = option(False, "wait for a call's function before the next frame: for files")
    turns: str = option("model", "who opens and ends the assistant's turns", ("model", "application"))
    turn_events: bool = option(False, "tell the turns of a model that owns them, too")
    longest_turn: float | None = option(None, "seconds after which an application's turn is ended")

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, most in (("max_seconds", MAX_SECONDS), ("longest_turn", MAX_SECONDS), ("tool_timeout", MAX_SECONDS)):
            if getattr(self, name) is not None:
                checked_number(name, getattr(self, name), most, above_zero=True)
        if self.guidance_scale is not None:
            checked_number("guidance_scale", self.guidance_scale, MAX_GUIDANCE)
        if self.system_prompt is not None and not isinstance(self.system_prompt, str):
            raise InputError(f"system_prompt must be a string, not {type(self.system_prompt).__name__}.")
        if self.voice is not None and not isinstance(self.voice, str):
            raise InputError(f"voice must be a name, not {type(self.voice).__name__}.")
        if self.noise is not None and not callable(self.noise):
            raise InputError(f"noise must be callable, not {type(self.noise).__name__}.")
        _check_unicode(self.system_prompt or "")
        _check_choices(self)


def checked_number(name: str, value: Any, most: float, above_zero: bool = False) -> float:
    """`value` as a float when it is a real number in 0..most, 0 itself excluded by `above_zero`; else InputError."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value <= most or (above_zero and not value):
        least = "above 0" if above_zero else "of at least 0"
        raise InputError(f"{name} is {brief(value)}, expected a number {least} and at most {most:g}.")
    return float(value)


def check_seed(seed: Any) -> None:
    """InputError for a seed that is no integer of at least 0."""
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"seed is {brief(seed)}, expected an integer of at least 0.")


def _check_choices(options: Any) -> None:
    for each in fields(options):
        choices, value = each.metadata["choices"], getattr(options, each.name)
        if choices and value not in choices:
            named = " or ".join(str(choice) for choice in choices if choice is not None)
            raise InputError(f"{each.name} is {brief(value)}, expected {named}.")


def _check_unicode(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The system prompt is not valid Unicode: character {error.start} is {prompt[error.start]!a}, half a pair.",
            "Give it as UTF-8.",
        ) from None
