"""Lets a frame be counted as a GPU starts it, where there is none.

On a CPU, MLX builds the functions of `mx.fast` from plain operations; on a GPU each is one kernel that nothing fuses
with. Meanwhile one such operation stands in for each, of the same shape and type: the graph has a GPU's form, and its
values mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

import mlx.core as mx

from ..frame import State
from ..networks import mamba
from ..noise import draws_from
from .counting import Count

if TYPE_CHECKING:
    from ..voicechat import VoiceChat

STEADY_FRAMES = 2  # before the one that is counted: the first has no TTS step
ONE_INPUT = ("rms_norm", "layer_norm", "rope")  # those whose result is of the first argument's shape


def _of_one(x: mx.array, *others: Any, **options: Any) -> mx.array:
    weight = next((a for a in others if isinstance(a, mx.array)), None)
    return mx.sort(x if weight is None else x.astype(mx.result_type(x, weight)))


def _attention(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
    given = [keys, values, *(a for a in options.values() if isinstance(a, mx.array))]
    return mx.depends([mx.sort(queries)], given)[0]


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Put the stand-ins in the place of `mx.fast` until the block ends, and take a GPU's ways; nothing on a GPU.

    What is traced, computed or kept meanwhile must not be used after it.
    """
    if mx.default_device().type == mx.gpu:
        yield
        return
    stand_ins: dict[str, Any] = dict.fromkeys(ONE_INPUT, _of_one) | {"scaled_dot_product_attention": _attention}
    with patch.multiple(mx.fast, **stand_ins), patch.object(mamba, "ONE_KERNEL", True):
        yield


class _Drawn(Exception):
    """Ends a frame where it would wait for the device: what it would have evaluated."""

    def __init__(self, arrays: list[mx.array]) -> None:
        super().__init__()
        self.arrays = arrays


def steady_state(model: VoiceChat) -> State:
    """A conversation's state after frames of silence, evaluated; for `gpu_launches`, before the model is compiled."""
    config, draws = model.config, draws_from(model.config.tts, 0, None, model.draw)
    state = model.init_state(model.voice(None), config.tts.guidance_scale)
    for step in range(STEADY_FRAMES):
        (heard,) = model.hear(mx.zeros((1, config.frame_samples_in)), state)
        model.frame(heard, state, draws(step) if step else None)
    return state


def gpu_launches(model: VoiceChat, state: State) -> int:
    """What a GPU starts in a frame without a transcript symbol after `state`, as the model is compiled or not.

    The frame's graph is built and counted, never evaluated. Off a GPU a compiled model traces its functions here: it
    must be compiled anew before it is used.
    """

    def stop(outputs: list[mx.array], state: State) -> NoReturn:
        raise _Drawn([*outputs, *state.arrays])

    state, draws = state.copy(), draws_from(model.config.tts, 0, None, model.draw)
    samples = mx.zeros((1, model.config.frame_samples_in))
    mx.eval(samples)
    with as_on_gpu(), patch.object(model, "_read", stop), patch.object(mx, "async_eval", lambda *_: None):
        try:
            (heard,) = model.hear(samples, state)
            model.frame(heard, state, draws(state.steps))
        except _Drawn as drawn:
            drawing = StringIO()
            mx.export_to_dot(drawing, *drawn.arrays)
            count = Count()
            count.add(drawing.getvalue())
            return count.launches
    raise AssertionError("a frame that waits for nothing")
