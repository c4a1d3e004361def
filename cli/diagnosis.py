"""What a machine must have to run this program: `probe` looks, `diagnose` judges. Works when a dependency does not.

Nothing here imports a dependency but inside `probe`, where its absence is a finding.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mlx_voicechat.weights.hub_cache import DOWNLOAD_BYTES, PUBLISHED, CachedModel

OK, WARNING, STOP = "ok", "warning", "stop"
PYTHONS = ((3, 10), (3, 14))  # from, and below: requires-python in pyproject.toml
OLDEST_MLX = (0, 32)  # pyproject.toml
OLDEST_MACOS = (14, 0)  # of MLX's wheels
NO_CACHE = "cannot cache"  # what numba says, for librosa, where it finds no folder that it may write
FRAME_MS, JUDGED_POSITIONS = 80, 1500  # a frame's length, and after how many a frame is judged (`gauges.plans`)
TALK = "pip install 'mlx-voicechat[talk]'"


class Check(NamedTuple):
    """One finding: `level` is ok, warning, or stop for what would stop a run; `remedy` may be empty."""

    name: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What `probe` found. Bytes; a `*_fault` says why a package cannot be imported, empty if it can."""

    python: tuple[int, int, int]
    executable: str
    system: str  # Darwin, Linux ...
    architecture: str  # of this Python
    translated: bool  # under Rosetta
    macos: str
    mlx: str
    mlx_fault: str
    device: str
    on_gpu: bool
    memory_bytes: int
    available_bytes: int
    usable_bytes: int  # what a GPU may take of it
    cache: str
    free_bytes: int
    hub_fault: str
    microphone: str
    microphone_fault: str
    compiler: str
    librosa_fault: str = ""
    temporary: str = ""
    temporary_fault: str = ""
    cached: Mapping[str, CachedModel] = field(default_factory=dict)  # by name: 4bit, 8bit, bf16
    # Memory by name, after one minute and after ten; empty if it cannot be told.
    needs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # What can be had, best first (`recommendation.Candidate`); empty without MLX.
    candidates: Sequence[Any] = ()
    bandwidth: tuple[float, str] = (0.0, "")  # of memory in GB/s, and where the figure comes from
    # Of each checkpoint the forms in which it can be held here, and what a frame then moves (`info.frame_table`).
    forms: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def diagnose(facts: Facts) -> list[Check]:
    """Every finding, in the order in which to read them."""
    checks = [_python(facts), _architecture(facts)]
    if facts.system == "Darwin":
        checks.append(_macos(facts))
    checks += [_mlx(facts), _memory(facts), _disk(facts), *_cache(facts), _microphone(facts)]
    checks += [check for check in (_librosa(facts), _temporary(facts)) if check is not None]
    if facts.system == "Linux":
        checks.append(_compiler(facts))
    return [*checks, _fitting(facts), *_speed(facts), *_recommended(facts)]


def _python(facts: Facts) -> Check:
    text = f"{'.'.join(map(str, facts.python))}, {facts.executable}"
    low, above = PYTHONS
    if low <= facts.python[:2] < above:
        return Check("python", OK, text)
    return Check("python", STOP, text, f"Use Python {low[0]}.{low[1]} to {above[0]}.{above[1] - 1}.")


def _architecture(facts: Facts) -> Check:
    machine = facts.architecture
    if facts.system == "Darwin" and facts.translated:
        return Check(
            "architecture",
            STOP,
            f"{machine} under Rosetta: this Python is built for Intel, on Apple Silicon",
            "Install an arm64 Python and make a new environment: MLX does not run under Rosetta.",
        )
    if facts.system == "Darwin" and machine != "arm64":
        return Check("architecture", STOP, f"{machine}: an Intel Mac", "MLX needs Apple Silicon (M1 or later).")
    if facts.system == "Darwin":
        return Check("architecture", OK, "Apple Silicon (arm64)")
    if facts.system == "Linux":
        text = f"Linux ({machine}): it runs on the CPU, which is for tests"
        return Check("architecture", WARNING, text, "Conversations at speed need a Mac with Apple Silicon.")
    return Check("architecture", STOP, f"{facts.system} ({machine})", "Use a Mac with Apple Silicon.")


def _macos(facts: Facts) -> Check:
    if version(facts.macos) >= OLDEST_MACOS:
        return Check("macOS", OK, facts.macos)
    needed = ".".join(map(str, OLDEST_MACOS))
    level = STOP if facts.mlx_fault else WARNING
    return Check("macOS", level, facts.macos or "of unknown version", f"MLX is made for macOS {needed} and later.")


def _mlx(facts: Facts) -> Check:
    package = "mlx" if facts.system == "Darwin" else "mlx[cpu]"
    if facts.mlx_fault:
        return Check("mlx", STOP, f"cannot be imported: {facts.mlx_fault}", f"pip install -U '{package}'")
    text = f"{facts.mlx}, {facts.device}"
    if version(facts.mlx) < OLDEST_MLX:
        return Check("mlx", STOP, text, f"Too old: pip install -U '{package}'")
    if facts.system == "Darwin" and not facts.on_gpu:
        return Check("mlx", WARNING, text, "The GPU is not in use: a conversation will fall behind.")
    return Check("mlx", OK, text)


def _memory(facts: Facts) -> Check:
    text = f"{_gb(facts.memory_bytes)}, {_gb(facts.available_bytes)} available"
    if not facts.needs:
        return Check("memory", OK, text)
    name, (least, _) = min(facts.needs.items(), key=lambda item: item[1])
    needed = f"The smallest checkpoint ({name}) needs {_gb(least)}"
    if least > facts.usable_bytes:
        return Check("memory", STOP, text, f"{needed}, and the model may use {_gb(facts.usable_bytes)} here.")
    if least > facts.available_bytes:
        return Check("memory", WARNING, text, f"{needed}: close other programs.")
    return Check("memory", OK, text)


def _disk(facts: Facts) -> Check:
    text = f"{_gb(facts.free_bytes)} free at {facts.cache}"
    if any(model.state == "complete" for model in facts.cached.values()):
        return Check("disk", OK, text)
    to_come = {name: size - _arrived(facts, name) for name, size in DOWNLOAD_BYTES.items()}
    name, least = min(to_come.items(), key=lambda item: item[1])
    if facts.free_bytes >= least:
        return Check("disk", OK, text)
    remedy = f"No checkpoint is here, and {name} has {_gb(least)} to come: free some space, or set HF_HOME elsewhere."
    return Check("disk", STOP, text, remedy)


def _cache(facts: Facts) -> list[Check]:
    if facts.hub_fault:
        text = f"huggingface_hub cannot be imported: {facts.hub_fault}"
        return [Check("hub cache", WARNING, text, "Only folders can be named as a model: pip install huggingface_hub")]
    checks = []
    for name, model in facts.cached.items():
        if model.state == "complete":
            checks.append(Check(f"cache, {name}", OK, f"complete, {_gb(model.bytes)}"))
        elif model.state == "partial":
            text = f"partial, {_gb(model.bytes)} of {_gb(DOWNLOAD_BYTES[name])}"
            checks.append(Check(f"cache, {name}", WARNING, text, f"`mlx-voicechat download {name}` goes on with it."))
        else:
            checks.append(Check(f"cache, {name}", OK, f"absent, {_gb(DOWNLOAD_BYTES[name])} to fetch"))
    return checks


def _microphone(facts: Facts) -> Check:
    if not facts.microphone_fault:
        return Check("microphone", OK, f"sounddevice {facts.microphone}")
    if facts.temporary_fault and facts.temporary_fault in facts.microphone_fault:
        return Check("microphone", WARNING, "sounddevice needs a temporary folder to be imported", "See `temporary`.")
    return Check("microphone", WARNING, f"sounddevice: {facts.microphone_fault}", f"For `talk`: {TALK}")


def _librosa(facts: Facts) -> Check | None:
    if NO_CACHE in facts.librosa_fault:
        text = "numba, for librosa, can keep nothing: neither the packages' folder nor your home can be written"
        return Check("librosa", WARNING, text, "It runs without. A place for it: NUMBA_CACHE_DIR=FOLDER")
    if facts.librosa_fault:
        return Check("librosa", STOP, f"cannot be imported: {facts.librosa_fault}", "pip install -U librosa numba")
    return None


def _temporary(facts: Facts) -> Check | None:
    if not facts.temporary_fault:
        return None
    remedy = "Recordings that must be converted, and typed text, need one: set TMPDIR to a folder that is yours."
    return Check("temporary", WARNING, facts.temporary_fault, remedy)


def _compiler(facts: Facts) -> Check:
    if facts.compiler:
        return Check("compiler", OK, facts.compiler)
    return Check("compiler", WARNING, "no g++", "Frames run uncompiled, which is slower: install g++.")


def _fitting(facts: Facts) -> Check:
    """Which of the published checkpoints this machine has the memory for."""
    if not facts.needs:
        return Check("fits", WARNING, "cannot be told without MLX")
    fitting = [name for name, (first, _) in facts.needs.items() if first <= facts.usable_bytes]
    listed = {
        name: f"{name} ({_gb(a)}, after ten minutes {_gb(b)}{'' if b <= facts.usable_bytes else ': too much'})"
        for name, (a, b) in facts.needs.items()
    }
    others = ", ".join(text for name, text in listed.items() if name not in fitting)
    if not fitting:
        return Check("fits", STOP, f"no checkpoint: not {others}", "`--model tiny` runs anywhere.")
    return Check("fits", OK, ", ".join(listed[name] for name in fitting) + (f"; not {others}" if others else ""))


def _recommended(facts: Facts) -> list[Check]:
    """What to run here: a checkpoint or a plan, and the least time that one of its frames takes."""
    if not facts.candidates:
        return []
    from .recommendation import recommended

    best = recommended(facts.candidates, facts.usable_bytes, FRAME_MS)
    if best is None:
        return []  # `fits` says so
    text = f"{best.name}: at least {best.floor_ms:.0f} ms of {FRAME_MS} a frame, at {facts.bandwidth[0]:.0f} GB/s"
    if best.floor_ms > FRAME_MS:
        return [Check("recommended", WARNING, text, "It falls behind on this machine, and so does every other.")]
    return [Check("recommended", OK, text, f"To get it: {best.how}.")]


def _speed(facts: Facts) -> list[Check]:
    """Which of them this machine's memory is fast enough for: moving a frame's bytes must leave time to compute."""
    if not facts.forms:
        return []
    gbps, source = facts.bandwidth
    text, slow = [], []
    for name, forms in facts.forms.items():
        (at,) = [at for form in forms if form["chosen"] for at in form["at"] if at["positions"] == JUDGED_POSITIONS]
        text.append(f"{name} {at['floor_ms']:.0f} ms")
        if at["floor_ms"] > FRAME_MS:
            slow.append(name)
    words = f"{gbps:.0f} GB/s ({source}); moving a frame's bytes takes {', '.join(text)}"
    if not slow:
        return [Check("bandwidth", OK, words)]
    return [Check("bandwidth", WARNING, words, f"A frame lasts {FRAME_MS} ms: {', '.join(slow)} would fall behind.")]


def _arrived(facts: Facts, name: str) -> int:
    return facts.cached[name].bytes if name in facts.cached else 0


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, two at least."""
    numbers = [int(part) for part in re.findall(r"\d+", text)[:3]]
    return tuple([*numbers, 0, 0][: max(2, len(numbers))])


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def probe() -> Facts:
    """Look at this machine; nothing that is missing raises."""
    mlx, mlx_fault = _import("mlx.core")
    sound, sound_fault = _import("sounddevice")
    _, hub_fault = _import("huggingface_hub")
    _, librosa_fault = _import("librosa.filters")
    temporary, temporary_fault = _temporary_folder()
    total, available, usable = _memory_of(mlx)
    cache = _cache_folder(not hub_fault)
    return Facts(
        python=sys.version_info[:3],
        executable=sys.executable,
        system=platform.system(),
        architecture=platform.machine(),
        translated=_translated(),
        macos=platform.mac_ver()[0],
        mlx=getattr(mlx, "__version__", ""),
        mlx_fault=mlx_fault,
        device=_device(mlx),
        on_gpu=mlx is not None and mlx.default_device().type == mlx.gpu,
        memory_bytes=total,
        available_bytes=available,
        usable_bytes=usable,
        cache=str(cache),
        free_bytes=shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free,
        hub_fault=hub_fault,
        microphone=getattr(sound, "__version__", ""),
        microphone_fault=sound_fault,
        compiler=shutil.which("g++") or "",
        librosa_fault=librosa_fault,
        temporary=temporary,
        temporary_fault=temporary_fault,
        cached={} if hub_fault else _cached(),
        needs=_needs(),
        **_forms(mlx),
    )


def _import(name: str) -> tuple[Any, str]:
    """A module, and why there is none; a broken shared library raises OSError, or whatever its maker chose."""
    try:
        return importlib.import_module(name), ""
    except ImportError as error:
        return None, str(error)
    except (OSError, RuntimeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"


def _temporary_folder() -> tuple[str, str]:
    try:
        return tempfile.gettempdir(), ""
    except FileNotFoundError as error:
        return "", error.strerror or str(error)


def _translated() -> bool:
    if platform.system() != "Darwin":
        return False
    command = ["/usr/sbin/sysctl", "-in", "sysctl.proc_translated"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "1"
    except OSError:
        return False


def _device(mlx: Any) -> str:
    if mlx is None:
        return ""
    device = mlx.default_device()
    name = mlx.device_info().get("device_name", "") if device.type == mlx.gpu else ""
    return f"{name} (GPU)" if name else "GPU" if device.type == mlx.gpu else "CPU"


def _memory_of(mlx: Any) -> tuple[int, int, int]:
    """All memory, what is available, what the GPU may take."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if mlx is None:
        return total, total, total
    from mlx_voicechat.gauges import memory

    machine = memory.machine()
    on_gpu = mlx.default_device().type == mlx.gpu
    working_set = mlx.device_info().get("max_recommended_working_set_size", machine.total) if on_gpu else machine.total
    return machine.total, machine.available, min(machine.total, int(working_set))


def _cache_folder(with_hub: bool) -> Path:
    if with_hub:
        from mlx_voicechat.weights.hub_cache import root

        return root()
    return Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface"))


def _cached() -> dict[str, CachedModel]:
    from mlx_voicechat.weights.hub_cache import look_up

    return {name: look_up(repository) for name, repository in PUBLISHED.items()}


def _needs() -> dict[str, tuple[int, int]]:
    try:
        from .published import needs
    except ImportError:
        return {}
    return needs()


def _forms(mlx: Any) -> dict[str, Any]:
    """Memory's bandwidth, and the forms that it decides between; nothing without MLX."""
    try:
        from mlx_voicechat.gauges import chips, plans

        from .published import forms
        from .recommendation import candidates
    except ImportError:
        return {}
    if mlx is None:
        return {}
    speed = chips.bandwidth()
    found = {name: [plans.as_facts(row) for row in rows] for name, rows in forms().items()}
    reached = candidates(speed.gbps)
    return {"bandwidth": (speed.gbps, speed.source), "forms": found, "candidates": reached}
