"""The five networks as one module tree, whose paths are the names of the checkpoint's tensors.

Arrays are lazy: the tree of the released model takes no memory until weights are loaded into it, so names, shapes and
sizes are asked of it.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..config import ModelConfig
from .codec import Codec
from .conformer import Perception
from .duplex_lm import DuplexLm
from .ear_tts import EarTts
from .rnnt import Joint, PredictionNet


class ListeningLm(DuplexLm):
    """The language model, and the listening networks that the checkpoint nests beside its parts."""

    def __init__(self, config: ModelConfig) -> None:
        boosts = {config.pad_id: config.pad_boost, config.bos_id: config.bos_boost, config.eos_id: config.eos_boost}
        super().__init__(
            config.llm,
            text_weight=config.text_weight,
            user_weight=config.user_weight,
            function_weight=config.function_weight,
            boosts=boosts,
        )
        self.perception = Perception(config.mel, config.encoder)
        self.rnnt_decoder = PredictionNet(config.rnnt)
        self.rnnt_joint = Joint(config.rnnt)


class Speech(nn.Module):
    """The speech generator, its codec (`encoder`: with the half that no conversation needs), the codes of silence."""

    def __init__(self, config: ModelConfig, encoder: bool = False) -> None:
        super().__init__()
        self.tts_model = EarTts(config.tts, config.llm.vocab_size)
        self.audio_codec = Codec(config.codec, encoder)
        self.codec_silence_tokens = mx.zeros((config.codec.num_quantizers,), mx.int32)


class Networks(nn.Module):
    """All of it; `encoder` as in `Speech`."""

    def __init__(self, config: ModelConfig, encoder: bool = False) -> None:
        super().__init__()
        self.stt_model = ListeningLm(config)
        self.tts_model = Speech(config, encoder)
