"""The hosts of a hostfile of `mlx.launch`, each asked for its own `doctor` over ssh, as the launcher would reach it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_voicechat.errors import InputError

from .diagnosis import OK, STOP, WARNING, Check

HERE = "127.0.0.1"  # for which the launcher takes no ssh
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
ANSWER_SECONDS = 60


def look(hostfile: Path) -> list[Check]:
    """A finding for each host, and one for all of them together. Raises InputError for what is no hostfile."""
    hosts = _read(hostfile)
    with ThreadPoolExecutor(len(hosts)) as threads:
        answers = list(threads.map(_asked, [host["ssh"] for host in hosts]))
    checks = [_host(host, answer) for host, answer in zip(hosts, answers, strict=True)]
    found = {str(answer["facts"].get("mlx")) for answer in answers if isinstance(answer, dict)}
    if len(found) > 1:
        text = f"MLX is not the same on all: {', '.join(sorted(found))}"
        checks.append(Check("hosts", WARNING, text, "Give all the same version."))
    return checks


def _read(hostfile: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(hostfile.read_text(encoding="utf-8"))
        hosts = data["hosts"] if isinstance(data, dict) else data
        named = [{"ssh": str(host["ssh"]), "ips": list(host.get("ips", []))} for host in hosts]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise InputError(
            f"{hostfile} is no hostfile: {type(fault).__name__} {fault}.",
            'Write it like [{"ssh": "mac1.local", "ips": ["192.168.1.11"]}], or have mlx.distributed_config do it.',
        ) from None
    if not named:
        raise InputError(f"{hostfile} names no host.")
    return named


def _asked(host: str) -> dict[str, Any] | str:
    """The host's `doctor --json`, or why there is none."""
    doctor = [sys.argv[0], "doctor", "--json"]  # the launcher runs the same path everywhere
    command: Sequence[str] = doctor if host == HERE else [*SSH, host, shlex.join(doctor)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return str(fault)
    try:
        answer = json.loads(done.stdout)
        return answer if isinstance(answer["facts"], dict) else "no answer of doctor"
    except (ValueError, KeyError, TypeError):
        return " ".join(done.stderr.split()) or f"exit code {done.returncode}"


def _host(host: dict[str, Any], answer: dict[str, Any] | str) -> Check:
    name = f"host {host['ssh']}"
    if isinstance(answer, str):
        remedy = f"mlx.launch needs ssh there without a password, and {sys.argv[0]} at the same path."
        return Check(name, STOP, f"cannot be asked: {answer}", remedy)
    facts, stopping = answer["facts"], [each["name"] for each in answer["checks"] if each["level"] == STOP]
    text = f"{facts['device']}, {facts['memory_bytes'] / 1e9:.1f} GB, MLX {facts['mlx']}"
    if not host["ips"]:
        return Check(name, STOP, f"{text}; no ips in the hostfile", "The ring needs an address for each host.")
    alone = [each for each in stopping if each != "memory"]  # a part of a model may fit where the whole does not
    if alone:
        return Check(name, STOP, f"{text}; would stop a run: {', '.join(alone)}", "Run doctor there.")
    return Check(name, OK, text)
