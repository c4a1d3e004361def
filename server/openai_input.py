"""What a client says: its audio in order, and the utterances in it with their items.

`Ear` takes audio and what must keep its place behind it (commits, typed items, requests for a response). All audio has
been looked at by the detector before the model hears it, so that an answer never overtakes the events of its question.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .detector import RATE_HZ, Activity, SpeechDetector, detect, end
from .items import Item, Items, new_id, user_audio
from .openai_config import SERVER_VAD
from .openai_events import Emit

PIECE_SAMPLES = RATE_HZ // 2  # of a long append at once: others' audio comes between
RECENT_SECONDS, PREFIX_SECONDS = 30.0, 1.0  # of an utterance that may be heard again, and before it
QUIET_FRAMES = 12  # without more text, after which an utterance's transcript is complete

Work = Callable[[], Awaitable[None]]


class Ear:
    """One client's audio (16 kHz float32) and what keeps its place behind it, worked off by one task.

    `hear` gets each piece after `tell` got what the detector found in it.
    """

    def __init__(self, hear: Callable[[bytes], None], tell: Callable[[Activity], None]) -> None:
        self.detector: SpeechDetector | None = None
        self.waiting_samples = 0
        self._hear, self._tell = hear, tell
        self._waiting: deque[np.ndarray | Work] = deque()
        self._unheard_ms = 0
        self._filled = asyncio.Event()

    def configure(self, turn: Mapping[str, Any] | None) -> None:
        """Detect speech as a `turn_detection` has it, or not at all."""
        if turn is None:
            self.detector = None
            return
        values = [turn.get(key, SERVER_VAD[key]) for key in ("threshold", "prefix_padding_ms", "silence_duration_ms")]
        if self.detector is None:
            self.detector = SpeechDetector(*values)
        else:
            self.detector.configure(*values)

    def audio(self, samples: np.ndarray) -> None:
        """Samples (S,) of any length."""
        for start in range(0, len(samples), PIECE_SAMPLES):
            piece = samples[start : start + PIECE_SAMPLES]
            self.waiting_samples += len(piece)
            self._put(piece)

    def silence(self, samples: int) -> None:
        """The client is silent: an utterance that is under way ends by that, too."""
        if self.detector is not None and self.detector.speaking and not self._waiting:
            self.behind(partial(self._look, np.zeros(samples, np.float32), True))

    def behind(self, work: Work) -> None:
        """Do something when all audio so far was heard."""
        self._put(work)

    def clear(self) -> None:
        """Drop the audio that waits."""
        self._waiting = deque(one for one in self._waiting if not isinstance(one, np.ndarray))
        self.waiting_samples = 0

    @property
    def heard_ms(self) -> int:
        """How much of the client's audio the detector has heard."""
        return 0 if self.detector is None else max(0, round(self.detector.heard_ms) - self._unheard_ms)

    def forget(self) -> None:
        """What the detector hears now is no utterance any more; another may begin at once."""
        if self.detector is not None:
            end(self.detector)

    async def run(self) -> None:
        """Work off what comes, for ever."""
        while True:
            while not self._waiting:
                self._filled.clear()
                await self._filled.wait()
            one = self._waiting.popleft()
            if isinstance(one, np.ndarray):
                await self._listen(one)
            else:
                await one()

    def _put(self, one: np.ndarray | Work) -> None:
        self._waiting.append(one)
        self._filled.set()

    async def _listen(self, piece: np.ndarray) -> None:
        await self._look(piece, False)
        self.waiting_samples = max(0, self.waiting_samples - len(piece))
        self._hear(piece.tobytes())

    async def _look(self, piece: np.ndarray, unheard: bool) -> None:
        """Let the detector hear; its times are those of the client's audio alone."""
        if self.detector is None:
            return
        if unheard:
            self._unheard_ms += round(len(piece) * 1000 / RATE_HZ)
        for activity in await detect(self.detector, piece):
            self._tell(replace(activity, at_ms=max(0, activity.at_ms - self._unheard_ms)))


class Recent:
    """The audio of an utterance that is under way: a model that is opened anew meanwhile hears it again."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._bytes = 0

    def hear(self, samples: bytes, within: bool) -> None:
        """More audio (float32); `within` an utterance all of it is kept, else what may be the beginning of one."""
        self._pieces.append(samples)
        self._bytes += len(samples)
        most = RECENT_SECONDS if within else PREFIX_SECONDS
        while self._bytes > most * RATE_HZ * 4 and len(self._pieces) > 1:
            self._bytes -= len(self._pieces.popleft())

    def again(self) -> bytes:
        """All of it."""
        return b"".join(self._pieces)

    def clear(self) -> None:
        """The utterance is answered."""
        self._pieces.clear()
        self._bytes = 0


@dataclass
class Utterance:
    """What the user says before one answer; its item is in the conversation once it is `sealed`."""

    item: Item
    started_ms: float | None = None  # where speech_started was told
    stopped: bool = False
    sealed: bool = False
    text: str = ""
    seconds: float = 0.0
    quiet_frames: int = 0
    repeated: int = 0  # characters of the transcript that come again


class Utterances:
    """The utterance that is under way, and the order of its events.

    speech_started, speech_stopped, committed, the item, deltas of its transcript, completed. `unanswered` is called
    when one is completed before the agent answers.
    """

    def __init__(self, emit: Emit, items: Items, beta: bool, unanswered: Callable[[], None]) -> None:
        self.current: Utterance | None = None
        self._emit, self._items, self._beta, self._unanswered = emit, items, beta, unanswered

    def start(self, at_ms: int) -> None:
        """The detector hears speech."""
        if self.current is not None and self.current.sealed:
            self.complete()
        one = self._current()
        one.started_ms = at_ms
        self._emit("input_audio_buffer.speech_started", audio_start_ms=at_ms, item_id=one.item.id)

    def stop(self, at_ms: int) -> None:
        """The detector hears no more: the utterance is sealed."""
        one = self.current
        if one is None or one.started_ms is None or one.stopped:
            return
        one.stopped = True
        one.seconds = max(0.0, (at_ms - one.started_ms) / 1000)
        self._emit("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=one.item.id)
        self.seal()

    def seal(self, seconds: float | None = None) -> Utterance:
        """Commit the utterance: its item enters the conversation."""
        one = self._current()
        if one.sealed:
            return one
        one.sealed = True
        one.seconds = one.seconds if seconds is None else seconds
        before = self._items.last_id
        self._emit("input_audio_buffer.committed", previous_item_id=before, item_id=one.item.id)
        placed = self._items.add(one.item)
        shown = one.item.as_json(self._beta)
        self._emit("conversation.item.added", previous_item_id=placed.previous_item_id, item=shown)
        for dropped in placed.dropped:
            self._emit("conversation.item.deleted", item_id=dropped)
        self._emit("conversation.item.done", previous_item_id=placed.previous_item_id, item=shown)
        if one.text:
            self._delta(one, one.text)
        return one

    def heard(self, delta: str) -> None:
        """The model understood more."""
        one = self._current()
        again = min(one.repeated, len(delta))
        one.repeated -= again
        delta = delta[again:]
        one.text += delta
        one.quiet_frames = 0
        if one.sealed and delta:
            self._delta(one, delta)

    def repeat(self) -> None:
        """The model hears the utterance again from its beginning."""
        if self.current is not None:
            self.current.repeated, self.current.quiet_frames = len(self.current.text), 0

    def frame(self) -> None:
        """A frame passed."""
        if self.current is not None and self.current.sealed:
            self.current.quiet_frames += 1
            if self.current.quiet_frames >= QUIET_FRAMES:
                self.complete()
                self._unanswered()

    def complete(self) -> None:
        """The transcript of a sealed utterance is whole."""
        one, self.current = self.current, None
        assert one is not None
        assert one.sealed
        transcript = one.text.strip()
        one.item.parts[0]["transcript"] = transcript
        self._emit(
            "conversation.item.input_audio_transcription.completed",
            item_id=one.item.id,
            content_index=0,
            transcript=transcript,
            usage={"type": "duration", "seconds": round(one.seconds, 3)},
        )

    def answered(self, at_ms: int) -> None:
        """The agent answers: all events of its question come first."""
        one = self.current
        if one is None:
            return
        if one.started_ms is not None and not one.stopped:
            self.stop(at_ms)
        elif not one.sealed and not one.text:
            self.current = None
            return
        self.seal()
        self.complete()

    def drop(self, at_ms: int) -> None:
        """The client has cleared its buffer: what was not sealed is no utterance, and enters no conversation."""
        one = self.current
        if one is None or one.sealed:
            return
        self.current = None
        if one.started_ms is not None:
            self._emit("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=one.item.id)

    def _current(self) -> Utterance:
        if self.current is None:
            self.current = Utterance(user_audio(new_id("item")))
        return self.current

    def _delta(self, one: Utterance, delta: str) -> None:
        kind = "conversation.item.input_audio_transcription.delta"
        self._emit(kind, item_id=one.item.id, content_index=0, delta=delta)
