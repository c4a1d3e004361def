"""Two checkpoints of one model in the same recorded conversations, one after the other in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_voicechat.config import ModelConfig
from mlx_voicechat.errors import InputError
from mlx_voicechat.gauges import plans, traffic
from mlx_voicechat.gauges.memory import gigabytes
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.sound.recordings import AudioReader
from mlx_voicechat.voicechat import VoiceChat, load_opened
from mlx_voicechat.weights.checkpoint import Checkpoint
from mlx_voicechat.weights.shards import some_of

from .calibration import Recording
from .conversations import Measures, Run, measures, run, word_edits
from .source import Say, stored_bytes

FLOOR_SECONDS = 60.0  # of conversation, for the traffic of a frame
OF_THE_FILE = {"quantization", "synthetic", "demonstration"}  # what a config says of a checkpoint, not of its model

Progress = Callable[[str, int, int], Any]  # what is worked at, how many are done, of how many


class Own(NamedTuple):
    """Two runs that each chose for themselves: parts of ids that are equal, the first frame where one is not, and
    the words of transcript and reply that differ, of how many."""

    same_text: float
    same_function: float
    first_difference: int | None
    transcript_edits: int
    transcript_words: int
    reply_edits: int
    reply_words: int


class Compared(NamedTuple):
    """A recording: `forced` to the first checkpoint's ids, and on its `own`; what both said."""

    name: str
    forced: Measures
    own: Own
    texts: tuple[str, str]


class Size(NamedTuple):
    """A checkpoint: its weights' bytes, what a frame moves, and the time that takes at least."""

    name: str
    bytes: int
    moved: int
    floor_ms: float


class Report(NamedTuple):
    """What was found, by recording and of each checkpoint."""

    recordings: list[Compared]
    sizes: tuple[Size, Size]
    bandwidth_gbps: float

    def totals(self) -> dict[str, float | int]:
        """Means by frame, and errors by word."""
        frames = np.array([each.forced.frames for each in self.recordings])
        found: dict[str, float | int] = {"frames": int(frames.sum())}
        for name in Measures._fields[1:]:
            values = np.array([getattr(each.forced, name) for each in self.recordings])
            found[name] = float((values * frames).sum() / frames.sum())
        for name in ("same_text", "same_function"):
            values = np.array([getattr(each.own, name) for each in self.recordings])
            found[f"own_{name}"] = float((values * frames).sum() / frames.sum())
        found["all_equal"] = sum(each.own.first_difference is None for each in self.recordings)
        for name in ("transcript", "reply"):
            edits, words = (
                sum(getattr(each.own, f"{name}_{what}") for each in self.recordings) for what in ("edits", "words")
            )
            found[f"{name}_word_errors"] = edits / words if words else float(edits > 0)
        return found

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        recordings = [
            {"name": each.name, "told": each.forced._asdict(), "own": each.own._asdict(), "texts": list(each.texts)}
            for each in self.recordings
        ]
        sizes = [size._asdict() for size in self.sizes]
        return {
            "checkpoints": sizes,
            "bandwidth_gbps": self.bandwidth_gbps,
            "total": self.totals(),
            "recordings": recordings,
        }


def check(first: Checkpoint, second: Checkpoint) -> None:
    """Raise InputError unless both are of one model: sizes, rates, ids and tokens."""
    one, other = (_model(checkpoint.config) for checkpoint in (first, second))
    unlike = [each.name for each in fields(one) if getattr(one, each.name) != getattr(other, each.name)]
    if not unlike and first.tokenizer.backend.get_vocab() != second.tokenizer.backend.get_vocab():
        unlike = ["tokenizer"]
    if unlike:
        raise InputError(
            f"{first.folder} and {second.folder} are of two models: they differ in {some_of(unlike)}.",
            "Name two checkpoints of one model, in any precision.",
        )


def _model(config: ModelConfig) -> ModelConfig:
    llm = replace(config.llm, max_positions=None)
    ignored: dict[str, Any] = dict.fromkeys(OF_THE_FILE - {"quantization"})
    return replace(config, llm=llm, quantization={}, **ignored)


class Comparison:
    """Two opened checkpoints and what they are to hear; `extra_seconds` of silence follow a recording."""

    def __init__(
        self, opened: Sequence[tuple[str, Checkpoint]], heard: Sequence[Recording], extra_seconds: float, seed: int
    ) -> None:
        self._opened, self._heard = opened, heard
        self._extra_seconds, self._seed = extra_seconds, seed
        check(opened[0][1], opened[1][1])
        self._config = opened[0][1].config

    @property
    def disk_bytes(self) -> int:
        """Of temporary files: the first checkpoint's logits."""
        seconds = sum(recording.seconds + self._extra_seconds for recording in self._heard)
        return round(seconds / self._config.frame_seconds) * 2 * 4 * self._config.llm.vocab_size

    def run(
        self,
        say: Say,
        bandwidth_gbps: float | None = None,
        progress: Progress = lambda what, done, total: None,
    ) -> Report:
        """Each checkpoint hears every recording; raises InputError when temporary files have no room."""
        with tempfile.TemporaryDirectory(prefix="mlx-voicechat-") as place:
            folder, free = Path(place), shutil.disk_usage(place).free
            say(f"temporary files: {gigabytes(self.disk_bytes)} in {folder.parent}, {gigabytes(free)} free.")
            if self.disk_bytes > free:
                raise InputError(
                    f"{folder.parent} has no room for {gigabytes(self.disk_bytes)}.",
                    "Set TMPDIR to another folder, or name fewer recordings.",
                )
            expected = self._first(folder, say, progress)
            mx.clear_cache()
            compared = self._second(folder, expected, say, progress)
        bandwidth = bandwidth_gbps or traffic.measured_bandwidth()
        sizes = [_size(name, checkpoint, bandwidth) for name, checkpoint in self._opened]
        return Report(compared, (sizes[0], sizes[1]), bandwidth)

    def _first(self, folder: Path, say: Say, progress: Progress) -> list[Run]:
        model, runs = self._load(0, say), []
        for number, recording in enumerate(self._heard):
            progress("first", number, len(self._heard))
            found = run(model, self._samples(recording), **self._options(recording))
            np.save(folder / f"{number}.npy", found.logits)
            runs.append(found._replace(logits=np.zeros(0, np.float32)))
        return runs

    def _second(self, folder: Path, expected: list[Run], say: Say, progress: Progress) -> list[Compared]:
        model, found = self._load(1, say), []
        for number, (recording, first) in enumerate(zip(self._heard, expected, strict=True)):
            progress("second", number, len(self._heard))
            samples, options = self._samples(recording), self._options(recording)
            file = folder / f"{number}.npy"
            forced = run(model, samples, first.ids, **options)
            apart = measures(first._replace(logits=np.load(file)), forced, self._config.output_rate_hz)
            file.unlink()
            own = run(model, samples, **options)
            found.append(Compared(recording.path.name, apart, _own(first, own), (first.text, own.text)))
        progress("second", len(self._heard), len(self._heard))
        return found

    def _load(self, index: int, say: Say) -> VoiceChat:
        return load_opened(*self._opened[index], LoadOptions(), say)

    def _samples(self, recording: Recording) -> np.ndarray:
        with AudioReader(recording.path, self._config.input_rate_hz) as reader:
            samples = reader.read_all()
        return np.concatenate([samples, np.zeros(round(self._extra_seconds * self._config.input_rate_hz), np.float32)])

    def _options(self, recording: Recording) -> dict[str, Any]:
        return {**recording.options, "seed": self._seed}


def _own(first: Run, second: Run) -> Own:
    same = first.ids == second.ids
    apart = np.flatnonzero(~same.all(axis=1))
    transcript, reply = word_edits(first.transcript, second.transcript), word_edits(first.text, second.text)
    means = same.mean(axis=0)
    return Own(float(means[0]), float(means[1]), int(apart[0]) if len(apart) else None, *transcript, *reply)


def _size(name: str, opened: Checkpoint, bandwidth_gbps: float) -> Size:
    config, stored = opened.config, opened.stored
    form = plans.choose(config, stored, LoadOptions())
    positions = round(FLOOR_SECONDS / config.frame_seconds)
    moved = sum(traffic.traffic(config, stored, positions, form.requantise, form.states).values())
    weights = sum(map(stored_bytes, stored.values()))
    return Size(name, weights, moved, traffic.milliseconds(moved, bandwidth_gbps))
