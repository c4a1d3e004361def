"""Which layers of a checkpoint are quantised, and how: what `config.json` says, settled against the files' headers.

`quantization` is written as a setting for all layers, as one per layer, or both, and `quantization_config` copies it or
stands alone; where neither says anything, `mlx_conversion.quantization` may (spec: config-map.md; mlx.nn.quantize for
what the numbers mean). Names of layers have dots, so whatever else stands there is not one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .shards import some_of

KEYS = ("quantization", "quantization_config")  # in config.json; where both stand they must agree
CONVERSION = "mlx_conversion"  # a block of the public converter, with a `quantization` of its own
MODULES = "modules"  # where a map of the converter lists its layers: names, or entries by name
FIXED = {"mxfp8": (8, 32), "mxfp4": (4, 32), "nvfp4": (4, 16)}  # mode: bits and group size, of MLX
NUMBERS = ("group_size", "bits")
CORRECT = 'Correct it in config.json, as "quantization": {"group_size": 64, "bits": 4} for all layers; or get it again.'

Shape = tuple[int, ...]
Entry = dict[str, Any]  # group_size, bits, and mode unless it is affine


class Settings(NamedTuple):
    """One of the two maps: the setting for all layers, None if it has none, and those of single layers or False."""

    common: Entry | None
    layers: dict[str, Any]


def resolve(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape] | None, plain: Mapping[str, Shape], where: str
) -> dict[str, Entry]:
    """The quantised layers of a checkpoint by module name: those that have `.scales` beside their weight.

    `shapes`: of all stored tensors; without them the layers that are named. `plain`: unquantised shapes of the model.
    Raises CheckpointError: maps that differ, scales without a setting, a setting that does not fit the packed width.
    """
    maps = [settings for key, value in _maps(raw) if any(settings := _settings(value, f"{where}: {key}"))]
    named = {layer for found in maps for layer, entry in found.layers.items() if entry}
    scaled = named if shapes is None else _scaled(shapes)
    options = [{layer: _entry(found, layer, scaled, shapes) for layer in sorted(scaled | named)} for found in maps]
    if len(options) == 2:
        _check_agreement(options[0], options[1], maps, where)
    entries = options[0] if options else {}
    if bare := sorted(layer for layer in scaled if not entries.get(layer)):
        raise CheckpointError(
            f"{where} does not say how {len(bare)} layers that have scales are quantised: {some_of(bare)}.", CORRECT
        )
    found = {layer: entry for layer, entry in entries.items() if entry}
    if shapes is not None:
        for layer in sorted(scaled & plain.keys()):
            _check_width(layer, found[layer], shapes, plain[layer], where)
    return found


def is_stated(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says anywhere that weights are quantised."""
    return bool(_maps(raw))


def summary(raw: Mapping[str, Any]) -> str:
    """What a config alone says of it: `4 bits`, `3 to 8 bits`, `mxfp4, 8 bits`; empty where it says nothing."""
    bits: set[int] = set()
    modes: set[str] = set()
    for key, value in _maps(raw):
        settings = _settings(value, key)
        for entry in [settings.common, *settings.layers.values()]:
            mode = entry.get("mode", "affine") if isinstance(entry, dict) else ""
            if mode in FIXED:
                modes.add(mode)
            elif isinstance(entry, dict) and entry.get("bits"):
                bits.add(entry["bits"])
    words = sorted(modes)
    if bits:
        words.append(f"{min(bits)} bits" if len(bits) == 1 else f"{min(bits)} to {max(bits)} bits")
    return ", ".join(words)


def _maps(raw: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What a config says of quantisation, by key."""
    block = raw.get(CONVERSION)
    inside = block.get(KEYS[0]) if isinstance(block, Mapping) else None
    found = [(key, raw[key]) for key in KEYS if raw.get(key)]
    return found or ([(f"{CONVERSION}.{KEYS[0]}", inside)] if inside else [])


def _scaled(shapes: Mapping[str, Shape]) -> set[str]:
    layers = (name.removesuffix(".scales") for name in shapes if name.endswith(".scales"))
    return {layer for layer in layers if f"{layer}.weight" in shapes}


def _settings(value: Any, where: str) -> Settings:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} is {value!r}, expected an object.", CORRECT)
    listed = value.get(MODULES) or {}
    named = listed if isinstance(listed, Mapping) else dict.fromkeys(map(str, listed), True)
    entries = [*value.items(), *named.items()]
    layers = {name: entry for name, entry in entries if isinstance(entry, dict | bool) and "." in name}
    common = {key: value[key] for key in (*NUMBERS, "mode") if value.get(key) is not None}
    for name, entry in {"": common, **layers}.items():
        if isinstance(entry, dict) and any(type(entry.get(key, 0)) is not int for key in NUMBERS):
            raise CheckpointError(f"{where}{'.' * bool(name)}{name} is {entry}, expected whole numbers.", CORRECT)
    return Settings(common or None, layers)


def _entry(settings: Settings, layer: str, scaled: set[str], shapes: Mapping[str, Shape] | None) -> Entry | None:
    """A layer's own setting, what it leaves out taken from the common one; None if it has none or False."""
    own = settings.layers.get(layer, layer in scaled)
    if not own or (own is True and settings.common is None):
        return None
    own = {} if own is True else {key: value for key, value in own.items() if value is not None}
    entry = {**(settings.common or {}), **own}
    # biases beside the scales: the common mode is not this layer's
    affine = shapes is not None and f"{layer}.biases" in shapes and "mode" not in own
    mode = "affine" if affine else entry.get("mode", "affine")
    bits, group_size = FIXED.get(mode, (None, None)) if isinstance(mode, str) else (None, None)
    found = {"group_size": entry.get("group_size", group_size), "bits": entry.get("bits", bits)}
    return found if mode == "affine" else found | {"mode": mode}


def _check_agreement(
    first: Mapping[str, Entry | None], second: Mapping[str, Entry | None], maps: list[Settings], where: str
) -> None:
    apart = [f"{layer}: {entry or 'none'} and {second[layer] or 'none'}" for layer, entry in first.items()]
    apart = [text for text, layer in zip(apart, first, strict=True) if first[layer] != second[layer]]
    if not first and maps[0].common != maps[1].common:
        apart = [f"{maps[0].common} and {maps[1].common}"]
    if apart:
        raise CheckpointError(
            f"{where}: {' and '.join(KEYS)} differ, for {some_of(apart)}.",
            "Remove the one that is not what the layers were quantised with, or get it again.",
        )


def _check_width(layer: str, entry: Entry, shapes: Mapping[str, Shape], plain: Shape, where: str) -> None:
    """Raise CheckpointError unless so many bits and groups are what the packed weight and its scales hold."""
    packed, scales = shapes[f"{layer}.weight"], shapes[f"{layer}.scales"]
    if len(plain) != 2 or len(packed) != 2 or len(scales) != 2 or not packed[0] == scales[0] == plain[0]:
        return  # what is wrong here is more than the setting
    inputs, bits, group_size = plain[1], entry["bits"], entry["group_size"]
    if None not in (bits, group_size) and packed[1] * 32 == inputs * bits and scales[1] * group_size == inputs:
        return
    is_bits, is_group = packed[1] * 32 / inputs, inputs / max(1, scales[1])
    raise CheckpointError(
        f"{where}: quantization of {layer} is {entry}, but with {inputs:,} inputs its packed weight is {packed} and "
        f"its scales are {scales}: {is_bits:g} bits in groups of {is_group:g}.",
        CORRECT,
    )
