"""A loaded checkpoint and its conversations: load it, warm it, open sessions, answer a recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import InputError
from .frame import Frame
from .gauges import memory, plans
from .model import BLOCK_FRAMES, Model
from .options import LoadOptions, SessionOptions, checked_number
from .session import Session
from .weights import checkpoint
from .weights.wired import wire

CACHE_VARIABLE = "MLX_VOICECHAT_CACHE_MB"
CACHE_PART, MAX_CACHE_BYTES = 16, 2**31
MLX_CPU_CACHE_BYTES = 2**25  # what MLX keeps on a CPU unless told otherwise
MAX_EXTRA_SECONDS = 1e6  # of silence at once: it is all in memory


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


class VoiceChat(Model):
    """A loaded checkpoint: any number of sessions of one thread. `held`: in which form, where `load` decided it."""

    held: plans.Held | None = None

    def session(self, **options: Any) -> Session:
        """Open a conversation; `options` are those of `SessionOptions`. Raises InputError."""
        session = Session(self, SessionOptions(**options))
        for _ in session.open():
            pass
        return session

    def opening(self, **options: Any) -> Generator[None, None, Session]:
        """`session` in steps: yields between the pieces of a long prompt, returns what `session` would.

        For who holds several conversations: others can have their frames between two steps.
        """
        session = Session(self, SessionOptions(**options))
        yield from session.open()
        return session

    def warm(self, voice: str | None = None) -> None:
        """Run every path of a frame once on this thread, so that no conversation waits for a kernel to compile.

        That is: a system prompt, silence, speech, a transcript symbol, and the very first frame of a session without a
        prompt, whose opening is kept. Raises what `session` raises for `voice`.
        """
        session = self.session(system_prompt="Hello.", voice=voice)
        silence = np.zeros(self.config.frame_samples_in, np.float32)
        spoken = next(token for token in range(self.config.llm.vocab_size) if token not in self.config.quiet_ids)
        for text in (self.config.pad_id, self.config.bos_id, spoken, self.config.eos_id):
            session.force(text=text)
            session.push(silence)
        first = self.rnnt.first(mx.zeros((1, 1, self.config.encoder.d_model)), self.rnnt.init_state())
        self.rnnt.finish(first, [0], self.rnnt.init_state())
        if self.call_tokens is not None:
            self.between("silence")
        self.forget_openings()
        self.session(voice=voice).push(silence)

    def answer(self, audio: Any, rate_hz: int = 16000, extra_seconds: float = 0.0, **options: Any) -> Answer:
        """The offline form: a whole recording (S,), float mono, and `extra_seconds` of silence after it -> Answer.

        `options` are those of `session`; a tool's function is waited for. Equals the events of a session that was
        pushed the same samples.
        """
        extra_seconds = checked_number("extra_seconds", extra_seconds, MAX_EXTRA_SECONDS)
        session = self.session(**{"wait_for_tools": True, **options})
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


def load(
    model: str | Path,
    say: Callable[[str], None] = checkpoint.print_notice,
    **options: Any,
) -> VoiceChat:
    """Open a checkpoint: a folder, a hub id (from the cache or fetched) or `tiny`, the packaged demonstration.

    `options` are those of `LoadOptions`: `compile`, `speech_weights`, `kv_cache`, `arithmetic`, `sessions`. `say` gets
    notices: the size of a download, too little memory. Raises CheckpointError, HubError and InputError.
    """
    chosen = LoadOptions(**options)
    return load_opened(str(model), checkpoint.open_model(model, say), chosen, say)


def load_opened(
    name: str,
    opened: checkpoint.Checkpoint,
    options: LoadOptions,
    say: Callable[[str], None] = checkpoint.print_notice,
) -> VoiceChat:
    """`load` of a checkpoint that is open already; `name` is what it is called."""
    config, stored = opened.config, opened.stored
    held = plans.hold(config, stored, options)
    parameters = opened.parameters(held.plan.arithmetic)
    limit_buffer_cache()
    warning = memory.shortfall(config, stored, memory.machine(), held.requantise, held.states)
    if warning is not None:
        say(warning)
    loaded = VoiceChat(name, config, opened.tokenizer, parameters, say, held.requantise)
    loaded.held = held
    wire(loaded)
    loaded.tts.cache_dtype = memory.KV_TYPES[held.plan.kv_cache]
    on_gpu = mx.default_device().type == mx.gpu
    if (on_gpu if options.compile is None else options.compile) and not loaded.compile():
        say("Frames run uncompiled, which is slower: MLX found no C++ compiler (g++) here.")
    return loaded


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
