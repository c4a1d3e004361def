"""The language model on several ranks: rank 0 leads, the others follow each of its steps with their part of the blocks.

All hold the residual stream; after each block its parts are added up (one all-reduce), and the stream once.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..frame import Frame, Request, State
from ..gauges.profile import Profile
from ..networks.duplex_lm import LlmState, NemotronH
from ..networks.linear import prepare_linears
from ..voicechat import VoiceChat
from ..weights import layout
from .ring import Ranks

WORDS = 4
BACK_TO_THE_STREAM = ("out_proj", "o_proj", "down_proj")


class Order(IntEnum):
    """What the leader has the others do."""

    OPEN = 0  # a conversation
    COPY = 1  # one that goes on from another
    STEP = 2  # positions of one; their inputs follow
    CLOSE = 3  # one that nobody goes on with
    END = 4  # of the run


class Reduced(nn.Module):
    """A layer of which each rank holds a part of the inputs: the sum of what they give."""

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.layer = layer
        self._group = ranks.group

    def __call__(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(self.layer(x), group=self._group)


def reduce(stack: NemotronH, ranks: Ranks) -> None:
    """Add up over the ranks whatever goes back to the residual stream; call it before `prepare`."""
    for block in stack.layers:
        for name in BACK_TO_THE_STREAM:
            if name in block.mixer:
                block.mixer[name] = Reduced(block.mixer[name], ranks)


class Led:
    """A conversation's state on rank 0, which the others have in their parts."""

    def __init__(self, state: LlmState, number: Number, hidden: mx.array | None = None) -> None:
        self.state, self.number = state, number
        # With the last output: its sum over the ranks must be computed even where nobody reads it.
        self.arrays = [*state.arrays, *([] if hidden is None else [hidden])]

    def copy(self) -> Led:
        """A state that goes on independently of this one."""
        return Led(self.state.copy(), self.number.copied())


class Number:
    """What the other ranks call a conversation, as long as any state of it is held."""

    def __init__(self, orders: Orders, value: int) -> None:
        self.value = value
        self._orders = orders
        weakref.finalize(self, orders.closed.append, value).atexit = False

    def copied(self) -> Number:
        twin = self._orders.number()
        self._orders.give(Order.COPY, twin.value, self.value)
        return twin


class Orders:
    """The way from rank 0 to all others, by sums to which they add nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self.closed: deque[int] = deque()
        self._ranks = ranks
        self._numbers = itertools.count(1)

    def number(self) -> Number:
        """Of a new conversation."""
        return Number(self, next(self._numbers))

    def give(self, order: Order, number: int = 0, other: int = 0) -> None:
        """Have every other rank do something. Raises MachineLostError."""
        while self.closed:
            self._say(Order.CLOSE, self.closed.popleft(), 0)
        self._say(order, number, other)

    def end(self) -> None:
        """The run ends."""
        self._say(Order.END, 0, 0)

    def _say(self, *words: int) -> None:
        self.sum([*words, 0], idle=False)

    def take(self) -> tuple[Order, int, int]:
        """Any other rank: wait for the next order, for any time."""
        order, number, other, _ = self.sum([0] * WORDS, idle=True)
        return Order(order), number, other

    def sum(self, words: Sequence[int], idle: bool) -> list[int]:
        """Words of rank 0 on every rank."""
        with self._ranks.at_work(idle):
            total = mx.distributed.all_sum(mx.array(list(words), mx.int32), group=self._ranks.group)
            return [int(word) for word in np.array(total)]


class LedStack(nn.Module):
    """`NemotronH` on rank 0: each step is an order to the others, and its input goes to them."""

    def __init__(self, stack: NemotronH, ranks: Ranks, orders: Orders) -> None:
        super().__init__()
        self.stack = stack
        self._ranks, self._orders = ranks, orders

    @property
    def dtype(self) -> mx.Dtype:
        return self.stack.dtype

    def prepare(self) -> None:
        self.stack.prepare()

    def compile(self) -> None:
        self.stack.compile()

    def init_state(self, batch: int = 1) -> Led:
        """See `NemotronH.init_state`; one conversation."""
        number = self._orders.number()
        self._orders.give(Order.OPEN, number.value)
        return Led(self.stack.init_state(batch), number)

    def step(self, x: mx.array, state: Led) -> tuple[mx.array, Led]:
        """See `NemotronH.step`."""
        self._orders.give(Order.STEP, state.number.value, x.shape[1])
        x = mx.distributed.all_sum(x, group=self._ranks.group)
        hidden, new = self.stack.step(x, state.state)
        return hidden, Led(new, state.number, hidden)


class Leader(VoiceChat):
    """A whole model on rank 0, with its part of the language model's blocks."""

    batches = False

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        self._ranks, self.orders = ranks, Orders(ranks)
        super().__init__(*arguments)

    def _prepare_listening(self) -> None:
        language: Any = self.language
        reduce(language.llm, self._ranks)
        language.llm = LedStack(language.llm, self._ranks, self.orders)
        super()._prepare_listening()

    def run(self, request: Request, state: State, profile: Profile | None = None) -> Frame | int:
        """See `Model.run`."""
        with self._ranks.at_work():
            return super().run(request, state, profile)


class Follower(VoiceChat):
    """A rank's part of the language model's blocks, and nothing else."""

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        self._ranks, self._orders = ranks, Orders(ranks)
        super().__init__(*arguments)

    @classmethod
    def holds(cls, name: str) -> bool:
        return layout.STACK.match(name) is not None

    def _prepare(self, folder: Path, say: Callable[[str], None]) -> None:
        stack = self.language.llm
        reduce(stack, self._ranks)
        prepare_linears(stack)
        stack.prepare()

    def _compile_listening(self) -> None:
        self.language.llm.compile()

    def _compile_speech(self) -> None:
        """Nothing: those networks are not here."""

    def serve(self) -> None:
        """Follow to the end of the run. Raises MachineLostError when another rank is gone."""
        stack, width = self.language.llm, self.config.llm.hidden_size
        states: dict[int, LlmState] = {}
        while (order := self._orders.take())[0] != Order.END:
            kind, number, other = order
            if kind == Order.OPEN:
                states[number] = stack.init_state()
            elif kind == Order.COPY:
                states[number] = states[other].copy()
            elif kind == Order.CLOSE:
                states.pop(number, None)
            else:
                nothing = mx.zeros((1, other, width), stack.dtype)
                with self._ranks.at_work():
                    x = mx.distributed.all_sum(nothing, group=self._ranks.group)
                    hidden, states[number] = stack.step(x, states[number])
                    mx.eval(hidden, states[number].arrays)
