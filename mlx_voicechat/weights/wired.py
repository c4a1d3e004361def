"""Memory that the system must not take from the GPU while a model is in use (`mx.set_wired_limit`).

Without it macOS may page weights out between two frames of a quiet conversation, and the next frame waits for them.
"""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx

_before: list[int] = []  # the limit that the program had, while models hold ours
_users: set[int] = set()


def wire(owner: Any) -> None:
    """Let the GPU keep as much as it may until `owner`, and every other owner, is gone; nothing off a GPU."""
    if mx.default_device().type != mx.gpu:
        return
    if not _users:
        _before.append(mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"])))
    _users.add(id(owner))
    weakref.finalize(owner, _let_go, id(owner))


def _let_go(user: int) -> None:
    _users.discard(user)
    if not _users and _before:
        mx.synchronize()
        mx.set_wired_limit(_before.pop())
