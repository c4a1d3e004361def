"""Who owns the turns: settling, opening and ending the agent's turn, watchdogs. No MLX here.

The session asks `forced` before a frame and tells `took` after it. Times are in audio frames, levels in dBFS; the rules
are those of spec/turns-and-tools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .errors import InputError
from .events import CloseReason, Event, SettleTimeout, TurnClosed, TurnOpened

SETTLED_BLANKS = 10  # frames without a transcript symbol, quiet ones, in a row
MAX_SETTLING = 20
MAX_CLOSING = 27  # EOS, what it takes to fall silent, and one more
SILENT_FRAMES = 3  # in a row, until a turn has ended for the ear
MAX_TAIL = 25  # after EOS
HUSHED_FRAMES = 3  # after a cycle that was interrupted
OWED_FRAMES = 4  # the model's own BOS after a cycle is waited for so long
SILENT_DBFS = -60.0  # of what is said
DEAD_DBFS = -90.0
DEAD_FRAMES = 20  # after audible speech
NOTHING_FRAMES = 30  # neither text nor function id, or no audio, since BOS


class Phase(str, Enum):
    """Whose turn it is. The agent's lasts until it has ended for the ear."""

    USER = "user"
    CLOSING = "closing"  # begin_turn drives the agent's turn to its end
    SETTLING = "settling"  # end_turn waits for the transcript
    OPENING = "opening"  # BOS comes on the next frame
    AGENT = "agent"


class Ids(NamedTuple):
    """Token ids that turns are made of."""

    bos: int
    eos: int
    pad: int


class Forced(NamedTuple):
    """What turns want of the next frame: ids, or None for the model's own, and whether its own BOS becomes PAD."""

    text: int | None = None
    function: int | None = None
    held_back: bool = False


@dataclass
class Passed:
    """What a frame gave, as far as turns care.

    `spoke`: the transcript grew. `loud`: the input was loud enough for speech. `text`: the text id is one that is said.
    `cycle`: a tool cycle was open at its end, `called`: one began in it.
    """

    frame_index: int
    text_id: int
    text: bool
    function: bool
    spoke: bool
    loud: bool
    zero: bool
    cycle: bool
    called: bool


class Watch:
    """What the watchdogs count since a BOS."""

    def __init__(self) -> None:
        self.frames = self.dead = 0
        self.text = self.function = self.audio = False

    def seen(self, text: bool, function: bool, dbfs: float) -> CloseReason | None:
        """Count one frame; which watchdog it wakes."""
        self.frames += 1
        self.text |= text
        self.function |= function
        self.audio |= dbfs > SILENT_DBFS
        self.dead = 0 if text or dbfs > DEAD_DBFS or not self.audio else self.dead + 1
        if self.dead >= DEAD_FRAMES:
            return CloseReason.DECODED_SILENCE
        if self.frames >= NOTHING_FRAMES and not (self.text or self.function):
            return CloseReason.NO_TEXT
        if self.frames >= NOTHING_FRAMES and not self.audio:
            return CloseReason.NO_AUDIO
        return None


class Turns:
    """The turns of one session; `application` says who owns them, `tools` whether the agent may open with a call.

    `emitted`: whether TurnOpened and TurnClosed are events; without it a model's own turns are only followed.
    """

    def __init__(
        self, ids: Ids, application: bool, tools: bool, emitted: bool = False, longest_frames: int | None = None
    ) -> None:
        self.phase = Phase.USER
        self.application = application
        self.emitted = emitted or application
        self.openings = 0  # of the agent's turn
        self._ids, self._tools, self._longest = ids, tools, longest_frames
        self._begun = False
        self._blanks = self._settling = self._patience = self._closing = 0
        self._tail: int | None = None  # frames since EOS
        self._silent = 0
        self._reason: CloseReason | None = None
        self._ending = False  # EOS on the next frame
        self._hushed = 0  # frames of PAD after it
        self._owed: int | None = None  # frames since a cycle whose BOS has not come
        self._watch = Watch()
        self._open_frames = 0

    # -- what the application says -------------------------------------------------------------------------------

    def begin(self, in_cycle: bool) -> bool:
        """The user's turn begins; whether it is a new one, whose transcript starts anew."""
        self.emitted = True
        new = self.phase in (Phase.AGENT, Phase.CLOSING) or in_cycle or not self._begun
        if self.phase == Phase.AGENT or in_cycle:
            self._enter(Phase.CLOSING)
            self._closing, self._reason = 0, CloseReason.CANCELLED
            self._ending = self._tail is None
        elif self.phase in (Phase.SETTLING, Phase.OPENING):
            self._enter(Phase.USER)
        self._begun = True
        return new

    def end(self, patience_frames: int = 0) -> None:
        """The user's turn ends: settle, then open the agent's. InputError when it is no turn of the user."""
        self.emitted = True
        self._require_user("end_turn")
        self._enter(Phase.SETTLING)
        self._settling, self._patience = 0, patience_frames

    def open(self) -> None:
        """Open the agent's turn on the next frame, settled or not. InputError while it is open."""
        self.emitted = True
        self._require_user("open_turn")
        self._enter(Phase.OPENING)

    def interrupt(self, in_cycle: bool = False) -> None:
        """EOS at the next frame; a turn of the agent that was to be opened is not.

        After a cycle the next frames are PAD: the model has just got something to say.
        """
        self._ending = True
        self._hushed = HUSHED_FRAMES if in_cycle else 0
        if self.phase == Phase.AGENT and self._tail is None:
            self._reason = self._reason or CloseReason.INTERRUPTED
        elif self.phase in (Phase.SETTLING, Phase.OPENING):
            self._enter(Phase.USER)

    def close(self, frame_index: int) -> list[Event]:
        """The session ends: an open turn with it."""
        if self.phase not in (Phase.AGENT, Phase.CLOSING):
            return []
        reason = self._reason if self.phase == Phase.CLOSING else None
        return self._closed(frame_index, reason or CloseReason.ENDED)

    def give_up(self, reason: CloseReason) -> None:
        """A watchdog: force EOS, and say why when the turn has ended."""
        self._reason, self._ending = reason, True

    # -- around a frame ------------------------------------------------------------------------------------------

    def zero_frame(self, audio_waits: bool) -> bool:
        """Whether the next frame is one of zeros that no audio brings; `audio_waits`: of before `end`."""
        if self.phase == Phase.SETTLING and not audio_waits and self._settled and not self._patience:
            self._enter(Phase.OPENING)
        if self.phase == Phase.CLOSING:
            return True
        return self.phase in (Phase.SETTLING, Phase.OPENING) and not audio_waits

    def forced(self, in_cycle: bool) -> Forced:
        """What the next frame must carry."""
        if self._ending:
            return Forced(self._ids.eos, self._ids.pad if self._tools or self.application else None)
        if self.phase == Phase.CLOSING or self._hushed:
            return Forced(self._ids.pad, self._ids.pad)
        if in_cycle:
            return Forced()
        if self.phase == Phase.OPENING:
            return Forced(self._ids.bos, None if self._tools else self._ids.pad)
        if not self.application:
            return Forced()
        if self.phase != Phase.AGENT or self._tail is not None:
            return Forced(None, self._ids.pad, True)
        if self._owed is None:
            return Forced(None, None, True)
        return Forced(self._ids.bos if self._owed >= OWED_FRAMES else None)

    @property
    def cancelled(self) -> bool:
        """Whether the next frame belongs to a turn that was cancelled."""
        return self.phase == Phase.CLOSING

    def took(self, passed: Passed, dbfs: Callable[[], float], transcript: str) -> tuple[list[Event], list[Event]]:
        """What the frame means: events before what the frame says, and after its audio."""
        self._blanks = 0 if passed.spoke or passed.loud else self._blanks + 1
        self._hushed -= self._hushed > 0 and not self._ending
        self._ending = False
        opens = passed.text_id == self._ids.bos or passed.called
        before: list[Event] = []
        if opens and self.phase == Phase.AGENT and self._tail is not None:
            before += self._closed(passed.frame_index - 1, self._reason or CloseReason.MODEL)
        if opens and self.phase not in (Phase.AGENT, Phase.CLOSING):
            before += self._opened(passed.frame_index, transcript)
        elif self.phase == Phase.SETTLING and passed.zero:
            return before, self._settle(passed.frame_index)
        if self.phase in (Phase.AGENT, Phase.CLOSING):
            return before, self._agent(passed, dbfs())
        return before, []

    # -- phases --------------------------------------------------------------------------------------------------

    @property
    def _settled(self) -> bool:
        return self._blanks >= SETTLED_BLANKS

    def _enter(self, phase: Phase) -> None:
        self.phase = phase

    def _require_user(self, call: str) -> None:
        if self.phase != Phase.USER:
            remedy = "begin_turn() ends it." if self.phase == Phase.AGENT else "Let its frames run first."
            raise InputError(f"{call}: the turn is not the user's, it is {self.phase.value}.", remedy)

    def _settle(self, frame_index: int) -> list[Event]:
        if self._settled:
            self._patience -= self._patience > 0 and self._blanks > SETTLED_BLANKS
            return []
        self._settling += 1
        if self._settling < MAX_SETTLING:
            return []
        self._enter(Phase.USER)
        return [SettleTimeout(frame_index)]

    def _opened(self, frame_index: int, transcript: str) -> list[Event]:
        self._enter(Phase.AGENT)
        self.openings += 1
        self._begun = False
        self._tail = self._owed = self._reason = None
        self._silent = self._open_frames = 0
        self._watch = Watch()
        return [TurnOpened(frame_index, transcript)] if self.emitted else []

    def _closed(self, frame_index: int, reason: CloseReason) -> list[Event]:
        self._enter(Phase.USER)
        self._tail = self._owed = self._reason = None
        return [TurnClosed(frame_index, reason)] if self.emitted else []

    def _agent(self, passed: Passed, dbfs: float) -> list[Event]:
        """A frame of the agent's turn, its tail and its cycles included."""
        self._open_frames += 1
        self._closing += self.phase == Phase.CLOSING
        if passed.text_id == self._ids.eos and self._tail is None:
            self._tail, self._silent = 0, 0
        if self._tail is None:
            self._running(passed, dbfs)
            return []
        self._tail += 1
        self._silent = self._silent + 1 if dbfs <= SILENT_DBFS else 0
        over = self._silent >= SILENT_FRAMES or self._tail > MAX_TAIL or self._closing >= MAX_CLOSING
        return self._closed(passed.frame_index, self._reason or CloseReason.MODEL) if over else []

    def _running(self, passed: Passed, dbfs: float) -> None:
        if passed.cycle:
            self._owed = 0
        elif passed.text_id == self._ids.bos:
            self._owed, self._watch = None, Watch()
        elif self._owed is not None:
            self._owed += 1
        if not self.application or passed.cycle or self._ending:
            return
        longest = self._longest is not None and self._open_frames >= self._longest
        reason = CloseReason.LONGEST_TURN if longest else None
        if self._owed is None:
            reason = self._watch.seen(passed.text, passed.function, dbfs) or reason
        if reason is not None and self.phase == Phase.AGENT:
            self.give_up(reason)
