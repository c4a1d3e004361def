"""Every tensor of a checkpoint by name, with its shape as NVIDIA's file stores it (PyTorch axis orders).

Follows from the config alone. Random checkpoints are made from it, and a size can be told before a download.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config import CODEC_CONTROL_CODES, CodecConfig, EncoderConfig, LlmConfig, ModelConfig, RnntConfig, TtsConfig

Shape = tuple[int, ...]
INTEGERS = ("_control_codes", ".codec_silence_tokens", ".pad_tensor", ".special_flags", ".is_continuation")


def is_integer(name: str) -> bool:
    """Whether a tensor holds int32 codes, ids or flags."""
    return name.endswith(INTEGERS)


def tensors(config: ModelConfig, voices: Sequence[str] | None = None) -> dict[str, Shape]:
    """Shapes by tensor name, with a latent for each of `voices` (default: the config's speaker)."""
    llm, tts = config.llm, config.tts
    table = {
        "stt_model.embed_tokens.weight": (llm.vocab_size, llm.hidden_size),
        "stt_model.lm_head.weight": (llm.vocab_size, llm.hidden_size),
        "stt_model.function_head.weight": (llm.vocab_size, llm.hidden_size),
        "tts_model._control_codes": (CODEC_CONTROL_CODES,),
        "tts_model.codec_silence_tokens": (tts.num_quantizers,),
    }
    for voice in voices or (config.speaker,):
        table[f"tts_model.audio_prompt_latents.{voice}"] = (1, tts.prompt_frames, tts.hidden_size)
    parts = {
        "stt_model.perception.": _perception(config.encoder),
        "stt_model.": _rnnt(config.rnnt),
        "stt_model.llm.": _llm(llm),
        "tts_model.tts_model.": _tts(tts, llm.vocab_size),
        "tts_model.audio_codec.": _codec(config.codec),
    }
    return table | {prefix + name: shape for prefix, part in parts.items() for name, shape in part.items()}


def originals(config: ModelConfig, voices: Sequence[str] | None = None) -> dict[str, Shape]:
    """`tensors`, and the buffers of NeMo's featurizer, which NVIDIA's file and the published ones carry unused."""
    featurizer = "stt_model.perception.preprocessor.featurizer."
    mel = config.mel
    buffers: dict[str, Shape] = {"fb": (1, mel.features, mel.n_fft // 2 + 1), "window": (mel.window_samples,)}
    return tensors(config, voices) | {featurizer + name: shape for name, shape in buffers.items()}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _perception(c: EncoderConfig) -> dict[str, Shape]:
    d, channels = c.d_model, c.subsampling_channels
    table: dict[str, Shape] = {}
    for stage in range(int(math.log2(c.subsampling_factor))):
        strided = 3 * stage - 1 if stage else 0  # indices of the Sequential: 0, then 2 and 3, then 5 and 6
        table |= {f"encoder.pre_encode.conv.{strided}.weight": (channels, 1, 3, 3)}
        table |= {f"encoder.pre_encode.conv.{strided}.bias": (channels,)}
        if stage:
            table |= {f"encoder.pre_encode.conv.{strided + 1}.weight": (channels, channels, 1, 1)}
            table |= {f"encoder.pre_encode.conv.{strided + 1}.bias": (channels,)}
    table |= _linear("encoder.pre_encode.out", channels * c.subsampled_features, d)
    for layer in range(c.n_layers):
        block: dict[str, Shape] = {}
        for feed_forward in ("feed_forward1", "feed_forward2"):
            block |= {f"{feed_forward}.linear1.weight": (d * c.ff_expansion_factor, d)}
            block |= {f"{feed_forward}.linear2.weight": (d, d * c.ff_expansion_factor)}
        for name in ("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out"):
            block |= _norm(name, d)
        block |= _norm("conv.batch_norm", d)
        block |= {f"self_attn.linear_{name}.weight": (d, d) for name in ("q", "k", "v", "out", "pos")}
        block |= {f"self_attn.pos_bias_{name}": (c.n_heads, c.head_dim) for name in "uv"}
        block["conv.pointwise_conv1.weight"] = (2 * d, d, 1)
        block["conv.depthwise_conv.weight"] = (d, 1, c.conv_kernel_size)
        block["conv.pointwise_conv2.weight"] = (d, d, 1)
        table |= {f"encoder.layers.{layer}.{name}": shape for name, shape in block.items()}
    return table | _linear("proj", d, c.output_dim)


def _rnnt(c: RnntConfig) -> dict[str, Shape]:
    width, symbols = c.pred_hidden, len(c.pieces) + 1
    table: dict[str, Shape] = {"rnnt_decoder.prediction.embed.weight": (symbols, width)}
    for layer in range(c.pred_layers):
        for side in ("ih", "hh"):
            table[f"rnnt_decoder.prediction.dec_rnn.lstm.weight_{side}_l{layer}"] = (4 * width, width)
            table[f"rnnt_decoder.prediction.dec_rnn.lstm.bias_{side}_l{layer}"] = (4 * width,)
    table |= _linear("rnnt_joint.enc", c.encoder_hidden, c.joint_hidden)
    table |= _linear("rnnt_joint.pred", width, c.joint_hidden)
    return table | _linear("rnnt_joint.joint_net.2", c.joint_hidden, symbols)


def _llm(c: LlmConfig) -> dict[str, Shape]:
    h, inner, heads = c.hidden_size, c.mamba_inner, c.mamba_num_heads
    mamba: dict[str, Shape] = {
        "in_proj.weight": (inner + c.conv_dim + heads, h),
        "conv1d.weight": (c.conv_dim, 1, c.conv_kernel),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (h, inner),
    }
    if c.use_conv_bias:
        mamba["conv1d.bias"] = (c.conv_dim,)
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention: dict[str, Shape] = {
        "q_proj.weight": (queries, h),
        "k_proj.weight": (keys, h),
        "v_proj.weight": (keys, h),
        "o_proj.weight": (h, queries),
    }
    mlp: dict[str, Shape] = {"up_proj.weight": (c.intermediate_size, h), "down_proj.weight": (h, c.intermediate_size)}
    for mixer, biased in ((mamba, c.use_bias or c.mamba_proj_bias), (attention, c.attention_bias), (mlp, c.mlp_bias)):
        if biased:
            linear = [name for name in mixer if name.endswith("_proj.weight")]
            mixer |= {name.replace(".weight", ".bias"): mixer[name][:1] for name in linear}
    table: dict[str, Shape] = {"norm_f.weight": (h,)}
    for layer, kind in enumerate(c.pattern):
        table[f"layers.{layer}.norm.weight"] = (h,)
        mixer = {"M": mamba, "*": attention, "-": mlp}[kind]
        table |= {f"layers.{layer}.mixer.{name}": shape for name, shape in mixer.items()}
    return table


def _gemma_block(width: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Shape]:
    return {
        "self_attn.q_proj.weight": (heads * head_dim, width),
        "self_attn.k_proj.weight": (kv_heads * head_dim, width),
        "self_attn.v_proj.weight": (kv_heads * head_dim, width),
        "self_attn.o_proj.weight": (width, heads * head_dim),
        **_gated_mlp("mlp", width, inner),
    }


def _gated_mlp(name: str, width: int, inner: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (inner, width),
        f"{name}.up_proj.weight": (inner, width),
        f"{name}.down_proj.weight": (width, inner),
    }


def _tts(c: TtsConfig, vocab_size: int) -> dict[str, Shape]:
    w, z, chars = c.hidden_size, c.latent_size, c.characters
    table: dict[str, Shape] = {
        "rvq_embs": (c.num_quantizers, c.codebook_size, z),
        "embed_code.weight": (w, z),
        "bos_emb": (w,),
        "null_emb": (w,),
        "audio_prompt_projection_W": (w, w),
        "backbone.norm.weight": (w,),
        "gated_fusion_audio_text.gate": (w,),
        "gated_fusion_audio_text.residual_scale": (),
        "gated_fusion_audio_text.final_norm.weight": (w,),
        **_linear("gated_fusion_audio_text.audio_proj", w, w),
        **_linear("gated_fusion_audio_text.text_proj", w, w),
    }
    block = _gemma_block(w, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    block |= {f"self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        block[f"{norm}_layernorm.weight"] = (w,)
    for layer in range(c.num_hidden_layers):
        table |= {f"backbone.layers.{layer}.{name}": shape for name, shape in block.items()}
    block = _gemma_block(
        chars.hidden_size, chars.intermediate_size, chars.num_attention_heads, chars.num_key_value_heads, chars.head_dim
    )
    for norm in ("pre_self_attn", "post_self_attn", "pre_feedforward", "post_feedforward"):
        block[f"{norm}_layernorm.weight"] = (chars.hidden_size,)
    for layer in range(chars.num_hidden_layers):
        table |= {f"embed_subword.backbone.encoder.layers.{layer}.{name}": shape for name, shape in block.items()}
    subword: dict[str, Shape] = {
        "embed_tokens.weight": (chars.char_vocab_size, chars.hidden_size),
        "backbone.encoder.norm.weight": (chars.hidden_size,),
        "proj_embedding.weight": (w, chars.hidden_size),
        "subword_flag_emb.cont_emb.weight": (2, w),
        "subword_flag_emb.is_continuation": (vocab_size + 1,),
        "subword_flag_emb.pad_tensor": (),
        "bos_eos_emb.special_emb.weight": (3, w),
        "bos_eos_emb.special_flags": (vocab_size,),
        "bos_eos_emb.pad_tensor": (),
    }
    table |= {f"embed_subword.{name}": shape for name, shape in subword.items()}
    return table | {f"mog_head.{name}": shape for name, shape in _mog(c).items()}


def _mog(c: TtsConfig) -> dict[str, Shape]:
    w, z, mog = c.hidden_size, c.latent_size, c.mog
    table: dict[str, Shape] = {
        "proj_logits.weight": (mog.num_predictions, w),
        "proj_mus.weight": (mog.num_predictions * mog.low_rank, w),
        "proj_logs.weight": (1, w),
        "proj_else.weight": (z, w),
        "low_mat": (mog.num_predictions, z, mog.low_rank),
        f"mlp_stack.{mog.num_layers}.weight": (w,),
    }
    for layer in range(mog.num_layers):
        table |= _gated_mlp(f"mlp_stack.{layer}.mlp", w, mog.intermediate_size)
        table |= {f"mlp_stack.{layer}.{norm}.weight": (w,) for norm in ("pre_norm", "post_norm")}
    return table


def _codec(c: CodecConfig) -> dict[str, Shape]:
    """Encoder: 1x1, then stages of blocks and a strided convolution; the decoder mirrors it, transposed ones first."""
    table: dict[str, Shape] = {}
    for quantizer in range(c.num_quantizers):
        table[f"prvq.mus_list.{quantizer}"] = (c.codebook_size, c.latent_dim)
        table[f"prvq._variance_list.{quantizer}.variance"] = ()
    widths = [c.base_channels * multiplier for multiplier in c.channel_multipliers]
    stages = list(zip(widths, [*widths[1:], c.latent_dim], c.downsample_rates, strict=True))
    table["encoder.layers.0.weight"] = (widths[0], 2 * c.bins, 1)
    place = 1
    for width, following, rate in stages:
        for block in range(place, place + c.blocks_per_stage):
            table |= _convnext(f"encoder.layers.{block}", width, c.block_kernel_size)
        place += c.blocks_per_stage
        table[f"encoder.layers.{place}.weight"] = (following, width, rate)
        place += 1
    place = 0
    for width, following, rate in reversed(stages):
        table[f"decoder.layers.{place}.weight"] = (following, width, rate)  # transposed convolution: (in, out, k)
        for block in range(place + 1, place + 1 + c.blocks_per_stage):
            table |= _convnext(f"decoder.layers.{block}", width, c.block_kernel_size)
        place += 1 + c.blocks_per_stage
    table[f"decoder.layers.{place}.weight"] = (2 * c.bins, widths[0], 1)
    return table


def _convnext(name: str, width: int, kernel: int) -> dict[str, Shape]:
    return {
        f"{name}.dwconv.weight": (width, 1, kernel),
        f"{name}.dwconv.bias": (width,),
        **_norm(f"{name}.norm", width),
        f"{name}.pwconv1.weight": (4 * width, width, 1),
        f"{name}.pwconv1.bias": (4 * width,),
        f"{name}.pwconv2.weight": (width, 4 * width, 1),
        f"{name}.pwconv2.bias": (width,),
    }
