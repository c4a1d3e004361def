"""The five networks together: one frame in, one frame out, one evaluation between."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .config import ModelConfig
from .errors import InputError
from .frame import (
    NO_FORCE,
    OWN,
    Calls,
    Draws,
    Frame,
    FrameRequest,
    Heard,
    Override,
    PositionsRequest,
    Request,
    Sound,
    State,
)
from .networks.codec import CodecState
from .networks.rnnt import FirstChoice, GreedyDecoder
from .networks.tree import Networks
from .noise import draw_of
from .text import Tokenizer, call_tokens, character_table
from .weights import checkpoint, layout, text_table
from .weights.precision import Requantisation

if TYPE_CHECKING:
    from .gauges.profile import Profile

BLOCK_FRAMES = 512  # frames of perception at once in the offline form
# Prompt positions of the LLM at once; on a GPU few, so that other sessions wait for tens of milliseconds.
PREFILL_CHUNK = 64 if mx.default_device().type == mx.gpu else 512
KEPT_OPENINGS = 2  # a prompt's caches are hundreds of megabytes at full size


class Model:
    """Weights and constants of one checkpoint, shared by any number of conversations of one thread.

    `loads` are the networks whose weights it has: on several machines each model has a part. `late`: a frame's sound
    comes with the frame after it. `batches`: frames of several conversations can be one evaluation.
    """

    loads: Collection[str] = layout.NETWORKS
    late = False
    batches = True

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer,
        parameters: checkpoint.Parameters,
        say: Callable[[str], None] = checkpoint.print_notice,
        requantise: Requantisation = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.config = config
        self.tokenizer = tokenizer
        self.requantised = requantise
        self.voices = layout.voices(parameters)
        networks = Networks(config)
        checkpoint.build(networks, parameters, config, requantise, self.holds)
        self._voices = {voice: checkpoint.voice(parameters, voice, config) for voice in self.voices}
        self.language, self.speech = networks.stt_model, networks.tts_model
        self.perception, self.tts, self.codec = self.language.perception, self.speech.tts_model, self.speech.audio_codec
        self.rnnt = GreedyDecoder(self.language.rnnt_decoder, self.language.rnnt_joint, config.rnnt)
        folder = parameters.folder
        parameters.clear()  # the networks hold the tensors now, and let go of those that `prepare` lays out anew
        self._openings: OrderedDict[Hashable, State] = OrderedDict()
        self._between: dict[str, mx.array] = {}
        self.call_tokens = call_tokens(tokenizer)
        self.draw = draw_of(config.tts)
        self._prepare(folder, say)

    @classmethod
    def holds(cls, name: str) -> bool:
        """Whether it has the weights of this path, or stored tensor."""
        return layout.network(name) in cls.loads

    def _prepare(self, folder: Path, say: Callable[[str], None]) -> None:
        self._prepare_listening()
        self._prepare_speech(folder, say)

    def _prepare_listening(self) -> None:
        self.perception.prepare()
        self.language.prepare()
        self._hear = self.perception.step

    def _prepare_speech(self, folder: Path, say: Callable[[str], None]) -> None:
        config, silence = self.config, self.speech.codec_silence_tokens
        self.tts.prepare(silence, config.pad_id, config.eos_id)
        characters = character_table(self.tokenizer)
        self.tts.use_text_rows(text_table.cached_rows(self.tts, config.tts.characters, characters, folder, say))
        self.codec.prepare()
        self._silence = silence[None].astype(mx.uint32)  # as codes that are chosen
        self._decode = self.codec.step
        mx.eval(self._silence, *self._voices.values())

    def compile(self) -> bool:
        """Fuse the fixed-shape work of a frame (`mx.compile`); each thread traces it at its first frame.

        False, and nothing changed, where MLX cannot compile: on Linux without a C++ compiler.
        """
        if not fuses():
            return False
        self._compile_listening()
        self._compile_speech()
        return True

    def _compile_listening(self) -> None:
        self.language.compile()
        self.rnnt.compile()
        self._hear = mx.compile(self.perception.step)

    def _compile_speech(self) -> None:
        self.tts.compile()
        self._decode = mx.compile(self.codec.step)
        self.draw = mx.compile(draw_of(self.config.tts))

    def voice(self, name: str | None) -> mx.array:
        """Stored latents (1, P, W) of a voice, by default the config's speaker; InputError lists the names."""
        chosen = self.config.speaker if name is None else name
        if chosen not in self._voices:
            raise InputError(f"There is no voice {chosen!r} in this checkpoint.", f"Voices: {', '.join(self.voices)}.")
        return self._voices[chosen]

    @property
    def block_frames(self) -> int:
        """How many frames perception may run at once when they are all there.

        One where the LLM's input is rounded to bfloat16: blocks differ from single frames by float noise, rounding
        would turn that into other tokens, and the offline and the streamed form would part.
        """
        return BLOCK_FRAMES if self.language.llm.dtype == mx.float32 else 1

    # -- the timeline --------------------------------------------------------------------------------------------

    def open(
        self,
        prompt: str,
        voice: str | None,
        guidance_scale: float,
        draws: Callable[[int], Draws],
        seed: int | None,
        copies: int = 1,
    ) -> Generator[None, None, State]:
        """The state at the first audio frame: voice prompt and system prompt done, evaluated; yields between steps.

        Finished openings are kept, so that the next conversation that opens alike starts at once. `seed` is what
        `draws` follows from; None (the caller's own noise) keeps nothing. Only a system prompt's steps draw. `copies`
        says how often the prompt stands there.
        """
        prompt = prompt if prompt.strip() else ""
        chosen = self.config.speaker if voice is None else voice
        key = (prompt, copies, chosen, guidance_scale, seed if prompt else None)
        keep = seed is not None or not prompt
        state = self._openings.get(key) if keep else None
        if state is None:
            ids = self._prompt_ids(prompt) * copies if prompt else []
            state = self.init_state(self.voice(voice), guidance_scale)
            if prompt:
                yield from self.prefill(ids, state, draws)
            mx.eval(state.arrays)
        if keep:
            self._openings[key] = state
            self._openings.move_to_end(key)
            while len(self._openings) > KEPT_OPENINGS:
                self._openings.popitem(last=False)
        return state.copy()

    def forget_openings(self) -> None:
        """Let go of what is kept of finished openings, and of the silence between frames."""
        self._openings.clear()
        self._between.clear()

    def _prompt_ids(self, prompt: str) -> list[int]:
        ids = [self.config.bos_id, *self.tokenizer.encode(prompt), self.config.eos_id]
        limit = self.config.llm.max_positions
        if limit is not None and len(ids) > limit:
            raise InputError(
                f"The system prompt is {len(ids):,} tokens long, the model takes {limit:,}.", "Shorten it."
            )
        return ids

    def init_state(self, voice: mx.array, guidance_scale: float) -> State:
        """The state after the voice prompt, before position 0; lazy."""
        pad = _one(self.config.pad_id)
        return State(
            perception=self.perception.init_state(),
            rnnt=self.rnnt.init_state(),
            language=self.language.init_state(),
            tts=self.tts.warmup(voice, self.tts.init_state(guidance_scale=guidance_scale)),
            codec=self.codec.init_state(),
            text_id=pad,
            function_id=pad,
        )

    def prefill(
        self, ids: Sequence[int], state: State, draws: Callable[[int], Draws], chunk: int = PREFILL_CHUNK
    ) -> Generator[None, None, None]:
        """Run the system prompt: its embeddings take the audio slot, both channels stay PAD, nothing is spoken.

        The LLM runs in chunks of `chunk` positions; the TTS feeds its own codes back and steps position by position,
        the first excepted. Yields after each of them.
        """
        for start in range(0, len(ids), chunk):
            tokens = mx.array([ids[start : start + chunk]])
            pad = mx.full(tokens.shape, self.config.pad_id)
            fused = self.language.fuse(pad, self.language.embed(tokens), pad)
            _, state.language = self.language.step(fused, state.language)
            mx.eval(state.language.arrays)
            yield
        for _ in ids[1:]:
            self._speak_prompt(state, draws(state.steps))
            yield
        state.position = len(ids)

    def _speak_prompt(self, state: State, draws: Draws) -> None:
        """The TTS's step at a position of the system prompt."""
        self._speak(_one(self.config.pad_id), state, draws)
        mx.async_eval(state.tts.arrays)

    def hear(self, samples: mx.array, state: State) -> list[Heard]:
        """Whole frames (B, n * 1280) -> n frames' Heard; advances the perception state. Lazy for one frame.

        Several frames are one evaluation: the offline form.
        """
        state.leave()
        count = samples.shape[1] // self.config.frame_samples_in
        if count == 1:
            encoded, projected, state.perception = self._hear(samples, state.perception)
            mx.async_eval(encoded, projected, state.perception)  # the device works while the rest is built
            return [Heard(encoded, projected)]
        encoded, projected, state.perception = self.perception.step(samples, state.perception)
        mx.eval(encoded, projected, state.perception)
        return [Heard(encoded[:, i : i + 1], projected[:, i : i + 1]) for i in range(count)]

    def _heard(self, sound: Sound, state: State) -> Heard:
        return sound if isinstance(sound, Heard) else self.hear(mx.array(sound)[None], state)[0]

    def forget_transcript(self, state: State) -> None:
        """The recogniser begins anew, as at the first frame."""
        state.leave()
        state.rnnt = self.rnnt.init_state()

    def frame(
        self,
        heard: Heard,
        state: State,
        draws: Draws | None,
        override: Override = OWN,
        profile: Profile | None = None,
    ) -> Frame:
        """One frame of one conversation (B = 1); advances `state` and reads from the device once.

        `draws` is None at position 0, which has no TTS step: its code frame is silence. Each emitted symbol costs one
        more evaluation.
        """
        stage = _stages(profile)
        stage("perception", heard, state.perception)
        first = self.rnnt.first(heard.encoded, state.rnnt)
        stage("rnnt", first)
        fused = self.language.fuse(state.text_id, heard.projected, state.function_id)
        hidden, state.language = self.language.step(fused, state.language)
        chosen = self.language.choose(hidden)
        state.text_id, state.function_id = self._overridden(*chosen, override)
        mx.async_eval(first, state.text_id, state.function_id, state.language.arrays)
        stage("language", state.text_id, state.function_id, state.language.arrays)
        codes = self._silence
        if draws is not None:
            spoken = state.text_id if override.spoken == NO_FORCE else _one(override.spoken)
            codes = self._speak(spoken, state, draws)
        asked = chosen[1] if override.calls == Calls.REFUSE else None
        frame = self._emit(codes, first, asked, state, stage)
        self._advance(state, 1)
        return frame

    def aside(self, heard: Heard, state: State, draws: Draws, spoken: int, profile: Profile | None = None) -> Frame:
        """A frame for which the language model stands still: the transcript goes on, and the speech of id `spoken`."""
        stage = _stages(profile)
        stage("perception", heard, state.perception)
        first = self.rnnt.first(heard.encoded, state.rnnt)
        stage("rnnt", first)
        codes = self._speak(_one(spoken), state, draws)
        frame = self._emit(codes, first, None, state, stage)
        return replace(frame, text_id=self.config.pad_id, function_id=self.config.pad_id)

    def think(self, function_ids: tuple[int, ...], state: State, audio: mx.array, opens: bool = False) -> int:
        """Positions of the language model between two frames, text PAD, that hear `audio` (1, 1, H); one evaluation.

        `function_ids` are forced, one a position; none is one position that chooses its own. `opens`: the text id
        of the last is BOS. Returns the function id of the last.
        """
        count = max(len(function_ids), 1)
        pad = _one(self.config.pad_id)
        texts, functions = state.text_id[None], state.function_id[None]
        if count > 1:
            texts = mx.concatenate([texts, mx.broadcast_to(pad, (1, count - 1))], axis=1)
            functions = mx.concatenate([functions, mx.array([function_ids[:-1]], functions.dtype)], axis=1)
            audio = mx.broadcast_to(audio, (1, count, audio.shape[-1]))
        hidden, state.language = self.language.step(self.language.fuse(texts, audio, functions), state.language)
        own = self.language.choose(hidden)[1]
        state.text_id = _one(self.config.bos_id) if opens else pad
        state.function_id = mx.array(function_ids[-1:], own.dtype) if function_ids else own
        (chosen,) = self._read([state.function_id], state)
        self._advance(state, count)
        return int(chosen[0])

    def late_sound(self, state: State) -> tuple[np.ndarray, tuple[int, ...]]:
        """Samples and codes of the last frame, where they are still to come."""
        raise NotImplementedError

    def run(self, request: Request, state: State, profile: Profile | None = None) -> Frame | int:
        """What a session asked for: a frame, or the function id of the last position."""
        state.leave()
        if isinstance(request, PositionsRequest):
            return self.think(request.function_ids, state, request.audio, request.opens)
        heard = self._heard(request.sound, state)
        if isinstance(request, FrameRequest):
            return self.frame(heard, state, request.draws, request.override, profile)
        return self.aside(heard, state, request.draws, request.spoken, profile)

    def between(self, kind: str) -> mx.array:
        """What the language model hears at a position without audio, (1, 1, H): "silence" or "zero".

        Silence is what the encoder makes of the first frame of zeros.
        """
        if kind not in self._between:
            zeros = mx.zeros((1, self.config.frame_samples_in))
            _, silence, _ = self._hear(zeros, self.perception.init_state())
            self._between[kind] = mx.zeros_like(silence) if kind == "zero" else silence
            mx.eval(self._between[kind])
        return self._between[kind]

    def _overridden(self, text: mx.array, function: mx.array, override: Override) -> tuple[mx.array, mx.array]:
        """The model's own ids (B,), and what the override makes of them."""
        config = self.config
        start = NO_FORCE if self.call_tokens is None else self.call_tokens.start
        if override.function != NO_FORCE:
            function = mx.full(function.shape, override.function, function.dtype)
        elif override.calls == Calls.REFUSE:
            function = mx.where(function == start, config.pad_id, function)
        elif override.calls == Calls.ALONE:
            function = mx.where(function == start, function, config.pad_id)
        if override.text != NO_FORCE:
            text = mx.full(text.shape, override.text, text.dtype)
        elif override.held_back:
            text = mx.where(text == config.bos_id, config.pad_id, text)
        if override.calls in (Calls.SILENCE, Calls.ALONE):
            text = mx.where(function == start, config.pad_id, text)
        return text, function

    def _emit(
        self, codes: mx.array, first: FirstChoice, asked: mx.array | None, state: State, stage: Callable[..., None]
    ) -> Frame:
        """Codes (1, Q) to samples, the evaluation of the whole frame, and the symbols that follow its first one."""
        stage("tts", codes, state.tts.arrays)
        samples, state.codec = self.sound(codes, state.codec)
        outputs = [samples, codes, state.text_id, state.function_id, first.ids, *([] if asked is None else [asked])]
        spoken, chosen, text, function, symbol, *refused = self._read(outputs, state)
        stage("codec")
        symbols, state.rnnt = self.rnnt.finish(first, symbol.tolist(), state.rnnt)
        stage("rnnt")
        return Frame(
            text_id=int(text[0]),
            function_id=int(function[0]),
            symbols=tuple(symbols[0]),
            samples=spoken[0],
            codes=tuple(chosen[0].tolist()),
            refused=bool(refused) and self.call_tokens is not None and int(refused[0][0]) == self.call_tokens.start,
        )

    def sound(self, codes: mx.array, codec: CodecState) -> tuple[mx.array, CodecState]:
        """Codes (1, Q) -> samples (1, 1764), state; lazy."""
        samples, codec = self._decode(codes[:, None], codec)
        return samples, codec

    @staticmethod
    def _advance(state: State, positions: int) -> None:
        state.position += positions

    def _speak(self, text_id: mx.array, state: State, draws: Draws) -> mx.array:
        codes, state.tts = self.tts.step(text_id, state.tts, draws.uniform[None], draws.normal[None])
        state.steps += 1
        return codes

    @staticmethod
    def _read(outputs: list[mx.array], state: State) -> list[np.ndarray]:
        """The frame's one wait: for all state and the outputs, which are then copied from where they lie."""
        mx.eval(outputs, state.arrays)
        return [np.array(array) for array in outputs]


def _one(token: int) -> mx.array:
    """An id (1,) in the type of those that are chosen, so that no compiled function is traced again for it."""
    return mx.array([token], mx.uint32)


def _stages(profile: Profile | None) -> Callable[..., None]:
    """What marks the end of a stage: on the profile's barrier frames it waits for the arrays, else it does nothing."""
    if profile is None or not profile.barriers:
        return lambda name, *arrays: None

    def stage(name: str, *arrays: Any) -> None:
        mx.eval(*arrays)
        profile.stage(name)

    return stage


def fuses() -> bool:
    """Whether `mx.compile` fuses anything here: without a compiler MLX runs the parts one by one and says nothing."""
    drawn = io.StringIO()
    fused = mx.compile(lambda x: mx.exp(x) + 1)(mx.zeros((1,)))
    mx.export_to_dot(drawn, fused)
    return "Compiled" in drawn.getvalue()
