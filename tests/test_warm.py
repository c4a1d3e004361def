"""What a GPU needs: nothing compiled in a conversation, memory that stays, one mask, launches as it starts them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat import model as models
from mlx_voicechat.gauges.counting import counting
from mlx_voicechat.gauges.launches import as_on_gpu, gpu_launches, steady_state
from mlx_voicechat.networks import duplex_lm
from mlx_voicechat.weights import wired

EXAMPLES = Path(__file__).parents[1] / "examples"


def signature(tree: Any) -> Any:
    """What a compiled function is traced for: shapes and types of arrays, all else itself."""
    if isinstance(tree, mx.array):
        return (tree.shape, str(tree.dtype))
    return tuple(map(signature, tree)) if isinstance(tree, list | tuple) else tree


def test_the_first_conversation_after_warming_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compiled function has met the shapes and types of its arguments before: with a prompt and without, both."""
    traces: set[Any] = set()
    counts: list[int] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        counts.append(len(counts))
        number = counts[-1]

        def run(*arguments: Any) -> Any:
            traces.add((number, signature(arguments)))
            return function(*arguments)

        return run

    monkeypatch.setattr(mx, "compile", recorded)
    monkeypatch.setattr(models, "fuses", lambda: True)
    model = mlx_voicechat.load("tiny", compile=True)
    model.warm()
    assert len({number for number, _ in traces}) == len(counts)  # each was called
    assert len(traces) == len(counts)  # for one form of arguments each
    before = set(traces)
    audio = np.concatenate([sf.read(EXAMPLES / "hello.wav", dtype="float32")[0], np.zeros(32000, np.float32)])
    for options in ({}, {"system_prompt": "Be brief."}, {"turns": "application"}):
        session = model.session(**options)
        session.push(audio[:12800])
        session.force(text=model.config.bos_id)
        session.push(audio[12800:])
    assert traces == before


def test_memory_is_wired_while_a_model_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [5]

    def set_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 70.0})
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    owners = [type("Owner", (), {})() for _ in range(2)]
    for owner in owners:
        wired.wire(owner)
    assert limits == [5, 70]
    del owner
    owners.pop()
    gc.collect()
    assert limits == [5, 70]
    owners.pop()
    gc.collect()
    assert limits == [5, 70, 5]


def test_one_causal_mask_is_what_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlx_voicechat.load("tiny", compile=False)
    hidden = []
    for one in (False, True):
        monkeypatch.setattr(duplex_lm, "ONE_MASK", one)
        state, steps = model.language.init_state(), []
        for count in (70, 30):
            ids = mx.arange(count)[None] % 50
            out, state = model.language.step(model.language.fuse(ids, model.language.embed(ids), ids), state)
            steps.append(out)
        hidden.append(np.array(mx.concatenate(steps, axis=1).astype(mx.float32)))
    np.testing.assert_allclose(hidden[1], hidden[0], atol=0.05)  # the LLM is bfloat16


def test_launches_as_a_gpu_starts_them() -> None:
    x = mx.ones((2, 8))
    mx.eval(x)
    norm = mx.fast.rms_norm
    with as_on_gpu(), counting() as count:
        mx.eval(mx.concatenate([mx.fast.rms_norm(x, None, 1e-5), mx.fast.layer_norm(x, None, None, 1e-5), x]))
    assert count.launches == 1 + 1 + 3
    assert mx.fast.rms_norm is norm
    with counting() as count:
        mx.eval(mx.fast.scaled_dot_product_attention(*(mx.ones((1, 2, 1, 8)),) * 3, scale=1.0))
        several = count.launches
    assert several > 1


def test_counting_a_frame_leaves_the_model_as_it_was() -> None:
    model = mlx_voicechat.load("tiny", compile=False)
    state = steady_state(model)
    launches = gpu_launches(model, state)
    assert launches == gpu_launches(model, state)
    with counting() as count:
        session = model.session()
        session.push(np.zeros(1280, np.float32))
    assert 0 < launches < count.launches
