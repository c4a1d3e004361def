"""Who spoke when, as `generate --json` prints it. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_voicechat import Event

LATE_FRAMES = 12  # a second: the last words of a user who is already answered come within it


@dataclass
class Turn:
    """Frames `first` to before `end`."""

    speaker: str
    first: int
    end: int
    text: str = ""


class TurnTimes:
    """Turns in the order they began, from the events of a session that tells its turns.

    The assistant's is told, from its opening until it has ended for the ear. The user's runs from the frame of the
    first word that was understood to that of the last before the assistant's turn.
    """

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._user: Turn | None = None
        self._assistant: Turn | None = None
        self._answered = False  # since the user's turn began

    def take(self, event: Event) -> None:
        """Add one event."""
        from mlx_voicechat.events import TextDelta, TranscriptDelta, TurnClosed, TurnOpened

        if isinstance(event, TurnOpened):
            self._answered = True
            self._assistant = self._begun("assistant", event.frame_index)
        elif isinstance(event, TurnClosed):
            if self._assistant:
                self._assistant.end = event.frame_index + 1
            self._assistant = None
        elif isinstance(event, TextDelta):
            if self._assistant is None:  # said after its turn
                self._assistant = self._begun("assistant", event.frame_index)
            _add(self._assistant, event)
        elif isinstance(event, TranscriptDelta):
            late = self._user is not None and event.frame_index - self._user.end < LATE_FRAMES
            if self._user is None or (self._answered and not late):
                self._user, self._answered = self._begun("user", event.frame_index), False
            _add(self._user, event)

    def listed(self, frame_seconds: float) -> list[dict[str, Any]]:
        """What was said and by whom, start and end in seconds."""
        return [
            {
                "speaker": turn.speaker,
                "text": turn.text.strip(),
                "start": round(turn.first * frame_seconds, 6),
                "end": round(turn.end * frame_seconds, 6),
            }
            for turn in self._turns
        ]

    def _begun(self, speaker: str, frame_index: int) -> Turn:
        self._turns.append(Turn(speaker, frame_index, frame_index + 1))
        return self._turns[-1]


def _add(turn: Turn, event: Any) -> None:
    turn.text += event.delta
    turn.end = event.frame_index + 1
