"""RNNT branch: prediction network, joint network and greedy decoding of the user's transcript.

Graves 2012 (arXiv 1211.3711); NeMo RNNTDecoder, RNNTJoint and GreedyRNNTInfer. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config import RnntConfig
from .activations import relu
from .linear import Linear


class LstmState(NamedTuple):
    """Hidden and cell state, per layer one (B, P)."""

    hidden: tuple[mx.array, ...]
    cell: tuple[mx.array, ...]


class RnntState(NamedTuple):
    """`pred` (B, 1, J): the prediction after the symbols so far, already through `joint.pred`; and the LSTM's state."""

    pred: mx.array
    lstm: LstmState


class FirstChoice(NamedTuple):
    """Lazy: `ids` (B,) is the frame's first choice, `encoded` (B, 1, J) its encoder side, kept for further symbols."""

    ids: mx.array
    encoded: mx.array


class LstmLayer(nn.Module):
    """One LSTM layer, gates in PyTorch's order i, f, g, o; its two bias vectors come added."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.Wx = mx.zeros((4 * width, inputs))
        self.Wh = mx.zeros((4 * width, width))
        self.bias = mx.zeros((4 * width,))

    def __call__(self, x: mx.array, hidden: mx.array, cell: mx.array) -> tuple[mx.array, mx.array]:
        """x (B, P), state (B, P) twice -> new hidden and cell state."""
        gates = mx.addmm(mx.addmm(self.bias, x, self.Wx.T), hidden, self.Wh.T)
        i, f, g, o = mx.split(gates, 4, axis=-1)
        cell = mx.sigmoid(f) * cell + mx.sigmoid(i) * mx.tanh(g)
        return mx.sigmoid(o) * mx.tanh(cell), cell


class Lstm(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = [LstmLayer(width, width) for _ in range(layers)]


class DecRnn(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm = Lstm(width, layers)


class Prediction(nn.Module):
    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(config.pieces) + 1, config.pred_hidden)
        self.dec_rnn = DecRnn(config.pred_hidden, config.pred_layers)


class PredictionNet(nn.Module):
    """`rnnt_decoder`: embedding and LSTM over the emitted symbols; P = `pred_hidden` (NeMo RNNTDecoder)."""

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.prediction = Prediction(config)
        self._width = config.pred_hidden

    def start(self, batch: int = 1) -> tuple[mx.array, LstmState]:
        """-> prediction (B, 1, P) before any symbol and the state after it: a zero vector into a zero state."""
        zeros = tuple(mx.zeros((batch, self._width)) for _ in self.prediction.dec_rnn.lstm.layers)
        return self._advance(mx.zeros((batch, self._width)), LstmState(zeros, zeros))

    def step(self, symbol: mx.array, state: LstmState) -> tuple[mx.array, LstmState]:
        """symbol (B,) -> prediction (B, 1, P), state."""
        return self._advance(self.prediction.embed(symbol), state)

    def _advance(self, x: mx.array, state: LstmState) -> tuple[mx.array, LstmState]:
        hidden, cell = [], []
        for layer, *before in zip(self.prediction.dec_rnn.lstm.layers, state.hidden, state.cell, strict=True):
            x, c = layer(x, *before)
            hidden.append(x)
            cell.append(c)
        return x[:, None], LstmState(tuple(hidden), tuple(cell))


class Joint(nn.Module):
    """`rnnt_joint`: `linear(relu(enc(e) + pred(p)))`; J = `joint_hidden` (NeMo RNNTJoint)."""

    def __init__(self, config: RnntConfig) -> None:
        super().__init__()
        self.enc = Linear(config.encoder_hidden, config.joint_hidden)
        self.pred = Linear(config.pred_hidden, config.joint_hidden)
        # Indices as in NeMo's nn.Sequential: activation, dropout, linear; the first two have no weights.
        self.joint_net = [nn.ReLU(), nn.Identity(), Linear(config.joint_hidden, len(config.pieces) + 1)]

    def __call__(self, encoded: mx.array, pred: mx.array) -> mx.array:
        """encoded (B, T, D), pred (B, T, P) or one of them with T = 1 -> logits (B, T, pieces + 1)."""
        return self.combine(self.enc(encoded), self.pred(pred))

    def combine(self, encoded: mx.array, pred: mx.array) -> mx.array:
        """Both sides already projected, (B, T, J) -> logits (B, T, pieces + 1)."""
        return self.joint_net[2](relu(encoded + pred))


class GreedyDecoder:
    """Greedy decoding, at most `max_symbols` symbols a frame (NeMo GreedyRNNTInfer); holds no state of a conversation.

    `first` is pure and rides in the frame's own evaluation; `finish` reads its choice afterwards and costs one more
    evaluation per emitted symbol.
    """

    def __init__(self, decoder: PredictionNet, joint: Joint, config: RnntConfig) -> None:
        self.decoder = decoder
        self.joint = joint
        self.blank = config.blank_id
        self.max_symbols = config.max_symbols
        self._choose: Callable[..., Any] = self._choose_first
        self._advance: Callable[..., Any] = self._choose_next

    def compile(self) -> None:
        """Fuse both steps (`mx.compile`); weights must be loaded and stay as they are."""
        self._choose = mx.compile(self._choose_first)
        self._advance = mx.compile(self._choose_next)

    def init_state(self, batch: int = 1) -> RnntState:
        pred, lstm = self.decoder.start(batch)
        return RnntState(self.joint.pred(pred), lstm)

    def first(self, encoded: mx.array, state: RnntState) -> FirstChoice:
        """encoded (B, 1, D), before `perception.proj` -> the lazy first choice of the frame."""
        return FirstChoice(*self._choose(encoded, state.pred))

    def finish(self, first: FirstChoice, chosen: list[int], state: RnntState) -> tuple[list[list[int]], RnntState]:
        """The frame's symbols, B lists, and the state after them; `chosen` is what `first.ids` was read as.

        The state is evaluated when symbols were emitted, and the one given when there were none.
        """
        ids = first.ids
        symbols: list[list[int]] = [[] for _ in range(ids.shape[0])]
        for count in range(1, self.max_symbols + 1):
            going = [token != self.blank and len(row) == count - 1 for token, row in zip(chosen, symbols, strict=True)]
            if not any(going):
                break
            for row, token, goes in zip(symbols, chosen, going, strict=True):
                if goes:
                    row.append(token)
            ids, pred, lstm = self._advance(ids, first.encoded, state.lstm)
            new = RnntState(pred, LstmState(*lstm))
            state = new if all(going) else _where(mx.array(going), new, state)
            mx.eval(ids, state)
            chosen = ids.tolist()
        return symbols, state

    def whole(self, encoded: mx.array, state: RnntState | None = None) -> tuple[list[int], list[int], RnntState]:
        """encoded (T, D) of one conversation -> symbols, the frame of each, and the state after them."""
        state = self.init_state() if state is None else state
        symbols: list[int] = []
        frames: list[int] = []
        for index in range(encoded.shape[0]):
            first = self.first(encoded[None, index : index + 1], state)
            (emitted,), state = self.finish(first, first.ids.tolist(), state)  # type: ignore[arg-type]
            symbols += emitted
            frames += [index] * len(emitted)
        return symbols, frames, state

    def _choose_first(self, encoded: mx.array, pred: mx.array) -> tuple[mx.array, mx.array]:
        """encoded (B, 1, D), pred (B, 1, J) -> choice (B,), projected encoder output (B, 1, J)."""
        projected = self.joint.enc(encoded.astype(mx.float32))
        return mx.argmax(self.joint.combine(projected, pred)[:, 0], axis=-1), projected

    def _choose_next(
        self, symbol: mx.array, encoded: mx.array, lstm: LstmState
    ) -> tuple[mx.array, mx.array, LstmState]:
        """symbol (B,), encoded (B, 1, J) -> next choice (B,), projected prediction (B, 1, J), state."""
        out, after = self.decoder.step(symbol, LstmState(*lstm))
        pred = self.joint.pred(out)
        return mx.argmax(self.joint.combine(encoded, pred)[:, 0], axis=-1), pred, after


def _where(rows: mx.array, new: RnntState, old: RnntState) -> RnntState:
    """`new` in the rows (B,) that emitted a symbol, `old` in the others."""

    def pick(a: mx.array, b: mx.array) -> mx.array:
        return mx.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    hidden, cell = (tuple(map(pick, *pair)) for pair in zip(new.lstm, old.lstm, strict=True))
    return RnntState(pick(new.pred, old.pred), LstmState(hidden, cell))
