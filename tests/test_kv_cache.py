"""The option that halves the speech generator's keys and values: what it changes and what it does not."""

import mlx.core as mx
import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat.errors import InputError
from tests.test_talking import EXAMPLES


def test_bf16_caches_say_the_same_in_half_the_memory() -> None:
    audio = np.concatenate([sf.read(EXAMPLES / "hello.wav", dtype="float32")[0], np.zeros(48000, np.float32)])
    wide, narrow = (mlx_voicechat.load("tiny", kv_cache=kind) for kind in ("f32", "bf16"))
    sessions = [wide.session(), narrow.session()]
    for session in sessions:
        session.push(audio)
    assert sessions[0].text == sessions[1].text == "Hello, how can I help you?"
    held = [sum(cache.nbytes for cache in session.state.tts.caches) for session in sessions]
    assert held[1] * 2 == held[0]
    assert all(a.dtype == mx.bfloat16 for cache in sessions[1].state.tts.caches for a in cache.arrays)
    first, again = (narrow.answer(audio[:16000]) for _ in range(2))
    np.testing.assert_array_equal(first.codes, again.codes)


def test_another_word_is_refused() -> None:
    with pytest.raises(InputError, match=r"q3.*f32 or bf16"):
        mlx_voicechat.load("tiny", kv_cache="q3")
