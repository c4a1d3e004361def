"""`mlx-voicechat info`: what a checkpoint is, what it will take, and what this machine has. Nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mlx_voicechat.errors import CheckpointError
from mlx_voicechat.options import LoadOptions

from .options import DEFAULT_MODEL, MODEL_VARIABLE, Arithmetic, KeyValueCache, SpeechWeights
from .render import Output, note, progress_bar

if TYPE_CHECKING:
    from mlx_voicechat.config import ModelConfig
    from mlx_voicechat.weights.shards import Stored

ANNOUNCED_SECONDS = (60, 600)  # lengths of conversation to tell the memory for
NAME_WIDTH = 22
SHA256_DIGITS = 64


def info(
    model: Annotated[
        str,
        Argument(
            metavar="[MODEL]",
            envvar=MODEL_VARIABLE,
            show_default=False,
            help="A folder, a Hub repository that was fetched, or tiny; the 11B model in 4 bits if absent.",
        ),
    ] = DEFAULT_MODEL,
    speech_weights: SpeechWeights = LoadOptions.speech_weights,
    kv_cache: KeyValueCache = LoadOptions.kv_cache,
    arithmetic: Arithmetic = LoadOptions.arithmetic,
    with_hashes: Annotated[
        bool, Option("--hash", help="SHA-256 of every file too, compared with what the Hub cache knows.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, not text.")] = False,
) -> None:
    """Describe a model: its format and sizes, the memory it will take, and what this machine has.

    Reads configuration and file headers only, with --hash whole files; downloads nothing.
    """
    facts = describe(model, speech_weights, kv_cache, arithmetic)
    if with_hashes:
        facts["hashes"] = hashes(Path(facts["folder"]))
    Output().write(json.dumps(facts, ensure_ascii=False) + "\n" if as_json else text(facts))
    if facts["warning"]:
        note(facts["warning"])
    damaged = [name for name, found in facts.get("hashes", {}).items() if found["as_fetched"] is False]
    if damaged:
        raise CheckpointError(
            f"{', '.join(damaged)}: not what was fetched.",
            f"Remove {', '.join(str((Path(facts['folder']) / name).resolve()) for name in damaged)}, "
            "and fetch it again with `mlx-voicechat download`.",
        )


def describe(
    model: str, speech_weights: str | None = None, kv_cache: str | None = None, arithmetic: str | None = None
) -> dict[str, Any]:
    """Everything `info` tells. Raises CheckpointError and, for an unknown word, InputError."""
    from mlx_voicechat.gauges import chips, memory, plans
    from mlx_voicechat.weights import checkpoint, hub_cache

    from . import composition

    folder = _folder(model)
    facts = {"model": model, "folder": str(folder.resolve())}
    if hub_cache.layout(folder) == "nvidia":
        return facts | _original(folder)
    opened = checkpoint.open_folder(folder)
    config, stored, version = opened.config, opened.stored, opened.format
    options = LoadOptions(None, speech_weights, kv_cache, arithmetic)
    chosen, plan, states = plans.choose(config, stored, options)
    lengths = {seconds: round(seconds / config.frame_seconds) for seconds in ANNOUNCED_SECONDS}
    announced = {s: memory.announce(config, stored, n, requantise=plan, states=states) for s, n in lengths.items()}
    first = announced[ANNOUNCED_SECONDS[0]]
    have = memory.machine()
    warning = memory.shortfall(config, stored, have, plan, states)
    return {
        **facts,
        "kind": config.demonstration or ("random weights" if config.synthetic else ""),
        "format": f"mlx-voicechat {version}" if version else "mlx-community",
        "conversion": opened.raw.get(checkpoint.CONVERSION_KEY) or {},
        "quantization": quantization(config),
        "language_type": "f32" if states.types.float32_llm else "bf16",
        **_stored(folder, stored, config.quantization),
        "speech_weights": "q8" if plan else "f32",
        "kv_cache": chosen.kv_cache,
        "arithmetic": chosen.arithmetic,
        "sizes": sizes(config),
        "speaker": config.speaker,
        "default_system_prompt": config.default_system_prompt,
        "resident_bytes": first.weights | {"text_table": first.text_table, "other": first.constants},
        "loaded_bytes": first.loaded,
        "announced_bytes": {str(seconds): each.total for seconds, each in announced.items()},
        "longest": composition.longest(config, states, first, have.available)._asdict(),
        "machine": {"memory_bytes": have.total, "available_bytes": have.available},
        "bandwidth": {"gbps": chips.bandwidth().gbps, "source": chips.bandwidth().source},
        "forms": [plans.as_facts(row) for row in plans.table(config, stored, options)],
        "fits": warning is None,
        "warning": warning,
    }


def _original(folder: Path) -> dict[str, Any]:
    """What can be told of NVIDIA's original."""
    from mlx_voicechat.weights.config_file import read_json
    from mlx_voicechat.weights.shards import verify

    model = read_json(folder).get("model")
    speaker = model.get("inference_speaker_name") if isinstance(model, dict) else None
    return {
        "kind": "",
        "format": "NVIDIA's original",
        **_stored(folder, verify(folder), {}),
        "speaker": speaker or "",
        "fits": False,
        "warning": "NVIDIA's original does not load, it is to be converted: "
        f"mlx-voicechat convert --source {shlex.quote(str(folder))} --output FOLDER",
    }


def _stored(folder: Path, stored: Mapping[str, Stored], quantised: Mapping[str, Any]) -> dict[str, Any]:
    """What the files hold."""
    from mlx_voicechat.weights import layout

    from . import composition

    networks = composition.composition(stored, quantised)
    files = {tensor.file for tensor in stored.values()}
    return {
        "files": len(files),
        "stored_bytes": sum((folder / name).stat().st_size for name in files),
        "tensors": len(stored),
        "types": types(stored),
        "networks": {
            name: {precision: part._asdict() for precision, part in parts.items()} for name, parts in networks.items()
        },
        "voices": layout.voices(stored),
    }


def hashes(folder: Path) -> dict[str, dict[str, Any]]:
    """SHA-256 of each file, and whether it is what was fetched: None for a file that the Hub cache does not know."""
    from mlx_voicechat.weights.hub import sha256
    from mlx_voicechat.weights.hub_cache import known_hash

    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = {}
    total = sum(path.stat().st_size for path in files)
    with progress_bar(total=total, unit="B", unit_scale=True) as bar:
        for path in files:
            known, digest = known_hash(path), sha256(path, bar.update)
            same = None if known is None else known == (digest if len(known) == SHA256_DIGITS else git_hash(path))
            found[path.name] = {"sha256": digest, "as_fetched": same}
    return found


def git_hash(path: Path) -> str:
    """Git's SHA-1 of a file, by which the Hub knows small ones."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _folder(model: str) -> Path:
    """Where the checkpoint is; a Hub repository must have been fetched."""
    from mlx_voicechat.weights import checkpoint, hub, hub_cache

    if model == checkpoint.DEMONSTRATION or os.path.isdir(os.path.expanduser(model)):
        return checkpoint.find(model)
    if not hub.is_repository_id(model):
        return checkpoint.find(model)  # which says what is wrong with it
    folder = hub_cache.snapshot(model)
    if folder is None or not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{model} is not on this machine, and `info` downloads nothing.",
            f"`mlx-voicechat download {model}` fetches it; `mlx-voicechat info tiny` describes the built-in one.",
        )
    return folder


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
    from mlx_voicechat.gauges.memory import gigabytes

    conversion = facts.get("conversion", {})
    origin = [conversion.get(key) for key in ("source", "source_revision") if conversion.get(key)]
    size = gigabytes(facts["stored_bytes"])
    rows = {
        "model": facts["model"],
        "folder": facts["folder"],
        "kind": facts["kind"],
        "format": f"{facts['format']}, {facts['files']} file{'s' * (facts['files'] != 1)}, {size}",
        "plan": conversion.get("plan", ""),
        "converted from": ", revision ".join(map(str, origin)),
        "quantization": facts.get("quantization", ""),
        "language computes in": facts.get("language_type", ""),
        "tensors": f"{facts['tensors']:,}: " + ", ".join(f"{name} {count:,}" for name, count in facts["types"].items()),
        **{f"stored, {name}": _parts(parts) for name, parts in facts["networks"].items()},
        **{
            network: ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in values.items())
            for network, values in facts.get("sizes", {}).items()
        },
        "voices": ", ".join(f"{name} (default)" if name == facts["speaker"] else name for name in facts["voices"]),
    }
    rows |= _running(facts) if "machine" in facts else {}
    for name, found in facts.get("hashes", {}).items():
        verdict = {True: "  as fetched", False: "  DIFFERS from what was fetched", None: ""}[found["as_fetched"]]
        rows[name] = f"{found['sha256']}{verdict}"
    width = max(NAME_WIDTH, *(len(name) + 2 for name in rows))
    return "".join(f"{name:<{width}}{value}\n" for name, value in rows.items() if value)


def _running(facts: Mapping[str, Any]) -> dict[str, str]:
    """What running it takes, and what this machine has."""
    from mlx_voicechat.gauges.memory import gigabytes

    prompt = facts["default_system_prompt"]
    resident = {name.replace("_", " "): gigabytes(size) for name, size in facts["resident_bytes"].items()}
    rows = {
        "default prompt": repr(prompt) if prompt else "none",
        "speech weights": f"held as {facts['speech_weights']}, keys and values as {facts['kv_cache']}",
        "resident": ", ".join(f"{name} {size}" for name, size in resident.items()),
        "memory, loaded": gigabytes(facts["loaded_bytes"]),
    }
    rows |= {f"memory, {seconds} s": gigabytes(size) for seconds, size in facts["announced_bytes"].items()}
    longest, machine = facts["longest"], facts["machine"]
    made_for = longest["positions_seconds"]
    rows["longest session"] = (
        f"{duration(longest['memory_seconds'])} in the memory available now"
        + (f"; made for {duration(made_for)} (positions of the language model)" if made_for else "")
        + f"; speech looks back {duration(longest['window_seconds'])}"
    )
    speed = facts["bandwidth"]
    rows["this machine"] = (
        f"{gigabytes(machine['memory_bytes'])}, {gigabytes(machine['available_bytes'])} available; "
        f"{speed['gbps']:.0f} GB/s ({speed['source']})"
    )
    return rows | {f"a frame moves, {i}": line for i, line in enumerate(frame_table(facts["forms"]), 1)}


def frame_table(forms: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each form on a line: bytes a frame and the time that moving them takes, after so many positions."""
    for form in forms:
        sizes = "; ".join(
            f"{at['positions']:,}: {at['bytes'] / 1e9:.2f} GB, {at['floor_ms']:.1f} ms" for at in form["at"]
        )
        mark = "taken  " if form["chosen"] else "       "
        words = f"speech {form['speech_weights']}, keys {form['kv_cache']}, {form['arithmetic']}"
        yield f"{mark}{words:<34}{sizes}"


def _parts(parts: Mapping[str, Mapping[str, int]]) -> str:
    """Parameters and bytes by precision, on one line."""
    from mlx_voicechat.gauges.memory import gigabytes

    return ", ".join(
        f"{precision} {part['parameters']:,} ({gigabytes(part['bytes'])})" for precision, part in parts.items()
    )


def duration(seconds: float) -> str:
    """Seconds for a person to read."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
