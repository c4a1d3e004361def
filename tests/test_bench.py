"""`bench`: what it measures and counts, what it prints, and what it refuses before the model loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_voicechat.cli.bench import tables
from mlx_voicechat.cli.main import run
from mlx_voicechat.gauges import bench as measure
from mlx_voicechat.gauges import memory, traffic
from mlx_voicechat.gauges.bench import bench, count_frame, faint_noise, growth
from mlx_voicechat.gauges.company import frame_times, real_time_sessions
from mlx_voicechat.gauges.counting import BUFFER, FUNCTIONS, METHODS, counting
from mlx_voicechat.gauges.profile import STAGES, FrameTiming
from mlx_voicechat.gauges.sustained import sustained
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.voicechat import VoiceChat, load
from mlx_voicechat.weights.config_file import read_config
from mlx_voicechat.weights.shards import verify
from tests.support.checkpoints import GOLDEN

FRAMES = 20
SPREAD = ["mean_ms", "p50_ms", "p95_ms", "max_ms"]


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    """Not compiled; a test that alters it puts it back."""
    return load(GOLDEN / "tiny-f32", compile=False)


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], dict[str, Any]]:
    """A report and the timings of its frames."""
    return bench(GOLDEN / "tiny-f32", FRAMES, LoadOptions(compile=False))


def test_frames_without_rest(model: VoiceChat) -> None:
    """On a clock that goes on by a second whenever it is read, and slower frames later."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0 if now < 60 else 2.0
        return now

    found = sustained(model, 120.0, faint_noise(model.config), clock=clock)
    assert [part.second for part in found] == [10.0 * index for index in range(len(found))]
    assert found[0].p50_ms == 1000
    assert found[-1].p50_ms == found[-1].p95_ms == 2000
    assert len(sustained(model, 120.0, faint_noise(model.config), stop=lambda: True)) == 0


def test_the_curve_is_shown(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    parts = [{"second": 0.0, "frames": 9, "p50_ms": 20.0, "p95_ms": 22.0}]
    parts.append({"second": 5.0, "frames": 4, "p50_ms": 40.0, "p95_ms": 41.0})
    shown = tables({**measured[0], "sustained": parts})
    assert "from 0 s        20.00    22.00        9  " + "#" * 20 + "\n" in shown
    assert "takes 2.00 of the first one's time" in shown
    assert "without rest" not in tables(measured[0])


# -- counting --------------------------------------------------------------------------------------------------------


def test_primitives_launches_and_evaluations() -> None:
    x = mx.arange(6.0)
    mx.eval(x)
    with counting() as count:
        y = mx.exp(x.reshape(2, 3)).T + 1
        mx.eval(y, [y, {"again": (y,)}])
        mx.eval(y)
    assert count.primitives == 4 + 1  # the 1 is broadcast
    assert count.launches == 2
    assert count.evaluations == 2
    assert count.operations["Exp"] == count.operations["Add"] == count.operations["Reshape"] == 1


READS: dict[str, Callable[[mx.array], Any]] = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "__int__": int,
    "__float__": float,
    "__bool__": bool,
    "__index__": lambda x: range(9)[x],
    "__repr__": repr,
    "__format__": lambda x: f"{x}",
    "__bytes__": bytes,
    "__dlpack__": lambda x: np.from_dlpack(x),  # type: ignore[arg-type]
    "eval": lambda x: mx.eval(x),  # looked up late, as programs do
    "async_eval": lambda x: mx.async_eval(x),
    "synchronize": lambda x: mx.synchronize(),
    BUFFER: lambda x: np.array(x),
    f"{BUFFER} asarray": lambda x: np.asarray(x),
    f"{BUFFER} list": lambda x: np.stack([x]),
    f"{BUFFER} memoryview": lambda x: memoryview(x),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("how", READS)
def test_every_way_to_read_is_counted_once(how: str) -> None:
    with counting() as count:
        x = mx.array(2) + 1
        READS[how](x)
    assert count.reads == {how.split()[0]: 1}
    assert count.operations.get("Add", 0) == (how != "synchronize")
    assert np.array(x) == 3


def test_counting_leaves_nothing_behind() -> None:
    before = [getattr(mx, name) for name in FUNCTIONS] + [vars(mx.array)[name] for name in METHODS]
    with pytest.raises(ZeroDivisionError), counting() as count:
        raise ZeroDivisionError
    assert before == [getattr(mx, name) for name in FUNCTIONS] + [vars(mx.array)[name] for name in METHODS]
    assert np.array(mx.arange(3)).tolist() == mx.arange(3).tolist()
    assert count.evaluations == 0


def test_a_read_that_fails_still_fails() -> None:
    with counting() as count, pytest.raises(ValueError, match="bfloat16"):
        np.array(mx.ones((2,), mx.bfloat16))
    assert count.evaluations == 1


READS_IN_A_FRAME: list[Callable[[mx.array], Any]] = [
    lambda ids: ids.item(),
    lambda ids: np.array(ids),
    lambda ids: np.asarray(ids),
    lambda ids: mx.async_eval(ids),
]


@pytest.mark.parametrize("read", READS_IN_A_FRAME)
def test_a_stray_read_in_a_frame_is_counted(
    read: Callable[[mx.array], Any], model: VoiceChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = count_frame(model, faint_noise(model.config))
    choose = model.language.choose

    def reading(hidden: mx.array) -> tuple[mx.array, mx.array]:
        text, function = choose(hidden)
        read(text)
        return text, function

    monkeypatch.setattr(model.language, "choose", reading)
    _, after = count_frame(model, faint_noise(model.config))
    assert before.symbols == after.symbols == 0
    assert after.count.evaluations == before.count.evaluations + 1
    assert after.count.primitives == pytest.approx(before.count.primitives, rel=0.01)


def test_a_frame_without_a_symbol_is_one_evaluation(model: VoiceChat) -> None:
    _, counted = count_frame(model, faint_noise(model.config))
    assert counted.symbols == 0
    assert counted.count.waits == 1
    assert counted.count.reads == {"async_eval": 2, "eval": 1}
    assert 0 < counted.count.launches < counted.count.primitives


# -- the report ------------------------------------------------------------------------------------------------------


def test_what_the_report_holds(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    report, timings = measured
    assert json.loads(json.dumps(report)) == report
    for stage in (*STAGES, "total"):
        assert list(report["stages"][stage]) == SPREAD
        assert all(value > 0 for value in report["stages"][stage].values())
    assert report["realtime_factor"] == report["stages"]["total"]["mean_ms"] / 80
    assert report["evaluations"] == 1
    assert report["primitives"] == sum(report["counted_frame"]["operations"].values()) > report["launches"] > 0
    assert report["growth"] is None  # too few frames
    assert report["machine"]["compiled"] is False
    assert {"chip", "platform", "mlx", "device"} <= report["machine"].keys()
    assert report["load_seconds"] > 0
    assert [frame["cold"] for frame in timings["frames"]] == [True] * 5 + [False] * (FRAMES - 5)
    assert "sub_stages" not in report


def test_memory_in_the_report(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found = measured[0]["memory"]
    assert found["announced"]["loaded_bytes"] == pytest.approx(found["loaded_bytes"], rel=0.05)
    assert found["announced"]["total_bytes"] == pytest.approx(found["active_bytes"], rel=0.05)
    assert found["peak_bytes"] >= found["load_peak_bytes"] >= found["loaded_bytes"]
    assert found["resident"].keys() == {"perception", "rnnt", "language", "tts", "codec", "text_table", "other"}
    assert found["process"]["last_frame_bytes"] > found["active_bytes"]


def test_floor_in_the_report(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    report = measured[0]
    speed = report["bandwidth"]["gbps"] * 1e6  # bytes a millisecond
    for stage, row in report["floor"].items():
        assert row["floor_ms"] == pytest.approx(row["bytes"] / speed)
        assert row["p50_ms"] == report["stages"][stage]["p50_ms"]
    assert report["floor"]["total"]["bytes"] == sum(report["floor"][stage]["bytes"] for stage in STAGES)
    assert report["bandwidth"]["measured"] is True
    assert speed > 0


def test_growth_compares_the_ends_of_a_long_session() -> None:
    def timing(index: int) -> FrameTiming:
        staged = index % 4 == 3
        return FrameTiming(index, 500.0 if staged else 10.0 + (index > 1500), {"tts": 1.0} if staged else {})

    assert growth([timing(i) for i in range(2004)]) is None
    assert growth([timing(i) for i in range(2005)]) == {"first_p50_ms": 10, "last_p50_ms": 11, "growth_ms": 1}


def test_traffic_by_hand() -> None:
    config, stored = read_config(GOLDEN / "tiny-f32"), verify(GOLDEN / "tiny-f32")
    moved = {n: traffic.traffic(config, stored, n) for n in (0, 10, 10_000)}
    llm, tts = config.llm, config.tts
    keys_values = 2 * llm.num_key_value_heads * llm.head_dim * 4 * llm.pattern.count("*")
    assert moved[10]["language"] - moved[0]["language"] == 10 * keys_values
    rows = 2 * 2 * tts.num_key_value_heads * tts.head_dim * 4
    assert moved[10]["tts"] - moved[0]["tts"] == 10 * rows * tts.num_hidden_layers
    full = (tts.num_hidden_layers - 1) * (tts.sliding_window - tts.prompt_frames)  # one layer is global
    assert moved[10_000]["tts"] - moved[0]["tts"] == rows * (10_000 + full)
    weights = memory.announce(config, stored, 0).weights
    assert moved[0]["perception"] < 2 * weights["perception"]
    assert moved[0]["codec"] < weights["codec"]  # rows of the codebooks, not all of them
    assert moved[0]["rnnt"] < weights["rnnt"]  # the prediction network runs for symbols only
    assert traffic.milliseconds(10**9, 800.0) == 1.25


# -- the command -----------------------------------------------------------------------------------------------------


def test_bench_prints_tables_or_json(
    measured: tuple[dict[str, Any], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def fake(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.append((args, kwargs))
        return measured

    monkeypatch.setattr(measure, "bench", fake)
    options = ["bench", "somewhere", "--frames", str(FRAMES), "--no-compile", "--bandwidth", "100"]
    assert run(options) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("perception", "total", "real-time factor", "launches", "1 evaluation", "announced", "GB/s"):
        assert word in out
    assert run([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == measured[0]
    assert asked[0][0] == ("somewhere", FRAMES, LoadOptions(compile=False))
    assert asked[0][1]["bandwidth_gbps"] == 100.0
    assert run(["bench", "somewhere", "--frames", str(FRAMES + 1)]) == 130  # it was stopped
    assert asked[-1][0][2].compile is True
    assert f"interrupted after {FRAMES} of {FRAMES + 1} frames" in capsys.readouterr().err


def test_bench_with_the_profile_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_STAGES", "1")
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_FRAMES", str(tmp_path / "frames.json"))
    assert run(["bench", str(GOLDEN / "tiny-f32"), "--frames", str(FRAMES), "--no-compile", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["frames"] == FRAMES
    assert report["bandwidth"]["measured"] is True
    assert report["realtime_factor"] > 0  # of a session without finer barriers
    assert {"perception.layers", "tts.backbone", "codec.decoder_istft"} <= report["sub_stages"].keys()
    assert len(json.loads((tmp_path / "frames.json").read_text())["frames"]) == FRAMES


def test_tables_of_an_interrupted_bench() -> None:
    report, _ = bench(GOLDEN / "tiny-f32", FRAMES, LoadOptions(compile=False), bandwidth_gbps=10.0, stop=lambda: True)
    assert report["frames"] == 1
    assert report["realtime_factor"] is None
    assert "real-time factor -" in tables(report)


def test_several_sessions_together(model: VoiceChat) -> None:
    noise = faint_noise(model.config)
    assert {count: len(times) for count, times in frame_times(model, (1, 3), 6, noise).items()} == {1: 6, 3: 6}
    report, _ = bench(GOLDEN / "tiny-f32", 2, LoadOptions(compile=False), bandwidth_gbps=10.0, sessions=3)
    assert list(report["together"]["rows"]) == ["1", "2", "4"]
    assert f"{report['together']['real_time_sessions']} of 3 sessions together run in real time" in tables(report)


@pytest.mark.parametrize(
    ("milliseconds", "most", "fit"),
    [((61, 70, 80, 90), 8, 0), ((20, 22, 25, 61), 8, 4), ((20, 22, 25, 35), 100, 12), ((1, 1, 1, 1), 16, 16)],
)
def test_how_many_run_in_real_time(milliseconds: tuple[float, ...], most: int, fit: int) -> None:
    """A round of 60 of 80 ms; of more than eight, slab after slab."""
    assert real_time_sessions(dict(zip((1, 2, 4, 8), milliseconds, strict=True)), most, 80.0) == fit


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--frames", "0"], "--frames"),
        (["--sessions", "0"], "--sessions"),
        (["--bandwidth", "0"], "--bandwidth"),
        (["--bandwidth", "nan"], "--bandwidth"),
        (["--speech-weights", "q7"], "q7"),
    ],
)
def test_bench_refuses(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tiny", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert word in err


def test_a_bad_place_for_the_timings_is_refused_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_VOICECHAT_PROFILE_FRAMES", str(tmp_path / "absent" / "frames.json"))
    assert run(["bench", "no/such-model"]) == 2
    assert "MLX_VOICECHAT_PROFILE_FRAMES" in capsys.readouterr().err
