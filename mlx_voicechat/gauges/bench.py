"""Measures a model in use: frame times by stage, one frame's launches and host reads, memory, floor."""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
from mlx.utils import tree_flatten

from ..config import ModelConfig
from ..frame import Frame
from ..options import LoadOptions
from ..session import Session
from ..voicechat import VoiceChat, load_opened
from ..weights import checkpoint
from . import memory, traffic
from .company import company
from .counting import Count, counting
from .launches import gpu_launches, steady_state
from .parts import timed
from .profile import COLD_FRAMES, STAGES, FrameTiming, Profile
from .sustained import sustained

COMPILED = LoadOptions(compile=True)
STEADY_FRAMES = 12  # frames before the one that is counted
SEARCHED_FRAMES = 100  # tried for one without a transcript symbol
GROWTH_FRAMES = 1000  # at either end of a session
PART_FRAMES = 60  # at most, of a session whose parts are timed, and of several together
FAINT = 1e-3  # amplitude of the noise that is heard: a quiet room
NOISE_FRAMES = 125  # then it repeats


Load: TypeAlias = Callable[[str, checkpoint.Checkpoint, LoadOptions, Callable[[str], None]], VoiceChat]


class Loading(NamedTuple):
    """One load in seconds and bytes: MLX's active memory and the process's resident memory, before and after."""

    seconds: float
    active_before: int
    active_after: int
    peak: int
    resident_before: int
    resident_after: int

    @property
    def bytes(self) -> int:
        return self.active_after - self.active_before


@dataclass(frozen=True)
class Counted:
    """What a frame handed to the device, which frame it was, and how many transcript symbols it emitted."""

    count: Count
    index: int
    symbols: int


def bench(
    model: str | Path,
    frames: int = 250,
    options: LoadOptions = COMPILED,
    bandwidth_gbps: float | None = None,
    parts: bool = False,
    sessions: int = 1,
    say: Callable[[str], None] = checkpoint.print_notice,
    progress: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
    minutes: float = 0.0,
    load: Load = load_opened,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a model and measure `frames` frames of it -> the report, and the timing of every frame (`every_frame`).

    `parts` times the parts of the stages too, in a session of their own; `sessions` more than one, so many together
    (`company`). `progress` gets the number of frames done; `stop` ends the measured session early. `minutes`: then
    frames without a pause for so long (`sustained`). `load` makes the model of an opened checkpoint: on several
    machines, a part of it. Raises what `load` raises.
    """
    opened, loaded, loading = _load(model, options, say, load)
    config, stored, plan = opened.config, opened.stored, loaded.requantised
    noise = faint_noise(config)
    gpu, compiled = _compile_and_count(loaded, bool(options.compile), say)
    first_opening, counted = count_frame(loaded, noise, min(frames, SEARCHED_FRAMES))
    few = min(frames, PART_FRAMES)
    sub_stages = _time_parts(loaded, noise, few) if parts else None
    gc.collect()
    started = time.perf_counter()
    session = loaded.session(profile=True)
    opening, resident_at_start = time.perf_counter() - started, resident()
    _push(session, noise, frames, progress, stop)
    together = company(loaded, sessions, few, noise) if sessions > 1 else None
    curve = [part._asdict() for part in sustained(loaded, 60 * minutes, noise, stop)] if minutes else None
    asked = {"sub_stages": sub_stages, "together": together, "sustained": curve}

    profile = _profile(session.profile)
    summary = profile.summary()
    assert loaded.form is not None
    states = loaded.form.states
    announced = memory.announce(config, stored, session.frames, requantise=plan, states=states)
    moved = traffic.traffic(config, stored, session.frames, plan, states)
    bandwidth = bandwidth_gbps or traffic.measured_bandwidth()
    report: dict[str, Any] = {
        "model": loaded.name,
        "machine": describe_machine(compiled),
        "held": loaded.form.plan._asdict(),
        **summary,
        "growth": growth(profile.frames),
        **_describe_counted(counted),
        "gpu": gpu,
        "load_seconds": loading.seconds,
        "opening_seconds": {"first": first_opening, "again": opening},
        "memory": _memory(loaded, loading, announced, resident_at_start),
        "floor": floor(moved, bandwidth, summary["stages"]),
        "bandwidth": {"gbps": bandwidth, "measured": bandwidth_gbps is None},
        **{name: found for name, found in asked.items() if found is not None},
        "notes": [*summary["notes"], *_notes(counted)],
    }
    return report, profile.every_frame()


def _push(
    session: Session,
    noise: Iterator[np.ndarray],
    frames: int,
    progress: Callable[[int], None],
    stop: Callable[[], bool],
) -> None:
    for done in range(1, frames + 1):
        session.push(next(noise), session.model.config.input_rate_hz)
        progress(done)
        if stop():
            break
    gc.collect()


def faint_noise(config: ModelConfig) -> Iterator[np.ndarray]:
    """Endless input frames (frame_samples,) of a quiet room."""
    heard = FAINT * np.random.default_rng(0).standard_normal((NOISE_FRAMES, config.frame_samples_in))
    while True:
        yield from heard.astype(np.float32)


def count_frame(model: VoiceChat, noise: Iterator[np.ndarray], search: int = SEARCHED_FRAMES) -> tuple[float, Counted]:
    """Seconds to open a session, and the count of its first steady frame without a symbol (else with the fewest)."""
    started = time.perf_counter()
    session = model.session()
    seconds = time.perf_counter() - started
    seen: list[Frame] = []
    session.observe(seen.append)
    for _ in range(STEADY_FRAMES):
        session.push(next(noise))
    tried: list[Counted] = []
    while len(tried) < search and not (tried and tried[-1].symbols == 0):
        with counting() as count:
            session.push(next(noise))
        tried.append(Counted(count, len(seen) - 1, len(seen[-1].symbols)))
    return seconds, min(tried, key=lambda counted: counted.symbols)


def _compile_and_count(model: VoiceChat, wanted: bool, say: Callable[[str], None]) -> tuple[dict[str, int], bool]:
    """What a GPU starts in a frame, uncompiled and, if it was asked for and can be, compiled; and whether it is."""
    state = steady_state(model)
    gpu = {"launches": gpu_launches(model, state)}
    if not wanted:
        return gpu, False
    if not model.compile():
        say("Frames are measured uncompiled: MLX found no C++ compiler here.")
        return gpu, False
    gpu["launches_compiled"] = gpu_launches(model, state)
    return gpu, model.compile()  # anew: what was counted must not run


def growth(frames: list[FrameTiming]) -> dict[str, float] | None:
    """Medians in ms of the first and the last thousand warm frames, those with barriers left out; None if too few."""
    warm = frames[COLD_FRAMES:]
    if len(warm) < 2 * GROWTH_FRAMES:
        return None
    ends = warm[:GROWTH_FRAMES], warm[-GROWTH_FRAMES:]
    first, last = (float(np.median([frame.total for frame in end if not frame.stages])) for end in ends)
    return {"first_p50_ms": first, "last_p50_ms": last, "growth_ms": last - first}


def floor(moved: dict[str, int], bandwidth_gbps: float, stages: dict[str, Any]) -> dict[str, Any]:
    """By stage and in total: bytes to move, the time that takes, and the median time measured."""
    sizes = {stage: moved[stage] for stage in STAGES} | {"total": sum(moved.values())}
    return {
        stage: {
            "bytes": size,
            "floor_ms": traffic.milliseconds(size, bandwidth_gbps),
            "p50_ms": stages[stage]["p50_ms"],
        }
        for stage, size in sizes.items()
    }


def networks_resident(model: VoiceChat, loaded_bytes: int) -> dict[str, int]:
    """Bytes of each network's weights as they are held, of the text table, and of all else that loading made."""
    language = model.language
    sizes = {
        "perception": _bytes(model.perception),
        "rnnt": _bytes(language.rnnt_decoder) + _bytes(language.rnnt_joint),
        "language": _bytes(language) - _bytes(model.perception),
        "tts": _bytes(model.tts),
        "codec": _bytes(model.codec),
    }
    sizes["language"] -= sizes["rnnt"]  # both nest in it
    sizes = {name: size if name in model.loads else 0 for name, size in sizes.items()}
    sizes["text_table"] = model.tts._text_rows.nbytes if "tts" in model.loads else 0
    return sizes | {"other": loaded_bytes - sum(sizes.values())}


def describe_announced(announced: memory.Announced) -> dict[str, Any]:
    """An announcement for JSON."""
    return asdict(announced) | {"loaded_bytes": announced.loaded, "total_bytes": announced.total}


def describe_machine(compiled: bool) -> dict[str, Any]:
    """What the figures were measured on."""
    have = memory.machine()
    return {
        "platform": platform.platform(),
        "chip": str(mx.device_info().get("device_name") or platform.machine()),
        "cores": os.cpu_count(),
        "memory_bytes": have.total,
        "available_bytes": have.available,
        "device": "gpu" if mx.default_device().type == mx.gpu else "cpu",
        "mlx": metadata.version("mlx"),
        "python": platform.python_version(),
        "compiled": compiled,
    }


def resident() -> int:
    """Bytes of physical memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident() -> int:
    """The most physical memory that this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kB


def _load(
    model: str | Path, options: LoadOptions, say: Callable[[str], None], load: Load
) -> tuple[checkpoint.Checkpoint, VoiceChat, Loading]:
    gc.collect()  # an earlier model of this process must not be freed while this one is measured
    active, process = mx.get_active_memory(), resident()
    mx.reset_peak_memory()
    started = time.perf_counter()
    opened = checkpoint.open_model(model, say)
    loaded = load(str(model), opened, replace(options, compile=False), say)
    seconds = time.perf_counter() - started
    return opened, loaded, Loading(seconds, active, mx.get_active_memory(), mx.get_peak_memory(), process, resident())


def _time_parts(model: VoiceChat, noise: Iterator[np.ndarray], frames: int) -> dict[str, Any]:
    session = model.session(profile=True)
    profile = _profile(session.profile)
    with timed(model, profile):
        for _ in range(frames):
            session.push(next(noise))
    return profile.summary()["sub_stages"]


def _profile(profile: Profile | None) -> Profile:
    assert profile is not None
    return profile


def _memory(model: VoiceChat, loading: Loading, announced: memory.Announced, resident_at_start: int) -> dict[str, Any]:
    return {
        "resident": networks_resident(model, loading.bytes),
        "announced": describe_announced(announced),
        "loaded_bytes": loading.bytes,
        "active_bytes": mx.get_active_memory() - loading.active_before,
        "load_peak_bytes": loading.peak,
        "peak_bytes": mx.get_peak_memory(),
        "buffer_cache_bytes": mx.get_cache_memory(),
        "process": {
            "before_load_bytes": loading.resident_before,
            "after_load_bytes": loading.resident_after,
            "peak_bytes": peak_resident(),
            "first_frame_bytes": resident_at_start,
            "last_frame_bytes": resident(),
        },
    }


def _bytes(module: nn.Module) -> int:
    flat: Any = tree_flatten(module.parameters(), destination={})
    return sum(array.nbytes for array in flat.values())


def _describe_counted(counted: Counted) -> dict[str, Any]:
    count = counted.count
    return {
        "primitives": count.primitives,
        "launches": count.launches,
        "evaluations": count.waits,
        "counted_frame": {
            "index": counted.index,
            "symbols": counted.symbols,
            "reads": dict(count.reads),
            "operations": dict(count.operations.most_common()),
        },
    }


def _notes(counted: Counted) -> list[str]:
    notes = ["floor: weights and caches once for each time they are used, at the bandwidth given; no activations"]
    if counted.symbols:
        notes.append(f"no frame tried was without transcript symbols; the one counted has {counted.symbols}")
    return notes
