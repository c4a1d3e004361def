"""Every mixture of forms that people publish: made from one set of weights, it opens and means what the others mean."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat.cli.download import table
from mlx_voicechat.cli.info import describe
from mlx_voicechat.convert import conversion, plans
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.convert.writer import check_target
from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.weights import assets, hub_cache, synthetic
from mlx_voicechat.weights.config_file import check_config
from tests.support.checkpoints import GOLDEN, edit_json, rewrite
from tests.support.mixtures import Mixture, Setting, layers, write

SECONDS = 0.4
COMMIT = "b" * 40
EIGHT = (8, 32, "affine")
SETTINGS: dict[str, dict[str, Setting]] = {
    "plain": {},
    "3 to 8 bits": {
        "*.v_proj": (6, 32, "affine"),
        "*.linear_k": (5, 32, "affine"),
        "*_head": (8, 64, "affine"),
        "*.gate_proj": (5, 32, "affine"),
        "*.pwconv1": (3, 32, "affine"),
        "stt_model.llm.*": (3, 32, "affine"),
        "*": (4, 32, "affine"),
    },
    "speech alone": {"tts_model.*": EIGHT, "stt_model.perception.*": EIGHT, "stt_model.rnnt_*": (6, 32, "affine")},
    "mxfp8": {"*": (8, 32, "mxfp8")},
    "mxfp4 and 8 bits": {"*_head": EIGHT, "*.embed_tokens": EIGHT, "*.k_proj": (8, 32, "mxfp8"), "*": (4, 32, "mxfp4")},
}
BITS = Mixture(SETTINGS["3 to 8 bits"])
MIXED = Mixture(SETTINGS["mxfp4 and 8 bits"])
# Each value of each form at least once, and those that meet in one place of the code together.
COVERING = {
    "NVIDIA's config, one file": replace(BITS, config="nvidia", files="one", metadata=True),
    "its own text config, float16": replace(
        BITS, config="nvidia-text", scales="f16", entries="block", files="numbered"
    ),
    "bfloat16 scales, linear convolutions": replace(
        BITS, scales="bf16", entries="copy", files="shard", pointwise="linear"
    ),
    "a list of layers": replace(BITS, entries="list", metadata=True),
    "a copy beside metadata": replace(BITS, entries="copy", metadata=True, config="nvidia"),
    "one setting": Mixture(SETTINGS["mxfp8"], entries="setting", metadata=True, files="one"),
    "one setting, NVIDIA's config": Mixture(SETTINGS["mxfp8"], entries="setting", config="nvidia", scales="f16"),
    "modes and bits": replace(MIXED, config="nvidia", entries="block", scales="bf16", files="numbered"),
    "modes and bits, a list": replace(MIXED, entries="list", pointwise="linear"),
    "float16 all through": Mixture(SETTINGS["speech alone"], rest="f16", scales="f16", config="nvidia"),
    "float16, float32 scales": Mixture(SETTINGS["speech alone"], rest="f16", entries="list", pointwise="linear"),
    "plain linear convolutions": Mixture(pointwise="linear", metadata=True, files="numbered"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The float32 weights of a configuration, made once."""

    @cache
    def made(name: str) -> Path:
        raw = json.loads((assets.CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
        return synthetic.write(raw, tmp_path_factory.mktemp("weights") / name, seed=1)

    return made


@pytest.fixture(scope="module")
def expected(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Mixture], Any]:
    """What the plainest form of a mixture's precision gives."""

    @cache
    def answered(name: str, precision: tuple[Any, ...]) -> Any:
        settings, rest, wide = precision
        plainest = Mixture(dict(settings), rest=rest, scales="f32" if wide else "bf16")
        return answer(write(base(name), tmp_path_factory.mktemp("plainest") / "model", plainest))

    return lambda name, mixture: answered(name, mixture.precision)


@cache
def question() -> np.ndarray:
    samples, rate = sf.read(GOLDEN / "audio" / "question.wav", dtype="float32")
    return np.asarray(samples[: round(SECONDS * rate)], np.float32)


def answer(folder: Path) -> Any:
    return mlx_voicechat.load(folder, lambda text: None, compile=False).answer(question())


def same(got: Any, wanted: Any) -> None:
    assert (got.text_ids, got.function_ids) == (wanted.text_ids, wanted.function_ids)
    assert np.array_equal(got.codes, wanted.codes)
    assert got.samples.tobytes() == wanted.samples.tobytes()


def converted(source: Path, out: Path, plan: str) -> Path:
    with open_source(str(source)) as opened:
        conversion.run(conversion.prepare(opened, plans.find(plan)), check_target(out))
    return out


# -- what opens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", COVERING)
def test_random(form: str, base: Callable[[str], Path], expected: Any, tmp_path: Path) -> None:
    mixture = COVERING[form]
    folder = write(base("random"), tmp_path / "model", mixture)
    same(answer(folder), expected("random", mixture))
    check_config(folder)


def test_deep(base: Callable[[str], Path], expected: Any, tmp_path: Path) -> None:
    """Many layers, all of them of widths that divide: 642 quantised ones, those of the LLM and the codec among them."""
    mixture = replace(BITS, config="nvidia", scales="f16", entries="block", files="numbered", metadata=True)
    folder = write(base("deep"), tmp_path / "model", mixture)
    model = mlx_voicechat.load(folder, lambda text: None, compile=False)
    same(model.answer(question()), expected("deep", mixture))
    divided = {layer for layer, (_, inputs) in layers(base("deep")).items() if inputs % 32 == 0}
    assert set(model.config.quantization) == divided
    assert {entry["bits"] for entry in model.config.quantization.values()} == {3, 4, 5, 6, 8}


def test_convert_takes_what_load_takes(base: Callable[[str], Path], expected: Any, tmp_path: Path) -> None:
    """Two forms give the same bytes, which mean what the mixture means; kept as it is, it stays the mixture."""
    other = replace(BITS, config="nvidia", scales="bf16", entries="list", files="one", metadata=True)
    sources = [write(base("random"), tmp_path / str(i), mixture) for i, mixture in enumerate((BITS, other))]
    first, second = (converted(source, tmp_path / f"f32 {source.name}", "f32") for source in sources)
    for file in first.glob("*.safetensors"):
        assert (second / file.name).read_bytes() == file.read_bytes()
    whole = answer(first)
    assert (whole.text_ids, whole.function_ids) == (
        expected("random", BITS).text_ids,
        expected("random", BITS).function_ids,
    )
    (tmp_path / "keep.toml").write_text('"*" = "keep"', encoding="utf-8")
    for source in sources:
        kept = converted(source, tmp_path / f"kept {source.name}", str(tmp_path / "keep.toml"))
        same(answer(kept), expected("random", BITS))


def test_info_tells_nvidias_names_and_mixed_bits(base: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write(base("random"), tmp_path / "model", replace(BITS, config="nvidia"))
    told = describe(str(folder))
    assert "6 bits, groups of 32, affine" in told["quantization"]
    assert told["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rest", ["f32", "bf16"])
def test_every_mixture_of_random(
    setting: str, rest: str, base: Callable[[str], Path], expected: Any, tmp_path: Path
) -> None:
    """The product of types, configs and files; what is said where, and metadata, in turn."""
    entries = itertools.cycle(["modules", "copy", "block", "list", *(["setting"] if setting == "mxfp8" else [])])
    turns = itertools.cycle(itertools.product([False, True], ["torch", "linear"]))
    forms = itertools.product(
        ["f32", "bf16", "f16"], ["runtime", "nvidia", "nvidia-text"], ["index", "one", "shard", "numbered"]
    )
    for scales, config, files in forms:
        metadata, pointwise = next(turns)
        if setting == "plain" and config != "runtime":
            continue  # the original, which is to be converted
        mixture = Mixture(SETTINGS[setting], rest, scales, config, next(entries), metadata, files, pointwise)
        folder = write(base("random"), tmp_path / "model", mixture)
        same(answer(folder), expected("random", mixture))
        with open_source(str(folder)) as source:
            assert {name for name, t in source.tensors.items() if t.quantised} == {
                f"{layer}.weight" for layer in source.config.quantization
            }
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_mixtures_of_deep(setting: str, base: Callable[[str], Path], expected: Any, tmp_path: Path) -> None:
    entries = itertools.cycle(["modules", "copy", "block", "list"])
    forms = itertools.product(["f32", "bf16"], ["bf16", "f16"], ["runtime", "nvidia"])
    for rest, scales, config in forms:
        if setting == "plain" and config != "runtime":
            continue
        mixture = Mixture(SETTINGS[setting], rest, scales, config, next(entries), True, "numbered", "linear")
        folder = write(base("deep"), tmp_path / "model", mixture)
        same(answer(folder), expected("deep", mixture))
        shutil.rmtree(folder)
    if setting != "plain":
        source = write(base("deep"), tmp_path / "source", Mixture(SETTINGS[setting]))
        whole, wanted = answer(converted(source, tmp_path / "f32", "f32")), expected("deep", Mixture(SETTINGS[setting]))
        assert (whole.text_ids, whole.function_ids) == (wanted.text_ids, wanted.function_ids)


# -- what is refused, by what is missing ----------------------------------------------------------------------------

Change = Callable[[Path], Any]
LAYER = "tts_model.tts_model.backbone.layers.0.self_attn.q_proj"


def config(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit_json(folder / "config.json", change)


def retyped(name: str, dtype: mx.Dtype) -> Change:
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))


REFUSED: dict[str, tuple[Mixture, Change | None, tuple[str, ...]]] = {
    "no tensors of TTS and codec": (
        replace(BITS, dropped=("tts_model.*",)),
        None,
        ("half a model", "nothing of the speech generator (TTS), the audio codec", "Get a whole checkpoint"),
    ),
    "no tensors of TTS and codec, NVIDIA's config": (
        replace(BITS, config="nvidia", dropped=("tts_model.*",)),
        None,
        ("half a model", "nothing of the speech generator (TTS), the audio codec"),
    ),
    "no tensors of the encoder": (
        replace(BITS, dropped=("stt_model.perception.*",)),
        None,
        ("half a model", "nothing of the speech encoder"),
    ),
    "a config of encoder and LLM": (
        replace(BITS, dropped=("tts_model.*",)),
        config(lambda raw: [raw.pop("tts_config"), raw.pop("codec_config")]),
        ("config.json is of half a model", "nothing of the speech generator (TTS), nor of the audio codec"),
    ),
    "NVIDIA's config of encoder and LLM": (
        replace(BITS, config="nvidia", dropped=("tts_model.*",)),
        config(lambda raw: raw["model"].pop("speech_generation")),
        ("config.json is of half a model", "the speech generator (TTS) and its codec"),
    ),
    "scales that are not there": (replace(BITS, dropped=(f"{LAYER}.scales",)), None, ("missing", f"{LAYER}.scales")),
    "biases that are not there": (replace(BITS, dropped=(f"{LAYER}.biases",)), None, ("missing", f"{LAYER}.biases")),
    "a weight that is not there": (replace(BITS, dropped=(f"{LAYER}.weight",)), None, (f"{LAYER}.",)),
    "a shard that is not there": (
        replace(BITS, files="numbered"),
        lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(),
        ("no model.safetensors.index.json, and not all",),
    ),
    "bits that MLX lacks": (
        BITS,
        config(lambda raw: raw["quantization"][LAYER].update(bits=7)),
        (LAYER, "'bits': 7", "4 bits in groups of 32"),
    ),
    "float scales of mxfp8": (
        Mixture(SETTINGS["mxfp8"]),
        retyped(f"{LAYER}.scales", mx.float16),
        (f"{LAYER}.scales", "F16"),
    ),
    "bytes for numbers": (BITS, retyped(f"{LAYER}.biases", mx.uint8), (f"{LAYER}.biases", "U8")),
    "an entry that no layer has": (
        BITS,
        config(
            lambda raw: raw["quantization"].update({"stt_model.llm.layers.0.mixer.gate": {"bits": 4, "group_size": 32}})
        ),
        ("stt_model.llm.layers.0.mixer.gate",),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    mixture, change, words = REFUSED[what]
    folder = write(base("random"), tmp_path / "model", mixture)
    if change is not None:
        change(folder)
    for open_it in (lambda: mlx_voicechat.load(folder, lambda text: None), lambda: open_source(str(folder))):
        with pytest.raises(CheckpointError) as caught:
            open_it()
        for word in (str(folder), *words):
            assert word in f"{caught.value.message} {caught.value.remedy}"


def test_an_original_without_scales_is_still_to_be_converted(base: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write(base("random"), tmp_path / "model", Mixture(config="nvidia", rest="bf16"))
    with pytest.raises(CheckpointError, match="mlx-voicechat convert --source"):
        mlx_voicechat.load(folder)
    with open_source(str(folder)) as source:
        assert source.layout == "nvidia"


# -- the hub's cache ------------------------------------------------------------------------------------------------


def test_the_list_shows_what_a_config_says(
    base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    made = {
        "someone/voice-3bit": (BITS, "4 to 6 bits"),
        "someone/voice-nemo": (replace(MIXED, config="nvidia-text"), "NVIDIA's config, mxfp4, mxfp8"),
        "someone/plain": (Mixture(), "not quantised"),
        "someone/original": (Mixture(config="nvidia"), "NVIDIA's original"),
        "someone/block": (Mixture(SETTINGS["mxfp8"], entries="block"), "mxfp8"),
        "someone/half": (BITS, "4 to 6 bits, without the speech generator (TTS), without the audio codec"),
    }
    for repository, (mixture, _) in made.items():
        kept = hub_cache.folder_of(repository) / "snapshots"
        kept.mkdir(parents=True)
        write(base("random"), kept / COMMIT, mixture)
    config(lambda raw: [raw.pop("tts_config"), raw.pop("codec_config")])(
        hub_cache.folder_of("someone/half") / "snapshots" / COMMIT
    )
    other = hub_cache.folder_of("someone/other-nemo") / "snapshots" / COMMIT
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"model": {"encoder": {}}, "data": {}}', encoding="utf-8")
    rows = {row.repository: row for row in hub_cache.checkpoints() if row.state != "absent"}
    assert {name: (row.state, row.kind) for name, row in rows.items()} == {
        name: ("complete", kind) for name, (_, kind) in made.items()
    }
    lines = table(list(rows.values())).splitlines()
    assert all(any(line.endswith(f"{COMMIT[:12]}  {kind}") for line in lines) for _, kind in made.values())


def test_scales_are_the_same_numbers_in_every_type(base: Callable[[str], Path], tmp_path: Path) -> None:
    """What the comparisons above stand on."""
    from tests.support.checkpoints import tensors_of

    found = [tensors_of(write(base("random"), tmp_path / t, replace(BITS, scales=t))) for t in ("f32", "bf16", "f16")]
    for name, array in found[0].items():
        assert all(mx.array_equal(array.astype(mx.float32), other[name].astype(mx.float32)) for other in found[1:]), (
            name
        )
    assert math.prod(found[0][f"{LAYER}.scales"].shape) > 0
