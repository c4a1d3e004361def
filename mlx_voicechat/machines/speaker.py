"""The rank that speaks: speech generator and codec, one frame behind the rank that thinks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import MachineLostError
from ..frame import Draws, leaves
from ..networks.codec import CodecState
from ..networks.ear_tts import TtsState
from ..noise import draw_shapes, seeded_draws
from ..voicechat import VoiceChat
from .messages import NO_STEP, Kind, Message, floats, receive
from .ring import Wire

DONE, FAILED = 0.0, 1.0  # the first float of an answer


@dataclass
class Voice:
    """A conversation's speech."""

    tts: TtsState
    codec: CodecState
    seed: int | None = None


class Speaker(VoiceChat):
    """Speech generator and codec of a checkpoint, which speak what `Thinker` asks for."""

    loads = ("tts", "codec")

    def _prepare(self, folder: Path, say: Callable[[str], None]) -> None:
        self._prepare_speech(folder, say)
        self._conversations: dict[int, Voice] = {}

    def _compile_listening(self) -> None:
        """Nothing: those networks are not here."""

    @property
    def answer_size(self) -> int:
        """Floats of an answer: whether it failed, the conversation's number, codes and samples."""
        return answer_size(self)

    def serve(self, wire: Wire) -> None:
        """Answer until the end of the run. Raises MachineLostError when the other rank is gone."""
        while (message := receive(wire)).kind != Kind.END:
            answer = self.take(message)
            if answer is not None:
                wire.send(answer)

    def take(self, message: Message) -> mx.array | None:
        """Do what a message asks for; the evaluated answer (answer_size,) where it has one."""
        conversations, number = self._conversations, message.number
        if message.kind == Kind.OPEN:
            scale, *_ = opening = floats(message.payload)
            latents = mx.array(opening[1:]).reshape(1, self.config.tts.prompt_frames, -1)
            tts = self.tts.warmup(latents, self.tts.init_state(guidance_scale=float(scale)))
            conversations[number] = Voice(tts, self.codec.init_state())
            mx.eval(tts.arrays)
        elif message.kind == Kind.COPY:
            old = conversations[message.token]
            conversations[number] = replace(old, tts=old.tts.copy())
        elif message.kind == Kind.SEED:
            conversations[number].seed = int(message.payload)
        elif message.kind == Kind.CLOSE:
            del conversations[number]
        else:
            return self._answer(message)
        return None

    def _answer(self, message: Message) -> mx.array:
        try:
            return self._spoken(message, self._conversations[message.number])
        except MachineLostError:
            raise
        except Exception:  # told to the rank that asked, whose session ends; the others go on
            traceback.print_exc()
            failed = mx.zeros((self.answer_size,))
            failed[:2] = mx.array([FAILED, message.number])
            mx.eval(failed)
            return failed

    def _spoken(self, message: Message, voice: Voice) -> mx.array:
        """One step, and its sound unless it is of a prompt."""
        codes = self._silence
        if message.step != NO_STEP:
            draws = self._draws(message, voice)
            token = mx.array([message.token], mx.uint32)
            codes, voice.tts = self.tts.step(token, voice.tts, draws.uniform[None], draws.normal[None])
        size = self.answer_size - 2
        sound = mx.zeros((size,))
        if message.kind == Kind.FRAME:
            samples, voice.codec = self.sound(codes, voice.codec)
            sound = mx.concatenate([codes.reshape(-1).astype(mx.float32), samples.reshape(-1)])
        answer = mx.concatenate([mx.array([DONE, message.number]), sound])
        mx.eval(answer, voice.tts.arrays, leaves(voice.codec))
        return answer

    def _draws(self, message: Message, voice: Voice) -> Draws:
        """Noise of a step: sent with it, or from the conversation's seed."""
        shapes = draw_shapes(self.config.tts)
        if message.payload:
            drawn = mx.array(floats(message.payload))
            cut = shapes[0][0] * shapes[0][1]
            return Draws(drawn[:cut].reshape(shapes[0]), drawn[cut:].reshape(shapes[1]))
        assert voice.seed is not None
        return seeded_draws(voice.seed, message.step, *shapes)


def answer_size(model: Any) -> int:
    """See `Speaker.answer_size`."""
    return 2 + int(model.config.codec.num_quantizers) + int(model.config.frame_samples_out)
