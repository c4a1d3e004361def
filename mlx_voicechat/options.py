"""What a checkpoint is loaded with and a conversation opened with: each option once, with default, range and help."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import InputError, brief

if TYPE_CHECKING:
    from .tools import Tool

Noise: TypeAlias = Callable[[int], tuple[Any, Any]]

MAX_SECONDS = 1e9  # 30 years: a limit beyond it is a mistake
MAX_GUIDANCE = 1e6  # logits stay finite


def option(default: Any, help: str, choices: tuple[Any, ...] = (), **more: Any) -> Any:
    """A field of an options class: what it takes, and what a command shows.

    `more`: metavar, envvar and show_default as a command has them; min and max; `above` 0 for seconds.
    """
    return field(default=default, metadata={"help": help, "choices": choices, **more})


def described(options: type, name: str) -> Mapping[str, Any]:
    """What `option` was told of a field of an options class."""
    return {each.name: each for each in fields(options)}[name].metadata


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is held in memory. Raises InputError for a value that is none of its choices."""

    compile: bool | None = option(None, "Fuse kernels first; on a GPU only if absent.", show_default=False)
    speech_weights: str | None = option(
        None, "How speech weights are held; else by bandwidth and memory.", (None, "f32", "q8"), show_default=False
    )
    kv_cache: str | None = option(
        None,
        "How the speech generator's keys and values are held; else likewise.",
        (None, "f32", "bf16"),
        show_default=False,
    )
    arithmetic: str | None = option(
        None,
        "Of language model and encoder; bfloat16 on a GPU if absent.",
        (None, "float32", "bfloat16"),
        show_default=False,
    )
    sessions: int = option(1, "Conversations at once that all must keep up.", min=1)
    shard_llm: bool = option(False, "Under mlx.launch, share the LLM's blocks among all machines.")
    batch: bool = option(True, "Frames of several conversations run together.")

    def __post_init__(self) -> None:
        _check_choices(self)
        if not isinstance(self.sessions, int) or isinstance(self.sessions, bool) or self.sessions < 1:
            raise InputError(f"sessions is {brief(self.sessions)}, expected an integer of at least 1.")


@dataclass(frozen=True)
class SessionOptions:
    """How a conversation is opened. Raises InputError that names the option and what it takes."""

    system_prompt: str | None = option(None, "The model's own if absent.", metavar="TEXT")
    seed: int = option(0, "Of the speech's noise: same seed, same speech.", metavar="N", min=0)
    max_seconds: float | None = option(None, "End the conversation after so much audio.", metavar="SECONDS", above=0)
    voice: str | None = option(None, "One of the model's voices, if it has several.", metavar="NAME")
    guidance_scale: float | None = option(
        None, "How closely speech follows text; else the model's.", metavar="X", min=0, max=MAX_GUIDANCE
    )
    noise: Noise | None = option(None, "Replaces the sampler's draws: (uniform (5, C), normal (5, Z)) of a step.")
    profile: bool = option(False, "Frame times by stage.")
    tools: Sequence[Tool] = option((), "What the model may call; at most 32, five are recommended.")
    tool_clock: str = option("held", "Whether frames go on while a call is written and answered.", ("held", "running"))
    tool_audio: str = option("silence", "What the model hears meanwhile on the held clock.", ("silence", "zero"))
    tool_timeout: float = option(30.0, "Until a call without a result fails.", metavar="SECONDS", above=0)
    tool_key_order: str = option("given", "Order of the keys of a tool's JSON in the prompt.", ("given", "sorted"))
    prompt_copies: int = option(1, "How often the system prompt stands before the conversation.", (1, 2))
    drop_strays: bool = option(False, "In the agent's turn, let nothing but a call onto the function channel.")
    wait_for_tools: bool = option(False, "Wait for a call's function before the next frame: for files.")
    turns: str = option("model", "Who opens and ends the assistant's turns.", ("model", "application"))
    turn_events: bool = option(False, "Tell the turns of a model that owns them, too.")
    longest_turn: float | None = option(None, "End an application's turn after so long.", metavar="SECONDS", above=0)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for each in fields(self):
            value, seconds = getattr(self, each.name), "above" in each.metadata
            if value is not None and (seconds or "max" in each.metadata):
                checked_number(each.name, value, each.metadata.get("max", MAX_SECONDS), above_zero=seconds)
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
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or seed < 0:
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
