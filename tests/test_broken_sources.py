"""What `convert` and the header check are given by a damaged disk or a hasty hand."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_voicechat.convert import plans, writer
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.errors import CheckpointError, InputError
from mlx_voicechat.weights.config_file import parse_config, read_config
from mlx_voicechat.weights.original import runtime_config
from mlx_voicechat.weights.shards import places, verify
from tests.support.checkpoints import GOLDEN


def file_of(folder: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any, first: Any, last: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_a_header_that_agrees_with_itself(tmp_path: Path) -> None:
    header = {"b": entry([2], 8, 16), "a": entry([2, 1], 0, 8), "c": entry([0], 8, 8), "d": entry([3], 16, 19, "NEW")}
    path = file_of(tmp_path, header, b"\0" * 19)
    assert [(name, place[2] - path.stat().st_size + 19) for name, place in places(path).items()] == [
        ("b", 8),
        ("a", 0),
        ("c", 8),
        ("d", 16),
    ]


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry([3], 0, 16)},
        {"a": entry([4], 0, 16, "BF16")},
        {"a": entry([-4], 0, 16)},
        {"a": entry([4.0], 0, 16)},
        {"a": entry([True, 4], 0, 16)},
        {"a": entry("4", 0, 16)},
        {"a": entry(None, 0, 16)},
        {"a": entry([4], -4, 16)},
        {"a": entry([4], 0, 16.0)},
        {"a": entry([2**40, 2**40], 0, 16)},
        {"a": entry([4], 0, 16, ["F32"])},
        {"a": entry([4], 0, 16), "b": entry([2], 4, 12)},
        {"a": entry([2], 8, 16)},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}},
        {"a": 5},
        '{"a": ' + "[" * 100_000,
    ],
)
def test_a_header_that_does_not(header: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="header cannot be read"):
        places(file_of(tmp_path, header))


def test_a_length_that_is_damaged_does_not_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little") + b"{")
        file.truncate(4 * 10**9)  # a sparse file
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        places(path)


def test_an_index_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        verify(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{}, {"bits": "4", "group_size": 32}, {"bits": 0, "group_size": 32}, {"bits": [4], "group_size": 32}],
)
def test_quantisation_that_is_none(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "tiny-4bit", tmp_path / "broken", copy_function=shutil.copyfile)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization"]["stt_model.lm_head"] = settings
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"config\.json.*[ .]stt_model\.lm_head"):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("part", "dtype", "shape"),
    [("weight", "F32", [384, 8]), ("weight", "U32", [384, 4, 2]), ("scales", "BF16", [2, 192]), ("biases", "F32", [1])],
)
def test_quantised_parts_that_do_not_fit(part: str, dtype: str, shape: list[int], tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "tiny-4bit", tmp_path / "broken", copy_function=shutil.copyfile)
    for path in folder.glob("model*.safetensors"):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        changed = header.get(f"stt_model.lm_head.{part}")
        if changed is None:
            continue
        first, last = changed["data_offsets"]
        size = {"F32": 4, "U32": 4, "BF16": 2}[dtype]
        for number in shape:
            size *= number
        for other in header.values():  # those behind it move
            if other is not changed and "data_offsets" in other and other["data_offsets"][0] >= last:
                other["data_offsets"] = [offset + size - (last - first) for offset in other["data_offsets"]]
        changed |= {"dtype": dtype, "shape": shape, "data_offsets": [first, first + size]}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[:first] + bytes(size) + data[last:])
    with pytest.raises(CheckpointError, match=rf"stt_model\.lm_head\.{part} is {dtype} .* does not fit"):
        open_source(str(folder))


@pytest.mark.parametrize("value", [3.5, -1, {"a": 1}, "x", [None]])
@pytest.mark.parametrize(
    "keys",
    [
        ("model", "stt", "model", "perception", "encoder", "att_context_size"),
        ("_rnnt_merge_info", "joint_config", "vocabulary"),
    ],
)
def test_an_originals_config_of_other_types(keys: tuple[str, ...], value: Any) -> None:
    raw = json.loads((GOLDEN / "tiny-nvidia" / "config.json").read_text())
    node = raw
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    ids = {"<s>": 1, "</s>": 2, "<SPECIAL_12>": 12, "<SPECIAL_11>": 11}
    with pytest.raises(CheckpointError, match=r"att_context_size|rnnt_vocabulary"):
        parse_config(runtime_config(raw, {}, ids, 40))


@pytest.mark.parametrize(
    ("text", "words"),
    [("a = " + "[" * 5000, "is not TOML"), (f'"a" = "{"9" * 5000}/64"', "is not understood")],
    ids=["nested", "digits"],
)
def test_plans_that_are_hardly_any(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(InputError, match=words):
        plans.find(str(tmp_path / "plan.toml"))


def test_the_first_idle_rule_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("".join(f'"nothing-{n}" = "bf16"\n' for n in range(20)))
    with pytest.raises(InputError, match='"nothing-0"'):
        plans.find(str(tmp_path / "plan.toml")).settings({"a": plans.Facts((4,), False)})


def test_homes_that_are_none() -> None:
    with pytest.raises(InputError, match="There is no folder"):
        writer.check_target(Path("~nobody-of-this-name/out"))
    with pytest.raises(CheckpointError, match="There is no folder ~nobody-of-this-name"):
        open_source("~nobody-of-this-name/model")


def test_a_target_that_is_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="exists already"):
        writer.check_target(tmp_path / "pipe")


def test_a_target_that_is_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="exists already"):
        writer.check_target(tmp_path / "loop")


def test_the_folder_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the folder you are in"):
        writer.check_target(Path())


def test_a_file_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").touch()
    with pytest.raises(CheckpointError, match="model/weights is a file"):
        open_source("model/weights")


def test_the_demonstration_has_no_revision() -> None:
    with pytest.raises(InputError, match="no revisions"):
        open_source("tiny", revision="main")


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS takes no such names")
def test_a_source_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "tiny-f32", tmp_path / "caf\udce9", copy_function=shutil.copyfile)
    with open_source(str(folder)) as source:
        assert source.name == "caf?"


def test_a_damaged_config_is_removed_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{")
    (tmp_path / "config.json").symlink_to("blob")
    with pytest.raises(CheckpointError, match=f"remove {re.escape(str(tmp_path.resolve()))}/blob and"):
        read_config(tmp_path)
