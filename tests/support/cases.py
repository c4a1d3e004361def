"""Long lists of cases: a part of them each time, all of them with the slow tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

PART = 3  # one of so many each time


def a_part_of(cases: Sequence[Any], name: Callable[[Any], str]) -> list[Any]:
    """For `parametrize`: every third case, the others marked slow."""
    return [
        pytest.param(case, id=name(case), marks=[pytest.mark.slow] if number % PART else [])
        for number, case in enumerate(cases)
    ]
