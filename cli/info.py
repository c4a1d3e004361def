"""`mlx-voicechat info`: what a checkpoint is, what it will take, and what this machine has. Nothing is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mlx_voicechat.errors import CheckpointError

from .generate import DEFAULT_MODEL
from .options import SpeechWeights
from .render import Output, note

if TYPE_CHECKING:
    from mlx_voicechat.config import ModelConfig
    from mlx_voicechat.shards import Stored

ANNOUNCED_SECONDS = (60, 600)  # lengths of conversation to tell the memory for
NAME_WIDTH = 22


def info(
    model: Annotated[
        str,
        Argument(
            metavar="[MODEL]",
            envvar="MLX_VOICECHAT_MODEL",
            show_default=False,
            help="A folder, a Hub repository that was fetched, or tiny; the 11B model in 4 bits if absent.",
        ),
    ] = DEFAULT_MODEL,
    speech_weights: SpeechWeights = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, not text.")] = False,
) -> None:
    """Describe a model: its format and sizes, the memory it will take, and what this machine has.

    Reads configuration and file headers only; downloads nothing.
    """
    facts = describe(model, speech_weights)
    Output().write(json.dumps(facts, ensure_ascii=False) + "\n" if as_json else text(facts))
    if facts["warning"]:
        note(facts["warning"])


def describe(model: str, speech_weights: str | None = None) -> dict[str, Any]:
    """Everything `info` tells. Raises CheckpointError and, for an unknown `speech_weights`, InputError."""
    from mlx_voicechat import checkpoint, memory
    from mlx_voicechat.config import read_config
    from mlx_voicechat.shards import files, verify

    folder = _folder(model)
    config, stored = read_config(folder), verify(folder)
    version = checkpoint.stored_format(folder)
    plan = memory.speech_plan(config, stored, speech_weights)
    lengths = {seconds: round(seconds / config.frame_seconds) for seconds in ANNOUNCED_SECONDS}
    announced = {s: memory.announce(config, stored, n, requantise=plan) for s, n in lengths.items()}
    first = announced[ANNOUNCED_SECONDS[0]]
    have = memory.machine()
    warning = memory.shortfall(config, stored, have, plan)
    voices = sorted(name.removeprefix(checkpoint.VOICE_PREFIX) for name in stored if checkpoint.VOICE_PREFIX in name)
    return {
        "model": model,
        "folder": str(folder.resolve()),
        "kind": config.demonstration or ("random weights" if config.synthetic else ""),
        "format": f"mlx-voicechat {version}" if version else "mlx-community",
        "quantization": quantization(config),
        "types": types(stored),
        "speech_weights": "q8" if plan else "f32",
        "files": len(files(folder)),
        "stored_bytes": sum((folder / name).stat().st_size for name in files(folder)),
        "sizes": sizes(config),
        "voices": voices,
        "speaker": config.speaker,
        "default_system_prompt": config.default_system_prompt,
        "resident_bytes": first.weights | {"text_table": first.text_table, "other": first.constants},
        "loaded_bytes": first.loaded,
        "announced_bytes": {str(seconds): each.total for seconds, each in announced.items()},
        "machine": {"memory_bytes": have.total, "available_bytes": have.available},
        "fits": warning is None,
        "warning": warning,
    }


def _folder(model: str) -> Path:
    """Where the checkpoint is; a Hub repository must have been fetched."""
    from mlx_voicechat import checkpoint, hub

    if model == checkpoint.DEMONSTRATION or os.path.isdir(os.path.expanduser(model)):
        return checkpoint.find(model)
    if not hub.is_repository_id(model):
        return checkpoint.find(model)  # which says what is wrong with it
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    if not isinstance(config, str):
        raise CheckpointError(
            f"{model} is not on this machine, and `info` downloads nothing.",
            "`mlx-voicechat generate -m` fetches it; `mlx-voicechat info tiny` describes the built-in one.",
        )
    return Path(config).parent


def quantization(config: ModelConfig) -> str:
    """How the file's weights are quantised, most layers first; "none"."""
    counts: dict[str, int] = {}
    for entry in config.quantization.values():
        kind = f"{entry.get('bits')} bits, groups of {entry.get('group_size')}, {entry.get('mode', 'affine')}"
        counts[kind] = counts.get(kind, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return "; ".join(f"{kind}: {count} layers" for kind, count in ranked) or "none"


def types(stored: Mapping[str, Stored]) -> dict[str, int]:
    """Number of stored tensors by type."""
    counts: dict[str, int] = {}
    for tensor in stored.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def sizes(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Layers and widths by network."""
    encoder, rnnt, llm, tts, codec = config.encoder, config.rnnt, config.llm, config.tts, config.codec
    return {
        "perception": {"layers": encoder.n_layers, "width": encoder.d_model, "left_frames": encoder.left_frames},
        "rnnt": {"layers": rnnt.pred_layers, "width": rnnt.pred_hidden, "pieces": len(rnnt.pieces)},
        "language": {
            "layers": llm.num_hidden_layers,
            "mamba_layers": llm.pattern.count("M"),
            "attention_layers": llm.pattern.count("*"),
            "width": llm.hidden_size,
            "vocabulary": llm.vocab_size,
        },
        "tts": {
            "layers": tts.num_hidden_layers,
            "width": tts.hidden_size,
            "window_frames": tts.sliding_window,
            "codebooks": tts.num_quantizers,
            "codes": tts.codebook_size,
        },
        "codec": {"width": codec.base_channels, "rate_hz": codec.sample_rate, "frame_samples": codec.frame_samples},
    }


def text(facts: Mapping[str, Any]) -> str:
    """The facts for a person to read."""
    from mlx_voicechat.memory import gigabytes

    prompt = facts["default_system_prompt"]
    rows = {
        "model": facts["model"],
        "folder": facts["folder"],
        "kind": facts["kind"],
        "format": f"{facts['format']}, {facts['files']} files, {gigabytes(facts['stored_bytes'])}",
        "quantization": facts["quantization"],
        "types": ", ".join(f"{name} {count}" for name, count in facts["types"].items()),
        "speech weights": f"held as {facts['speech_weights']}",
        **{
            network: ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in values.items())
            for network, values in facts["sizes"].items()
        },
        "voices": ", ".join(f"{name} (default)" if name == facts["speaker"] else name for name in facts["voices"]),
        "default prompt": repr(prompt) if prompt else "none",
    }
    resident = {name.replace("_", " "): gigabytes(size) for name, size in facts["resident_bytes"].items()}
    rows["resident"] = ", ".join(f"{name} {size}" for name, size in resident.items())
    rows["memory, loaded"] = gigabytes(facts["loaded_bytes"])
    for seconds, size in facts["announced_bytes"].items():
        rows[f"memory, {seconds} s"] = gigabytes(size)
    machine = facts["machine"]
    rows["this machine"] = f"{gigabytes(machine['memory_bytes'])}, {gigabytes(machine['available_bytes'])} available"
    return "".join(f"{name:<{NAME_WIDTH}}{value}\n" for name, value in rows.items() if value)
