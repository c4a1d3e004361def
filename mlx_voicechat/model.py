"""The five networks together: one frame in, one frame out, one evaluation between."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from .config import ModelConfig
from .errors import InputError
from .gauges import memory
from .networks.codec import CodecState, replace_control_codes
from .networks.conformer import PerceptionState
from .networks.duplex_lm import LlmState
from .networks.ear_tts import TtsState
from .networks.rnnt import GreedyDecoder, RnntState
from .networks.tree import Networks
from .text import Tokenizer, character_table
from .weights import checkpoint, text_table
from .weights.config_file import read_config
from .weights.precision import Choice, Plan, check_choice

if TYPE_CHECKING:
    from .gauges.profile import Profile
    from .session import Noise, Session

NO_FORCE = -1  # not a token id: the model's own choice stands
BLOCK_FRAMES = 512  # frames of perception at once in the offline form
CLEARED_FRAMES = 256  # kept buffers are let go so often: what grows with time never asks for the old sizes again
PREFILL_CHUNK = 512  # prompt positions of the LLM at once
CACHE_VARIABLE = "MLX_VOICECHAT_CACHE_MB"
CACHE_PART, MAX_CACHE_BYTES = 16, 2**31
MLX_CPU_CACHE_BYTES = 2**25  # what MLX keeps on a CPU unless told otherwise
MAX_EXTRA_SECONDS = 1e6  # of silence at once: it is all in memory
KEPT_OPENINGS = 2  # a prompt's caches are hundreds of megabytes at full size


class Draws(NamedTuple):
    """Noise of one TTS step: uniform (5, C), normal (5, Z); one row per pass that fills codebooks."""

    uniform: mx.array
    normal: mx.array


class Heard(NamedTuple):
    """What perception makes of n frames: encoded (B, n, D) for the transcript, projected (B, n, H) for the LLM."""

    encoded: mx.array
    projected: mx.array


@dataclass
class State:
    """Everything one conversation carries from frame to frame, and nothing of the weights.

    Networks' states are replaced by a step; only the attention caches inside them are written in place.
    """

    perception: PerceptionState
    rnnt: RnntState
    language: LlmState
    tts: TtsState
    codec: CodecState
    text_id: mx.array  # (B,) fed back to the LLM
    function_id: mx.array  # (B,)
    position: int = 0  # on the whole timeline, prompt included
    steps: int = 0  # TTS steps so far

    def copy(self) -> State:
        """A state that goes on independently; arrays are shared until one of the two writes."""
        return replace(self, language=self.language.copy(), tts=self.tts.copy())

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that a frame's evaluation must cover."""
        functional = leaves((self.perception, self.rnnt, self.codec, self.text_id, self.function_id))
        return [*functional, *self.language.arrays, *self.tts.arrays]


def leaves(tree: Any) -> list[mx.array]:
    """The arrays in nested tuples and lists."""
    if isinstance(tree, mx.array):
        return [tree]
    return [leaf for branch in tree for leaf in leaves(branch)]


@dataclass(frozen=True)
class Frame:
    """What one frame gave: ids after the override, RNNT symbols, samples (1764,) float32 and Q codes."""

    text_id: int
    function_id: int
    symbols: tuple[int, ...]
    samples: np.ndarray
    codes: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """A whole conversation, n frames: texts, ids (n,), codes (n, Q) and samples (n * 1764,) at `rate_hz`."""

    transcript: str
    text: str
    function: str
    text_ids: list[int]
    function_ids: list[int]
    codes: np.ndarray
    samples: np.ndarray
    rate_hz: int


class VoiceChat:
    """A loaded checkpoint: weights and constants, shared by any number of sessions of one thread."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer,
        parameters: checkpoint.Parameters,
        say: Callable[[str], None] = checkpoint.print_notice,
        requantise: Plan = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.config = config
        self.tokenizer = tokenizer
        self.voices = checkpoint.voice_names(parameters)
        networks = Networks(config)
        checkpoint.build(networks, parameters, config, requantise)
        self._voices = {voice: checkpoint.voice(parameters, voice, config) for voice in self.voices}
        self.language, self.speech = networks.stt_model, networks.tts_model
        self.perception, self.tts, self.codec = self.language.perception, self.speech.tts_model, self.speech.audio_codec
        self.rnnt = GreedyDecoder(self.language.rnnt_decoder, self.language.rnnt_joint, config.rnnt)
        folder = parameters.folder
        parameters.clear()  # the networks hold the tensors now, and let go of those that `prepare` lays out anew
        self._openings: OrderedDict[Hashable, State] = OrderedDict()
        self._prepare(folder, say)

    def _prepare(self, folder: Path, say: Callable[[str], None]) -> None:
        config, silence = self.config, self.speech.codec_silence_tokens
        self.perception.prepare()
        self.language.prepare()
        self.tts.prepare(silence, config.pad_id, config.eos_id)
        characters = character_table(self.tokenizer)
        self.tts.use_text_rows(text_table.kept(self.tts, config.tts.characters, characters, folder, say))
        self.codec.prepare()
        self._silence = silence[None]
        self._hear, self._decode = self.perception.step, self.codec.step
        mx.eval(self._silence, *self._voices.values())

    def compile(self) -> bool:
        """Fuse the fixed-shape work of a frame (`mx.compile`); each thread traces it at its first frame.

        False, and nothing changed, where MLX cannot compile: on Linux without a C++ compiler.
        """
        if not fuses():
            return False
        self.language.compile()
        self.rnnt.compile()
        self.tts.compile()
        self._hear, self._decode = mx.compile(self.perception.step), mx.compile(self.codec.step)
        return True

    # -- conversations -------------------------------------------------------------------------------------------

    def session(
        self,
        system_prompt: str | None = None,
        seed: int = 0,
        max_seconds: float | None = None,
        voice: str | None = None,
        guidance_scale: float | None = None,
        noise: Noise | None = None,
        profile: bool = False,
    ) -> Session:
        """Open a conversation; see `Session`. None takes the checkpoint's own prompt, voice and guidance scale.

        `noise(step)` replaces the sampler's draws: (uniform (5, C), normal (5, Z)) of one TTS step, counted from 0 with
        the prompt's steps included. Raises InputError.
        """
        from .session import Session

        session = Session(self, system_prompt, seed, max_seconds, voice, guidance_scale, noise, profile)
        for _ in session.open():
            pass
        return session

    def opening(self, **options: Any) -> Generator[None, None, Session]:
        """`session` in steps: yields between the pieces of a long prompt, returns what `session` would.

        For who holds several conversations: others can have their frames between two steps.
        """
        from .session import Session

        session = Session(self, **options)
        yield from session.open()
        return session

    def warm(self, voice: str | None = None) -> None:
        """Run every path of a frame once on this thread, so that no conversation waits for a kernel to compile.

        That is: a system prompt, silence, speech, a transcript symbol; then the opening of a session without a prompt,
        which is kept. Raises what `session` raises for `voice`.
        """
        session = self.session(system_prompt="Hello.", voice=voice)
        silence = np.zeros(self.config.frame_samples_in, np.float32)
        spoken = next(token for token in range(self.config.llm.vocab_size) if token not in self.config.quiet_ids)
        for text in (self.config.pad_id, self.config.bos_id, spoken, self.config.eos_id):
            session.force(text=text)
            session.push(silence)
        first = self.rnnt.first(mx.zeros((1, 1, self.config.encoder.d_model)), self.rnnt.init_state())
        self.rnnt.finish(first, [0], self.rnnt.init_state())
        self._openings.clear()
        self.session(voice=voice)

    def answer(self, audio: Any, rate_hz: int = 16000, extra_seconds: float = 0.0, **options: Any) -> Answer:
        """The offline form: a whole recording (S,), float mono, and `extra_seconds` of silence after it -> Answer.

        `options` are those of `session`. Equals the events of a session that was pushed the same samples.
        """
        from .session import checked_number

        extra_seconds = checked_number("extra_seconds", extra_seconds, MAX_EXTRA_SECONDS)
        session = self.session(**options)
        silence = np.zeros(round(extra_seconds * self.config.input_rate_hz), np.float32)
        frames: list[Frame] = []
        session.observe(frames.append)
        for samples in (audio, silence):
            for _ in session.feed(samples, rate_hz, block_frames=BLOCK_FRAMES):
                pass
        session.finish()
        quantizers = self.config.codec.num_quantizers
        return Answer(
            transcript=session.transcript,
            text=session.text,
            function=session.function,
            text_ids=[frame.text_id for frame in frames],
            function_ids=[frame.function_id for frame in frames],
            codes=np.array([frame.codes for frame in frames], np.int32).reshape(-1, quantizers),
            samples=np.concatenate([np.zeros(0, np.float32), *(frame.samples for frame in frames)]),
            rate_hz=self.config.output_rate_hz,
        )

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
        self, prompt: str, voice: str | None, guidance_scale: float, draws: Callable[[int], Draws], seed: int | None
    ) -> Generator[None, None, State]:
        """The state at the first audio frame: voice prompt and system prompt done, evaluated; yields between steps.

        Finished openings are kept, so that the next conversation that opens alike starts at once. `seed` is what
        `draws` follows from; None (the caller's own noise) keeps nothing. Only a system prompt's steps draw.
        """
        prompt = prompt if prompt.strip() else ""
        key = (prompt, self.config.speaker if voice is None else voice, guidance_scale, seed if prompt else None)
        keep = seed is not None or not prompt
        state = self._openings.get(key) if keep else None
        if state is None:
            ids = self._prompt_ids(prompt) if prompt else []
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
        pad = mx.array([self.config.pad_id])
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
        pad = mx.array([self.config.pad_id])
        for _ in ids[1:]:
            self._speak(pad, state, draws(state.steps))
            mx.async_eval(state.tts.arrays)
            yield
        state.position = len(ids)

    def hear(self, samples: mx.array, state: State) -> list[Heard]:
        """Whole frames (B, n * 1280) -> n frames' Heard; advances the perception state. Lazy for one frame.

        Several frames are one evaluation: the offline form.
        """
        count = samples.shape[1] // self.config.frame_samples_in
        if count == 1:
            encoded, projected, state.perception = self._hear(samples, state.perception)
            return [Heard(encoded, projected)]
        encoded, projected, state.perception = self.perception.step(samples, state.perception)
        mx.eval(encoded, projected, state.perception)
        return [Heard(encoded[:, i : i + 1], projected[:, i : i + 1]) for i in range(count)]

    def frame(
        self,
        heard: Heard,
        state: State,
        draws: Draws | None,
        forced: Sequence[int] = (NO_FORCE, NO_FORCE),
        profile: Profile | None = None,
    ) -> Frame:
        """One frame of one conversation (B = 1); advances `state` and reads from the device once.

        `forced`: text and function id that replace the model's choice, or NO_FORCE. `draws` is None at position 0,
        which has no TTS step: its code frame is silence. Each emitted symbol costs one more evaluation.
        """
        stage = _stages(profile)
        stage("perception", heard, state.perception)
        first = self.rnnt.first(heard.encoded, state.rnnt)
        stage("rnnt", first)
        fused = self.language.fuse(state.text_id, heard.projected, state.function_id)
        hidden, state.language = self.language.step(fused, state.language)
        chosen = self.language.choose(hidden)
        state.text_id, state.function_id = (
            own if token == NO_FORCE else mx.full(own.shape, token, own.dtype)
            for own, token in zip(chosen, forced, strict=True)
        )
        stage("language", state.text_id, state.function_id, state.language.arrays)
        codes = self._silence
        if draws is not None:
            codes = self._speak(state.text_id, state, draws)
        stage("tts", codes, state.tts.arrays)
        codes = replace_control_codes(codes, self._silence, self.config.codec.codebook_size)
        samples, state.codec = self._decode(codes[:, None], state.codec)
        values = self._read([samples, codes, state.text_id, state.function_id, first.ids], state)
        stage("codec")
        symbols, state.rnnt = self.rnnt.finish(first, [int(values[-1])], state.rnnt)
        stage("rnnt")
        state.position += 1
        if state.position % CLEARED_FRAMES == 0:
            mx.clear_cache()
        spoken, quantizers = samples.shape[1], codes.shape[1]
        return Frame(
            text_id=int(values[-3]),
            function_id=int(values[-2]),
            symbols=tuple(symbols[0]),
            samples=values[:spoken],
            codes=tuple(values[spoken : spoken + quantizers].astype(int).tolist()),
        )

    def _speak(self, text_id: mx.array, state: State, draws: Draws) -> mx.array:
        codes, state.tts = self.tts.step(text_id, state.tts, draws.uniform[None], draws.normal[None])
        state.steps += 1
        return codes

    @staticmethod
    def _read(outputs: list[mx.array], state: State) -> np.ndarray:
        """The frame's one evaluation: all state, and the outputs as one float32 vector (exact for ids, below 2^24)."""
        packed = mx.concatenate([a.reshape(-1).astype(mx.float32) for a in outputs])
        return np.array(mx.depends([packed], state.arrays)[0])


def _stages(profile: Profile | None) -> Callable[..., None]:
    """What marks the end of a stage: on the profile's barrier frames it waits for the arrays, else it does nothing."""
    if profile is None or not profile.barriers:
        return lambda name, *arrays: None

    def stage(name: str, *arrays: Any) -> None:
        mx.eval(*arrays)
        profile.stage(name)

    return stage


def load(
    model: str | Path,
    say: Callable[[str], None] = checkpoint.print_notice,
    compile: bool | None = None,
    speech_weights: Choice | None = None,
    kv_cache: str = "f32",
) -> VoiceChat:
    """Open a checkpoint: a folder, a hub id (from the cache or fetched) or `tiny`, the packaged demonstration.

    `compile` fuses the kernels of a frame; None does on a GPU and not on a CPU, where it first costs seconds.
    `speech_weights` holds the speech networks' weights as `f32` or `q8` (8 bits); None decides by the machine's memory.
    `kv_cache` holds the speech generator's keys and values, the largest thing that grows, as `f32` or `bf16`.
    `say` gets notices: the size of a download, too little memory. Raises CheckpointError, HubError and InputError.
    """
    check_choice(speech_weights)
    cache_bytes = memory.tts_cache_bytes(kv_cache)
    folder = checkpoint.find(model, say)
    config = read_config(folder)
    tokenizer = Tokenizer(folder)
    parameters = checkpoint.load_parameters(folder, config, tokenizer)
    limit_buffer_cache()
    requantise = memory.speech_plan(config, parameters.stored, speech_weights, cache_bytes)
    warning = memory.shortfall(config, parameters.stored, memory.machine(), requantise, cache_bytes)
    if warning is not None:
        say(warning)
    loaded = VoiceChat(str(model), config, tokenizer, parameters, say, requantise)
    loaded.tts.cache_dtype = mx.bfloat16 if kv_cache == "bf16" else None
    on_gpu = mx.default_device().type == mx.gpu
    if (on_gpu if compile is None else compile) and not loaded.compile():
        say("Frames run uncompiled, which is slower: MLX found no C++ compiler (g++) here.")
    return loaded


def fuses() -> bool:
    """Whether `mx.compile` fuses anything here: without a compiler MLX runs the parts one by one and says nothing."""
    drawn = io.StringIO()
    fused = mx.compile(lambda x: mx.exp(x) + 1)(mx.zeros((1,)))
    mx.export_to_dot(drawn, fused)
    return "Compiled" in drawn.getvalue()


def limit_buffer_cache() -> None:
    """Bound the buffers that MLX keeps for reuse: CACHE_VARIABLE in MB, else a part of the machine's memory.

    On a CPU nothing is kept: malloc is as fast there, and attention asks for larger buffers each frame. A smaller
    limit than MLX's own, which on a GPU is all memory, is the program's and stays.
    """
    own = os.environ.get(CACHE_VARIABLE)
    if own and not own.isdecimal():
        raise InputError(f"{CACHE_VARIABLE} is {own!r}, expected a whole number of megabytes.")
    on_cpu = mx.default_device().type == mx.cpu
    part = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // CACHE_PART
    limit = int(own) * 2**20 if own else 0 if on_cpu else min(part, MAX_CACHE_BYTES)
    before = mx.set_cache_limit(limit)
    if not own and before < (MLX_CPU_CACHE_BYTES if on_cpu else mx.get_memory_limit()):
        mx.set_cache_limit(before)
