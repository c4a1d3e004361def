"""The profile keeps barrier frames and plain frames apart, and can look into the stages."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from mlx.utils import tree_flatten

import mlx_voicechat
from mlx_voicechat.cli.main import run
from mlx_voicechat.gauges.parts import parts, timed
from mlx_voicechat.gauges.profile import BARRIER_PERIOD, COLD_FRAMES, STAGES, FrameTiming, Profile, spread
from mlx_voicechat.voicechat import VoiceChat, load
from tests.support.checkpoints import GOLDEN


def filled(frames: int) -> Profile:
    profile = Profile(budget_ms=80.0)
    for index in range(frames):
        staged = profile.barriers
        stages = dict.fromkeys(STAGES, 2.0) if staged else {}
        total = 1000.0 if index < COLD_FRAMES or staged else 40.0
        profile.frames.append(FrameTiming(index, total, stages))
    return profile


def test_total_is_of_warm_frames_without_barriers() -> None:
    summary = filled(41).summary()
    assert summary["realtime_factor"] == 0.5
    assert summary["processing_frames_per_second"] == 25.0
    assert summary["stages"]["total"]["max_ms"] == 40.0
    assert summary["stages"]["tts"] == {"mean_ms": 2.0, "p50_ms": 2.0, "p95_ms": 2.0, "max_ms": 2.0}
    assert summary["barrier_frames"] == 9
    assert summary["cold_frames_dropped"] == COLD_FRAMES
    assert any("barrier" in note for note in summary["notes"])


def test_too_short_a_session_has_no_figures() -> None:
    summary = filled(COLD_FRAMES).summary()
    assert summary["realtime_factor"] is None
    assert summary["stages"]["codec"]["p95_ms"] is None


def test_every_fourth_frame_has_barriers() -> None:
    profile = Profile(budget_ms=80.0)
    flags = []
    for index in range(12):
        flags.append(profile.barriers)
        profile.frames.append(FrameTiming(index, 1.0))
    assert [i for i, flag in enumerate(flags) if flag] == [BARRIER_PERIOD * k + 3 for k in range(3)]


def test_marks_add_up() -> None:
    profile = Profile(budget_ms=80.0)
    profile.start()
    for name in STAGES:
        profile.stage(name)
    profile.stop()
    timing = profile.frames[0]
    assert set(timing.stages) == set(STAGES)
    assert timing.total >= sum(timing.stages.values())


def test_spread() -> None:
    assert spread([1.0, 2.0, 3.0, 10.0]) == {
        "mean_ms": 4.0,
        "p50_ms": 2.5,
        "p95_ms": pytest.approx(8.95),
        "max_ms": 10.0,
    }


# -- finer ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return load(GOLDEN / "tiny-f32", compile=False)


def noise(frames: int) -> np.ndarray:
    return (0.01 * np.random.default_rng(0).standard_normal(1280 * frames)).astype(np.float32)


def test_parts_of_the_stages(model: VoiceChat) -> None:
    plain, finer = model.session(), model.session(profile=True)
    assert finer.profile is not None
    expected = plain.push(noise(10))
    before = vars(model).copy()
    with timed(model, finer.profile):
        events = finer.push(noise(10))
    assert events == expected
    assert vars(model) == before
    summary = finer.profile.summary()
    parts = summary["sub_stages"]
    assert {"perception.mel", "perception.layers", "language.layers", "language.heads"} <= parts.keys()
    assert {"tts.embed", "tts.backbone", "tts.codes", "codec.decoder", "codec.decoder_istft"} <= parts.keys()
    assert {name.partition(".")[0] for name in parts} == set(STAGES)
    for frame in finer.profile.frames:
        for stage, spent in frame.stages.items():
            within = sum(ms for name, ms in frame.parts.items() if name.startswith(f"{stage}."))
            assert within == pytest.approx(spent, abs=1.0)  # marks are set one after the other
    assert summary["realtime_factor"] is summary["processing_frames_per_second"] is None
    assert summary["stages"]["total"]["mean_ms"] > 0
    assert any("not the real-time factor" in text for text in summary["notes"])


def test_the_model_is_as_before_once_its_parts_were_timed(model: VoiceChat) -> None:
    profile = Profile(budget_ms=80.0)
    names = [(part.owner, part.name, getattr(part.owner, part.name)) for part in parts(model)]
    weights = list(dict(tree_flatten(model.perception.parameters())))
    with timed(model, profile):
        assert profile.barriers
        assert all(getattr(owner, name) != original for owner, name, original in names)
    with pytest.raises(ZeroDivisionError), timed(model, profile):
        raise ZeroDivisionError
    assert not profile.barriers
    assert all(getattr(owner, name) == original for owner, name, original in names)
    assert list(dict(tree_flatten(model.perception.parameters()))) == weights
    assert model.session().push(noise(2)) == model.session().push(noise(2))


def test_every_frame_is_told_the_cold_ones_too() -> None:
    profile = filled(9)
    profile.frames[8].parts["tts.backbone"] = 1.5
    told = profile.every_frame()
    assert (told["budget_ms"], told["cold_frames"]) == (80.0, COLD_FRAMES)
    assert [frame["index"] for frame in told["frames"]] == list(range(9))
    assert [frame["cold"] for frame in told["frames"]] == [True] * 5 + [False] * 4
    assert told["frames"][7]["stages_ms"]["tts"] == 2.0
    assert told["frames"][8]["sub_stages_ms"] == {"tts.backbone": 1.5}
    assert "sub_stages_ms" not in told["frames"][0]


@pytest.fixture
def generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`generate --stream` on a second of noise -> exit code, stderr."""
    soundfile.write(tmp_path / "second.wav", noise(13)[:16000], 16000)

    def call(*options: str) -> tuple[int, str]:
        audio = ["--audio", str(tmp_path / "second.wav"), "--extra-decoding-seconds", "0"]
        code = run(["generate", "-m", str(GOLDEN / "tiny-f32"), "--stream", *audio, *options])
        return code, capsys.readouterr().err

    return call


def test_variables_refine_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generate: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_STAGES", "1")
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_FRAMES", str(tmp_path / "frames.json"))
    code, _ = generate("--profile-json", str(tmp_path / "profile.json"))
    assert code == 0
    summary = json.loads((tmp_path / "profile.json").read_text())
    assert {"perception.layers", "tts.backbone", "codec.decoder_istft"} <= summary["sub_stages"].keys()
    assert summary["realtime_factor"] is None
    frames = json.loads((tmp_path / "frames.json").read_text())["frames"]
    assert len(frames) == summary["frames"] == 13
    assert all(frame["total_ms"] > 0 and frame["sub_stages_ms"] for frame in frames)


def test_without_profile_the_variables_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generate: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_STAGES", "1")
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_FRAMES", str(tmp_path / "absent" / "frames.json"))
    code, err = generate()
    assert code == 0
    assert "sub_stages" not in err


@pytest.mark.parametrize("place", ["absent/frames.json", ".", "-", "second.wav/frames.json", "profile.json"])
def test_a_bad_place_is_refused_before_the_model_loads(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generate: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.setattr(mlx_voicechat, "load", None, raising=False)
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_FRAMES", place if place == "-" else str(tmp_path / place))
    code, err = generate("--profile-json", str(tmp_path / "profile.json"))
    assert code == 2
    assert "MLX_VOICECHAT_PROFILE_FRAMES" in err
    assert err.count("\n") == 1
