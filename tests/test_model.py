"""The loaded model: openings that are kept, compiling, one read a frame, the buffer cache's limit."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_voicechat
from mlx_voicechat import Event
from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.gauges.counting import counting
from mlx_voicechat.model import KEPT_OPENINGS
from mlx_voicechat.voicechat import CACHE_VARIABLE, VoiceChat, limit_buffer_cache
from tests.support.checkpoints import GOLDEN


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    return np.load(GOLDEN / "expected" / "perception.npz")["audio"][:25600]


@pytest.fixture
def model() -> VoiceChat:
    return mlx_voicechat.load(GOLDEN / "tiny-f32")


def steps_of(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every TTS step of the model."""
    steps: list[int] = []
    step: Callable[..., Any] = model.tts.step

    def counted(*arguments: Any) -> Any:
        steps.append(1)
        return step(*arguments)

    monkeypatch.setattr(model.tts, "step", counted)
    return steps


def test_an_opening_is_kept(model: VoiceChat, audio: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model.session(system_prompt="Be brief.", seed=1).push(audio)
    steps = steps_of(model, monkeypatch)
    again = model.session(system_prompt="Be brief.", seed=1)
    assert steps == []
    assert again.push(audio) == first
    # the first session went on from the kept state, and must not have changed it
    assert model.session(system_prompt="Be brief.", seed=1).push(audio) == first


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"system_prompt": "Be long."}, {"guidance_scale": 0.5}, {"system_prompt": ""}]
)
def test_another_opening_is_its_own(model: VoiceChat, audio: np.ndarray, other: dict[str, Any]) -> None:
    options = {"system_prompt": "Be brief.", "seed": 1}
    model.session(**options)
    expected = mlx_voicechat.load(GOLDEN / "tiny-f32").session(**{**options, **other}).push(audio)
    assert model.session(**{**options, **other}).push(audio) == expected


def test_without_a_prompt_the_opening_serves_every_seed(model: VoiceChat, audio: np.ndarray) -> None:
    expected = mlx_voicechat.load(GOLDEN / "tiny-f32").session(seed=9).push(audio)
    model.session(seed=1).push(audio)
    assert model.session(seed=9).push(audio) == expected


def test_own_noise_is_not_kept(model: VoiceChat, audio: np.ndarray) -> None:
    def loud(step: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((5, 32), 0.9), np.ones((5, 32))

    expected = model.session(system_prompt="Be brief.").push(audio)
    assert model.session(system_prompt="Be brief.", noise=loud).push(audio) != expected
    assert model.session(system_prompt="Be brief.").push(audio) == expected


def test_few_openings_are_kept(model: VoiceChat) -> None:
    for seed in range(2 * KEPT_OPENINGS):
        model.session(system_prompt="Be brief.", seed=seed)
    assert len(model._openings) == KEPT_OPENINGS


def test_a_prompt_longer_than_the_model_is_refused(model: VoiceChat) -> None:
    limit = model.config.llm.max_positions
    assert limit == 4096
    with pytest.raises(InputError, match=r"12,002 tokens.*4,096"):
        model.session(system_prompt="~" * 12_000)


def test_weights_that_are_nan_are_noticed(model: VoiceChat, audio: np.ndarray) -> None:
    decode = model._decode

    def broken(*arguments: Any) -> Any:
        samples, state = decode(*arguments)
        return samples * mx.nan, state

    session = model.session()
    session.push(audio[:2560])
    model._decode = broken
    with pytest.raises(VoiceChatError, match=r"NaN or infinity in frame 2\..*tiny-f32") as caught:
        session.push(audio[:1280])
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e300, 10**400, "1", None])
def test_seconds_of_silence_are_checked(model: VoiceChat, audio: np.ndarray, seconds: Any) -> None:
    with pytest.raises(InputError, match="extra_seconds"):
        model.answer(audio[:1280], extra_seconds=seconds)


def test_a_frame_without_a_symbol_waits_once(model: VoiceChat, audio: np.ndarray) -> None:
    """Between the start and the end of such a frame the device is waited for once, and all state is then there."""
    session = model.session()
    session.push(audio)
    model.rnnt.max_symbols = 0
    with counting() as count:
        session.push(np.zeros(1280, np.float32))
    assert count.waits == 1
    with counting() as count:
        np.array(mx.concatenate([array.reshape(-1) for array in session.state.arrays[:4]]))
    assert count.operations.keys() <= {"Concatenate", "Reshape", "Flatten", "AsType"}  # nothing was left undone


@pytest.mark.skipif(
    mx.default_device().type == mx.cpu and shutil.which("g++") is None, reason="MLX compiles for a CPU with g++"
)
def test_compiled_frames_give_the_same_conversation(model: VoiceChat, audio: np.ndarray) -> None:
    """Equal ids and codes on tiny-f32, whose margins are far above float noise; samples within the golden 1e-4."""

    def run() -> list[Event]:
        return model.session(system_prompt="Be brief.").push(audio)

    eager = run()
    model._openings.clear()
    assert model.compile()
    compiled = run()
    assert len(eager) == len(compiled)
    for one, other in zip(eager, compiled, strict=True):
        if isinstance(one, mlx_voicechat.AudioFrame):
            assert isinstance(other, mlx_voicechat.AudioFrame)
            assert one.codes == other.codes
            np.testing.assert_allclose(one.samples, other.samples, rtol=0, atol=1e-4)
        else:
            assert one == other


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac compiles for its GPU without a C++ compiler")
def test_without_a_compiler_frames_run_eagerly() -> None:
    """In a process of its own: MLX looks for the compiler once."""
    program = (
        "import sys, numpy, mlx_voicechat; said = []; "
        "model = mlx_voicechat.load(sys.argv[1], said.append, compile=True); "
        "assert model.session().push(numpy.zeros(2560, numpy.float32)); print(said)"
    )
    command = [sys.executable, "-c", program, str(GOLDEN / "tiny-f32")]
    done = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=True)
    assert done.stdout.count("C++ compiler") == 1


def test_the_buffer_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mx.set_cache_limit(mx.get_memory_limit())
    try:
        monkeypatch.delenv(CACHE_VARIABLE, raising=False)
        limit_buffer_cache()
        chosen = mx.set_cache_limit(12345)
        assert chosen == 0 if mx.default_device().type == mx.cpu else 0 < chosen < mx.get_memory_limit()
        limit_buffer_cache()  # the program's own limit stays
        assert mx.set_cache_limit(12345) == 12345
        monkeypatch.setenv(CACHE_VARIABLE, "7")
        limit_buffer_cache()  # the user's wins
        assert mx.set_cache_limit(12345) == 7 * 2**20
        monkeypatch.setenv(CACHE_VARIABLE, "lots")
        with pytest.raises(InputError, match="lots"):
            limit_buffer_cache()
    finally:
        mx.set_cache_limit(before)
