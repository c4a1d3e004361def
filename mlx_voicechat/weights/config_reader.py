"""Typed values of a nested JSON object, read by dotted keys; every fault is remembered, so that one error lists all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

# Bounds that tell a broken file before anything is built from it.
MAX_SIZE = 2**24  # widths and ids: ids are read from the device as float32, exact up to here
MAX_COUNT = 1000  # layers and the like, each a Python object
MAX_NUMBER = 1e30  # of any kind; float32 holds it
MIN_FLOAT = 1e-6  # durations, which others are divided by

T = TypeVar("T")


class Reader:
    """Reads dotted keys of nested dictionaries and remembers every fault, so that one error can list them all."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def find(self, key: str) -> Any:
        node: Any = self.raw
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return node

    def need(self, key: str, kind: type[T], *aliases: str) -> T:
        for name in (key, *aliases):
            value = self.find(name)
            if value is not None:
                return self._typed(name, value, kind)
        self.missing.append(key)
        return self._empty(kind)

    def optional(self, key: str, default: T, *aliases: str) -> T:
        for name in (key, *aliases):
            value = self.find(name)
            if value is not None:
                return self._typed(name, value, type(default))
        return default

    def within(self, key: str, kind: type[T], low: float, high: float, *aliases: str) -> T:
        value: Any = self.need(key, kind, *aliases)
        if low <= value <= high:
            return value
        self.wrong.append(f"{key} is {value!r}, expected a number in {low}..{high}")
        return self._empty(kind)

    def size(self, key: str, *aliases: str) -> int:
        return self.within(key, int, 1, MAX_SIZE, *aliases)

    def count(self, key: str) -> int:
        return self.within(key, int, 1, MAX_COUNT)

    def letters(self, key: str) -> str:
        """A string, or the list of its letters."""
        value = self.find(key)
        if isinstance(value, list) and all(isinstance(letter, str) and len(letter) == 1 for letter in value):
            return "".join(value)
        return self.need(key, str)

    def sizes(self, key: str) -> tuple[int, ...]:
        values = self.need(key, list)
        if not all(type(value) is int and 1 <= value <= MAX_SIZE for value in values):
            self.wrong.append(f"{key} is {values!r}, expected whole numbers above 0")
            return ()
        return tuple(values)

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.need(key, list)
        if not all(isinstance(value, str) for value in values):
            self.wrong.append(f"{key} holds something that is no string")
            return ()
        return tuple(values)

    def require_true(self, key: str) -> None:
        if not self.need(key, bool) and key not in self.missing:
            self.wrong.append(f"{key} must be true: this program has no other path")

    @staticmethod
    def _empty(kind: type[T]) -> T:
        return kind(1) if kind in (int, float) else kind()  # type: ignore[call-arg]

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind in (int, float) and isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            self.wrong.append(f"{key} is not a finite number of usual size")
            return self._empty(kind)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.wrong.append(f"{key} is {value!r}, expected {kind.__name__}")
            return self._empty(kind)
        return value
