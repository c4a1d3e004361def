"""Checkpoints in NVIDIA's own layout: the golden one, and random ones of any runtime config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mlx_voicechat.weights import synthetic
from mlx_voicechat.weights.shards import files, places

from .checkpoints import GOLDEN

# Buffers of NeMo's featurizer, which only the original carries.
BUFFERS = {
    "stt_model.perception.preprocessor.featurizer.fb": (1, 128, 257),
    "stt_model.perception.preprocessor.featurizer.window": (400,),
}
WIDTHS = {"F32": 4, "I32": 4}
PIECE = 2**24


def golden_original(where: Path) -> Path:
    """`tiny-nvidia` in `where`: its config and base config, and the tensors of `tiny-f32`, which are the same."""
    out = where / "tiny-nvidia"
    shutil.copytree(GOLDEN / "tiny-nvidia", out)
    _add_tokenizer(GOLDEN / "tiny-f32", out)
    join(GOLDEN / "tiny-f32", out / "model.safetensors")
    return out


def random_original(raw: dict[str, Any], out: Path, seed: int = 0) -> Path:
    """An original of random weights whose runtime config is to be `raw`."""
    plain = synthetic.write(raw, out.with_name(f"{out.name}-plain"), seed)
    out.mkdir()
    (out / "tokenizer").mkdir()
    _add_tokenizer(plain, out)
    (out / "tokenizer" / "config.json").write_text(json.dumps(raw["text_config"]), encoding="utf-8")
    (out / "config.json").write_text(json.dumps(nvidia_config(raw)), encoding="utf-8")
    join(plain, out / "model.safetensors")
    shutil.rmtree(plain)
    return out


def _add_tokenizer(plain: Path, out: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(plain / name, out / "tokenizer" / name)


def join(folder: Path, path: Path) -> None:
    """All shards of a folder as one file, the buffers added."""
    stored = {name: (file, *entry) for file in files(folder) for name, entry in places(folder / file).items()}
    header: dict[str, Any] = {}
    end = 0
    for name, (_, shape, dtype, _start) in stored.items():
        size = int(np.prod(shape, dtype=np.int64)) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end := end + size]}
    for name, shape in BUFFERS.items():
        size = int(np.prod(shape)) * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end := end + size]}
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, (file, _, _, start) in stored.items():
            first, last = header[name]["data_offsets"]
            with (folder / file).open("rb") as source:
                source.seek(start)
                for left in range(last - first, 0, -PIECE):
                    out.write(source.read(min(left, PIECE)))
        for name in BUFFERS:
            first, last = header[name]["data_offsets"]
            out.write(bytes(last - first))


def nvidia_config(raw: dict[str, Any]) -> dict[str, Any]:
    """NVIDIA's config.json of a runtime config: the specification's table, read the other way."""
    audio, tts, codec = raw["audio_config"], raw["tts_config"], raw["codec_config"]
    backbone = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "sliding_window"),
    )
    own = (
        *("latent_size", "num_quantizers", "codebook_size", "num_delay_speech_tokens", "exponent"),
        *("disable_eos_prediction", "use_gated_fusion_for_text_audio", "use_subword_flag_emb", "use_bos_eos_emb"),
        "use_audio_prompt_frozen_projection",
    )
    characters = {key: value for key, value in tts["character_encoder"].items() if key != "char_vocab_size"}
    encoder = audio["encoder"] | {"att_context_size": audio["encoder"]["att_context_size"][0]}
    prednet = {key: value for key, value in audio["decoder"].items() if key not in ("vocab_size", "blank_as_pad")}
    speech = {
        "data": {
            "audio_prompt_duration": tts["audio_prompt_duration"],
            "target_sample_rate": codec["sample_rate"],
            "frame_length": raw["frame_duration"],
        },
        "model": {
            "inference_guidance_scale": tts["guidance_scale"],
            "inference_top_p_or_k": tts["top_p"],
            "inference_noise_scale": tts["noise_scale"],
            "codec_config": {
                "base_hidden_size": codec["base_channels"],
                "channel_mult": codec["channel_multipliers"],
                "rates": codec["downsample_rates"],
                "num_blocks": codec["blocks_per_stage"],
                "kernel_size": codec["block_kernel_size"],
                "latent_size": codec["latent_dim"],
                **{key: codec[key] for key in ("n_fft", "hop_length", "num_quantizers", "codebook_size")},
            },
            "tts_config": {
                **{key: tts[key] for key in own},
                "backbone_config": {key: tts[key] for key in backbone},
                "cas_config": {"backbone_config": {"encoder": characters}},
                "mog_head_config": tts["mog_head"],
            },
        },
    }
    listening = {
        "duplex_function_channel_weight": raw["function_channel_weight"],
        "perception": {
            "output_dim": audio["output_dim"],
            "preprocessor": audio["preprocessor"] | {"_target_": "nemo.Preprocessor"},
            "encoder": encoder | {"_target_": "nemo.Encoder"},
        },
    }
    return {
        "data": {
            "source_sample_rate": raw["input_sample_rate"],
            "target_sample_rate": raw["output_sample_rate"],
            "frame_length": raw["frame_duration"],
        },
        "model": {
            "inference_speaker_name": raw["speaker"],
            "stt": {"model": listening},
            "speech_generation": speech,
        },
        "_rnnt_merge_info": {
            "decoder_config": {key: audio["decoder"][key] for key in ("vocab_size", "blank_as_pad")}
            | {"prednet": prednet},
            "joint_config": {
                "num_classes": audio["joint"]["num_classes"],
                "vocabulary": raw["rnnt_vocabulary"],
                "jointnet": {key: value for key, value in audio["joint"].items() if key != "num_classes"},
            },
        },
    }
