"""Counts what a piece of work hands to the device: primitives, launches, and how often the host reads or waits.

Every way from Python into an evaluation is wrapped meanwhile: the functions and methods below, and the buffer protocol,
through which numpy, `memoryview` and `bytes` read an array. Not seen: names bound before (`from mlx.core import eval`).
"""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

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
BUFFER = "buffer"  # how a read by numpy is named in `Count.reads`
NODE = re.compile(r'label ="(\w+)", shape=rectangle')


@dataclass
class Count:
    """`operations` counts primitives by name, `reads` the host's reads and waits by what did them."""

    operations: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    complete: bool = True  # False where the buffer protocol could not be watched

    @property
    def primitives(self) -> int:
        return self.operations.total()

    @property
    def launches(self) -> int:
        """Primitives without the views: what a GPU has to start."""
        return sum(count for name, count in self.operations.items() if name not in VIEWS)

    @property
    def evaluations(self) -> int:
        """Forced evaluations and host reads, of arrays that were evaluated before as well."""
        return self.reads.total()


@contextmanager
def counting() -> Iterator[Count]:
    """Count until the block ends. Draws each graph just before it is evaluated, so time nothing meanwhile."""
    count = Count()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        drawing = Path(folder) / "graph.dot"

        def note(how: str, *values: Any) -> None:
            count.reads[how] += 1
            flat: Any = tree_flatten(values, destination={})
            arrays = [leaf for leaf in flat.values() if isinstance(leaf, mx.array)]
            if arrays:
                mx.export_to_dot(str(drawing), *arrays)
                count.operations.update(NODE.findall(drawing.read_text(encoding="utf-8")))

        for name in FUNCTIONS:
            _replace(undo, mx, name, note)
        for name in METHODS:
            _replace(undo, mx.array, name, note)
        count.complete = _watch_buffers(undo, lambda array: note(BUFFER, array))
        yield count


def _replace(undo: ExitStack, owner: Any, name: str, note: Callable[..., None]) -> None:
    original = vars(owner)[name]

    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        note(name, args, kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, watched)
    undo.callback(setattr, owner, name, original)


# bf_getbuffer is a C function that Python 3.10 and 3.11 give no other way to wrap.
_GetBuffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_GETBUFFER_SLOT = 1  # Py_bf_getbuffer in CPython's typeslots.h
_AS_BUFFER = 20  # place of tp_as_buffer among the pointers of a PyTypeObject, from 3.10 to 3.14


def _watch_buffers(undo: ExitStack, note: Callable[[mx.array], None]) -> bool:
    """Call `note` before each read through the buffer protocol; False, and nothing done, where that is impossible."""
    pointer = ctypes.sizeof(ctypes.c_void_p)
    if sys.implementation.name != "cpython" or object.__basicsize__ != 2 * pointer:
        return False
    get_slot = ctypes.pythonapi.PyType_GetSlot
    get_slot.restype, get_slot.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    known = get_slot(mx.array, _GETBUFFER_SLOT)
    procedures = ctypes.c_void_p.from_address(id(mx.array) + _AS_BUFFER * pointer).value
    if not known or not procedures:
        return False
    entry = ctypes.c_void_p.from_address(procedures)
    if entry.value != known:
        return False
    original = _GetBuffer(known)

    def watched(array: Any, view: int, flags: int) -> int:
        note(array)
        try:
            return original(array, view, flags)
        except BufferError:  # a type that buffers lack, bfloat16
            return -1

    callback = _GetBuffer(watched)

    def restore(_: object) -> None:
        entry.value = known

    undo.callback(restore, callback)  # which must outlive its use
    entry.value = ctypes.cast(callback, ctypes.c_void_p).value
    return True
