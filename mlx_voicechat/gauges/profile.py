"""Frame timings of a session and their summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STAGES = ("perception", "rnnt", "language", "tts", "codec")
COLD_FRAMES = 5  # the first frames compile kernels and touch weights
BARRIER_PERIOD = 4  # every fourth frame waits for the device after each stage
REST = "rest"  # what a stage does outside its timed parts
NOTES = [
    f"stage times come from every {BARRIER_PERIOD}th frame, which waits for the device after each stage",
    "total and realtime_factor come only from frames without such barriers",
]
FINER_NOTES = [
    "sub_stages were timed: every frame waits for the device at each of their boundaries",
    "total is therefore longer than a frame in use, and not the real-time factor, which is null",
]


@dataclass
class FrameTiming:
    """One frame in milliseconds: `total`, `stages` when barriers were set between them, `parts` within those."""

    index: int
    total: float
    stages: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


class Profile:
    """Collects a FrameTiming a frame. Stage times and total times come from different frames.

    A barrier after each stage costs what overlapping them saves, so frames with barriers give the stage times and
    frames without give the total and the real-time factor. With `finer`, set while `parts.timed` wraps the model, every
    frame has barriers, within its stages too: `sub_stages` are known then, and the real-time factor is not.
    """

    def __init__(self, budget_ms: float) -> None:
        self.budget_ms = budget_ms
        self.frames: list[FrameTiming] = []
        self.finer = False
        self._started = 0.0
        self._mark = self._part_mark = 0.0
        self._stages: dict[str, float] = {}
        self._parts: dict[str, float] = {}

    @property
    def barriers(self) -> bool:
        """Whether the frame that starts next is one with barriers."""
        return self.finer or len(self.frames) % BARRIER_PERIOD == BARRIER_PERIOD - 1

    def start(self) -> None:
        self._started = self._mark = self._part_mark = time.perf_counter()
        self._stages, self._parts = {}, {}

    def stage(self, name: str) -> None:
        """The time since the last mark belongs to `name`; the caller has waited for the device."""
        if self.finer:
            self.part(f"{name}.{REST}")
        now = time.perf_counter()
        self._stages[name] = self._stages.get(name, 0.0) + (now - self._mark) * 1000
        self._mark = now

    def part(self, name: str) -> None:
        """Like `stage`, for a part of one, `<stage>.<part>`; parts have marks of their own."""
        now = time.perf_counter()
        self._parts[name] = self._parts.get(name, 0.0) + (now - self._part_mark) * 1000
        self._part_mark = now

    def stop(self) -> None:
        total = (time.perf_counter() - self._started) * 1000
        self.frames.append(FrameTiming(len(self.frames), total, self._stages, self._parts))

    def summary(self) -> dict[str, Any]:
        """Mean, p50, p95 and max per stage, frames per second and the real-time factor (mean frame / budget).

        Values are None when the session was too short to have a warm frame of their kind.
        """
        warm = self.frames[COLD_FRAMES:]
        staged = [f for f in warm if f.stages]
        finer = any(f.parts for f in self.frames)
        stages = {name: spread([f.stages[name] for f in staged if name in f.stages]) for name in STAGES}
        stages["total"] = spread([f.total for f in warm if finer or not f.stages])
        mean = None if finer else stages["total"]["mean_ms"]
        summary: dict[str, Any] = {
            "stages": stages,
            "processing_frames_per_second": None if mean is None else 1000 / mean,
            "realtime_factor": None if mean is None else mean / self.budget_ms,
            "budget_ms": self.budget_ms,
            "frames": len(self.frames),
            "cold_frames_dropped": min(COLD_FRAMES, len(self.frames)),
            "barrier_frames": len(staged),
            "notes": FINER_NOTES if finer else NOTES,
        }
        if finer:
            names = dict.fromkeys(name for f in warm for name in f.parts)
            summary["sub_stages"] = {name: spread([f.parts[name] for f in warm if name in f.parts]) for name in names}
        return summary

    def every_frame(self) -> dict[str, Any]:
        """All timings, those of the cold frames included: what `MLX_VOICECHAT_PROFILE_FRAMES` writes."""
        frames = [
            {"index": f.index, "cold": f.index < COLD_FRAMES, "total_ms": f.total, "stages_ms": f.stages}
            | ({"sub_stages_ms": f.parts} if f.parts else {})
            for f in self.frames
        ]
        return {"budget_ms": self.budget_ms, "cold_frames": COLD_FRAMES, "frames": frames}


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, 95th percentile and maximum of times in milliseconds; None where there is none."""
    if not values:
        return {"mean_ms": None, "p50_ms": None, "p95_ms": None, "max_ms": None}
    array = np.asarray(values)
    return {
        "mean_ms": float(array.mean()),
        "p50_ms": float(np.percentile(array, 50)),
        "p95_ms": float(np.percentile(array, 95)),
        "max_ms": float(array.max()),
    }
