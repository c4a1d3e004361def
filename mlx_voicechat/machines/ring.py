"""The ranks of this run, as `mlx.launch` started them, and arrays sent from one to another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx

from ..errors import InputError, MachineLostError
from .watch import Watch, connections, descriptors


class Wire(Protocol):
    """A way to one other rank and back; arrays come in the order in which they were sent."""

    def send(self, array: mx.array) -> None:
        """Evaluate and send. Raises MachineLostError."""

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, idle: bool = False) -> mx.array:
        """Wait for an array, for any time where the other side may be `idle`. Raises MachineLostError."""


class Ranks:
    """All ranks of this run; made once a process, on the thread that computes."""

    def __init__(self) -> None:
        before = descriptors()
        try:
            self.group = mx.distributed.init(strict=True)
        except RuntimeError as fault:
            raise InputError(
                f"The machines do not find each other: {fault}.", "Start all of them by one mlx.launch."
            ) from None
        self.rank, self.count = self.group.rank(), self.group.size()
        self.watch = Watch(connections(before))

    @contextmanager
    def at_work(self, idle: bool = False) -> Iterator[None]:
        """What MLX raises meanwhile is the loss of another rank; unless `idle`, it is one to take too long."""
        try:
            if idle:
                yield
            else:
                with self.watch.waiting():
                    yield
        except RuntimeError as fault:
            raise MachineLostError(f"Another machine of this model is gone: {fault}.") from None

    def wire(self, other: int) -> Wire:
        """The way to the rank `other`."""
        return _RingWire(self, other)


class _RingWire:
    def __init__(self, ranks: Ranks, other: int) -> None:
        self._ranks, self._other = ranks, other

    def send(self, array: mx.array) -> None:
        with self._ranks.at_work():
            mx.eval(mx.distributed.send(array, self._other, group=self._ranks.group))

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, idle: bool = False) -> mx.array:
        with self._ranks.at_work(idle):
            array = mx.distributed.recv(shape, dtype, self._other, group=self._ranks.group)
            mx.eval(array)
        return array


def own_rank() -> int | None:
    """This process's rank in a run of several, as `mlx.launch` says it; None where there is one machine."""
    rank, several = os.environ.get("MLX_RANK"), ("MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_WORLD_SIZE")
    if rank is None or not any(name in os.environ for name in several):
        return None
    hosts = os.environ.get("MLX_HOSTFILE")
    if hosts is not None and os.path.isfile(hosts) and os.path.getsize(hosts) < 2:
        return None  # mlx.launch -n 1
    return int(rank)
