"""The rank that listens and thinks: perception, transcript and language model; another one speaks for it."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import VoiceChatError
from ..frame import Draws, Frame, State
from ..networks.rnnt import FirstChoice
from ..voicechat import VoiceChat
from .messages import NO_STEP, Kind, Message, send
from .ring import Wire
from .speaker import FAILED, answer_size

MOST_OWED = 8  # answers of all conversations together that are not fetched yet: what the connection holds for sure
PROMPT_AHEAD = 2  # steps of a prompt that the speaking rank may be behind


class RemoteVoice:
    """Stands for a conversation's `TtsState`, which is on the speaking rank."""

    arrays: tuple[mx.array, ...] = ()

    def __init__(self, line: Line, number: int) -> None:
        self.number = number
        self.seeded = False
        self.asked: tuple[mx.array, Draws] | None = None  # the id to speak, not evaluated yet, and its noise
        self.answers: deque[np.ndarray] = deque()
        self.owed = 0  # answers that are still to come
        self._line = line
        weakref.finalize(self, line.closed.append, number).atexit = False

    def copy(self) -> RemoteVoice:
        """A conversation that goes on independently."""
        return self._line.copy(self)


class Line:
    """Conversations on the speaking rank."""

    def __init__(self, wire: Wire) -> None:
        self.closed: deque[int] = deque()  # filled wherever the last reference goes
        self._wire = wire
        self._numbers = itertools.count(1)
        self._voices: weakref.WeakValueDictionary[int, RemoteVoice] = weakref.WeakValueDictionary()
        self._owed = 0
        self._size = 0

    def use(self, size: int) -> None:
        """Say how many floats an answer has."""
        self._size = size

    def open(self, latents: mx.array, guidance_scale: float) -> RemoteVoice:
        """A conversation after the voice prompt, stored latents (1, P, W)."""
        values = np.concatenate([[guidance_scale], np.array(latents.astype(mx.float32)).reshape(-1)])
        voice = self._new()
        self._send(Message(Kind.OPEN, voice.number, payload=values.astype(np.float32).tobytes()))
        return voice

    def copy(self, voice: RemoteVoice) -> RemoteVoice:
        twin = self._new()
        self._send(Message(Kind.COPY, twin.number, voice.number))
        return twin

    def seed(self, voice: RemoteVoice, seed: int) -> None:
        """What the conversation's noise follows from."""
        voice.seeded = True
        self._send(Message(Kind.SEED, voice.number, payload=str(seed).encode()))

    def speak(self, voice: RemoteVoice, kind: Kind, token: int, step: int, noise: bytes) -> None:
        """Ask for a step; its answer comes in `answer`."""
        while self._owed >= MOST_OWED:
            self._fetch()
        self._send(Message(kind, voice.number, token, step, noise))
        voice.owed += 1
        self._owed += 1

    def answer(self, voice: RemoteVoice) -> np.ndarray:
        """The next answer of a conversation, without its head. Raises VoiceChatError where it failed."""
        while not voice.answers:
            self._fetch()
        failed, sound = voice.answers[0][0] == FAILED, voice.answers.popleft()[2:]
        if failed:
            raise VoiceChatError("The machine that speaks failed.", "What it printed says why.")
        return sound

    def end(self) -> None:
        """The run ends."""
        send(self._wire, Message(Kind.END))

    def _new(self) -> RemoteVoice:
        voice = RemoteVoice(self, next(self._numbers))
        self._voices[voice.number] = voice
        return voice

    def _send(self, message: Message) -> None:
        while self.closed:
            send(self._wire, Message(Kind.CLOSE, self.closed.popleft()))
        send(self._wire, message)

    def _fetch(self) -> None:
        answer = np.array(self._wire.receive((self._size,), mx.float32))
        self._owed -= 1
        voice = self._voices.get(int(answer[1]))
        if voice is not None:  # else its session ended meanwhile
            voice.owed -= 1
            voice.answers.append(answer)


class Thinker(VoiceChat):
    """Perception, transcript and language model of a checkpoint; `Speaker` speaks, one frame later."""

    loads = ("perception", "rnnt", "language")
    late = True
    batches = False

    def __init__(self, line: Line, *arguments: Any) -> None:
        self._line = line
        super().__init__(*arguments)

    def _prepare(self, folder: Path, say: Callable[[str], None]) -> None:
        self._prepare_listening()
        self._line.use(answer_size(self))
        self._silence = mx.zeros((1, self.config.codec.num_quantizers), mx.int32)
        mx.eval(*self._voices.values())

    def _compile_speech(self) -> None:
        """Nothing: those networks are not here."""

    def open(
        self,
        prompt: str,
        voice: str | None,
        guidance_scale: float,
        draws: Callable[[int], Draws],
        seed: int | None,
        copies: int = 1,
    ) -> Generator[None, None, State]:
        """See `Model.open`."""
        state = yield from super().open(prompt, voice, guidance_scale, draws, seed, copies)
        if seed is not None:
            self._line.seed(remote(state), seed)
        return state

    def init_state(self, voice: mx.array, guidance_scale: float) -> State:
        """See `Model.init_state`."""
        pad = mx.array([self.config.pad_id], mx.uint32)
        speech: Any = self._line.open(voice, guidance_scale)
        nothing: Any = ()
        return State(
            perception=self.perception.init_state(),
            rnnt=self.rnnt.init_state(),
            language=self.language.init_state(),
            tts=speech,
            codec=nothing,
            text_id=pad,
            function_id=pad,
        )

    def late_sound(self, state: State) -> tuple[np.ndarray, tuple[int, ...]]:
        """See `Model.late_sound`."""
        sound, quantizers = self._line.answer(remote(state)), self.config.codec.num_quantizers
        return sound[quantizers:], tuple(sound[:quantizers].astype(int).tolist())

    def _speak_prompt(self, state: State, draws: Draws) -> None:
        voice = remote(state)
        while voice.owed + len(voice.answers) >= PROMPT_AHEAD:
            self._line.answer(voice)
        noise = mx.concatenate([part.reshape(-1) for part in draws])
        self._line.speak(voice, Kind.PROMPT, self.config.pad_id, state.steps, np.array(noise).tobytes())
        state.steps += 1

    def _speak(self, text_id: mx.array, state: State, draws: Draws) -> mx.array:
        """Note what is to be said: its id is known when the frame has been evaluated."""
        remote(state).asked = (text_id, draws)
        state.steps += 1
        return self._silence

    def _emit(
        self, codes: mx.array, first: FirstChoice, asked: mx.array | None, state: State, stage: Callable[..., None]
    ) -> Frame:
        """The evaluation of the frame; then its id goes to the speaking rank, and the sound before comes back."""
        voice = remote(state)
        said, voice.asked = voice.asked, None
        outputs = [] if asked is None else [asked]
        outputs += [state.text_id, state.function_id, first.ids]
        if said is not None:
            noise = () if voice.seeded else said[1]
            outputs = [*noise, said[0], *outputs]
        values = self._read(outputs, state)
        behind = bool(voice.owed or voice.answers)
        self._ask(voice, said is not None, values, state)
        before = self.late_sound(state) if behind else (np.zeros(self.config.frame_samples_out, np.float32), ())
        stage("tts")
        stage("codec")
        symbols, state.rnnt = self.rnnt.finish(first, values[-1].tolist(), state.rnnt)
        stage("rnnt")
        start = None if self.call_tokens is None else self.call_tokens.start
        return Frame(
            text_id=int(values[-3][0]),
            function_id=int(values[-2][0]),
            symbols=tuple(symbols[0]),
            samples=before[0],
            codes=before[1],
            refused=asked is not None and start is not None and int(values[-4][0]) == start,
        )

    def _ask(self, voice: RemoteVoice, speaks: bool, values: list[np.ndarray], state: State) -> None:
        if not speaks:
            self._line.speak(voice, Kind.FRAME, 0, NO_STEP, b"")
            return
        *noise, token = values[: 1 if voice.seeded else 3]
        payload = b"".join(each.astype(np.float32).tobytes() for each in noise)
        self._line.speak(voice, Kind.FRAME, int(token[0]), state.steps - 1, payload)


def remote(state: State) -> RemoteVoice:
    """What stands for the speech in a state of `Thinker`."""
    speech: Any = state.tts
    assert isinstance(speech, RemoteVoice)
    return speech
