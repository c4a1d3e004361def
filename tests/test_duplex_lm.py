"""Duplex LLM against the PyTorch oracle, and its step form against its whole form."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import GOLDEN
from support.listening import DISTINCT_LLM, close, duplex_lm, golden_llm, random_llm, random_weights

from mlx_voicechat.config import LlmConfig
from mlx_voicechat.networks import mamba
from mlx_voicechat.networks.duplex_lm import DuplexLm, LlmState
from mlx_voicechat.networks.mamba import CHUNK, MambaMixer, MambaState

ORACLE = dict(np.load(GOLDEN / "oracle" / "llm.npz"))
PAD = 12
VIEWS = {"Broadcast", "BroadcastAxes", "Reshape", "Transpose", "Slice", "ExpandDims", "Squeeze", "Flatten", "Unflatten"}
VIEWS |= {"AsStrided", "Split", "StopGradient", "Depends"}


@cache
def oracle_llm(compiled: bool = False) -> DuplexLm:
    llm = golden_llm()
    if compiled:
        llm.compile()
    return llm


def noise(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def flat(tree: Any) -> list[tuple[str, mx.array]]:
    found = tree_flatten(tree)
    assert isinstance(found, list)
    return found


def run(llm: DuplexLm, x: mx.array, piece: int, state: LlmState | None = None) -> tuple[mx.array, LlmState]:
    """Hidden states of x (B, T, H) in pieces, and the state after them."""
    state = llm.init_state(x.shape[0]) if state is None else state
    hidden = []
    for start in range(0, x.shape[1], piece):
        out, state = llm.step(x[:, start : start + piece], state)
        mx.eval(out, state.arrays)
        hidden.append(out)
    return mx.concatenate(hidden, axis=1), state


@pytest.mark.parametrize("one_kernel", [False, True])  # as a CPU and as a GPU takes a Mamba step
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["plain", "prompt"])
def test_free_run_follows_the_oracle(
    case: str, compiled: bool, one_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba, "ONE_KERNEL", one_kernel)
    llm, state = oracle_llm(compiled), oracle_llm(compiled).init_state()
    expected = {key.removeprefix(f"{case}_"): array for key, array in ORACLE.items() if key.startswith(f"{case}_")}
    prompt = ORACLE["prompt_ids"].size if case == "prompt" else 0
    if prompt:
        pads = mx.full((1, prompt), PAD)
        fused = llm.fuse(pads, llm.embed(mx.array(ORACLE["prompt_ids"])[None]), pads)
        hidden, state = llm.step(fused, state)
        close(fused[0], expected["fused"][:prompt])
        close(hidden[0], expected["hidden"][:prompt])
    text = function = mx.array([PAD])
    chosen = []
    for index, audio in enumerate(ORACLE["audio_embeds"], prompt):
        fused = llm.fuse(text, mx.array(audio)[None, None], function)
        hidden, state = llm.step(fused, state)
        close(fused[0, 0], expected["fused"][index])
        close(hidden[0, 0], expected["hidden"][index])
        for logits, channel in zip(llm.logits(hidden), ("text", "function"), strict=True):
            close(logits[0, 0], expected[f"{channel}_logits"][index])
        text, function = llm.choose(hidden)
        chosen.append((text.item(), function.item()))
    both = zip(expected["text_tokens"][prompt:].tolist(), expected["function_tokens"][prompt:].tolist(), strict=True)
    assert chosen == list(both)


@pytest.mark.parametrize("piece", [1, 27])
def test_state_after_the_run_equals_the_oracle(piece: int) -> None:
    _, state = run(oracle_llm(), mx.array(ORACLE["plain_fused"])[None], piece)
    for layer, kept in zip((0, 2, 5), state.mamba, strict=True):
        close(kept.ssm, ORACLE[f"plain_cache{layer}_recurrent_states"])
        past = mx.concatenate(list(kept.conv), axis=1).swapaxes(1, 2)
        close(past, ORACLE[f"plain_cache{layer}_conv_states"][:, :, 1:])
    (cache,) = state.caches
    assert cache.joint is not None
    keys, values = mx.split(cache.joint, 2, axis=1)
    assert cache.offset == 27
    close(keys[:, :, :27], ORACLE["plain_cache3_keys"])
    close(values[:, :, :27], ORACLE["plain_cache3_values"])


@pytest.mark.parametrize("piece", [1, 3, 7, 300])
def test_three_hundred_positions_in_any_pieces(piece: int) -> None:
    hidden, _ = run(oracle_llm(piece == 1), mx.array(ORACLE["long300_in"])[None], piece)
    close(hidden[0], ORACLE["long300_hidden"])


@pytest.mark.parametrize("piece", [1, 3, 7, CHUNK, CHUNK + 1])
def test_pieces_of_a_model_with_distinct_widths(piece: int) -> None:
    llm, x = random_llm(), noise(2, 2 * CHUNK + 5, DISTINCT_LLM.hidden_size)
    whole, last = run(llm, x, x.shape[1])
    hidden, state = run(llm, x, piece)
    assert whole.shape == x.shape
    close(hidden, whole)
    for ours, theirs in zip(state.mamba, last.mamba, strict=True):
        close(ours.ssm, theirs.ssm)
        close(mx.concatenate(list(ours.conv), axis=1), mx.concatenate(list(theirs.conv), axis=1))


@pytest.mark.parametrize("piece", [1, 5])
def test_a_batch_and_interleaved_conversations_give_what_each_gives_alone(piece: int) -> None:
    llm, x = random_llm(), noise(2, 20, DISTINCT_LLM.hidden_size, seed=1)
    together, _ = run(llm, x, piece)
    states = [llm.init_state(), llm.init_state()]
    for start in range(0, 20, piece):
        for row in (0, 1):
            out, states[row] = llm.step(x[row : row + 1, start : start + piece], states[row])
            close(out[0], together[row, start : start + piece])


def test_a_copied_state_goes_on_independently() -> None:
    llm, x, y = random_llm(), noise(1, 12, DISTINCT_LLM.hidden_size), noise(1, 12, DISTINCT_LLM.hidden_size, seed=2)
    _, state = run(llm, x, 4)
    twin, third = state.copy(), state.copy()
    for index in range(12):  # the original and the twin take turns at the same positions
        _, state = llm.step(x[:, index : index + 1], state)
        ours, twin = llm.step(y[:, index : index + 1], twin)
        theirs, third = llm.step(y[:, index : index + 1], third)
        close(ours, theirs)


def test_a_step_does_not_change_the_state_it_is_given() -> None:
    llm, x = random_llm(), noise(1, 6, DISTINCT_LLM.hidden_size)
    _, state = run(llm, x, 3)
    before = [np.array(array) for _, array in flat(state.mamba)]
    run(llm, x, 1, state)
    run(llm, x, 6, state)
    assert all(np.array_equal(a, b) for a, (_, b) in zip(before, flat(state.mamba), strict=True))


def mamba_in_numpy(mixer: MambaMixer, config: LlmConfig, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of the paper, a position and a head at a time, in double precision: (T, H) -> (T, H), state."""
    weights = {path: np.array(array, np.float64) for path, array in flat(mixer.parameters())}
    inner, size, groups, heads = config.mamba_inner, config.ssm_state_size, config.n_groups, config.mamba_num_heads
    projected = x.astype(np.float64) @ weights["in_proj.weight"].T + weights.get("in_proj.bias", 0)
    gate, channels, dt = np.split(projected, [inner, inner + config.conv_dim], axis=1)
    kernel = weights["conv1d.weight"][:, :, 0].T
    padded = np.concatenate([np.zeros((len(kernel) - 1, config.conv_dim)), channels])
    mixed = np.stack([(padded[t : t + len(kernel)] * kernel).sum(0) for t in range(len(x))])
    mixed += weights.get("conv1d.bias", 0)
    mixed /= 1 + np.exp(-mixed)
    dt = np.log1p(np.exp(dt + weights["dt_bias"]))
    dt = np.clip(dt, *(config.time_step_limit or (0, np.inf)))
    state = np.zeros((heads, config.mamba_head_dim, size))
    out = np.zeros((len(x), heads, config.mamba_head_dim))
    for t in range(len(x)):
        value, key, query = np.split(mixed[t], [inner, inner + groups * size])
        value, key, query = value.reshape(heads, -1), key.reshape(groups, size), query.reshape(groups, size)
        for head in range(heads):
            group = head // (heads // groups)
            decay = np.exp(-np.exp(weights["A_log"][head]) * dt[t, head])
            state[head] = decay * state[head] + dt[t, head] * np.outer(value[head], key[group])
            out[t, head] = state[head] @ query[group] + weights["D"][head] * value[head]
    gated = (out.reshape(len(x), inner) * gate / (1 + np.exp(-gate))).reshape(len(x), groups, -1)
    normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + config.norm_eps)
    normed = normed.reshape(len(x), inner) * weights["norm.weight"]
    return normed @ weights["out_proj.weight"].T + weights.get("out_proj.bias", 0), state


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"time_step_limit": (0.4, 0.9)},
        {"time_step_limit": (0.0, float("inf"))},
        {"use_bias": True},
        {"mamba_proj_bias": True, "use_conv_bias": False},
        {"conv_kernel": 3, "n_groups": 1},
    ],
)
def test_mamba_equals_the_recurrence_of_the_paper(change: dict[str, object]) -> None:
    config = replace(DISTINCT_LLM, **change)  # type: ignore[arg-type]
    mixer = MambaMixer(config)
    random_weights(mixer, seed=3)
    mixer.prepare()
    x = noise(1, CHUNK + 9, config.hidden_size, seed=4)
    expected, last = mamba_in_numpy(mixer, config, np.array(x[0]))
    whole, state = mixer.step(x, mixer.init_state(1, mx.float32))
    close(whole[0], expected)
    close(state.ssm[0], last)
    stepped = mixer.init_state(1, mx.float32)
    for index in range(x.shape[1]):
        out, stepped = mixer.step(x[:, index : index + 1], stepped)
        close(out[0, 0], expected[index])
    close(stepped.ssm[0], last)


def test_long_decays_keep_their_digits() -> None:
    """Sums over a chunk of several hundred: differences of running sums would be off by more than the tolerance."""
    mixer = MambaMixer(DISTINCT_LLM)
    random_weights(mixer, seed=5)
    mixer.A_log = mx.log(mx.array([1e-3, 0.1, 1.0, 4.0, 16.0, 64.0]))
    mixer.prepare()
    x = noise(1, 2 * CHUNK, DISTINCT_LLM.hidden_size, seed=6)
    expected, last = mamba_in_numpy(mixer, DISTINCT_LLM, np.array(x[0]))
    whole, state = mixer.step(x, mixer.init_state(1, mx.float32))
    close(whole[0], expected)
    close(state.ssm[0], last)


def test_biases_exist_where_the_config_says_so() -> None:
    def biased(**flags: bool) -> set[str]:
        llm = duplex_lm(replace(DISTINCT_LLM, use_conv_bias=False, **flags))  # type: ignore[arg-type]
        paths = [path for path, _ in flat(llm.parameters()) if path.endswith(".bias")]
        return {path.removesuffix(".bias").rpartition(".")[2] for path in paths}

    assert biased() == set()
    assert biased(use_bias=True) == biased(mamba_proj_bias=True) == {"in_proj", "out_proj"}
    assert biased(attention_bias=True) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert biased(mlp_bias=True) == {"up_proj", "down_proj"}


def test_all_biases_step_like_the_whole() -> None:
    flags = {"attention_bias": True, "mamba_proj_bias": True, "mlp_bias": True, "use_bias": True}
    llm = random_llm(replace(DISTINCT_LLM, **flags))  # type: ignore[arg-type]
    x = noise(1, 9, DISTINCT_LLM.hidden_size)
    close(run(llm, x, 1)[0], run(llm, x, 9)[0])


@pytest.mark.parametrize("pattern", ["-", "M", "*", "**-"])
def test_any_pattern_runs(pattern: str) -> None:
    llm = random_llm(replace(DISTINCT_LLM, pattern=pattern, num_hidden_layers=len(pattern)))
    x = noise(1, 5, DISTINCT_LLM.hidden_size)
    close(run(llm, x, 1)[0], run(llm, x, 5)[0])


def test_channels_are_weighted_and_summed() -> None:
    llm = duplex_lm(DISTINCT_LLM, user_weight=0.5)
    random_weights(llm)
    llm.prepare()
    text, function = mx.array([[3, 4], [5, 6]]), mx.array([[7, 8], [9, 10]])
    audio, table = noise(2, 2, DISTINCT_LLM.hidden_size), np.array(llm.embed_tokens.weight)
    expected = table[np.array(text)] + 0.5 * np.array(audio) + 2 * table[np.array(function)]
    close(llm.fuse(text, audio, function), expected)
    close(llm.fuse(text[:, 0], audio[:, :1], function[:, 0]), expected[:, :1])
    close(llm.embed(text), table[np.array(text)])


def test_boosts_change_the_text_channel_alone() -> None:
    plain, boosted = (duplex_lm(DISTINCT_LLM, boosts) for boosts in ({1: 0.0}, {1: 0.25, PAD: 1000.0, 2: -0.5}))
    hidden = noise(1, 1, DISTINCT_LLM.hidden_size)
    for llm in (plain, boosted):
        random_weights(llm)
        llm.prepare()
    (text, function), (louder, same) = plain.logits(hidden), boosted.logits(hidden)
    added = np.zeros(DISTINCT_LLM.vocab_size, np.float32)
    added[[1, PAD, 2]] = 0.25, 1000.0, -0.5
    close(louder[0, 0], np.array(text[0, 0]) + added)
    assert mx.array_equal(function, same)
    assert boosted.choose(hidden)[0].item() == PAD
    assert plain.choose(hidden)[1].item() == boosted.choose(hidden)[1].item()


@pytest.mark.parametrize("name", ["tiny-bf16", "tiny-4bit"])
def test_rounded_checkpoints_keep_their_types(name: str) -> None:
    llm = golden_llm(name)
    audio, pad = mx.array(ORACLE["audio_embeds"])[None], mx.full((1, 27), PAD)
    fused = llm.fuse(pad, audio, pad)
    assert fused.dtype == llm.llm.dtype == mx.bfloat16

    def ids() -> list[object]:
        state, text, function = llm.init_state(), mx.array([PAD]), mx.array([PAD])
        out: list[object] = []
        for index in range(27):
            hidden, state = llm.step(llm.fuse(text, audio[:, index : index + 1], function), state)
            text, function = llm.choose(hidden)
            out += [text.item(), function.item()]
        assert hidden.dtype == mx.bfloat16
        check_types(state)
        return out

    assert ids() == ids()
    _, state = llm.step(fused, llm.init_state())
    check_types(state)


def check_types(state: LlmState) -> None:
    for each in state.mamba:
        assert isinstance(each, MambaState)
        assert each.ssm.dtype == mx.float32
        assert {array.dtype for array in each.conv} == {mx.bfloat16}
    assert {array.dtype for cache in state.caches for array in cache.arrays} == {mx.bfloat16}


def test_a_prompt_leaves_only_its_last_convolution_inputs_in_the_state() -> None:
    mixer = MambaMixer(DISTINCT_LLM)
    mixer.prepare()
    _, state = mixer.step(noise(1, 200, DISTINCT_LLM.hidden_size), mixer.init_state(1, mx.float32))
    mx.eval(state)
    before = mx.get_active_memory()
    kept = [mx.array(np.array(a)) for a in state.conv]
    mx.eval(kept)
    size = mx.get_active_memory() - before
    del state, kept
    assert before - mx.get_active_memory() < 4 * size + 64 * 1024


def launches(llm: DuplexLm, where: Path) -> int:
    """Primitives of one compiled position that do work, views left out."""
    llm.compile()
    x = noise(1, 1, DISTINCT_LLM.hidden_size)
    _, state = run(llm, x, 1)
    hidden, state = llm.step(x, state)
    mx.export_to_dot(str(where / "graph.dot"), hidden, *state.arrays)
    names = re.findall(r'label ="(\w+)", shape=rectangle', (where / "graph.dot").read_text(encoding="utf-8"))
    return sum(name not in VIEWS for name in names)


def test_a_mamba_block_costs_at_most_fourteen_launches(tmp_path: Path) -> None:
    short, long = (random_llm(replace(DISTINCT_LLM, pattern="M" * n, num_hidden_layers=n)) for n in (2, 4))
    assert launches(long, tmp_path) - launches(short, tmp_path) <= 2 * 14
