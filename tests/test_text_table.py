"""The kept text table: read bit for bit as it was built, rebuilt when anything differs, and never a cause to fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import copy_of
from support.speech import golden_characters, golden_config, golden_tts, random_tts

import mlx_voicechat
from mlx_voicechat.networks.linear import numpy_product
from mlx_voicechat.weights import assets, text_table

SHAPE = (5, 3)
FINGERPRINT = "0123456789abcdef" * 4
NAME = "text-table-0123456789abcdef.safetensors"


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlx-voicechat"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def table() -> mx.array:
    return mx.random.normal(SHAPE, key=mx.random.key(7))


def never(*text: str) -> Any:
    raise AssertionError(f"built again, or said something: {text}")


def get(folder: Path, build: Callable[[], mx.array] = table, fingerprint: str = FINGERPRINT) -> tuple[mx.array, str]:
    """The table and what was said."""
    said: list[str] = []
    return text_table.cached(build, fingerprint, SHAPE, folder, said.append), "\n".join(said)


def test_a_disk_that_cannot_flush(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    built, said = get(folder)
    assert "cannot be kept" not in said
    assert files(folder) == [f".mlx-voicechat/{NAME}"]
    assert same_bits(get(folder, never)[0], built)


def same_bits(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one.view(mx.uint32), other.view(mx.uint32)))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# -- built once ---------------------------------------------------------------------------------------------------


def test_it_is_built_once(folder: Path, user_cache: Path) -> None:
    built, said = get(folder)
    assert said.startswith("Preparing the text table, once: 5 tokens")
    assert files(folder) == [f".mlx-voicechat/{NAME}"]
    read, said = get(folder, never)
    assert said == ""
    assert same_bits(built, read)
    assert read.dtype == mx.float32
    assert not user_cache.exists()


def test_a_small_vocabulary_leaves_no_file(folder: Path) -> None:
    tts, characters = golden_tts(), golden_characters()
    rows = text_table.cached_rows(tts, golden_config().tts.characters, characters, folder, never)
    assert same_bits(rows, tts.text_rows(characters))
    mlx_voicechat.load("tiny", say=never)
    assert files(folder) == []
    assert not (assets.TINY / ".mlx-voicechat").exists()


def test_a_model_takes_its_table_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of("tiny-bf16", tmp_path)
    plain = mlx_voicechat.load(folder, compile=False)
    monkeypatch.setattr(text_table, "LONG_CHARACTERS", 0)
    said: list[str] = []
    built, read = (mlx_voicechat.load(folder, said.append, compile=False) for _ in range(2))
    assert len(said) == 1
    assert len(files(folder / ".mlx-voicechat")) == 1
    assert same_bits(built.tts._text_rows, read.tts._text_rows)
    assert mx.allclose(plain.tts._text_rows, read.tts._text_rows, rtol=0, atol=1e-5)


def test_reading_it_takes_its_own_memory_only(folder: Path) -> None:
    shape = (4096, 512)
    path = folder / ".mlx-voicechat" / NAME
    get(folder)
    facts = {"version": text_table.FORMAT_VERSION, "fingerprint": FINGERPRINT}
    mx.save_safetensors(str(path), {"text_rows": mx.ones(shape)}, metadata=facts)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read = text_table.cached(never, FINGERPRINT, shape, folder, never)
    assert mx.get_peak_memory() - before < 1.1 * read.nbytes


# -- verified -----------------------------------------------------------------------------------------------------


def rewrite(path: Path, how: str) -> None:
    facts = {"version": text_table.FORMAT_VERSION, "fingerprint": FINGERPRINT}
    tensors = {"text_rows": table()}
    if how == "version":
        facts["version"] = "0"
    elif how == "fingerprint":
        facts["fingerprint"] = FINGERPRINT[:-1] + "0"
    elif how == "no facts":
        facts = {}
    elif how == "shape":
        tensors = {"text_rows": mx.zeros((5, 4))}
    elif how == "type":
        tensors = {"text_rows": table().astype(mx.bfloat16)}
    elif how == "name":
        tensors = {"rows": table()}
    mx.save_safetensors(str(path), tensors, metadata=facts)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "truncated header":
        path.write_bytes(path.read_bytes()[:20])
    elif how == "noise":
        path.write_bytes(b"\xff" * 100)
    elif how == "empty":
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "how",
    ["version", "fingerprint", "no facts", "shape", "type", "name", "truncated", "truncated header", "noise", "empty"],
)
def test_a_wrong_file_is_replaced(folder: Path, how: str) -> None:
    get(folder)
    rewrite(folder / ".mlx-voicechat" / NAME, how)
    rebuilt, said = get(folder)
    assert "once" in said
    assert same_bits(rebuilt, table())
    assert same_bits(get(folder, never)[0], table())


def test_the_fingerprint_covers_every_input() -> None:
    tts, config, characters = random_tts(), golden_config().tts.characters, golden_characters()
    fusion = tts.gated_fusion_audio_text
    weights: Any = tree_flatten(tts.embed_subword.parameters(), destination={})
    weights |= {"gate": fusion.gate, "scale": fusion.residual_scale}
    prints = [text_table.fingerprint(weights, characters, config)]
    assert text_table.fingerprint(dict(reversed(weights.items())), characters, config) == prints[0]
    for name, array in weights.items():
        prints.append(text_table.fingerprint(weights | {name: array + 1}, characters, config))
    moved = [[*characters[0], *characters[1]], [], *characters[2:]]
    prints.append(text_table.fingerprint(weights, moved, config))
    prints.append(text_table.fingerprint(weights, characters, replace(config, num_attention_heads=99)))
    assert len(set(prints)) == len(prints) == len(weights) + 3


def test_a_model_with_other_weights_has_another_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "LONG_CHARACTERS", 0)
    config, characters = golden_config().tts.characters, golden_characters()
    one, other = random_tts(seed=0), random_tts(seed=1)
    for tts in (one, other):
        text_table.cached_rows(tts, config, characters, folder, lambda text: None)
    other.gated_fusion_audio_text.audio_proj.weight = other.gated_fusion_audio_text.audio_proj.weight + 1
    text_table.cached_rows(other, config, characters, folder, never)
    assert len(files(folder)) == 1


# -- places -------------------------------------------------------------------------------------------------------


def test_the_users_cache_stands_in_for_a_folder_that_cannot_be_written(folder: Path, user_cache: Path) -> None:
    (folder / ".mlx-voicechat").write_text("a file in the way")
    other = folder.parent / "other"
    other.mkdir()
    (other / ".mlx-voicechat").write_text("")
    built, said = get(folder)
    assert "cannot be kept" not in said
    assert same_bits(get(folder, never)[0], built)
    get(other, fingerprint="f" * 64)
    assert len(files(user_cache)) == 2
    assert same_bits(get(folder, never)[0], built)


def test_nowhere_to_keep_it_is_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / ".mlx-voicechat").write_text("")
    (tmp_path / "cache").write_text("")
    built, said = get(folder)
    assert same_bits(built, table())
    assert said.count("\n") == 1
    assert "cannot be kept" in said
    assert str(tmp_path / "cache") in said


def test_a_full_disk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, user_cache: Path) -> None:
    def fill(path: str, *arguments: Any, **options: Any) -> None:
        Path(path).write_bytes(b"part of it")
        raise RuntimeError("[write] Unable to write\n 604 bytes.")

    monkeypatch.setattr(text_table.mx, "save_safetensors", fill)
    built, said = get(folder)
    assert same_bits(built, table())
    assert said.splitlines()[1].endswith("prepares it again: [write] Unable to write 604 bytes.")
    assert files(folder) == files(user_cache) == []


def test_older_tables_of_the_model_are_removed(folder: Path) -> None:
    get(folder, fingerprint="f" * 64)
    place = folder / ".mlx-voicechat"
    stale, fresh, foreign = (place / name for name in (f".{NAME}.1.safetensors", f".{NAME}.2.safetensors", "notes.txt"))
    for path in (stale, fresh, foreign):
        path.write_text("")
    os.utime(stale, (0, 0))
    get(folder)
    assert files(place) == sorted([NAME, fresh.name, foreign.name])


def test_several_programs_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_while_another_does() -> mx.array:
        assert same_bits(get(folder)[0], table())
        return table()

    assert same_bits(get(folder, build_while_another_does)[0], table())
    assert files(folder) == [f".mlx-voicechat/{NAME}"]

    header = text_table.header

    def remove_after(path: Path) -> Any:
        found = header(path)
        path.unlink()
        return found

    monkeypatch.setattr(text_table, "header", remove_after)
    assert same_bits(get(folder)[0], table())


# -- products by numpy --------------------------------------------------------------------------------------------


def test_numpy_multiplies_alike() -> None:
    tts = random_tts()
    encoder, fusion = tts.embed_subword, tts.gated_fusion_audio_text
    characters = [[token % 5, 3][: token % 3] for token in range(31)]
    expected = encoder.table(characters, fusion.text)
    layers = [layer for _, layer in tts.named_modules() if isinstance(layer, nn.Linear)]
    multiplied: list[nn.Module] = []

    def by_numpy(layer: nn.Module, x: mx.array) -> mx.array:
        multiplied.append(layer)
        return numpy_product(layer, x)

    close = tts.text_rows(characters, by_numpy)
    own = [layer for tree in (encoder, fusion.text_proj) for _, layer in tree.named_modules()]
    assert {id(layer) for layer in multiplied} == {id(layer) for layer in own if isinstance(layer, nn.Linear)}
    assert mx.allclose(close, expected, rtol=0, atol=1e-5)
    assert [layer for _, layer in tts.named_modules() if isinstance(layer, nn.Linear)] == layers
