"""`doctor`: judgement over facts, and the command where a dependency cannot be imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_voicechat.cli import diagnosis, published
from mlx_voicechat.cli.diagnosis import OK, STOP, WARNING, Check, Facts, diagnose
from mlx_voicechat.cli.main import run
from mlx_voicechat.cli.recommendation import Candidate, candidates
from mlx_voicechat.gauges import memory
from mlx_voicechat.weights.hub_cache import DOWNLOAD_BYTES, PUBLISHED, CachedModel

GB = 10**9
NEEDS = {"4bit": (10 * GB, 13 * GB), "8bit": (15 * GB, 18 * GB), "bf16": (23 * GB, 26 * GB)}
MAC = Facts(
    python=(3, 12, 4),
    executable="/opt/venv/bin/python",
    system="Darwin",
    architecture="arm64",
    translated=False,
    macos="15.1",
    mlx="0.32.4",
    mlx_fault="",
    device="Apple M3 Pro (GPU)",
    on_gpu=True,
    memory_bytes=36 * GB,
    available_bytes=24 * GB,
    usable_bytes=27 * GB,
    cache="/Users/me/.cache/huggingface/hub",
    free_bytes=100 * GB,
    hub_fault="",
    microphone="0.5.1",
    microphone_fault="",
    compiler="/usr/bin/g++",
    cached={name: CachedModel(repository, "absent") for name, repository in PUBLISHED.items()},
    needs=NEEDS,
)
COMPLETE = {**MAC.cached, "8bit": CachedModel(PUBLISHED["8bit"], "complete", 14 * GB, "a" * 40)}
PARTIAL = {**MAC.cached, "4bit": CachedModel(PUBLISHED["4bit"], "partial", 9 * GB, "a" * 40)}


CANDIDATES = [
    Candidate("8bit", "mlx-voicechat download 8bit", 15 * GB, 90.0),
    Candidate("4bit", "mlx-voicechat download 4bit", 10 * GB, 60.0),
    Candidate("gptq-3", "a calibration", 9 * GB, 50.0),
]


def find(facts: Facts, name: str) -> Check:
    (found,) = [check for check in diagnose(facts) if check.name == name]
    return found


@pytest.mark.parametrize(
    ("gbps", "usable", "name"),
    [(400, 27, "8bit"), (250, 27, "4bit"), (400, 14, "4bit"), (100, 27, "gptq-3"), (400, 9, "gptq-3"), (400, 8, None)],
)
def test_the_best_checkpoint_in_time_is_recommended(gbps: int, usable: int, name: str | None) -> None:
    found = [each._replace(floor_ms=each.floor_ms * 150 / gbps) for each in CANDIDATES]
    facts = replace(MAC, candidates=found, bandwidth=(gbps, ""), usable_bytes=usable * GB)
    checks = [check for check in diagnose(facts) if check.name == "recommended"]
    assert [check.text.split(":")[0] for check in checks] == ([name] if name else [])
    assert all(check.level == OK for check in checks)
    slow = replace(facts, candidates=[each._replace(floor_ms=81.0) for each in found])
    assert all(check.level == WARNING for check in diagnose(slow) if check.name == "recommended")


def test_candidates_are_told_of_every_precision() -> None:
    found = {each.name: each for each in candidates(100.0)}
    assert list(found) == ["bf16", "8bit", "4bit", "gptq-4", "gptq-3"]
    floors = [found[name].floor_ms for name in ("bf16", "8bit", "gptq-4", "gptq-3")]
    assert floors == sorted(floors, reverse=True)
    assert found["gptq-3"].memory_bytes < found["4bit"].memory_bytes < found["8bit"].memory_bytes


def test_a_mac_that_is_well() -> None:
    checks = diagnose(MAC)
    assert [check.level for check in checks] == [OK] * len(checks)
    assert [check.name for check in checks] == [
        *("python", "architecture", "macOS", "mlx", "memory", "disk"),
        *("cache, 4bit", "cache, 8bit", "cache, bf16", "microphone", "fits"),
    ]
    assert find(MAC, "mlx").text == "0.32.4, Apple M3 Pro (GPU)"
    assert find(MAC, "cache, 4bit").text == "absent, 9.2 GB to fetch"


@pytest.mark.parametrize(
    ("name", "level", "changes", "words"),
    [
        ("python", STOP, {"python": (3, 9, 6)}, "3.9.6 /opt/venv/bin/python 3.10 to 3.13"),
        ("python", STOP, {"python": (3, 14, 0)}, "3.14.0 3.10 to 3.13"),
        ("python", OK, {"python": (3, 10, 0)}, ""),
        ("python", OK, {"python": (3, 13, 9)}, ""),
        ("architecture", STOP, {"architecture": "x86_64", "translated": True}, "Rosetta Intel arm64"),
        ("architecture", STOP, {"architecture": "x86_64"}, "Intel Silicon"),
        ("architecture", STOP, {"system": "Windows", "architecture": "AMD64"}, "Windows Mac"),
        ("architecture", WARNING, {"system": "Linux", "architecture": "x86_64"}, "Linux CPU tests"),
        ("macOS", WARNING, {"macos": "13.7"}, "13.7 14.0"),
        ("macOS", STOP, {"macos": "12.1", "mlx_fault": "none"}, "12.1 14.0"),
        ("macOS", WARNING, {"macos": ""}, "unknown"),
        ("mlx", STOP, {"mlx": "", "mlx_fault": "No module named 'mlx'"}, "No module named 'mlx' pip install"),
        ("mlx", STOP, {"mlx": "0.29.3"}, "0.29.3 old"),
        ("mlx", OK, {"mlx": "0.100.0"}, ""),
        ("mlx", OK, {"mlx": "1.0"}, ""),
        ("mlx", WARNING, {"on_gpu": False, "device": "CPU"}, "CPU behind"),
        ("memory", WARNING, {"available_bytes": 9 * GB}, "9.0 GB 4bit 10.0 GB close"),
        ("memory", STOP, {"usable_bytes": 6 * GB, "memory_bytes": 8 * GB}, "8.0 GB 4bit 10.0 GB 6.0 GB"),
        ("disk", STOP, {"free_bytes": 9 * GB}, "9.0 GB 4bit 9.2 GB HF_HOME"),
        ("disk", OK, {"free_bytes": GB, "cached": COMPLETE}, ""),
        ("disk", OK, {"free_bytes": GB, "cached": PARTIAL}, ""),
        ("disk", STOP, {"free_bytes": GB // 10, "cached": PARTIAL}, "0.2 GB to come"),
        ("cache, 8bit", OK, {"cached": COMPLETE}, "complete 14.0 GB"),
        ("cache, 4bit", WARNING, {"cached": PARTIAL}, "9.0 GB of 9.2 GB download 4bit"),
        (
            "hub cache",
            WARNING,
            {"hub_fault": "No module named 'huggingface_hub'", "cached": {}},
            "huggingface_hub folders",
        ),
        ("microphone", WARNING, {"microphone_fault": "No module"}, "pip install 'mlx-voicechat[talk]'"),
        ("compiler", WARNING, {"system": "Linux", "compiler": ""}, "g++"),
        ("fits", OK, {"usable_bytes": 20 * GB}, "4bit (10.0 GB, after ten minutes 13.0 GB), 8bit not bf16 (23.0"),
        ("fits", STOP, {"usable_bytes": 6 * GB}, "no checkpoint tiny"),
        ("fits", WARNING, {"needs": {}}, "without MLX"),
    ],
)
def test_findings(name: str, level: str, changes: dict[str, Any], words: str) -> None:
    check = find(replace(MAC, **changes), name)
    text = f"{check.text} {check.remedy}"
    assert check.level == level, text
    assert all(word in text for word in words.split()), text
    assert level == OK or check.remedy or name in ("fits", "hub cache")


def test_needs_of_the_published_checkpoints() -> None:
    """More than their files less what the 8-bit speech weights save, and in order; the long conversation takes more."""
    needs = published.needs()
    assert list(needs) == list(DOWNLOAD_BYTES)
    for name, (first, later) in needs.items():
        assert DOWNLOAD_BYTES[name] * 0.9 < first < later < DOWNLOAD_BYTES[name] * 1.6
    assert needs["4bit"] < needs["8bit"] < needs["bf16"]


def test_what_is_supported_is_what_the_package_declares() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (low, above) = re.findall(r'requires-python = ">=(\d+\.\d+),<(\d+\.\d+)"', text)[0]
    assert (diagnosis.version(low), diagnosis.version(above)) == diagnosis.PYTHONS
    assert set(re.findall(r'"mlx(?:\[cpu\])?>=([\d.]+)', text)) == {".".join(map(str, diagnosis.OLDEST_MLX))}


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"python": (3, 9, 0)}, 1)])
def test_exit_code(
    changes: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "probe", lambda: replace(MAC, **changes))
    assert run(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["stop" if code else "ok", "python"]
    assert lines[-1] == ("Would stop a run: python." if code else "Nothing would stop a run.")
    assert run(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] is (code == 0)
    assert report["checks"][1] == {"name": "architecture", "level": "ok", "text": "Apple Silicon (arm64)", "remedy": ""}
    assert report["facts"]["held"]["4bit"]["state"] == "absent"


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    facts = diagnosis.probe()
    assert facts.python == sys.version_info[:3]
    assert facts.mlx_fault == facts.hub_fault == ""
    assert facts.memory_bytes == memory.machine().total
    assert facts.free_bytes > 0
    assert {held.state for held in facts.cached.values()} == {"absent"}
    assert facts.needs == published.needs()


def test_rosetta_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    Done = namedtuple("Done", "stdout")
    monkeypatch.setattr(diagnosis.platform, "system", lambda: "Darwin")
    for answer, translated in (("1\n", True), ("0\n", False), ("", False)):
        monkeypatch.setattr(diagnosis.subprocess, "run", lambda *_, answer=answer, **__: Done(answer))
        assert diagnosis._translated() is translated


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
from mlx_voicechat.cli.main import run
sys.exit(run(["doctor", "--json"]))
"""


@pytest.mark.parametrize(
    ("blocked", "found"),
    [
        ("mlx", {"mlx": STOP, "fits": WARNING, "cache, 4bit": OK}),
        ("huggingface_hub", {"mlx": OK, "hub cache": WARNING}),
        ("mlx,huggingface_hub,numpy,sounddevice", {"mlx": STOP, "hub cache": WARNING, "microphone": WARNING}),
    ],
)
def test_where_something_cannot_be_imported(blocked: str, found: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, blocked],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    levels = {check["name"]: check["level"] for check in json.loads(done.stdout)["checks"]}
    assert {name: levels[name] for name in found} == found
    assert done.returncode == (1 if STOP in levels.values() else 0)
