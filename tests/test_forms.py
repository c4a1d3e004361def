"""Every form in which a checkpoint of this family is published opens, and means what the golden ones mean."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile as sf

import mlx_voicechat
from mlx_voicechat.cli import diagnosis, published
from mlx_voicechat.cli.info import describe
from mlx_voicechat.convert import agreement, conversations, conversion, plans
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.convert.writer import check_target
from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.gauges import memory
from mlx_voicechat.gauges.bench import networks_resident
from mlx_voicechat.model import BLOCK_FRAMES
from mlx_voicechat.networks.tree import Networks
from mlx_voicechat.voicechat import Answer, VoiceChat
from mlx_voicechat.weights import assets, checkpoint, hub_cache, layout, precision, synthetic
from mlx_voicechat.weights.config_file import check_config, parse_config, read_config
from mlx_voicechat.weights.shards import Stored, verify
from tests.support.checkpoints import GOLDEN, copy_of, edit_json, rewrite, tensors_of

BASES = ("tiny-4bit", "tiny-8bit")
COMMIT = "a" * 40
HEAD = "stt_model.lm_head"
Raw = dict[str, Any]


def setting(raw: Raw) -> Raw:
    return {key: raw["quantization"][key] for key in ("group_size", "bits")}


def entries(raw: Raw) -> Raw:
    return {name: entry for name, entry in raw["quantization"].items() if isinstance(entry, dict)}


def quantization(*maps: Callable[[Raw], Raw] | None) -> Callable[[Raw], None]:
    """Sets `quantization` and `quantization_config`; None leaves one out."""

    def change(raw: Raw) -> None:
        made = [None if make is None else make(raw) for make in maps]
        for key, value in zip(("quantization", "quantization_config"), made, strict=True):
            raw.pop(key)
            raw |= {} if value is None else {key: value}

    return change


def text(**values: Any) -> Callable[[Raw], None]:
    """Sets keys of `text_config`; Ellipsis removes one."""

    def change(raw: Raw) -> None:
        raw["text_config"] = {k: v for k, v in (raw["text_config"] | values).items() if v is not ...}

    return change


def letters(raw: Raw) -> None:
    raw["text_config"]["hybrid_override_pattern"] = list(raw["text_config"]["hybrid_override_pattern"])


def unknown_keys(raw: Raw) -> None:
    raw["mlx_conversion"] = {"quantization": setting(raw), "revision": COMMIT}
    raw |= {"transformers_version": "5.0", "rnnt_tokenizer": "rnnt_tokenizer", "dtype": "bfloat16"}
    raw["quantization"] |= {"quant_method": "mlx", "version": 1}


def public(raw: Raw) -> None:
    """All that the public converter may leave out or add."""
    unknown_keys(raw)
    letters(raw)
    text(head_dim=None, time_step_limit=[0.0, float("inf")])(raw)
    quantization(setting, setting)(raw)


FORMS: dict[str, Callable[[Raw], Any]] = {
    "the setting alone": quantization(setting, None),
    "entries alone": quantization(entries, None),
    "the copy alone, setting": quantization(None, setting),
    "the copy alone, entries": quantization(None, entries),
    "setting in one, entries in the other": quantization(setting, entries),
    "an empty map and a null": lambda raw: raw.update(quantization={}, quantization_config=setting(raw)),
    "a null map": lambda raw: raw.update(quantization_config=None),
    "mode everywhere": quantization(
        lambda raw: setting(raw) | {"mode": "affine"} | {n: e | {"mode": "affine"} for n, e in entries(raw).items()},
        setting,
    ),
    "entries that win": quantization(lambda raw: {"group_size": 32, "bits": 2} | entries(raw), None),
    "entries that leave out the group": quantization(
        lambda raw: setting(raw) | {name: {"bits": entry["bits"]} for name, entry in entries(raw).items()}, None
    ),
    "a mode that is not this file's": quantization(lambda raw: setting(raw) | {"mode": "mxfp4"}, None),
    "true and false": quantization(lambda raw: setting(raw) | {HEAD: True, "stt_model.perception.proj": False}, None),
    "no upper bound of the step": text(time_step_limit=[0.0, float("inf")]),
    "no upper bound, null": text(time_step_limit=[0.0, None]),
    "no upper bound, tagged": text(time_step_limit=[0.0, {"__float__": "Infinity"}]),
    "a list of letters": letters,
    "head_dim null": text(head_dim=None),
    "head_dim absent": text(head_dim=...),
    "whole floats": text(hidden_size=64.0, max_position_embeddings=4096.0),
    "unknown keys": unknown_keys,
    "all that the public converter does": public,
}
FILES = ("one file", "one shard", "folders", "a byte order mark")


def make(base: str, form: str, where: Path) -> Path:
    folder = copy_of(base, where)
    if form in FORMS:
        edit_json(folder / "config.json", FORMS[form])
    elif form == "one file":
        rewrite(folder, lambda tensors: None)
    elif form == "one shard":
        rewrite(folder, lambda tensors: None)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    elif form == "folders":
        for name in ("rnnt_tokenizer", ".git", "revisions"):
            (folder / name).mkdir()
            (folder / name / "tokenizer.json").write_text("{}", encoding="utf-8")
    else:
        config = (folder / "config.json").read_text(encoding="utf-8")
        (folder / "config.json").write_text(config, encoding="utf-8-sig")
    return folder


def rescaled(base: str, dtype: mx.Dtype, where: Path) -> Path:
    """A golden checkpoint with scales and biases of another type, and the values they had."""
    folder = copy_of(base, where)

    def change(tensors: dict[str, mx.array]) -> None:
        for name in tensors:
            if name.endswith((".scales", ".biases")):
                tensors[name] = tensors[name].astype(dtype)

    rewrite(folder, change)
    return folder


@cache
def question(seconds: float = 0.6) -> np.ndarray:
    samples, _ = sf.read(GOLDEN / "audio" / "question.wav", dtype="float32")
    return np.asarray(samples[: round(seconds * 16000)], np.float32)


def answer(folder: Path) -> Answer:
    return mlx_voicechat.load(folder, lambda text: None, compile=False).answer(question())


@cache
def base_answer(base: str) -> Answer:
    return answer(GOLDEN / base)


def same_answer(got: Answer, expected: Answer) -> None:
    assert (got.text_ids, got.function_ids) == (expected.text_ids, expected.function_ids)
    assert np.array_equal(got.codes, expected.codes)
    assert got.samples.tobytes() == expected.samples.tobytes()


# -- forms of the config and the files ------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("form", [*FORMS, *FILES])
def test_a_form_is_what_it_was_made_from(base: str, form: str, tmp_path: Path) -> None:
    folder = make(base, form, tmp_path)
    assert read_config(folder) == read_config(GOLDEN / base)
    check_config(folder)
    assert hub_cache.fault(folder) is None
    told, expected = describe(str(folder)), describe(str(GOLDEN / base))
    for key in ("quantization", "networks", "language_type", "resident_bytes", "loaded_bytes", "announced_bytes"):
        assert told[key] == expected[key]
    with open_source(str(folder)) as source, open_source(str(GOLDEN / base)) as plain:
        assert source.config == plain.config
        parts = {name: (tensor.shape, tensor.quantised) for name, tensor in source.tensors.items()}
        assert parts == {name: (tensor.shape, tensor.quantised) for name, tensor in plain.tensors.items()}
    same_answer(answer(folder), base_answer(base))


@pytest.mark.parametrize("plan", [plan.name for plan in plans.NAMED.values() if not plan.calibrated])
def test_what_a_form_is_converted_to(plan: str, tmp_path: Path) -> None:
    """To each plan, and from there back to float32: the bytes that the golden form gives."""

    def converted(source: Path, out: str, plan: str) -> Path:
        with open_source(str(source)) as opened:
            conversion.run(conversion.prepare(opened, plans.find(plan)), check_target(tmp_path / out))
        return tmp_path / out

    form = rescaled("tiny-4bit", mx.float32, tmp_path)
    whole = Path(shutil.copytree(form, tmp_path / "golden form"))
    edit_json(form / "config.json", public)
    for source in (form, whole):
        out = converted(source, f"{source.name} {plan}", plan)
        converted(out, f"{source.name} back", "f32")
    for name in (plan, "back"):
        ours, theirs = (tmp_path / f"{source.name} {name}" for source in (form, whole))
        assert read_config(ours) == read_config(theirs)
        for file in theirs.glob("*.safetensors"):
            assert (ours / file.name).read_bytes() == file.read_bytes()
    raw = json.loads((tmp_path / f"{form.name} {plan}" / "config.json").read_text(encoding="utf-8"))
    assert "mlx_conversion" not in raw
    assert raw["text_config"]["head_dim"] == read_config(whole).llm.head_dim
    if plan == "f32":
        back = mlx_voicechat.load(tmp_path / f"{form.name} f32", lambda text: None, compile=False)
        assert back.answer(question()).text_ids == answer(form).text_ids


@pytest.mark.parametrize("form", ["the setting alone", "all that the public converter does", "one shard"])
def test_the_cache_knows_a_form_as_complete(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = hub_cache.folder_of(hub_cache.PUBLISHED["4bit"])
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT, encoding="ascii")
    (kept / "snapshots").mkdir()
    shutil.move(make("tiny-4bit", form, tmp_path / "made"), kept / "snapshots" / COMMIT)
    assert diagnosis._cached()["4bit"].state == "complete"
    assert hub_cache.look_up(hub_cache.PUBLISHED["4bit"]).revision == COMMIT
    same_answer(answer(hub_cache.snapshot(hub_cache.PUBLISHED["4bit"]) or Path()), base_answer("tiny-4bit"))


# -- what is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Raw], Any], tuple[str, ...]]] = {
    "two settings": (
        quantization(setting, lambda raw: {"group_size": 32, "bits": 3}),
        ("quantization and quantization_config differ", "stt_model.embed_tokens", "Remove the one"),
    ),
    "an entry apart": (
        quantization(entries, lambda raw: entries(raw) | {HEAD: {"group_size": 32, "bits": 8}}),
        ("differ", HEAD, "Remove the one"),
    ),
    "an entry more": (
        quantization(entries, lambda raw: {n: e for n, e in entries(raw).items() if n != HEAD}),
        ("differ", HEAD, "none"),
    ),
    "no setting": (quantization(None, None), ("does not say how 19 layers", "stt_model.embed_tokens", "Correct it")),
    "an entry missing": (
        quantization(lambda raw: {n: e for n, e in entries(raw).items() if n != HEAD}, None),
        ("does not say how 1 layers", HEAD, "Correct it"),
    ),
    "false with scales": (quantization(lambda raw: setting(raw) | {HEAD: False}, None), ("1 layers", HEAD)),
    "other bits": (quantization(lambda raw: {"group_size": 64, "bits": 5}, None), ("bits in groups of 64", "Correct")),
    "other groups": (
        quantization(lambda raw: setting(raw) | {"group_size": 32}, None),
        ("bits in groups of 64", "Correct it"),
    ),
    "bits and groups that fit each other": (
        quantization(lambda raw: {"group_size": 128, "bits": raw["quantization"]["bits"] // 2}, None),
        ("bits in groups of 64", "Correct it"),
    ),
    "no bits": (quantization(lambda raw: {"group_size": 64}, None), ("'bits': None", "Correct it")),
    "words": (quantization(lambda raw: {"group_size": 64, "bits": "4"}, None), ("expected whole numbers", "Correct")),
    "a list": (quantization(lambda raw: [4], None), ("expected an object", "Correct")),  # type: ignore[arg-type, return-value]
    "steps the wrong way round": (text(time_step_limit=[1.0, 0.1]), ("time_step_limit", "the lower one first")),
    "no number of steps": (text(time_step_limit=[0.0, float("nan")]), ("time_step_limit",)),
    "words for letters": (text(hybrid_override_pattern=["mamba", "mlp"]), ("hybrid_override_pattern",)),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("mixture", REFUSED)
def test_a_contradiction_is_refused_by_name(base: str, mixture: str, tmp_path: Path) -> None:
    change, words = REFUSED[mixture]
    folder = copy_of(base, tmp_path)
    edit_json(folder / "config.json", change)
    for open_it in (mlx_voicechat.load, describe, open_source):
        with pytest.raises(CheckpointError) as caught:
            open_it(str(folder))
        assert str(folder / "config.json") in str(caught.value)
        for word in words:
            assert word in f"{caught.value.message} {caught.value.remedy}"


def test_head_sizes_that_no_projection_has(tmp_path: Path) -> None:
    folder = copy_of("tiny-4bit", tmp_path)
    edit_json(folder / "config.json", text(head_dim=None, num_attention_heads=5))
    with pytest.raises(CheckpointError, match=r"missing: text_config\.head_dim"):
        read_config(folder)


# -- types of scales and biases -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BASES)
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rescaled(request.param, mx.float32, tmp_path_factory.mktemp("float32"))


def ids_of(model: VoiceChat, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Text and function ids of the question, pushed in pieces of these sizes over and over."""
    frames: list[Any] = []
    session = model.session(seed=0)
    session.observe(frames.append)
    samples, start, index = question(2.4), 0, 0
    while start < len(samples):
        size = sizes[index % len(sizes)]
        session.push(samples[start : start + size])
        start, index = start + size, index + 1
    session.finish()
    return [frame.text_id for frame in frames], [frame.function_id for frame in frames]


def test_float32_scales_in_pieces_and_in_one(wide: Path) -> None:
    """The ids of the whole recording, of single frames and of odd pieces; perception runs in blocks where it may."""
    model = mlx_voicechat.load(wide, lambda text: None, compile=False)
    assert model.block_frames == BLOCK_FRAMES
    whole = model.answer(question(2.4))
    for sizes in ([1280], [1, 777, 4000, 1279], [len(question(2.4))]):
        assert ids_of(model, sizes) == (whole.text_ids, whole.function_ids)


def test_float32_scales_make_everything_float32(wide: Path) -> None:
    """The input is not rounded, the state is as wide, and the tokens are those of the dequantised weights."""
    model = mlx_voicechat.load(wide, lambda text: None, compile=False)
    language = model.language
    pad = mx.array([model.config.pad_id])
    audio = mx.random.normal((1, 1, model.config.llm.hidden_size), key=mx.random.key(0))
    fused = language.fuse(pad, audio, pad)
    rows = language.embed(pad).astype(mx.float32)
    assert (fused.dtype, rows.shape) == (mx.float32, (1, model.config.llm.hidden_size))
    assert mx.allclose(fused[0], rows + audio[0] + model.config.function_weight * rows, rtol=1e-6, atol=1e-7)
    hidden, state = language.step(fused, language.init_state())
    assert {array.dtype for array in (hidden, *language.logits(hidden), *state.arrays)} == {mx.float32}
    with open_source(str(wide)) as source:
        plain = agreement.reference(source, wide=True)
    assert ids_of(plain, [1280]) == ids_of(model, [1280])


def test_float32_scales_agree_with_bfloat16_ones(wide: Path) -> None:
    """The same weights, computed in float32 and in bfloat16, with the tokens of the first."""
    first = conversations.run(mlx_voicechat.load(wide, lambda text: None, compile=False), question(2.4))
    second = conversations.run(mlx_voicechat.load(GOLDEN / wide.name, lambda text: None), question(2.4), first.ids)
    same = (first.logits.argmax(-1) == second.logits.argmax(-1)).mean(axis=0)
    apart = conversations.divergence(first.logits, second.logits).mean(axis=0)
    print(f"{wide.name}: same text {same[0]:.3f}, function {same[1]:.3f}, KL {apart[0]:.2g} {apart[1]:.2g} nats")
    assert same.min() >= 0.8  # of 30 frames, with random weights, whose logits lie close together
    assert apart.max() < 0.01


@pytest.mark.parametrize("base", BASES)
def test_float16_scales_are_float32_ones(base: str, tmp_path: Path) -> None:
    """bfloat16 scales of usual size are exact in float16, and beside bfloat16 norms both meet as float32."""
    half = rescaled(base, mx.float16, tmp_path / "half")
    scales = [name for name in tensors_of(half) if name.endswith((".scales", ".biases"))]
    kept, stored = tensors_of(GOLDEN / base), tensors_of(half)
    assert all(mx.array_equal(kept[name].astype(mx.float32), stored[name].astype(mx.float32)) for name in scales)
    same_answer(answer(half), answer(rescaled(base, mx.float32, tmp_path / "wide")))
    narrower = sum(stored[f"stt_model.embed_tokens.{part}"].nbytes for part in ("scales", "biases"))  # meet no stream
    loaded = [describe(str(folder))["loaded_bytes"] for folder in (half, tmp_path / "wide" / base)]
    assert loaded[0] + narrower == loaded[1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_the_memory_of_wide_scales_is_announced(dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = rescaled("tiny-4bit", dtype, tmp_path)
    config, stored = read_config(folder), verify(folder)
    gc.collect()
    before = mx.get_active_memory()
    model = mlx_voicechat.load(folder, lambda text: None, compile=False)
    loaded = mx.get_active_memory() - before
    session = model.session()
    session.push(question(1.6))
    gc.collect()
    announced = memory.announce(config, stored, 20)
    assert announced.weights["language"] == networks_resident(model, loaded)["language"]
    assert announced.loaded == pytest.approx(loaded, rel=0.05)
    assert announced.total == pytest.approx(mx.get_active_memory() - before, rel=0.05)


def test_what_decides_the_type_of_the_llm() -> None:
    def computes_float32(**types: str) -> bool:
        return precision.llm_is_float32(
            {f"stt_model.{name.replace('__', '.')}": Stored("f", (8, 8), kind) for name, kind in types.items()}
        )

    narrow = {"llm__norm_f__weight": "BF16", "llm__layers__0__mixer__A_log": "F32", "lm_head__scales": "F32"}
    assert not computes_float32(**narrow, llm__layers__0__mixer__in_proj__weight="U32")
    for name in ("llm__norm_f__weight", "llm__layers__3__norm__weight", "llm__layers__3__mixer__up_proj__biases"):
        assert computes_float32(**narrow | {name: "F32"})
        assert computes_float32(**narrow | {name: "F16"})


# -- the published 4-bit checkpoint ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headers_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published 4-bit checkpoint's config and headers; the data is a hole in the file."""
    folder = tmp_path_factory.mktemp("published") / "4bit"
    folder.mkdir()
    raw = json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8"))
    raw |= {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}}
    text(head_dim=None, time_step_limit=[0.0, float("inf")])(raw)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    stored = published.headers(parse_config(raw | {"text_config": raw["text_config"] | {"head_dim": 128}}), 4)
    header: dict[str, Any] = {}
    end = 0
    for name, entry in sorted(stored.items()):
        size = int(np.prod(entry.shape, dtype=np.int64)) * (2 if entry.dtype == "BF16" else 4)
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + size]}
        end += size
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)
    synthetic._write_tokenizer(folder, synthetic.vocabulary(raw["text_config"]["vocab_size"]))
    return folder


def test_the_published_form_passes_all_that_is_checked_before_data_is_read(headers_only: Path) -> None:
    config, stored = read_config(headers_only), verify(headers_only)
    assert (len(stored), len(config.quantization), config.llm.head_dim) == (1878, 123, 128)
    assert set(stored) >= set(layout.shapes(config, buffers=True))
    assert hub_cache.fault(headers_only) is None
    networks = Networks(config)
    checkpoint.quantise_modules(networks, config)
    parameters = checkpoint.open_folder(headers_only).parameters()
    checkpoint.check(checkpoint._shapes(networks), parameters)
    with open_source(str(headers_only)) as source:
        for plan in ("4bit", "8bit", "bf16", "f32"):
            job = conversion.prepare(source, plans.find(plan))
            assert parse_config(conversion.configuration(job)).llm.head_dim == 128


def test_sizes_are_told_as_they_are(headers_only: Path) -> None:
    told = describe(str(headers_only), "q8")
    assert (told["tensors"], told["language_type"]) == (1878, "f32")
    assert told["quantization"] == "4 bits, groups of 64, affine: 123 layers"
    assert told["networks"]["language"]["4-bit"] == {"parameters": 9_473_228_800, "bytes": 5_920_768_000}
    assert sum(part["bytes"] for parts in told["networks"].values() for part in parts.values()) == 9_165_584_246
    assert told["announced_bytes"]["60"] == published.needs()["4bit"][0]
    for name, expected in hub_cache.DOWNLOAD_BYTES.items():
        stored = published.headers(read_config(headers_only), None if name == "bf16" else int(name[0]))
        size = sum(int(np.prod(e.shape, dtype=np.int64)) * memory.WIDTHS[e.dtype] for e in stored.values())
        assert 0 < expected - size < 0.002 * size  # and the tokenizer's files
