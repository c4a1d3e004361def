"""Activations: the library's values; an eager frame compiles nothing."""

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from support.checkpoints import GOLDEN

import mlx_voicechat
from mlx_voicechat.networks.activations import gated_gelu, gelu, relu, silu, silu_of_rows

X = mx.array(np.concatenate([np.linspace(-12, 12, 4801), [0.0, -0.0, 1e-30, 90.0, -90.0]]).astype(np.float32))


def test_values_are_the_librarys() -> None:
    up = mx.cos(X)
    for own, library in (
        (silu(X), nn.silu(X)),
        (silu_of_rows(X), nn.silu(X)),
        (relu(X), nn.relu(X)),
        (gelu(X), nn.gelu(X)),
        (gated_gelu(X, up), nn.gelu_approx(X) * up),
    ):
        np.testing.assert_allclose(np.array(own), np.array(library), atol=1e-6, rtol=1e-6)


def test_an_eager_frame_has_no_compiled_kernel(tmp_path: Path) -> None:
    """On Linux each would take a C++ compiler and seconds."""
    model = mlx_voicechat.load(GOLDEN / "tiny-f32", compile=False)
    state = model.init_state(model.voice(None), 0.2)
    heard = model.hear(mx.zeros((1, 1280)), state)[0]
    first = model.rnnt.first(heard.encoded, state.rnnt)
    fused = model.language.fuse(state.text_id, heard.projected, state.function_id)
    hidden, state.language = model.language.step(fused, state.language)
    mog, passes = model.config.tts.mog, len(model.config.tts.pass_counts)
    draws = mx.full((1, passes, mog.num_predictions), 0.5), mx.zeros((1, passes, model.config.tts.latent_size))
    codes, state.tts = model.tts.step(model.language.choose(hidden)[0], state.tts, *draws)
    samples, state.codec = model.codec.step(codes[:, None], state.codec)
    graph = tmp_path / "frame.dot"
    mx.export_to_dot(str(graph), samples, first.ids, *state.arrays)
    names = re.findall(r'label ="(\w+)", shape=rectangle', graph.read_text(encoding="utf-8"))
    assert len(names) > 1000
    assert not [name for name in names if name.startswith("Compiled")]
