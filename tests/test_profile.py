"""The profile keeps barrier frames and plain frames apart."""

import pytest

from mlx_voicechat.profile import BARRIER_PERIOD, COLD_FRAMES, STAGES, FrameTiming, Profile, spread


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
