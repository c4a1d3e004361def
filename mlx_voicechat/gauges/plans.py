"""In which form a checkpoint is held on a machine: decided by what a frame must move, then by memory.

Quality asks for the widest form, time for the narrowest: the widest one is taken that leaves half of every frame's time
to computing. What is stored rounded gains nothing by it: on a GPU its speech weights are held in 8 bits, its keys and
values in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from ..config import ModelConfig
from ..frame import rounds
from ..options import LoadOptions
from ..weights import precision
from ..weights.precision import LONG_SECONDS, Requantisation, Types, fits
from ..weights.shards import Stored
from . import chips, memory, traffic

JUDGED_POSITIONS = 1500  # of a conversation, two minutes, when a frame's traffic is judged
SHOWN_POSITIONS = (100, 1500, 7500)
BUDGET_PART = 0.5  # of a frame's time that memory may take
SLOWEST_GBPS = 4.0  # of any machine: what is in time even there needs no measured copy
# Speech weights, keys and values; widest first.
FORMS = (("f32", "f32"), ("f32", "bf16"), ("q8", "f32"), ("q8", "bf16"))


class Plan(NamedTuple):
    """What is chosen: each the word of the option of that name, and none of them open any more."""

    speech_weights: str
    kv_cache: str
    arithmetic: str


class Place(NamedTuple):
    """What of a machine decides: whether MLX runs on a GPU, all memory in bytes, GB a second (asked if it counts)."""

    on_gpu: bool
    memory_bytes: int
    gbps: Callable[[], float]


class Form(NamedTuple):
    """A checkpoint in the form of a plan: the layers quantised at load, and what a conversation keeps."""

    plan: Plan
    requantise: Requantisation
    states: memory.States

    @property
    def types(self) -> Types:
        return self.states.types


class Row(NamedTuple):
    """A plan, bytes a frame after so many positions, and the milliseconds that moving them takes."""

    plan: Plan
    chosen: bool
    moved: dict[int, int]
    floor_ms: dict[int, float]


def here() -> Place:
    """This machine."""
    on_gpu = mx.default_device().type == mx.gpu
    return Place(on_gpu, memory.machine().total, lambda: chips.bandwidth().gbps)


def choose(config: ModelConfig, stored: Mapping[str, Stored], options: LoadOptions, place: Place | None = None) -> Form:
    """What `load` makes of these options on a machine, by default this one. Raises InputError for an unknown word."""
    place = here() if place is None else place
    arithmetic = options.arithmetic or default_arithmetic(stored, place)
    *wider, narrowest = (
        Plan(weights, keys, arithmetic)
        for weights, keys in FORMS
        if options.speech_weights in (None, weights) and options.kv_cache in (None, keys)
    )
    if not (place.on_gpu and precision.llm_is_rounded(stored)):
        for plan in wider:
            form = _form(config, stored, plan, options.speech_weights)
            if _suits(config, stored, form, options, place):
                return form
    return _form(config, stored, narrowest, options.speech_weights)


def default_arithmetic(stored: Mapping[str, Stored], place: Place) -> str:
    """bfloat16 on a GPU, unless the LLM is stored in float32, unrounded; float32 on a CPU."""
    return "bfloat16" if place.on_gpu and precision.llm_is_rounded(stored) else "float32"


def table(
    config: ModelConfig, stored: Mapping[str, Stored], options: LoadOptions, place: Place | None = None
) -> list[Row]:
    """Every form in which the checkpoint can be held on a machine, widest first."""
    place = here() if place is None else place
    chosen = choose(config, stored, options, place).plan
    forms = [(*form, options.arithmetic or default_arithmetic(stored, place)) for form in FORMS]
    return [row(config, stored, Plan(*form), place.gbps(), Plan(*form) == chosen) for form in forms]


def row(config: ModelConfig, stored: Mapping[str, Stored], plan: Plan, gbps: float, chosen: bool = True) -> Row:
    """One form's traffic."""
    form = _form(config, stored, plan)
    moved = {count: _moved(config, stored, form, count) for count in SHOWN_POSITIONS}
    return Row(plan, chosen, moved, {count: traffic.milliseconds(size, gbps) for count, size in moved.items()})


def as_facts(each: Row) -> dict[str, Any]:
    """A row for JSON."""
    at = [{"positions": n, "bytes": each.moved[n], "floor_ms": each.floor_ms[n]} for n in each.moved]
    return each.plan._asdict() | {"chosen": each.chosen, "at": at}


def _form(config: ModelConfig, stored: Mapping[str, Stored], plan: Plan, asked: str | None = None) -> Form:
    """`asked`: 8 bits by name take what is stored in float32 too (`precision.plan`)."""
    states = memory.States(config, precision.types(stored, plan.arithmetic), plan.kv_cache)
    return Form(plan, precision.plan(stored, asked, plan.speech_weights == "f32"), states)


def _suits(config: ModelConfig, stored: Mapping[str, Stored], form: Form, options: LoadOptions, place: Place) -> bool:
    """Whether memory, and the time of a frame of each of the sessions, allow this form."""
    announced = memory.announce(
        config, stored, round(LONG_SECONDS / config.frame_seconds), requantise=form.requantise, states=form.states
    )
    if not fits(announced.with_sessions(options.sessions), place.memory_bytes):
        return False
    together = rounds(options.sessions) if options.batch else [1] * options.sessions
    by_rows = {rows: _moved(config, stored, form, JUDGED_POSITIONS, rows) for rows in set(together)}
    moved = sum(by_rows[rows] for rows in together)
    most = BUDGET_PART * 1000 * config.frame_seconds
    return traffic.milliseconds(moved, SLOWEST_GBPS) <= most or traffic.milliseconds(moved, place.gbps()) <= most


def _moved(config: ModelConfig, stored: Mapping[str, Stored], form: Form, positions: int, rows: int = 1) -> int:
    return sum(traffic.traffic(config, stored, positions, form.requantise, form.states, rows).values())
