"""Counts what a piece of work hands to the device: primitives, launches, and how often the host reads or waits.

Every way from Python into an evaluation is wrapped meanwhile: MLX's functions and methods below, and numpy, which reads
an array through the buffer protocol: its constructors, its functions and ufuncs by the protocols that it looks for on
a class (NEP 13 and 18), and `memoryview`. Not seen: names bound before, such as `from mlx.core import eval`.
"""

from __future__ import annotations

import builtins
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

# Primitives that only look at memory in another way: no device starts a kernel for them.
VIEWS = frozenset(
    [
        *("AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split"),
        *("Squeeze", "StopGradient", "Transpose", "Unflatten"),
    ]
)
FUNCTIONS = ("eval", "async_eval", "synchronize", "save", "savez", "savez_compressed", "save_safetensors", "save_gguf")
METHODS = (
    *("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__complex__", "__bytes__"),
    *("__repr__", "__format__", "__array__", "__dlpack__", "__getstate__"),
)
CONSTRUCTORS = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "frombuffer", "copyto")
BUFFER = "buffer"  # how a read by numpy is named in `Count.reads`
NODE = re.compile(r'(\d+) \[label ="(\w+)", shape=rectangle')
INPUT = re.compile(r'^"\w+" -> (\d+)$', re.MULTILINE)
JOINING = "Concatenate"  # a GPU starts a copy for each of its inputs

Note = Callable[..., None]


@dataclass
class Count:
    """`operations` counts primitives by name, `reads` the host's reads and waits by what did them.

    `copies`: arrays that concatenations join, all of them together. `waits`: how often the host may have waited; what
    only starts work is none, and a read of what was waited for before is neither that nor in `reads`.
    """

    operations: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    waits: int = 0

    def add(self, drawing: str) -> None:
        """Count the graph that `mx.export_to_dot` drew."""
        nodes = dict(NODE.findall(drawing))
        self.operations.update(nodes.values())
        self.copies += sum(nodes[node] == JOINING for node in INPUT.findall(drawing) if node in nodes)

    @property
    def primitives(self) -> int:
        return self.operations.total()

    @property
    def launches(self) -> int:
        """Primitives without the views, a concatenation once for each array that it joins: what a GPU has to start."""
        plain = sum(count for name, count in self.operations.items() if name not in VIEWS and name != JOINING)
        return plain + self.copies

    @property
    def evaluations(self) -> int:
        """Forced evaluations, of arrays that were evaluated before as well, and host reads of others."""
        return self.reads.total()


@contextmanager
def counting() -> Iterator[Count]:
    """Count until the block ends. Draws each graph just before it is evaluated, so time nothing meanwhile."""
    count = Count()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        drawing = Path(folder) / "graph.dot"

        waited_for: dict[int, mx.array] = {}  # what was waited for, by id, kept so that no other array gets the id

        def note(how: str, *values: Any) -> None:
            arrays = _arrays(values)
            if how not in FUNCTIONS and all(id(array) in waited_for for array in arrays):
                return
            count.reads[how] += 1
            if how != "async_eval":
                count.waits += 1
                waited_for.update((id(array), array) for array in arrays)
            if arrays:
                mx.export_to_dot(str(drawing), *arrays)
                count.add(drawing.read_text(encoding="utf-8"))

        for name in FUNCTIONS:
            _replace(undo, mx, name, note)
        for name in METHODS:
            _replace(undo, mx.array, name, note)
        _watch_numpy(undo, note)
        yield count


def _arrays(values: Any) -> list[mx.array]:
    flat: Any = tree_flatten(values, destination={})
    return [leaf for leaf in flat.values() if isinstance(leaf, mx.array)]


def _replace(undo: ExitStack, owner: Any, name: str, note: Note) -> None:
    original = vars(owner)[name]

    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        note(name, args, kwargs)
        return original(*args, **kwargs)

    _set(undo, owner, name, watched)


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `undo`, which leaves none where there was none."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _watch_numpy(undo: ExitStack, note: Note) -> None:
    plain = np.asarray

    def watch(owner: Any, name: str) -> None:
        original = vars(owner)[name]

        def reading(*args: Any, **kwargs: Any) -> Any:
            if _arrays((args, kwargs)):
                note(BUFFER, args, kwargs)
            return original(*args, **kwargs)

        _set(undo, owner, name, reading)

    def call(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        note(BUFFER, args, kwargs)
        args, kwargs = tree_map(lambda leaf: plain(leaf) if isinstance(leaf, mx.array) else leaf, (args, kwargs))
        return run(*args, **kwargs)

    def function(self: mx.array, run: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return call(run, args, kwargs)

    def ufunc(self: mx.array, run: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return call(getattr(run, method), args, kwargs)

    for name in CONSTRUCTORS:
        watch(np, name)
    watch(builtins, "memoryview")
    _set(undo, mx.array, "__array_function__", function)
    _set(undo, mx.array, "__array_ufunc__", ufunc)
