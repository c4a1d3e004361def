"""Positions of the language model without audio, frames in which it stands still, and what an override costs."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

import mlx_voicechat
from mlx_voicechat.frame import Calls, Frame, Override, State
from mlx_voicechat.gauges.counting import counting
from mlx_voicechat.noise import seeded_draws
from mlx_voicechat.session import Session
from mlx_voicechat.voicechat import VoiceChat
from mlx_voicechat.weights.assets import TINY
from tests.support.checkpoints import GOLDEN

IDS = tuple(int(token) for token in np.random.default_rng(0).integers(13, 380, 50))


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load(GOLDEN / "tiny-f32")


@pytest.fixture(scope="module")
def talking() -> VoiceChat:
    return mlx_voicechat.load(TINY)


def started(model: VoiceChat, frames: int = 6) -> State:
    session = model.session(seed=1, system_prompt="Hi")
    noise = np.random.default_rng(1).normal(0, 0.05, 1280 * frames).astype(np.float32)
    session.push(noise)
    return session.state


def ssm_of(state: State) -> list[mx.array]:
    """Everything that the language model keeps: Mamba states, and keys and values of what it has seen."""
    caches = [array[:, :, : cache.offset] for cache in state.language.caches for array in cache.arrays]
    return [*(array for mamba in state.language.mamba for array in (*mamba.conv, mamba.ssm)), *caches]


@pytest.mark.parametrize("name", ["tiny-f32", "tiny-bf16", "tiny-8bit", "tiny-4bit"])
@pytest.mark.parametrize("piece", [2, 7, 32, 50])
def test_a_run_equals_its_positions_one_by_one(name: str, piece: int) -> None:
    model = mlx_voicechat.load(GOLDEN / name)
    together = started(model)
    single = together.copy()
    audio = model.between("silence")
    for token in IDS:
        assert model.think((token,), single, audio) == token
    for start in range(0, len(IDS), piece):
        model.think(IDS[start : start + piece], together, audio)
    assert single.position == together.position
    exact = model.language.llm.dtype == mx.float32
    for one, other in zip(ssm_of(single), ssm_of(together), strict=True):
        first, second = (np.array(array.astype(mx.float32)) for array in (one, other))
        close = 1e-5 if exact else 2e-2  # a run rounds to bfloat16 elsewhere
        np.testing.assert_allclose(first, second, rtol=0, atol=close * max(1.0, float(np.abs(first).max())))
    following = [[model.think((), state, audio) for _ in range(5)] for state in (single, together)]
    if exact:
        assert following[0] == following[1]


def test_positions_are_frames_without_the_rest(model: VoiceChat) -> None:
    """The LLM after a position is the LLM after a frame that hears the same, with the text id PAD."""
    frames, positions = started(model), None
    positions = frames.copy()
    silence = model.hear(mx.zeros((1, 1280)), model.session().state)
    heard = silence[0]._replace(projected=model.between("silence"))
    for token in IDS[:8]:
        noise = seeded_draws(
            0, frames.steps, (5, model.config.tts.mog.num_predictions), (5, model.config.tts.latent_size)
        )
        model.frame(heard, frames, noise, Override(text=model.config.pad_id, function=token))
        model.think((token,), positions, model.between("silence"))
    for one, other in zip(ssm_of(frames), ssm_of(positions), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    assert frames.position == positions.position
    assert frames.steps == positions.steps + 8


def test_what_it_hears_between_frames(model: VoiceChat) -> None:
    """Silence is the encoder's output for the first frame of a second of zeros."""
    state = model.session().state
    _, projected, _ = model.perception.step(mx.zeros((1, 16000 // 1280 * 1280)), state.perception)
    np.testing.assert_allclose(
        np.array(model.between("silence")),
        np.array(projected[:, :1]),
        rtol=0,
        atol=1e-5 * float(mx.abs(projected).max()),
    )
    assert not np.array(model.between("zero")).any()
    assert model.between("zero").shape == model.between("silence").shape


def test_a_frame_in_which_it_stands_still(model: VoiceChat) -> None:
    state = started(model)
    before = [np.array(array) for array in ssm_of(state)]
    position, steps = state.position, state.steps
    (heard,) = model.hear(mx.zeros((1, 1280)), state)
    shapes = (5, model.config.tts.mog.num_predictions), (5, model.config.tts.latent_size)
    frame = model.aside(heard, state, seeded_draws(0, steps, *shapes), model.config.pad_id)
    assert (frame.text_id, frame.function_id) == (model.config.pad_id, model.config.pad_id)
    assert (state.position, state.steps) == (position, steps + 1)
    for one, other in zip(ssm_of(state), before, strict=True):
        np.testing.assert_array_equal(np.array(one), other)


# -- the override inside the graph ------------------------------------------------------------------------------------


def chosen(model: VoiceChat, override: Override, own: tuple[int, int]) -> tuple[int, int]:
    ids = model._overridden(*(mx.array([token]) for token in own), override)
    return int(ids[0].item()), int(ids[1].item())


@pytest.mark.parametrize(
    ("override", "own", "ids"),
    [
        (Override(), (1, 20), (1, 20)),
        (Override(text=2, function=5), (1, 20), (2, 5)),
        (Override(held_back=True), (1, 30), (12, 30)),
        (Override(held_back=True), (65, 20), (65, 20)),
        (Override(text=1, held_back=True), (65, 20), (1, 20)),
        (Override(calls=Calls.SILENCE), (65, 20), (12, 20)),
        (Override(calls=Calls.SILENCE), (65, 21), (65, 21)),
        (Override(text=1, calls=Calls.SILENCE), (65, 20), (12, 20)),
        (Override(text=1, function=12, calls=Calls.SILENCE), (65, 20), (1, 12)),
        (Override(function=20, calls=Calls.SILENCE), (65, 12), (12, 20)),
        (Override(calls=Calls.REFUSE), (65, 20), (65, 12)),
        (Override(calls=Calls.REFUSE), (65, 30), (65, 30)),
        (Override(calls=Calls.ALONE), (65, 30), (65, 12)),
        (Override(calls=Calls.ALONE), (65, 20), (12, 20)),
    ],
)
def test_override(talking: VoiceChat, override: Override, own: tuple[int, int], ids: tuple[int, int]) -> None:
    assert chosen(talking, override, own) == ids


def frames_of(session: Session, audio: np.ndarray) -> Iterator[Frame]:
    frames: list[Frame] = []
    session.observe(frames.append)
    session.push(audio)
    yield from frames


def test_a_refused_call_is_told(talking: VoiceChat) -> None:
    session = talking.session()
    session.push(np.zeros(2560, np.float32))
    state = session.state
    (heard,) = talking.hear(mx.zeros((1, 1280)), state)
    shapes = (5, talking.config.tts.mog.num_predictions), (5, talking.config.tts.latent_size)
    choose = talking.language.choose
    try:
        talking.language.choose = lambda hidden: (mx.array([12]), mx.array([20]))  # type: ignore[method-assign]
        frame = talking.frame(heard, state, seeded_draws(0, state.steps, *shapes), Override(calls=Calls.REFUSE))
    finally:
        talking.language.choose = choose  # type: ignore[method-assign]
    assert frame.refused
    assert frame.function_id == 12


def launches(session: Session) -> tuple[int, int]:
    """Of one steady frame: launches, and how often the host reads."""
    session.push(np.zeros(12800, np.float32))
    with counting() as count:
        session.push(np.zeros(1280, np.float32))
    return count.launches, count.waits


def test_what_turns_and_tools_add_to_a_frame(talking: VoiceChat) -> None:
    """Nothing where none are used; a few selections inside the graph where they are, and never another read."""
    plain = launches(talking.session())
    told = launches(talking.session(turn_events=True))
    tools = launches(talking.session(system_prompt="", tools=[mlx_voicechat.Tool("get_time")]))
    owned = launches(talking.session(turns="application"))
    assert told == plain
    assert plain[1] == tools[1] == owned[1] == 1
    assert max(tools[0], owned[0]) <= plain[0] + 3
