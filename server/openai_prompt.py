"""When the model reads its prompt: at the start alone, so that a change means to open its session anew.

It is opened a short while after an update, or at the first audio or request for a response. What changes later waits
for the end of a response; the conversation so far goes into the new prompt, and `session.updated` is said when it is
in force. An utterance that is under way is heard again from its beginning: `under_way` gives its audio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from . import messages
from .items import Items
from .openai_config import SessionConfig
from .settings import ServerSettings

QUIET_SECONDS = 0.2  # without another update, after which the model reads its prompt
NAMES = {"user": "User", "assistant": "Assistant", "system": "System"}


class Prompt:
    """The model's session of one conversation, as far as its opening goes."""

    def __init__(
        self,
        put: Callable[[messages.Request], None],
        updated: Callable[[dict[str, Any]], None],
        items: Items,
        settings: ServerSettings,
        under_way: Callable[[], bytes],
    ) -> None:
        self.touched = False  # something was heard or said
        self.operators = False  # the tools are the server's own: the client brought none
        self._put, self._updated, self._items, self._settings = put, updated, items, settings
        self._under_way = under_way
        self._config: SessionConfig | None = None  # what the model was opened with, or will be
        self._begun = False
        self._waits = False  # a change waits for the end of a response
        self._shown: list[dict[str, Any]] = []  # session objects that are not in force
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether a change of the prompt is refused by now."""
        return self._settings.fixed_prompt and self.touched

    def update(self, config: SessionConfig, shown: dict[str, Any], idle: bool) -> None:
        """Other settings, and the session object that shows them; `idle`: no response is under way."""
        before, self._config = self._config, config
        if not self._begun:
            self.stop()
            self._timer = asyncio.get_running_loop().call_later(QUIET_SECONDS, self.open)
            self._updated(shown)
        elif before is not None and (config.prompt, config.owner) == (before.prompt, before.owner):
            self._updated(shown)
        else:
            self._shown.append(shown)
            self._waits = True
            if idle:
                self.change()

    def first(self, config: SessionConfig) -> None:
        """What the session is without an update."""
        self._config = config

    def open(self) -> None:
        """Let the model read its prompt, if it has not."""
        if not self._begun:
            self._begun = True
            self.stop()
            self._open(())

    def change(self) -> None:
        """Open anew if a change waits: no response is under way."""
        if self._waits:
            self._waits = False
            turns = self._items.history() if self.touched else []
            audio = self._under_way()
            if audio:
                self._put(messages.Clear())
            self._open(tuple(f"{NAMES[role]}: {text}" for role, text in turns))
            if audio:
                self._put(messages.Append(audio))

    def opened(self) -> None:
        """The model has read it."""
        shown, self._shown = self._shown, []
        for session in shown:
            self._updated(session)

    def stop(self) -> None:
        """Open nothing by a timer any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _open(self, history: tuple[str, ...]) -> None:
        assert self._config is not None
        prompt, tools = self._config.prompt
        self.operators = not tools and self._config.tool_choice != "none"
        self._put(
            messages.Open(
                system_prompt=prompt,
                seed=0,
                max_seconds=self._settings.audio_seconds,
                tools=self._settings.tools if self.operators else tools,
                turns=self._config.owner,
                pace=messages.Pace(),
                history=history,
            )
        )
