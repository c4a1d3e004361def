"""The tools of a recording's conversation: each call is answered before its next frame, so that the result is one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING

from mlx_voicechat.errors import ToolError

if TYPE_CHECKING:
    from mlx_voicechat import Event, Session

    from .conversation import Interrupt
    from .tool_sources import ToolSources

POLL_SECONDS = 0.1  # between two looks at Ctrl-C


def answered(events: Iterator[Event], session: Session, sources: ToolSources, interrupt: Interrupt) -> Iterator[Event]:
    """The events of a session, whose calls are answered, each with what came back."""
    from mlx_voicechat.events import FunctionCall, FunctionResult

    for event in events:
        yield event
        if not isinstance(event, FunctionCall):
            continue
        running = sources.start(event.name, event.arguments, event.call_id)
        while not wait([running], POLL_SECONDS).done and not interrupt.pressed:
            pass
        if not running.done():
            continue  # the next frame ends the conversation
        try:
            result = running.result()
            session.give(event.call_id, result)
            yield FunctionResult(event.frame_index, event.call_id, result)
        except ToolError as fault:
            session.refuse(event.call_id, str(fault))
            yield FunctionResult(event.frame_index, event.call_id, str(fault), failed=True)
