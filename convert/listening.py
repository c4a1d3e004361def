"""What the language model is given in a conversation: perception and language model run, nothing is spoken.

The speech generator feeds nothing back to the language model, so its inputs are those of a whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_voicechat.frame import Draws, State
from mlx_voicechat.networks.codec import CodecState
from mlx_voicechat.networks.duplex_lm import LlmState
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.session import Session
from mlx_voicechat.voicechat import VoiceChat, load_opened
from mlx_voicechat.weights.checkpoint import Checkpoint

from .source import Say

SETTLED_SECONDS = 2.0  # of silence without an open turn or a tool call: the reply has ended, or none comes
LONGEST_REPLY_SECONDS = 30.0


class Listener(VoiceChat):
    """A model that hears, thinks and never speaks: its samples are zeros, its codes those of silence."""

    def _prepare(self, folder: Path, say: Say) -> None:
        super()._prepare(folder, say)
        self._stay_silent()

    def compile(self) -> bool:
        """As `Model.compile`."""
        compiled = super().compile()
        self._stay_silent()
        return compiled

    def _stay_silent(self) -> None:
        silence = mx.zeros((1, self.config.frame_samples_out))

        def decode(codes: mx.array, state: CodecState) -> tuple[mx.array, CodecState]:
            return silence, state

        self._decode = decode

    def _speak(self, text_id: mx.array, state: State, draws: Draws) -> mx.array:
        state.steps += 1
        return self._silence

    def heard(self, samples: np.ndarray, **options: Any) -> mx.array:
        """Inputs (T, H) of the language model, the system prompt's among them, in the type that it computes in.

        `samples` (S,) at the model's rate are a recording; silence follows until the reply has ended. `options` are
        those of a session, each of which opens anew.
        """
        self._openings.clear()
        with self._noted() as inputs:
            session = self.session(**options)
            session.push(samples, self.config.input_rate_hz)
            _wait_in_silence(session)
            session.cancel()
        whole = mx.concatenate(inputs, axis=1)[0]
        mx.eval(whole)
        return whole

    @contextmanager
    def _noted(self) -> Iterator[list[mx.array]]:
        inputs: list[mx.array] = []
        language, step = self.language, self.language.step

        def noted(fused: mx.array, state: LlmState) -> tuple[mx.array, LlmState]:
            inputs.append(fused)
            return step(fused, state)

        language.step = noted  # type: ignore[method-assign]
        try:
            yield inputs
        finally:
            language.step = step  # type: ignore[method-assign]


def listener(name: str, opened: Checkpoint, say: Say) -> Listener:
    """A checkpoint as a model that only listens; raises what `load` raises."""
    loaded = load_opened(name, opened, LoadOptions(), say, Listener)
    assert isinstance(loaded, Listener)
    return loaded


def _wait_in_silence(session: Session) -> None:
    config = session.model.config
    silence = np.zeros(config.frame_samples_in, np.float32)
    quiet = 0
    for _ in range(round(LONGEST_REPLY_SECONDS / config.frame_seconds)):
        if quiet >= round(SETTLED_SECONDS / config.frame_seconds) or session.limited:
            break
        session.push(silence, config.input_rate_hz)
        quiet = 0 if session.speaking or session.in_cycle else quiet + 1
