"""In which form a checkpoint is held: chips and their bandwidths, ten Macs, memory, sessions, what is named."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import mlx_voicechat
from mlx_voicechat.cli import published
from mlx_voicechat.cli.info import frame_table
from mlx_voicechat.gauges import chips, plans
from mlx_voicechat.gauges.chips import BANDWIDTH_GBPS, Bandwidth, known
from mlx_voicechat.gauges.plans import Place, Plan, choose, table
from mlx_voicechat.gauges.traffic import traffic
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.weights import assets, layout
from mlx_voicechat.weights.config_file import parse_config
from mlx_voicechat.weights.shards import Stored, verify
from tests.support.checkpoints import GOLDEN

GB = 10**9
CONFIG = parse_config(json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8")))
NARROW = ("q8", "bf16", "bfloat16")


@cache
def released(bits: int | None) -> dict[str, Stored]:
    return published.headers(CONFIG, bits)


@cache
def unrounded() -> dict[str, Stored]:
    """As if the released model's LLM were stored in float32."""
    language = layout.LANGUAGE_MATRIX.search
    return {name: entry._replace(dtype="F32") if language(name) else entry for name, entry in released(None).items()}


def mac(chip: str, gigabytes: int) -> Place:
    return Place(True, gigabytes * GB, lambda: float(BANDWIDTH_GBPS[chip]))


def chosen(stored: dict[str, Stored], place: Place, options: LoadOptions = LoadOptions()) -> Plan:  # noqa: B008
    return choose(CONFIG, stored, options, place).plan


# -- chips --------------------------------------------------------------------------------------------------------


def test_the_chip_is_told_by_its_name() -> None:
    assert known("Apple M4 Max\n") == Bandwidth(410, "M4 Max")
    assert known("Apple M1") == Bandwidth(68, "M1")
    for other in ("Apple M9 Ultra", "Apple M4 Pro (Virtual)", "Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz", ""):
        assert known(other) is None
    assert known("Apple M4 Max").source == "Apple M4 Max, as specified"  # type: ignore[union-attr]


def test_an_unknown_chip_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    monkeypatch.setattr(chips, "measured_bandwidth", lambda: measured.append(1.0) or 7.0)
    monkeypatch.setattr(chips, "brand", lambda: "Apple M99")
    chips.bandwidth.cache_clear()
    try:
        assert chips.bandwidth() == chips.bandwidth() == Bandwidth(7.0, "")
        assert len(measured) == 1
        assert chips.bandwidth().source == "measured"
    finally:
        chips.bandwidth.cache_clear()


# -- what is chosen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chip", "memory", "bits", "gigabytes", "floor_ms"),
    [
        ("M1", 16, 4, 7.5, 111),
        ("M2", 24, 4, 7.5, 75),
        ("M4", 32, 4, 7.5, 63),
        ("M5", 32, 4, 7.5, 49),
        ("M3 Pro", 36, 4, 7.5, 50),
        ("M4 Pro", 48, 8, 12.0, 44),
        ("M1 Max", 64, 8, 12.0, 30),
        ("M4 Max", 64, 8, 12.0, 29),
        ("M2 Ultra", 128, None, 20.3, 25),
        ("M3 Ultra", 256, None, 20.3, 25),
    ],
)
def test_ten_macs(chip: str, memory: int, bits: int | None, gigabytes: float, floor_ms: int) -> None:
    """The published checkpoints are rounded: each Mac holds them alike. GB a frame and its floor after 1,500 frames."""
    place = mac(chip, memory)
    (row,) = [row for row in table(CONFIG, released(bits), LoadOptions(), place) if row.chosen]
    assert tuple(row.plan) == NARROW
    assert row.moved[1500] / GB == pytest.approx(gigabytes, abs=0.06)
    assert row.floor_ms[1500] == pytest.approx(floor_ms, abs=0.6)


@pytest.mark.parametrize(
    ("gbps", "expected"),
    [
        (2000, ("f32", "f32", "float32")),
        (1070, ("f32", "bf16", "float32")),
        (980, ("q8", "f32", "float32")),
        (960, ("q8", "bf16", "float32")),
        (68, ("q8", "bf16", "float32")),
    ],
)
def test_what_is_stored_unrounded_is_as_wide_as_half_of_a_frame_allows(
    gbps: float, expected: tuple[str, str, str]
) -> None:
    place = Place(True, 512 * GB, lambda: gbps)
    assert tuple(chosen(unrounded(), place)) == expected


def test_so_it_is_on_a_cpu_and_it_computes_in_float32() -> None:
    assert tuple(chosen(released(4), Place(False, 512 * GB, lambda: 400.0))) == ("f32", "f32", "float32")
    assert tuple(chosen(released(4), Place(False, 512 * GB, lambda: 230.0))) == ("q8", "f32", "float32")


def test_all_sessions_must_keep_up() -> None:
    place = Place(False, 512 * GB, lambda: 800.0)
    in_turns = [chosen(released(4), place, LoadOptions(sessions=count, batch=False))[:2] for count in (1, 2, 3, 4)]
    assert in_turns == [("f32", "f32"), ("f32", "f32"), ("q8", "f32"), ("q8", "bf16")]
    together = [chosen(released(4), place, LoadOptions(sessions=count))[:2] for count in (4, 8, 9, 100)]
    assert together == [("f32", "f32"), ("f32", "f32"), ("f32", "bf16"), ("q8", "bf16")]


def test_together_weights_are_read_once_for_each_slab() -> None:
    stored = released(4)
    one, two, three = (sum(traffic(CONFIG, stored, 1500, rows=rows).values()) for rows in (1, 2, 3))
    assert three - two == two - one
    assert two - one < one / 4  # what is a conversation's own: caches and states


def test_memory_decides_too() -> None:
    assert chosen(unrounded(), Place(True, 64 * GB, lambda: 2000.0))[:2] == ("q8", "bf16")
    fits_one = Place(False, 34 * GB, lambda: 2000.0)
    assert chosen(released(4), fits_one)[:2] == ("f32", "f32")
    assert chosen(released(4), fits_one, LoadOptions(sessions=3))[:2] == ("f32", "bf16")


def test_what_is_named_is_taken() -> None:
    slow = mac("M1", 16)
    wide = LoadOptions(speech_weights="f32", kv_cache="f32", arithmetic="float32")
    assert tuple(chosen(released(4), slow, wide)) == ("f32", "f32", "float32")
    assert tuple(chosen(released(4), slow, LoadOptions(speech_weights="f32"))) == ("f32", "bf16", "bfloat16")
    assert tuple(chosen(released(4), slow, LoadOptions(kv_cache="f32"))) == ("q8", "f32", "bfloat16")
    fast = Place(False, 512 * GB, lambda: 2000.0)
    assert tuple(chosen(released(4), fast, LoadOptions(arithmetic="bfloat16"))) == ("f32", "f32", "bfloat16")


def test_a_small_model_asks_for_no_bandwidth() -> None:
    def ask() -> float:
        raise AssertionError("measured")

    config = parse_config(json.loads((GOLDEN / "tiny-bf16" / "config.json").read_text(encoding="utf-8")))
    form = choose(config, verify(GOLDEN / "tiny-bf16"), LoadOptions(), Place(False, 32 * GB, ask))
    assert tuple(form.plan) == ("f32", "f32", "float32")
    assert form.requantise == {}


def test_eight_bits_take_the_codecs_pointwise_matrices() -> None:
    form = choose(CONFIG, released(4), LoadOptions(), mac("M4", 32))
    codec = [name for name in form.requantise if "audio_codec" in name]
    assert len(codec) == 2 * 9  # two of each block
    assert all(name.startswith("tts_model.audio_codec.decoder.layers.") and ".pwconv" in name for name in codec)


def test_bfloat16_halves_scales_and_encoder() -> None:
    wide, narrow = (
        plans.row(CONFIG, released(4), Plan("q8", "bf16", arithmetic), 100.0) for arithmetic in ("float32", "bfloat16")
    )
    assert (wide.moved[1500] - narrow.moved[1500]) / GB == pytest.approx(0.7, abs=0.1)


def test_the_table_names_every_form_and_marks_the_chosen_one() -> None:
    rows = table(CONFIG, released(4), LoadOptions(), mac("M4", 32))
    lines = list(frame_table([plans.as_facts(row) for row in rows]))
    assert [line.startswith("taken") for line in lines] == [False, False, False, True]
    assert "speech q8, keys bf16, bfloat16" in lines[-1]
    assert all(f"{count}: " in lines[-1] for count in ("100", "1,500", "7,500"))


def test_a_loaded_model_says_how_it_is_held(tmp_path: Path) -> None:
    model = mlx_voicechat.load("tiny", compile=False, kv_cache="bf16")
    assert model.form is not None
    assert tuple(model.form.plan) == ("f32", "bf16", "float32")
