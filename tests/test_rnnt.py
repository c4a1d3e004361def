"""RNNT branch against NeMo's own decoder, joint and greedy decoding."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from support.checkpoints import GOLDEN
from support.listening import DISTINCT_RNNT, close, golden_config, golden_parameters, golden_rnnt, random_rnnt

from mlx_voicechat.networks.rnnt import GreedyDecoder, Joint, LstmState, PredictionNet, RnntState
from mlx_voicechat.text import TranscriptText

ORACLE = dict(np.load(GOLDEN / "oracle" / "rnnt.npz"))
ENCODER = dict(np.load(GOLDEN / "oracle" / "encoder.npz"))
CASES = {"online27": "online_encoder_27", "offline28": "offline_encoder", "online60": "online_encoder_60"}


def golden_decoder(compiled: bool = False) -> GreedyDecoder:
    decoder = GreedyDecoder(*golden_rnnt(), golden_config().rnnt)
    if compiled:
        decoder.compile()
    return decoder


def random_decoder() -> GreedyDecoder:
    """Sharp enough that frames emit no symbol, some, and as many as allowed."""
    net, joint = random_rnnt()
    net.update(tree_map(lambda array: 6 * array, net.parameters()))
    joint.pred.weight = 8 * joint.pred.weight
    joint.joint_net[2].bias[DISTINCT_RNNT.blank_id] += 3
    return GreedyDecoder(net, joint, DISTINCT_RNNT)


def random_frames(count: int, seed: int = 5) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 2, (count, DISTINCT_RNNT.encoder_hidden)).astype(np.float32))


def read(ids: mx.array) -> list[int]:
    return [int(token) for token in np.array(ids)]


def close_states(state: LstmState, hidden: np.ndarray, cell: np.ndarray) -> None:
    close(mx.concatenate(list(state.hidden)), hidden.reshape(-1, hidden.shape[-1]))
    close(mx.concatenate(list(state.cell)), cell.reshape(-1, cell.shape[-1]))


def test_start_is_a_zero_vector_into_a_zero_state() -> None:
    decoder, _ = golden_rnnt()
    pred, state = decoder.start()
    close(pred, ORACLE["sos_pred"])
    close_states(state, ORACLE["sos_h"], ORACLE["sos_c"])


def test_forced_symbols_follow_the_oracle() -> None:
    decoder, _ = golden_rnnt()
    zeros = (mx.zeros((1, ORACLE["chain_h"].shape[-1])),) * 2
    state = LstmState(zeros, zeros)
    for token, expected in zip(ORACLE["chain_tokens"].tolist(), ORACLE["chain_pred"], strict=True):
        pred, state = decoder.step(mx.array([token]), state)
        close(pred[0, 0], expected)
    close_states(state, ORACLE["chain_h"], ORACLE["chain_c"])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_greedy_symbols_equal_the_oracle(case: str, compiled: bool) -> None:
    symbols, frames, _ = golden_decoder(compiled).whole(mx.array(ENCODER[CASES[case]]))
    assert symbols == ORACLE[f"{case}_tokens"].tolist()
    assert frames == ORACLE[f"{case}_frames"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_final_state_is_the_oracle_s_one_symbol_later(case: str) -> None:
    """NeMo keeps the state before the last symbol: it predicts again at the next frame, this decoder at once."""
    net, _ = golden_rnnt()
    _, _, final = golden_decoder().whole(mx.array(ENCODER[CASES[case]]))
    _, state = net.start()
    *others, last = ORACLE[f"{case}_tokens"].tolist()
    for token in others:
        _, state = net.step(mx.array([token]), state)
    close_states(state, ORACLE[f"{case}_h"], ORACLE[f"{case}_c"])
    _, state = net.step(mx.array([last]), state)
    close_states(final.lstm, *(np.stack([np.array(a[0]) for a in arrays]) for arrays in state))


@pytest.mark.parametrize("case", CASES)
def test_first_logits_of_every_frame(case: str) -> None:
    decoder = golden_decoder()
    state = decoder.init_state()
    for frame, expected in zip(ENCODER[CASES[case]], ORACLE[f"{case}_first_logits"], strict=True):
        encoded = mx.array(frame)[None, None]
        logits = decoder.joint.combine(decoder.joint.enc(encoded), state.pred)[0, 0]
        close(logits - mx.logsumexp(logits), expected)
        first = decoder.first(encoded, state)
        _, state = decoder.finish(first, read(first.ids), state)


def test_without_blank_every_frame_stops_at_max_symbols() -> None:
    config = golden_config().rnnt
    net, _ = golden_rnnt()
    joint = Joint(config)
    joint.load_weights(golden_parameters("tiny-f32", "stt_model.rnnt_joint."))
    joint.joint_net[2].bias[config.blank_id] -= 50
    frames = mx.array(ENCODER["online_encoder_27"][:3])
    symbols, where, _ = GreedyDecoder(net, joint, config).whole(frames)
    assert symbols == ORACLE["noblank3_tokens"].tolist()
    assert where == ORACLE["noblank3_frames"].tolist()
    few = replace(config, max_symbols=2)
    assert GreedyDecoder(net, joint, few).whole(frames)[1] == [0, 0, 1, 1, 2, 2]


def test_one_prediction_per_emitted_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    step = PredictionNet.step

    def counted(self: PredictionNet, symbol: mx.array, state: LstmState) -> tuple[mx.array, LstmState]:
        nonlocal calls
        calls += 1
        return step(self, symbol, state)

    monkeypatch.setattr(PredictionNet, "step", counted)
    symbols, _, _ = golden_decoder().whole(mx.array(ENCODER["online_encoder_27"]))
    assert calls == len(symbols)


def test_a_blank_frame_leaves_the_state_untouched() -> None:
    decoder = random_decoder()
    state = decoder.init_state()
    first = decoder.first(random_frames(1)[None], state)
    symbols, after = decoder.finish(first, [DISTINCT_RNNT.blank_id], state)
    assert symbols == [[]]
    assert after is state


@pytest.mark.parametrize("piece", [1, 3, 7, 40])
def test_pieces_give_what_the_whole_gives(piece: int) -> None:
    decoder, frames = random_decoder(), random_frames(40)
    symbols, where, _ = decoder.whole(frames)
    state: RnntState | None = None
    pieces: list[int] = []
    for start in range(0, len(frames), piece):
        added, _, state = decoder.whole(frames[start : start + piece], state)
        pieces += added
    assert pieces == symbols
    counts = Counter(where)
    assert {counts[i] for i in range(40)} >= {0, 1, DISTINCT_RNNT.max_symbols}


def test_a_batch_gives_each_row_what_it_gives_alone() -> None:
    decoder, streams = random_decoder(), [random_frames(20, seed) for seed in (1, 2, 3)]
    state = decoder.init_state(len(streams))
    rows: list[list[int]] = [[] for _ in streams]
    for frame in zip(*streams, strict=True):
        first = decoder.first(mx.stack(list(frame))[:, None], state)
        symbols, state = decoder.finish(first, read(first.ids), state)
        for row, emitted in zip(rows, symbols, strict=True):
            row += emitted
    assert rows == [decoder.whole(stream)[0] for stream in streams]


def test_joint_adds_both_sides_before_the_activation() -> None:
    _, joint = random_rnnt()
    encoded, pred = random_frames(3)[:, None], mx.random.normal((3, 1, DISTINCT_RNNT.pred_hidden), key=mx.random.key(0))
    hidden = np.maximum(np.array(joint.enc(encoded)) + np.array(joint.pred(pred)), 0)
    last = joint.joint_net[2]
    expected = hidden @ np.array(last.weight).T + np.array(last.bias)
    assert expected.shape == (3, 1, len(DISTINCT_RNNT.pieces) + 1)
    close(joint(encoded, pred), expected)


@pytest.mark.parametrize("case", ["plain", "prompted"])
def test_transcript_of_the_recorded_run(case: str) -> None:
    expected = json.loads((GOLDEN / "expected" / "streams.json").read_text(encoding="utf-8"))[case]
    encoded = mx.array(np.load(GOLDEN / "expected" / "perception.npz")["encoded"])
    decoder, transcript = golden_decoder(), TranscriptText(golden_config().rnnt.pieces)
    symbols, where, _ = decoder.whole(encoded[: expected["frames"]])
    assert symbols == expected["rnnt_ids"]
    for index, frame in enumerate(expected["frames_text"]):
        emitted = [symbol for symbol, at in zip(symbols, where, strict=True) if at == index]
        assert bool(emitted) == (frame["transcript"] is not None)
        before = transcript.text
        assert before + transcript.push(emitted) == transcript.text
        if emitted:
            assert transcript.text == frame["transcript"]
