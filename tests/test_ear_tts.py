"""EAR-TTS: the oracle's hidden states and codes, whole equals stepped, sessions apart, compiled, distinct widths."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import GOLDEN
from support.speech import (
    DISTINCT,
    EOS,
    ORACLE,
    PREFIX,
    close,
    draws,
    golden_config,
    golden_tts,
    golden_voice,
    golden_weights,
    prepare,
    random_tts,
    random_weights,
)

from mlx_voicechat.config import CharacterEncoderConfig, MogConfig, TtsConfig
from mlx_voicechat.networks.ear_tts import EarTts, TtsState

EXPECTED = dict(np.load(GOLDEN / "expected" / "tts.npz"))
VIEWS = {"Broadcast", "Reshape", "Transpose", "Slice", "ExpandDims", "Squeeze", "Flatten", "Unflatten", "Split"}


def voice_of(config: TtsConfig, seed: int = 0) -> mx.array:
    return mx.random.normal((1, config.prompt_frames, config.hidden_size), key=mx.random.key(seed))


def talk(tts: EarTts, state: TtsState, ids: Sequence[int], noise: Sequence[tuple[mx.array, mx.array]]) -> np.ndarray:
    """Steps of one conversation, evaluated one by one -> codes (steps, Q)."""
    out = []
    for token, (uniform, normal) in zip(ids, noise, strict=True):
        codes, state = tts.step(mx.array([token]), state, uniform, normal)
        mx.eval(codes, state.arrays)
        out.append(np.array(codes)[0])
    return np.stack(out)


def oracle_noise(case: str) -> list[tuple[mx.array, mx.array]]:
    pairs = zip(ORACLE[f"{case}_uniform"], ORACLE[f"{case}_normal"], strict=True)
    return [(mx.array(uniform)[None], mx.array(normal)[None]) for uniform, normal in pairs]


def test_parameters_are_the_checkpoints() -> None:
    stored = {k.removeprefix(PREFIX): v.shape for k, v in golden_weights().items() if k.startswith(PREFIX)}
    own = {k: v.shape for k, v in dict(tree_flatten(EarTts(golden_config().tts, 384).parameters())).items()}
    assert own == stored


def test_voice_prompt_is_the_oracles() -> None:
    tts = golden_tts()
    inputs = tts.prompt_inputs(golden_voice(), 1, 2)
    close(inputs, ORACLE["warmup_inputs"])
    hidden = tts.backbone(inputs, tts.init_state().caches)
    close(hidden, ORACLE["warmup_hidden"])
    close(hidden, EXPECTED["warmup_hidden"])


def test_voice_prompt_without_guidance_is_the_oracles() -> None:
    tts = golden_tts()
    state = tts.init_state(guidance_scale=0.0)
    assert state.guidance_rows == 1
    close(tts.backbone(tts.prompt_inputs(golden_voice(), 1, 1), state.caches), ORACLE["warmup_hidden_noguidance"])


def test_steps_past_the_window_are_the_oracles() -> None:
    tts = golden_tts()
    state = tts.warmup(golden_voice(), tts.init_state())
    rows = zip(ORACLE["step_tokens"], ORACLE["step_hidden"], ORACLE["step_codes"], oracle_noise("step"), strict=True)
    for token, hidden, codes, noise in rows:
        ids = mx.array([int(token)])
        close(tts.backbone(tts.embed(ids, state.latent, 2), state.copy().caches)[:, 0], hidden)
        own, state = tts.step(ids, state, *noise)
        mx.eval(own, state.arrays)
        np.testing.assert_array_equal(np.array(own)[0], codes)
    assert state.caches[0].offset > golden_config().tts.sliding_window


@pytest.mark.parametrize("case", ["e2e_plain", "e2e_prompt"])
def test_whole_timelines_are_the_oracles(case: str) -> None:
    """The first position of a timeline has no TTS step."""
    tts = golden_tts()
    ids = ORACLE[f"{case}_tokens"][1:].tolist()
    codes = talk(tts, tts.warmup(golden_voice(), tts.init_state()), ids, oracle_noise(case))
    np.testing.assert_array_equal(codes, ORACLE[f"{case}_codes"][1:])


@pytest.mark.parametrize("piece", [1, 3, 7, 30])
def test_backbone_in_pieces_equals_the_whole(piece: int) -> None:
    backbone = golden_tts().backbone
    x = mx.random.normal((2, 70, golden_config().tts.hidden_size), key=mx.random.key(0))
    whole = np.array(backbone(x, backbone.init_caches()))
    caches = backbone.init_caches()
    close(mx.concatenate([backbone(part, caches) for part in mx.split(x, range(piece, 70, piece), axis=1)], 1), whole)


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_backbone_of_distinct_widths_in_pieces_equals_the_whole(piece: int) -> None:
    backbone = random_tts().backbone
    x = mx.random.normal((2, 25, DISTINCT.hidden_size), key=mx.random.key(0))
    whole = np.array(backbone(x, backbone.init_caches()))
    caches = backbone.init_caches()
    close(mx.concatenate([backbone(part, caches) for part in mx.split(x, range(piece, 25, piece), axis=1)], 1), whole)


def test_end_of_turn_hears_silence() -> None:
    tts = random_tts()
    latent = mx.random.normal((1, DISTINCT.latent_size), key=mx.random.key(0))
    ends, goes_on = mx.array([EOS]), mx.array([EOS + 1])
    close(tts.embed(ends, latent, 2), np.array(tts.embed(ends, tts._silence[None], 2)))
    assert not np.allclose(np.array(tts.embed(goes_on, latent, 2)), np.array(tts.embed(goes_on, tts._silence[None], 2)))


def test_guidance_row_does_not_see_the_text() -> None:
    tts = random_tts()
    latent = mx.zeros((1, DISTINCT.latent_size))
    rows = [np.array(tts.embed(mx.array([token]), latent, 2)) for token in (5, 6)]
    assert not np.allclose(rows[0][0], rows[1][0])
    np.testing.assert_array_equal(rows[0][1], rows[1][1])


def test_interleaved_and_copied_conversations_equal_those_alone() -> None:
    tts, noise = random_tts(), draws(DISTINCT, 14)
    ids = [(3 * i) % 31 for i in range(14)]
    options: list[dict[str, Any]] = [{}, {"guidance_scale": 0.0, "noise_scale": 0.4}]
    alone = [
        talk(tts, tts.warmup(voice_of(DISTINCT, i), tts.init_state(**o)), ids, noise) for i, o in enumerate(options)
    ]
    opened = [tts.warmup(voice_of(DISTINCT, i), tts.init_state(**o)) for i, o in enumerate(options)]
    for _ in range(2):  # twice from one opening: a copy leaves it untouched
        states = [state.copy() for state in opened]
        own: list[list[np.ndarray]] = [[], []]
        for token, (uniform, normal) in zip(ids, noise, strict=True):
            for i in range(2):
                codes, states[i] = tts.step(mx.array([token]), states[i], uniform, normal)
                mx.eval(codes, states[i].arrays)
                own[i].append(np.array(codes)[0])
        for i in range(2):
            np.testing.assert_array_equal(np.stack(own[i]), alone[i])


def test_two_conversations_in_one_step_equal_two_alone() -> None:
    tts, noise, voice = random_tts(), draws(DISTINCT, 12, batch=2), voice_of(DISTINCT)
    ids = np.random.default_rng(0).integers(0, 31, (12, 2))
    state, together = tts.warmup(voice, tts.init_state(batch=2)), []
    for row, (uniform, normal) in zip(ids, noise, strict=True):
        codes, state = tts.step(mx.array(row), state, uniform, normal)
        together.append(np.array(codes))
    for i in range(2):
        own = [(uniform[i : i + 1], normal[i : i + 1]) for uniform, normal in noise]
        alone = talk(tts, tts.warmup(voice, tts.init_state()), ids[:, i].tolist(), own)
        np.testing.assert_array_equal(np.stack(together)[:, i], alone)


def test_compiled_steps_equal_plain_ones() -> None:
    tts, noise = random_tts(), draws(DISTINCT, 14)
    ids, voice = [(3 * i) % 31 for i in range(14)], voice_of(DISTINCT)
    plain = talk(tts, tts.warmup(voice, tts.init_state()), ids, noise)
    tts.compile()
    np.testing.assert_array_equal(talk(tts, tts.warmup(voice, tts.init_state()), ids, noise), plain)


def test_a_compiled_step_stays_within_its_launches(tmp_path: Path) -> None:
    """Kernels of one step on the tiny sizes, CPU (fast norms count as their parts); views are free."""
    config, tts = golden_config().tts, EarTts(golden_config().tts, 384)
    random_weights(tts)
    prepare(tts, config)
    tts.compile()
    state = tts.warmup(voice_of(config), tts.init_state())
    mx.eval(state.arrays)
    codes, state = tts.step(mx.array([5]), state, *draws(config, 1)[0])
    mx.export_to_dot(str(tmp_path / "step.dot"), codes, *state.arrays)
    names = re.findall(r'label ="(\w+)", shape=rectangle', (tmp_path / "step.dot").read_text())
    assert sum(name not in VIEWS for name in names) <= 520


def test_quantised_weights_step() -> None:
    config = TtsConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=8,
        latent_size=64,
        num_quantizers=5,
        codebook_size=19,
        exponent=3.0,
        guidance_scale=0.2,
        top_p=0.95,
        noise_scale=0.001,
        prompt_frames=4,
        characters=CharacterEncoderConfig(
            hidden_size=64,
            intermediate_size=224,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=32,
            char_vocab_size=23,
        ),
        mog=MogConfig(intermediate_size=192, low_rank=7, min_log_std=-4.0, num_layers=1, num_predictions=29),
    )
    tts = EarTts(config, 31)
    random_weights(tts)
    nn.quantize(tts, group_size=32, bits=8)
    assert isinstance(tts.mog_head.proj_mus, nn.QuantizedLinear)
    prepare(tts, config)
    codes = [
        talk(tts, tts.warmup(voice_of(config), tts.init_state()), [5, 6, EOS, 7, 8, 9], draws(config, 6))
        for _ in range(2)
    ]
    np.testing.assert_array_equal(codes[0], codes[1])
    assert codes[0].shape == (6, 5)
    assert codes[0].max() < config.codebook_size
