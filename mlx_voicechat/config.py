"""The facts of a checkpoint, one frozen dataclass per network, and the constants that no config holds, with sources.

Facts have no default; `weights.config_file` reads them. Sizes that follow from others are properties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

RMS_EPS = 1e-6  # Gemma 3 and T5-Gemma model cards: rms_norm_eps
GEMMA_QUERY_SCALE = 256**-0.5  # Gemma 3 and T5-Gemma: query_pre_attn_scalar 256, whatever the head size
GEMMA_SOFT_CAP = 50.0  # T5-Gemma: attn_logit_softcapping
ROPE_BASE_LOCAL = 1e4  # Gemma 3: rope_local_base_freq; T5-Gemma: rope_theta
ROPE_BASE_GLOBAL = 1e6  # Gemma 3: rope_theta of the global layers
GLOBAL_LAYER_PERIOD = 6  # Gemma 3: sliding_window_pattern
CODE_PASSES = 8  # NeMo DuplexEARTTS: inference iterations of the masked code generation
CODEC_MAGNITUDE_LIMIT = 100.0  # NeMo RVQVAEModel: spectral magnitude limit
CODEC_CONTROL_CODES = 3  # NeMo DuplexEARTTS: bos, eos and pad speech codes follow the codebook's own
ENCODER_NORM_EPS = 1e-5  # torch.nn.LayerNorm default, NeMo ConformerEncoder
CODEC_NORM_EPS = 1e-6  # NeMo RVQVAEModel: ConvNeXt LayerNorm
ENCODER_POSITION_BASE = 10000.0  # NeMo RelPositionalEncoding, after Dai et al. 2019 (Transformer-XL)
PREEMPHASIS = 0.97  # NeMo AudioToMelSpectrogramPreprocessor default
LOG_GUARD = 2.0**-24  # NeMo AudioToMelSpectrogramPreprocessor default
LLM_NORM_EPS = 1e-5  # Nemotron-H: layer_norm_epsilon
MAX_SYMBOLS = 10  # NeMo greedy RNNT decoding: symbols a frame


@dataclass(frozen=True)
class MelConfig:
    """Log-mel front end; lengths in samples at `sample_rate` Hz."""

    sample_rate: int
    features: int
    n_fft: int
    window_samples: int
    hop_samples: int
    preemphasis: float
    log_guard: float


@dataclass(frozen=True)
class EncoderConfig:
    """FastConformer encoder; D = `d_model`, `left_frames` = frames of left attention context."""

    features: int
    n_layers: int
    d_model: int
    n_heads: int
    ff_expansion_factor: int
    subsampling_factor: int
    subsampling_channels: int
    conv_kernel_size: int
    left_frames: int
    output_dim: int

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def subsampled_features(self) -> int:
        """Frequency bins left after the strided convolutions, each padded 2 before and 1 after."""
        bins = self.features
        for _ in range(int(math.log2(self.subsampling_factor))):
            bins = bins // 2 + 1
        return bins


@dataclass(frozen=True)
class RnntConfig:
    """RNNT prediction and joint network; `pieces` are SentencePiece pieces, the blank id follows the last."""

    encoder_hidden: int
    pred_hidden: int
    pred_layers: int
    joint_hidden: int
    blank_id: int
    max_symbols: int
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class LlmConfig:
    """Nemotron-H; H = `hidden_size`, V = `vocab_size`. `pattern`: M Mamba-2, * attention, - MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    conv_kernel: int
    n_groups: int
    norm_eps: float
    pattern: str
    attention_bias: bool
    mamba_proj_bias: bool
    mlp_bias: bool
    use_bias: bool
    use_conv_bias: bool
    time_step_limit: tuple[float, float] | None
    max_positions: int | None = None  # longest prompt; None: not stated

    @property
    def mamba_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the Mamba convolution: x, B and C."""
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size


@dataclass(frozen=True)
class CharacterEncoderConfig:
    """T5-Gemma encoder over the characters of a token."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    char_vocab_size: int


@dataclass(frozen=True)
class MogConfig:
    """Mixture-of-Gaussians head: C = `num_predictions` components of rank R = `low_rank`."""

    intermediate_size: int
    low_rank: int
    min_log_std: float
    num_layers: int
    num_predictions: int


@dataclass(frozen=True)
class TtsConfig:
    """EAR-TTS; W = `hidden_size`, Z = `latent_size`, Q = `num_quantizers`, K = `codebook_size`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    latent_size: int
    num_quantizers: int
    codebook_size: int
    exponent: float
    guidance_scale: float
    top_p: float
    noise_scale: float
    prompt_frames: int
    characters: CharacterEncoderConfig
    mog: MogConfig

    @property
    def mask_code(self) -> int:
        """The code that stands for "not yet known"; it adds nothing to an embedding."""
        return self.codebook_size

    @property
    def pass_counts(self) -> tuple[int, ...]:
        """Codebooks filled by each pass that fills any; they sum to Q (NeMo DuplexEARTTS schedule)."""
        passes, exponent = CODE_PASSES, self.exponent
        masked = [
            math.ceil((1 - (i / passes) ** exponent) ** (1 / exponent) * self.num_quantizers) for i in range(passes + 1)
        ]
        return tuple(a - b for a, b in pairwise(masked) if a > b)


@dataclass(frozen=True)
class CodecConfig:
    """Residual VQ codec; one code frame is `frame_samples` samples at `sample_rate` Hz."""

    sample_rate: int
    base_channels: int
    channel_multipliers: tuple[int, ...]
    downsample_rates: tuple[int, ...]
    blocks_per_stage: int
    block_kernel_size: int
    latent_dim: int
    n_fft: int
    hop_length: int
    num_quantizers: int
    codebook_size: int

    @property
    def frame_samples(self) -> int:
        return self.hop_length * math.prod(self.downsample_rates)

    @property
    def bins(self) -> int:
        return self.n_fft // 2 + 1


@dataclass(frozen=True)
class ModelConfig:
    """Everything `config.json` says. `quantization`: `{"group_size", "bits", "mode"}` of each quantised layer."""

    mel: MelConfig
    encoder: EncoderConfig
    rnnt: RnntConfig
    llm: LlmConfig
    tts: TtsConfig
    codec: CodecConfig
    bos_id: int
    eos_id: int
    pad_id: int
    silence_id: int
    input_rate_hz: int
    output_rate_hz: int
    frame_seconds: float
    function_weight: float
    text_weight: float
    user_weight: float
    pad_boost: float
    bos_boost: float
    eos_boost: float
    speaker: str
    default_system_prompt: str
    synthetic: bool
    demonstration: str
    quantization: Mapping[str, Mapping[str, Any]]

    @property
    def quiet_ids(self) -> frozenset[int]:
        """Tokens of both channels that are no text."""
        return frozenset((self.pad_id, self.silence_id, self.bos_id, self.eos_id))

    @property
    def frame_samples_in(self) -> int:
        return round(self.input_rate_hz * self.frame_seconds)

    @property
    def frame_samples_out(self) -> int:
        return self.codec.frame_samples

    @property
    def budget_ms(self) -> float:
        return self.frame_seconds * 1000
