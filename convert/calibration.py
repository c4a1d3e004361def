"""A folder of calibration: what the language model is given in recorded conversations, and its second moments.

    calibration.json   the recordings, the model's fingerprint, the number of positions
    inputs/N           what the language model was given in recording N, (T, H)
    moments/LAYER      the upper half of the sum of x x^T of what a layer was given, float32

Each file appears whole, so that who is stopped goes on where the files end; what is gathered again is the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_voicechat.config import LlmConfig
from mlx_voicechat.errors import InputError
from mlx_voicechat.gauges.memory import announce, gigabytes
from mlx_voicechat.networks.duplex_lm import DuplexLm
from mlx_voicechat.sound.recordings import STDIN, AudioReader
from mlx_voicechat.weights.checkpoint import Checkpoint
from mlx_voicechat.weights.precision import llm_is_float32
from mlx_voicechat.weights.shards import some_of

from . import moments
from .listening import LONGEST_REPLY_SECONDS, Listener
from .moments import Energy, Gathering, Moments

VERSION = 1
FACTS, INPUTS, HIDDEN, MOMENTS = "calibration.json", "inputs", "hidden", "moments"
HIDDEN_STATE = "x"  # tensor of a file of inputs
SOUND = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".aiff", ".aif")
LONGEST_SECONDS = 3600.0
COMPLETE = "complete"

Progress = Callable[[str, int, int], Any]  # what is worked at, how many are done, of how many


class Recording(NamedTuple):
    """A recording to calibrate with, and the options of its session."""

    path: Path
    seconds: float
    sha256: str
    options: Mapping[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """For calibration.json: what must be the same when a calibration goes on."""
        tools = [tool.name for tool in self.options.get("tools", ())]
        return {
            "name": self.path.name,
            "sha256": self.sha256,
            "system_prompt": self.options.get("system_prompt"),
            "tools": tools,
        }


def recordings(
    places: Sequence[Path], prompts: Sequence[str | None] = (None,), options: Mapping[str, Any] | None = None
) -> list[Recording]:
    """Files, and those in folders by name; `prompts` are taken in turn. Raises AudioError and InputError."""
    paths: list[Path] = []
    for place in places:
        if str(place) == STDIN:
            raise InputError("A calibration reads its recordings again when it goes on.", "Name files, not -.")
        if place.is_dir():
            inside = sorted(path for path in place.iterdir() if path.suffix.lower() in SOUND and path.is_file())
            if not inside:
                raise InputError(f"{place} holds no recordings.", f"Known by their names: {', '.join(SOUND)}.")
            paths += inside
        else:
            paths.append(place)
    if not paths:
        raise InputError("There is nothing to hear.", "Name recordings, or a folder of them, with --audio.")
    found = []
    for number, path in enumerate(paths):
        with AudioReader(path, max_seconds=LONGEST_SECONDS) as reader:
            seconds = reader.seconds
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        prompt = prompts[number % len(prompts)]
        found.append(Recording(path, seconds, digest, {**(options or {}), "system_prompt": prompt}))
    return found


@dataclass
class Calibration:
    """A finished calibration: moments by layer, for whoever quantises."""

    folder: Path
    facts: Mapping[str, Any]
    _last: tuple[str, Moments] | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        return str(self.facts["fingerprint"])

    @property
    def positions(self) -> int:
        return int(self.facts["positions"])

    @property
    def identity(self) -> str:
        """Of everything that went into it."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def inputs(self) -> list[Path]:
        """What the language model was given, a file a recording."""
        return [_numbered(self.folder / INPUTS, number) for number in range(len(self.facts["recordings"]))]

    def moments(self, module: str, width: int) -> Moments:
        """Of the inputs of a layer of the language model, by its name there; the last ones are kept."""
        key = moments.key_of(module)
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, moments.read_moments(_moments_file(self.folder, key), width)
        return self._last[1]


def open_calibration(folder: Path) -> Calibration:
    """Raises InputError for what is none, or is not finished."""
    facts = _read_facts(folder)
    if facts is None:
        raise InputError(f"{folder} is no calibration: it has no {FACTS}.", "Make one with `mlx-voicechat calibrate`.")
    if not facts.get(COMPLETE):
        raise InputError(f"The calibration {folder} is not finished.", "Start `calibrate` again: it goes on.")
    found = Calibration(folder, facts)
    if absent := [path.name for path in found.inputs if not path.exists()]:
        raise InputError(f"{folder / INPUTS} lacks {some_of(absent)}.", "Calibrate again, into a new folder.")
    return found


def _read_facts(folder: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder / FACTS} cannot be read: {error}.", "Remove the folder, and calibrate again."
        ) from None
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise InputError(f"{folder} was written by another version of this program.", "Calibrate again.")
    return facts


def _moments_file(folder: Path, key: str) -> Path:
    return folder / MOMENTS / f"{key}.safetensors"


# -- making one -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A calibration to be made, or gone on with, in `folder`."""

    folder: Path
    opened: Checkpoint
    heard: Sequence[Recording]

    @property
    def config(self) -> LlmConfig:
        return self.opened.config.llm

    @property
    def most_positions(self) -> int:
        """Of all conversations, each with the longest reply; prompts are not counted."""
        seconds = sum(recording.seconds + LONGEST_REPLY_SECONDS for recording in self.heard)
        return round(seconds / self.opened.config.frame_seconds)

    @property
    def disk_bytes(self) -> int:
        """Most that the folder takes: all moments, the inputs, and those of two blocks."""
        width = 4 if llm_is_float32(self.opened.stored) else 2
        inputs = 3 * self.most_positions * self.config.hidden_size * width
        return inputs + sum(moments.packed_bytes(size) for size in moments.keys(self.config).values())

    @property
    def memory_bytes(self) -> int:
        """The model, and the sums of the widest block, once whole and once as they are written."""
        config = self.opened.config
        model = announce(config, self.opened.stored, 0).loaded
        sizes = moments.keys(self.config)
        blocks = {key.rpartition(".")[0] for key in sizes}
        sums = max(sum(8 * size**2 for key, size in sizes.items() if key.rpartition(".")[0] == b) for b in blocks)
        return model + sums // 2 + max(map(moments.packed_bytes, sizes.values()))

    def describe(self) -> list[str]:
        """What a user should know before the work."""
        seconds = sum(recording.seconds for recording in self.heard)
        free = shutil.disk_usage(self.folder if self.folder.is_dir() else self.folder.parent).free
        count, matrices = len(self.heard), len(moments.keys(self.config))
        return [
            f"{count} recording{'s' * (count != 1)}, {seconds / 60:.1f} minutes, each until its reply has ended; "
            f"{matrices} matrices, one block at a time",
            f"disk: at most {gigabytes(self.disk_bytes)} in {self.folder}, {gigabytes(free)} free; "
            f"memory: about {gigabytes(self.memory_bytes)}",
        ]

    def check(self) -> None:
        """Raise InputError: a folder of something else, of another calibration, or a disk that is too small."""
        if not self.folder.parent.is_dir():
            raise InputError(f"There is no folder {self.folder.parent}.", "Make it first.")
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file.", "Name a folder.")
        known = _read_facts(self.folder)
        if known is None:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise InputError(f"{self.folder} holds other things than a calibration.", "Name a new folder.")
            free = shutil.disk_usage(self.folder.parent).free
            if self.disk_bytes > free:
                raise InputError(
                    f"{self.folder} may need {gigabytes(self.disk_bytes)}, the disk has {gigabytes(free)}.",
                    "Free some space, or name fewer recordings.",
                )

    def run(self, model: Listener, progress: Progress = lambda what, done, total: None) -> Calibration:
        """Hear every recording, then gather block by block; what is there already is not made again."""
        begun = {
            "version": VERSION,
            "fingerprint": moments.fingerprint(self.config, moments.norms_of(model.language)),
            "recordings": [recording.facts for recording in self.heard],
        }
        known = _read_facts(self.folder)
        if known is not None and {key: known.get(key) for key in begun} != begun:
            raise InputError(
                f"{self.folder} is a calibration of another model, or with other recordings.", "Name a new folder."
            )
        if known is not None and known.get(COMPLETE):
            return Calibration(self.folder, known)
        for folder in (self.folder, self.folder / INPUTS, self.folder / MOMENTS):
            folder.mkdir(exist_ok=True)
        moments.save_json(self.folder / FACTS, begun)
        self._hear(model, progress)
        positions = self._gather(model.language, str(begun["fingerprint"]), progress)
        facts = {**begun, "positions": positions, COMPLETE: True}
        moments.save_json(self.folder / FACTS, facts)
        return Calibration(self.folder, facts)

    def _hear(self, model: Listener, progress: Progress) -> None:
        for number, recording in enumerate(self.heard):
            progress("recordings", number, len(self.heard))
            path = _numbered(self.folder / INPUTS, number)
            if path.exists():
                continue
            with AudioReader(recording.path, model.config.input_rate_hz) as reader:
                inputs = model.heard(reader.read_all(), **recording.options)
            moments.save(path, {HIDDEN_STATE: inputs}, {"positions": len(inputs)})
        progress("recordings", len(self.heard), len(self.heard))

    def _gather(self, language: DuplexLm, fingerprint: str, progress: Progress) -> int:
        """Every block's moments, from its inputs to those of the next one; returns the number of positions."""
        blocks, positions = language.llm.layers, 0
        files = {block: [k for k in moments.keys(self.config) if k.startswith(f"{block}.")] for block in self._blocks}
        for index, name in enumerate(self._blocks):
            progress("blocks", index, len(blocks))
            if all(_moments_file(self.folder, key).exists() for key in files[name]):
                continue
            gathering = Gathering(blocks[index].mixer, name)
            energy, positions = [0.0, 0.0], 0
            target = self._inputs_of(index + 1)
            target.mkdir(parents=True, exist_ok=True)
            for number in range(len(self.heard)):
                x = _read_hidden(_numbered(self._inputs_of(index), number))
                out = moments.run_block(blocks[index], x, gathering.multiply)
                moments.save(_numbered(target, number), {HIDDEN_STATE: out}, {})
                wide = out.astype(mx.float32)
                energy[0] += float(mx.square(wide).sum())
                energy[1] += float(mx.square(wide - x.astype(mx.float32)).sum())
                positions += len(x)
            facts = {"positions": positions, "fingerprint": fingerprint}
            for key in files[name]:
                half = gathering.sums.pop(key)
                moments.save_moments(_moments_file(self.folder, key), half, facts, Energy(*energy))
            if index:
                shutil.rmtree(self._inputs_of(index))
            mx.clear_cache()
        positions = self._gather_heads(language, fingerprint)
        progress("blocks", len(blocks), len(blocks))
        shutil.rmtree(self.folder / HIDDEN, ignore_errors=True)
        return positions

    def _gather_heads(self, language: DuplexLm, fingerprint: str) -> int:
        path = _moments_file(self.folder, moments.HEADS)
        if not path.exists():
            gathering, positions, energy = Gathering(language, ""), 0, 0.0
            for number in range(len(self.heard)):
                x = _read_hidden(_numbered(self._inputs_of(len(language.llm.layers)), number))
                gathering.note(moments.HEADS, language.llm.norm_f(x))
                energy += float(mx.square(x.astype(mx.float32)).sum())
                positions += len(x)
            facts = {"positions": positions, "fingerprint": fingerprint}
            moments.save_moments(path, gathering.sums.pop(moments.HEADS), facts, Energy(energy, energy))
        return moments.read_moments(path, self.config.hidden_size).positions

    @property
    def _blocks(self) -> list[str]:
        return [moments.block_name(index) for index in range(self.config.num_hidden_layers)]

    def _inputs_of(self, index: int) -> Path:
        """Where the inputs of a block are, of all recordings."""
        return self.folder / HIDDEN / str(index) if index else self.folder / INPUTS


def _numbered(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def _read_hidden(path: Path) -> mx.array:
    tensors, _ = moments.read(path)
    return tensors[HIDDEN_STATE]


def check_model(calibration: Calibration, config: LlmConfig, norms: Sequence[mx.array], name: str) -> None:
    """Raise InputError unless the calibration is of this language model, in whatever precision."""
    if moments.fingerprint(config, norms) != calibration.fingerprint:
        heard = some_of([str(each["name"]) for each in calibration.facts["recordings"]])
        raise InputError(
            f"The calibration {calibration.folder} ({heard}) is of another language model than {name}.",
            "Calibrate this one: any precision of it will do.",
        )
