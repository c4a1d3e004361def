"""A language model rounded with a calibration: no layer loses more than by rounding, and who is stopped goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import GOLDEN, copy_of, rewrite
from threadpoolctl import threadpool_limits

from mlx_voicechat import load
from mlx_voicechat.cli.main import run
from mlx_voicechat.convert import (
    bits,
    calibration,
    conversion,
    feeding,
    gptq,
    listening,
    moments,
    plans,
    rounding,
    writer,
)
from mlx_voicechat.convert.bits import Choice, Target, knapsack
from mlx_voicechat.convert.calibration import Calibration
from mlx_voicechat.convert.feeding import TO_STREAM, Feeding, Given
from mlx_voicechat.convert.source import Source, open_source
from mlx_voicechat.convert.verify import verify_tensors
from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.networks.duplex_lm import Block
from mlx_voicechat.weights.checkpoint import open_folder

FOLDER = GOLDEN / "tiny-f32"
DOWN = "stt_model.llm.layers.1.mixer.down_proj"
OWN_PLAN = '"stt_model.llm.*_proj" = "3/32"\n"stt_model.*_head" = "4/32"\n"*" = "keep"'


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices are too small for several threads, which wait for each other on a busy machine."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    where = tmp_path_factory.mktemp("calibration")
    noise = np.random.default_rng(0).normal(0, 0.05, 80000)
    sf.write(where / "noise.wav", noise.astype(np.float32), 16000)
    opened = open_folder(FOLDER)
    job = calibration.Job(where / "calib", opened, calibration.recordings([where / "noise.wav"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listening, "LONGEST_REPLY_SECONDS", 0.4)
        return job.run(listening.listener("tiny-f32", opened, lambda text: None))


@pytest.fixture
def plan(tmp_path: Path) -> plans.Plan:
    (tmp_path / "own.toml").write_text(OWN_PLAN, encoding="utf-8")
    return plans.find(str(tmp_path / "own.toml"))


def converted(plan: plans.Plan, gathered: Calibration | None, target: Path) -> conversion.Job:
    with open_source(str(FOLDER)) as source:
        job = conversion.prepare(source, plan, gathered)
        conversion.run(job, target)
    return job


def settings_of(source: Source, plan: plans.Plan) -> dict[str, plans.Setting]:
    return plan.settings({name: tensor.facts for name, tensor in source.tensors.items()})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def through(folder: Path, gathered: Calibration, noted: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A checkpoint's language model on all inputs -> what a layer was given, the streams before its block and last."""
    language = listening.listener(str(folder), open_folder(folder), lambda text: None).language
    number, name = int(noted.split(".")[2]), noted.rpartition(".")[2]
    x = mx.concatenate([moments.read(path)[0]["x"] for path in gathered.inputs])  # one recording
    found: list[np.ndarray] = []
    before = x
    for index, block in enumerate(language.llm.layers):

        def multiply(layer: nn.Module, rows: mx.array, block: Block = block, index: int = index) -> mx.array:
            if index == number and layer is block.mixer[name]:
                found.append(np.array(rows))
            return layer(rows)

        before = x if index == number else before
        x = moments.run_block(block, x, multiply)
    return np.concatenate(found), np.array(before), np.array(x)


def test_no_layer_loses_more_than_by_rounding(
    gathered: Calibration, plan: plans.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_one = rounding.rounded
    given: dict[str, Given] = {}

    def noted(source: Source, layer: rounding.Layer, what: Given) -> Any:
        given[layer.module] = what
        return round_one(source, layer, what)

    monkeypatch.setattr(rounding, "rounded", noted)
    job = converted(plan, gathered, tmp_path / "out")
    assert len(job.layers) == sum(setting.bits < 8 for setting in (layer.setting for layer in job.layers)) > 10
    less = []
    with open_source(str(FOLDER)) as source, open_source(str(tmp_path / "out")) as result:
        for layer in job.layers:
            what = given[layer.module]
            assert what.drift is not None
            assert (what.stream is not None) == layer.module.endswith(TO_STREAM)
            (weight,), (written,) = rounding.rows_of(source, layer), rounding.rows_of(result, layer)
            moved = what.moved(weight, 0, gptq.by_energy(what.moment, 32))
            plain = gptq.nearest(moved, layer.setting.bits, 32).dequantised(layer.setting.bits, 32)
            less.append(gptq.loss(moved - written, what.moment) / gptq.loss(moved - plain, what.moment))
    assert max(less) <= 1.01  # what is read here is dequantised in bfloat16
    assert np.mean(less) < 0.8


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_a_layer_is_told_what_both_models_give_it(
    name: str, gathered: Calibration, plan: plans.Plan, tmp_path: Path
) -> None:
    last = max(i for i, kind in enumerate(open_folder(FOLDER).config.llm.pattern) if kind == "-")
    module = f"{moments.block_name(last)}.{name}"
    converted(plan, gathered, tmp_path / "out")
    (x, stream, _), (q, fed, _) = (through(folder, gathered, module) for folder in (FOLDER, tmp_path / "out"))
    with open_source(str(FOLDER)) as source, open_source(str(tmp_path / "out")) as result:
        layers = {layer.module: layer for layer in rounding.calibrated(source, settings_of(source, plan))}

        def rounded(module: str) -> mx.array | None:
            return mx.array(next(rounding.rows_of(result, layers[module]))) if module in layers else None

        found = Feeding(source, gathered, tmp_path / "streams", [""] * 99, rounded).given(module)
    assert found.drift is not None
    assert np.abs(x - q).max() > 0.01 < np.abs(stream - fed).max()
    pairs = [(found.moment, q.T @ q), (found.drift, (x - q).T @ q)]
    if name == "down_proj":
        assert found.stream is not None
        pairs.append((found.stream, (stream - fed).T @ q))
    else:
        assert found.stream is None
    for sums, expected in pairs:
        np.testing.assert_allclose(sums, expected, atol=2e-3 * np.abs(expected).max())
    assert [path.name for path in (tmp_path / "streams").iterdir()] == [str(last)]


def test_what_is_lost_is_made_up_for(
    gathered: Calibration, plan: plans.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(plan, gathered, tmp_path / "fed")
    round_one = rounding.rounded

    def alone(source: Source, layer: rounding.Layer, given: Given) -> Any:
        return round_one(source, layer, Given(gathered.moments(layer.module, layer.tensor.shape[1]).matrix))

    monkeypatch.setattr(rounding, "rounded", alone)
    converted(plan, gathered, tmp_path / "alone")
    converted(plan, None, tmp_path / "plain")
    layer = f"{moments.block_name(1)}.down_proj"
    x, *others = (through(f, gathered, layer)[2] for f in (FOLDER, *(tmp_path / n for n in ("fed", "alone", "plain"))))
    fed, alone_, plain = (float(np.square(x - each).sum()) for each in others)
    assert fed < 0.7 * alone_ < 0.7 * plain


def test_the_checkpoint_is_sound(gathered: Calibration, plan: plans.Plan, tmp_path: Path) -> None:
    job = converted(plan, gathered, tmp_path / "out")
    with open_source(str(FOLDER)) as job_source:
        found = verify_tensors(conversion.prepare(job_source, plan, gathered), tmp_path / "out")
        assert f"{len(job.layers)} within the quantiser's bound" in found
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "own.toml"]
        load(tmp_path / "out", compile=False).session().push(np.zeros(1280, np.float32))
        raw = json.loads((tmp_path / "out" / "config.json").read_text())
        assert raw["quantization"][DOWN] == {"group_size": 32, "bits": 3}
        facts = raw["mlx_voicechat_conversion"]["calibration"]
        assert facts == {"recordings": 1, "positions": gathered.positions, "method": "GPTQ"}
        file = next((tmp_path / "out").glob("model-*.safetensors"))
        tensors: Any = mx.load(str(file))
        tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"][::-1]
        mx.eval(tensors)
        mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
        with pytest.raises(VoiceChatError, match="1 tensors are not what the source holds"):
            verify_tensors(conversion.prepare(job_source, plan, gathered), tmp_path / "out")


class Killed(BaseException):
    """As a signal would end it."""


def test_stopped_at_any_layer_it_goes_on_to_the_same_bytes(
    gathered: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text('"stt_model.llm.layers.[13].*_proj" = "3/32"\n"*" = "keep"')
    plan = plans.find(str(tmp_path / "own.toml"))
    job = converted(plan, gathered, tmp_path / "whole")
    round_one, done = rounding.rounded, 0

    def killed(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done % 2 == 0:
            raise Killed
        return round_one(*arguments)

    monkeypatch.setattr(rounding, "rounded", killed)
    for _ in range(len(job.layers) - 1):  # each gets one layer further
        with pytest.raises(Killed):
            converted(plan, gathered, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    converted(plan, gathered, tmp_path / "out")
    assert done == 2 * len(job.layers) - 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "own.toml", "whole"}


def test_stopped_between_blocks_it_goes_on_to_the_same_bytes(
    gathered: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text('"stt_model.llm.layers.[03].*_proj" = "3/32"\n"*" = "keep"')
    plan = plans.find(str(tmp_path / "own.toml"))
    converted(plan, gathered, tmp_path / "whole")
    run_block, done = moments.run_block, 0

    def killed(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done % 3 == 0:  # in the model whose layers are rounded, or in the other one
            raise Killed
        return run_block(*arguments)

    monkeypatch.setattr(moments, "run_block", killed)
    stops = 0
    while not (tmp_path / "out").exists():
        with suppress(Killed):
            converted(plan, gathered, tmp_path / "out")
            break
        stops += 1
        (streams,) = (tmp_path / ".out.mlx-voicechat-layers").glob("streams")
        assert len(list(streams.iterdir())) <= 2
    assert stops == 2 < done
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_layer_of_something_else_is_rounded_again(
    gathered: Calibration, plan: plans.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(plan, gathered, tmp_path / "whole")
    monkeypatch.setattr(conversion, "_write_shards", lambda *rest: (_ for _ in ()).throw(Killed))
    other = tmp_path / "other.toml"
    other.write_text(OWN_PLAN.replace("3/32", "2/32"))
    with pytest.raises(Killed):
        converted(plans.find(str(other)), gathered, tmp_path / "out")
    assert (tmp_path / ".out.mlx-voicechat-layers").is_dir()
    monkeypatch.undo()
    converted(plan, gathered, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_memory_time_and_disk_are_told(gathered: Calibration, plan: plans.Plan, tmp_path: Path) -> None:
    with open_source(str(FOLDER)) as source:
        job = conversion.prepare(source, plan, gathered)
        lines = job.describe(tmp_path / "out")
        assert f"{gathered.positions:,} positions; {len(job.layers)} layers to round, about 1 min" in lines[-1]
        streams = 4 * sum(path.stat().st_size for path in gathered.inputs)
        assert job.disk_bytes == job.bytes + rounding.layers_bytes(job.layers) + streams
        packed = [entry for output in job.outputs for entry in output.entries if entry.name.startswith(f"{DOWN}.")]
        (down,) = [layer for layer in job.layers if layer.tensor.name == f"{DOWN}.weight"]
        assert rounding.layers_bytes([down]) == sum(entry.bytes for entry in packed)
        assert sum(feeding.block_weights(source)) == sum(
            int(np.prod(tensor.shape)) for name, tensor in source.tensors.items() if ".llm.layers." in name
        )
    assert rounding.seconds(0) == 0 < rounding.seconds(1e12)


def test_two_conversions_of_one_target(gathered: Calibration, plan: plans.Plan, tmp_path: Path) -> None:
    target = tmp_path / "out"
    layers = tmp_path / rounding.FOLDER.format("out")
    with writer.alone(layers, target), pytest.raises(InputError, match=r"Another conversion is writing .*out"):
        converted(plan, gathered, target)
    assert not target.exists()
    converted(plan, gathered, target)
    assert target.is_dir()
    assert not layers.exists()


def test_of_another_model(gathered: Calibration, plan: plans.Plan, tmp_path: Path) -> None:
    other = copy_of("tiny-f32", tmp_path)
    rewrite(other, lambda tensors: tensors.update({(n := "stt_model.llm.norm_f.weight"): tensors[n] * 1.1}))
    with open_source(str(other)) as source, pytest.raises(InputError, match="is of another language model than"):
        conversion.prepare(source, plan, gathered)
    with open_source(str(FOLDER)) as source:
        with pytest.raises(InputError, match="needs a calibration"):
            conversion.prepare(source, plans.find("gptq-3"))
        with pytest.raises(InputError, match="quantises no layer"):
            conversion.prepare(source, plans.find("bf16"), gathered)
    for folder in ("tiny-bf16", "tiny-4bit"):  # any precision of the same one
        with open_source(str(GOLDEN / folder)) as source:
            rounding.check(source, gathered)


# -- bits per layer ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.floats(0, 10), min_size=3, max_size=3)), min_size=1, max_size=5),
    st.floats(2, 4),
)
def test_the_knapsack_is_the_best_there_is(layers: list[tuple[int, list[float]]], average: float) -> None:
    choices = [Choice(str(i), 64 * n, dict(zip((2, 3, 4), costs, strict=True))) for i, (n, costs) in enumerate(layers)]
    budget = int(average * sum(choice.weights for choice in choices))
    chosen = knapsack(choices, budget)
    assert list(chosen) == [choice.name for choice in choices]

    def totals(picked: tuple[int, ...]) -> tuple[float, int]:
        pairs = list(zip(choices, picked, strict=True))
        return sum(c.costs[b] for c, b in pairs), sum(c.weights * b for c, b in pairs)

    every = [totals(picked) for picked in itertools.product((2, 3, 4), repeat=len(choices))]
    cost, size = totals(tuple(chosen.values()))
    assert size <= budget
    assert cost == pytest.approx(min(cost for cost, size in every if size <= budget))


def test_odd_sizes_still_fit() -> None:
    rng = np.random.default_rng(0)
    choices = [Choice(str(i), int(n), {2: 4.0, 3: 1.0, 4: 0.2}) for i, n in enumerate(rng.integers(10**6, 10**8, 30))]
    budget = int(2.7 * sum(choice.weights for choice in choices))
    used = sum(choice.weights * knapsack(choices, budget)[choice.name] for choice in choices)
    assert 0.99 * budget < used <= budget


def test_what_costs_more_gets_more_bits(gathered: Calibration, plan: plans.Plan, monkeypatch: Any) -> None:
    with open_source(str(FOLDER)) as source:
        job = conversion.prepare(source, plan, gathered)
        body = [layer for layer in job.layers if "head" not in layer.module]
        measured = {choice.name: choice for choice in bits.measure(source, body, gathered)}
        assert all(list(each.costs.values()) == sorted(each.costs.values(), reverse=True) for each in measured.values())
        monkeypatch.setattr(bits, "_costs", None)  # measured once
        chosen = bits.choose(source, plan, gathered, Target(bits=2.5))
        given = {rule.text: rule.settings[0] for rule in chosen.rules if rule.text in measured}
        assert given.keys() == measured.keys()
        used = sum(measured[name].weights * setting.bits for name, setting in given.items())  # type: ignore[union-attr]
        weights = sum(choice.weights for choice in measured.values())
        assert 2.4 < used / weights <= 2.5
        assert "bits per layer by measured error" in conversion.prepare(source, chosen, gathered).describe(FOLDER)[1]
        size = conversion.prepare(source, plan, gathered).bytes / 1e9
        by_size = conversion.prepare(source, bits.choose(source, plan, gathered, Target(gigabytes=size)), gathered)
        assert 0.98 * size <= by_size.bytes / 1e9 <= size
        for target in (Target(bits=1.9), Target(gigabytes=size / 2)):
            with pytest.raises(InputError, match=r"out of reach with plan own.toml: its least is \d"):
                bits.choose(source, plan, gathered, target)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(gathered: Calibration, plan: plans.Plan, tmp_path: Path, capsys: Any) -> None:
    command = ["convert", "-s", str(FOLDER), "--plan", str(tmp_path / "own.toml")]
    asked = ["--calibration", str(gathered.folder), "--target-bits", "3.2", "-o", str(tmp_path / "out")]
    assert run([*command, *asked]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out'}\n"
    assert "plan: own.toml, 3.19 bits (bits per layer by measured error: " in err
    assert "layers to round" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target-bits", "3"], "need --calibration"),
        (["--target-bits", "3", "--target-gb", "4", "--calibration", "x"], "exclude each other"),
        (["--target-gb", "-1", "--calibration", "x"], "not a number above 0"),
        (["--plan", "gptq-3"], "needs a calibration"),
        (["--plan", "gptq-3", "--calibration", "absent"], "is no calibration"),
    ],
)
def test_bad_use(arguments: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert run(["convert", "-s", str(FOLDER), "-o", str(tmp_path / "out"), *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
