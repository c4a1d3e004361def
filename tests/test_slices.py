"""What each rank reads of the language model's blocks: together the whole, once; sizes that do not divide by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_voicechat.errors import InputError
from mlx_voicechat.machines.slices import MIXER, Share, SharedCheckpoint, part_of, share_of, shared
from mlx_voicechat.weights import assets, checkpoint, synthetic
from mlx_voicechat.weights.config_file import parse_config
from tests.support.checkpoints import GOLDEN

INPUT_LAYERS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
RELEASED = json.loads((assets.CONFIGS / "full.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_four(tmp_path_factory.mktemp("four") / "model")


def write_four(out: Path) -> Path:
    """A checkpoint whose language model four ranks can share."""
    raw = json.loads((assets.CONFIGS / "random.json").read_text(encoding="utf-8"))
    raw["text_config"] |= {"num_attention_heads": 8, "num_key_value_heads": 4, "n_groups": 4, "mamba_num_heads": 8}
    return synthetic.write(raw, out, seed=1)


@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_are_the_whole(four: Path, count: int) -> None:
    opened = checkpoint.open_folder(four)
    whole = opened.parameters()
    parts = [SharedCheckpoint.of(opened, share_of(opened.config, rank, count)).parameters() for rank in range(count)]
    cut = 0
    for name, array in whole.items():
        shapes = {part[name].shape for part in parts}
        if MIXER.search(name) is None:
            assert shapes == {array.shape}
            continue
        cut += 1
        axis = int(name.endswith(INPUT_LAYERS))
        together = np.concatenate([np.array(part[name]) for part in parts], axis=axis)
        assert together.shape == array.shape
        # rows of several sections (gate, x, B, C, dt) come rank by rank: the same rows in another order
        assert sorted(map(bytes, together)) == sorted(map(bytes, np.array(array))), name
    assert cut


def test_a_rank_s_rows_are_those_of_its_groups_and_heads() -> None:
    llm = parse_config(RELEASED).llm
    mamba, attention, mlp = (f"x.llm.layers.{llm.pattern.index(kind)}.mixer." for kind in "M*-")
    share = Share(1, 2, 64)
    inner, state, heads = 10240, 1024, 128
    gate, value = (inner // 2, inner), (inner * 3 // 2, inner * 2)
    key = (2 * inner + state // 2, 2 * inner + state)
    query = (2 * inner + state * 3 // 2, 2 * inner + 2 * state)
    dt = (2 * inner + 2 * state + heads // 2, 2 * inner + 2 * state + heads)
    assert part_of(mamba + "in_proj.weight", llm, share) == (0, [gate, value, key, query, dt])
    assert part_of(mamba + "A_log", llm, share) == (0, [(64, 128)])
    assert part_of(mamba + "out_proj.scales", llm, share) == (1, [(5120, 10240)])
    assert part_of(attention + "q_proj.weight", llm, share) == (0, [(2560, 5120)])
    assert part_of(attention + "k_proj.weight", llm, share) == (0, [(512, 1024)])
    assert part_of(mlp + "down_proj.weight", llm, share) == (1, [(122 * 64, 15680)])  # 245 groups of 64 columns
    assert part_of("x.llm.layers.0.norm.weight", llm, share) is None
    assert shared(llm, share).conv_dim == llm.conv_dim // 2


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_released_4_bit_model_can_be_shared(count: int) -> None:
    config = parse_config(RELEASED)
    layers = {f"x.llm.layers.{index}.mixer.up_proj": {"group_size": 64, "bits": 4} for index in range(2)}
    config = replace(config, quantization=layers)
    shares = [share_of(config, rank, count) for rank in range(count)]
    columns = [share.columns(config.llm.intermediate_size) for share in shares]
    assert [start for start, _ in columns[1:]] == [end for _, end in columns[:-1]]
    assert (columns[0][0], columns[-1][1]) == (0, config.llm.intermediate_size)
    assert all((end - start) % 64 == 0 for start, end in columns)


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    opened = checkpoint.open_folder(GOLDEN / "tiny-f32")
    with pytest.raises(InputError, match="num_key_value_heads 2, n_groups 2 does not divide"):
        share_of(opened.config, 0, 4)
    rounded = checkpoint.open_folder(GOLDEN / "tiny-4bit")
    with pytest.raises(InputError, match=r"num_attention_heads \* head_dim 64 into parts of whole .* groups of 64"):
        share_of(rounded.config, 0, 2)


def test_packed_columns_are_cut_at_whole_groups() -> None:
    """A quantised layer's part gives what those inputs give in the whole layer."""
    opened = checkpoint.open_folder(GOLDEN / "tiny-4bit")
    share = Share(1, 2, 64)
    made = SharedCheckpoint.of(opened, share)
    whole, part = opened.parameters(), made.parameters()
    layer = next(name.removesuffix(".weight") for name in whole if name.endswith("mixer.down_proj.weight"))
    settings = {key: opened.config.quantization[layer][key] for key in ("group_size", "bits")}

    def wide(held: checkpoint.Parameters) -> mx.array:
        packed = (held[f"{layer}.{name}"] for name in ("weight", "scales", "biases"))
        return mx.dequantize(*packed, **settings).astype(mx.float32)

    np.testing.assert_array_equal(wide(part), wide(whole)[:, 64:])
