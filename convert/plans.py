"""Conversion plans: ordered rules from a tensor's name to the precision it is stored in.

The first rule that matches decides. What no rule names becomes bfloat16, but KEPT stays as wide as the source has it.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import mlx.core as mx

from mlx_voicechat.errors import InputError
from mlx_voicechat.weights import layout
from mlx_voicechat.weights.layout import fused_with
from mlx_voicechat.weights.quantization import FIXED
from mlx_voicechat.weights.shards import some_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
WORDS = ("f32", "bf16", "keep")

BODY = r"stt_model\.llm\.layers\.\d+\.mixer\.\w+_proj\.weight"
HEADS = r"stt_model\.(embed_tokens|lm_head|function_head)\.weight"
LANGUAGE = re.compile(f"{BODY}|{HEADS}")
CODEBOOKS = re.compile(r"tts_model\.(tts_model\.rvq_embs|audio_codec\.prvq\.mus_list\.\d+)")
REST = {"codebooks, A_log, integers": "keep", "all others": "bf16"}  # what no rule decides
KEPT = re.compile(rf".*\.A_log|{CODEBOOKS.pattern}")  # never below the source's width, unless as published


class Quantised(NamedTuple):
    """Settings of `mx.quantize`."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.bits}/{self.group_size}/{self.mode}"

    def entry(self) -> dict[str, Any]:
        """As `quantization` in config.json names it."""
        fields: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits}
        return fields if self.mode == "affine" else fields | {"mode": self.mode}

    @property
    def types(self) -> tuple[tuple[str, str], ...]:
        """(name, safetensors type) of the tensors that a weight becomes."""
        if self.mode == "affine":
            return ("weight", "U32"), ("scales", "BF16"), ("biases", "BF16")
        return ("weight", "U32"), ("scales", "U8")

    def arguments(self) -> dict[str, Any]:
        """Of `mx.quantize` and `mx.dequantize`."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def known_settings(bits: object, group_size: object, mode: object) -> Quantised | None:
    """Settings that MLX has; None for others, or for what is no setting at all."""
    if type(bits) is not int or type(group_size) is not int or not isinstance(mode, str):
        return None
    affine = mode == "affine" and bits in AFFINE_BITS and group_size in AFFINE_GROUPS
    return Quantised(bits, group_size, mode) if affine or FIXED.get(mode) == (bits, group_size) else None


Word: TypeAlias = Literal["f32", "bf16", "keep"]
Setting: TypeAlias = "Word | Quantised"


class Facts(NamedTuple):
    """A tensor to plan for: its shape in MLX's axis order, and whether it holds integers."""

    shape: tuple[int, ...]
    integer: bool


@dataclass(frozen=True)
class Rule:
    """`pattern` decides for the names it matches whole.

    Several `settings` (of the speech networks in named plans): the first whose group divides the inputs, else bfloat16.
    """

    text: str
    pattern: re.Pattern[str]
    settings: tuple[Setting, ...]

    def matches(self, name: str) -> bool:
        return self.pattern.fullmatch(name) is not None or (
            name.endswith(".weight") and self.pattern.fullmatch(name.removesuffix(".weight")) is not None
        )


@dataclass(frozen=True)
class Plan:
    """`name` as given, and its rules in order; `file` says that a user wrote them.

    `calibrated`: of no use without a calibration. `summary`: in place of rules that are too many to tell.
    """

    name: str
    rules: tuple[Rule, ...]
    file: bool = False
    calibrated: bool = False
    summary: str = ""

    def with_bits(self, chosen: Mapping[str, Quantised], name: str, summary: str) -> Plan:
        """This plan, but for tensors that have a setting of their own."""
        own = tuple(Rule(tensor, re.compile(re.escape(tensor)), (setting,)) for tensor, setting in chosen.items())
        return replace(self, name=name, rules=own + self.rules, file=False, summary=summary)

    def described(self) -> dict[str, str]:
        """The rules as text, for config.json and the model card."""
        rules = {rule.text: ", else ".join(map(str, rule.settings)) for rule in self.rules}
        return rules if "*" in rules else rules | REST

    def settings(self, tensors: Mapping[str, Facts]) -> dict[str, Setting]:
        """How each tensor is stored. Raises InputError, by name: what cannot be narrowed, groups, parts, idle rules."""
        for setting in dict.fromkeys(setting for rule in self.rules for setting in rule.settings):
            _check_available(setting)
        chosen: dict[str, Setting] = {}
        refused: dict[Rule, list[str]] = {}
        odd: dict[Rule, list[str]] = {}
        idle = dict.fromkeys(self.rules)
        for name, facts in tensors.items():
            rule = next((rule for rule in self.rules if rule.matches(name)), None)
            if rule is None:
                chosen[name] = "keep" if facts.integer or KEPT.fullmatch(name) else "bf16"
                continue
            idle.pop(rule, None)
            chosen[name] = setting = _first_fitting(rule, facts)
            if _narrows(name, facts, setting, self.file):
                refused.setdefault(rule, []).append(name)
            elif isinstance(setting, Quantised) and facts.shape[-1] % setting.group_size:
                odd.setdefault(rule, []).append(f"{name} ({facts.shape[-1]:,} inputs)")
            elif facts.integer:
                chosen[name] = "keep"
        self._refuse(refused, odd, list(idle) if self.file else [])
        _check_parts(chosen)
        return chosen

    def _refuse(self, refused: dict[Rule, list[str]], odd: dict[Rule, list[str]], idle: list[Rule]) -> None:
        where = f"{self.name}: the rule " if self.file else f"Plan {self.name}: "
        for rule, names in refused.items():
            raise InputError(
                f'{where}"{rule.text}" = "{rule.settings[0]}" would narrow what must stay wide: {some_of(names)}.',
                'Name only matrices (`*_proj`, `*.linear1`), or put a rule such as "*.A_log" = "keep" before it.',
            )
        for rule, names in odd.items():
            raise InputError(
                f'{where}"{rule.text}" = "{rule.settings[0]}" has a group that does not divide: {some_of(names)}.',
                "Choose `bf16`, or other groups for them in a plan of your own, a .toml file.",
            )
        for rule in idle:
            raise InputError(
                f'{where}"{rule.text}" decides for no tensor of this model.',
                "Patterns are names with * for anything, and the first that matches decides.",
            )


def _first_fitting(rule: Rule, facts: Facts) -> Setting:
    if len(rule.settings) == 1:
        return rule.settings[0]
    fitting = (s for s in rule.settings if isinstance(s, Quantised) and facts.shape[-1] % s.group_size == 0)
    return next(fitting, "bf16") if len(facts.shape) == 2 else "bf16"


def quantisable(name: str, facts: Facts) -> bool:
    """Matrices of linear layers and the LLM's embedding.

    Not: norms, biases, convolutions, LSTM, codebooks, latents, `low_mat`, and what the text table is made of.
    """
    known = LANGUAGE.fullmatch(name) or layout.SPEECH_MATRIX.search(name)
    return len(facts.shape) == 2 and not facts.integer and known is not None


def _narrows(name: str, facts: Facts, setting: Setting, file: bool) -> bool:
    if isinstance(setting, Quantised):
        return not quantisable(name, facts)
    return file and setting == "bf16" and KEPT.fullmatch(name) is not None


def _check_parts(chosen: Mapping[str, Setting]) -> None:
    for name, setting in chosen.items():
        parts = [part for part in fused_with(name) if part in chosen]
        if any(chosen[part] != setting for part in parts if isinstance(setting, Quantised)):
            listed = ", ".join(f"{part} {chosen[part]}" for part in parts)
            raise InputError(f"Parts that run as one layer must be stored alike: {listed}.", "Give them one rule.")


def _check_available(setting: Setting) -> None:
    """Raise InputError when this MLX cannot quantise so."""
    if not isinstance(setting, Quantised):
        return
    try:
        mx.quantize(mx.zeros((32, 128), mx.bfloat16), **setting.arguments())
    except (ValueError, TypeError, RuntimeError):
        raise InputError(
            f"This MLX ({metadata.version('mlx')}) cannot quantise as {setting}.", "Update MLX, or choose another plan."
        ) from None


# -- named plans ----------------------------------------------------------------------------------------------------


def _rule(text: str, pattern: str, *settings: Setting) -> Rule:
    return Rule(text, re.compile(pattern), settings)


def _language(body: Quantised, heads: Quantised) -> tuple[Rule, ...]:
    return _rule("LLM body", BODY, body), _rule("LLM embeddings and heads", HEADS, heads)


A_LOG = _rule("*.A_log", r".*\.A_log", "keep")
EVERYTHING_BF16 = _rule("*", ".*", "bf16")
EIGHT = Quantised(8, 64)
SPEECH = _rule(
    "matrices of encoder, TTS, MoG and the codec's blocks",
    rf"(?={layout.SPEECH_MATRIX.pattern}).*",
    EIGHT,
    Quantised(8, 32),
)


def _named() -> dict[str, Plan]:
    plans = [Plan("f32", (_rule("*", ".*", "f32"),)), Plan("bf16", (A_LOG, EVERYTHING_BF16))]
    for bits in (8, 6, 5, 4):  # everything but the LLM as the published checkpoints have it
        whole = Quantised(bits, 64)
        plans.append(Plan(f"{bits}bit", (A_LOG, *_language(whole, whole), EVERYTHING_BF16)))
    plans.append(Plan("mixed-5", (*_language(Quantised(5, 64), EIGHT), SPEECH)))
    plans.append(Plan("mixed-4", _language(Quantised(4, 64), EIGHT)))
    for bits in (4, 3):
        rules = (*_language(Quantised(bits, 64), EIGHT), SPEECH)
        plans.append(Plan(f"gptq-{bits}", rules, calibrated=True))
    for mode in ("mxfp8", "mxfp4"):
        whole = Quantised(*FIXED[mode], mode)
        plans.append(Plan(mode, _language(whole, whole)))
    return {plan.name: plan for plan in plans}


NAMED = _named()


def find(name: str) -> Plan:
    """A named plan, or that of a TOML file. Raises InputError."""
    if name in NAMED:
        return NAMED[name]
    if not name.endswith(".toml"):
        raise InputError(f"There is no plan {name!r}.", f"Plans: {', '.join(NAMED)}, or a file that ends in .toml.")
    try:
        raw = tomllib.loads(Path(os.path.expanduser(name)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"The plan {name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are the first
        raise InputError(f"The plan {name} is not TOML: {error}.") from None
    if not raw:
        raise InputError(f"The plan {name} has no rules.", 'A rule: "stt_model.lm_head" = "8/64/affine"')
    rules = []
    for pattern, value in raw.items():
        if not isinstance(value, str):
            raise InputError(
                f"The plan {name}: {pattern} is no rule.", 'Quote both sides: "stt_model.lm_head" = "8/64/affine"'
            )
        rules.append(Rule(pattern, re.compile(fnmatch.translate(pattern)), (parse_setting(value, pattern, name),)))
    return Plan(Path(name).name, tuple(rules), file=True)


def parse_setting(value: str, pattern: str, where: str) -> Setting:
    """`f32`, `bf16`, `keep`, `bits/group`, `bits/group/mode`, or a mode that fixes both."""
    for word in WORDS:
        if value == word:
            return word  # type: ignore[return-value]
    if value in FIXED:
        return Quantised(*FIXED[value], value)
    found = re.fullmatch(r"(\d{1,3})/(\d{1,3})(?:/(\w+))?", value)
    if found and (setting := known_settings(int(found[1]), int(found[2]), found[3] or "affine")):
        return setting
    numbers = " ".join(map(str, AFFINE_BITS)), " ".join(map(str, AFFINE_GROUPS))
    fixed = ", ".join(f"{bits}/{group}/{mode}" for mode, (bits, group) in FIXED.items())
    raise InputError(
        f'{where}: the rule "{pattern}" = "{value}" is not understood.',
        f"Use {', '.join(WORDS)}, bits/group/affine (bits {numbers[0]}; groups {numbers[1]}), or {fixed}.",
    )
