"""`doctor --hostfile`: what each host's own doctor says, over an ssh that is a program of this test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_voicechat.cli import hosts
from mlx_voicechat.cli.diagnosis import OK, STOP, WARNING
from mlx_voicechat.errors import InputError

FACTS = {"device": "Apple M4 (GPU)", "memory_bytes": 16 * 10**9, "mlx": "0.32.4"}


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each host answers, written to where the stand-in for ssh looks for it; others cannot be reached."""
    told: dict[str, Any] = {}
    program = tmp_path / "ssh.py"
    program.write_text(
        "import json, sys\n"
        f"answers = json.load(open({str(tmp_path / 'answers.json')!r}))\n"
        "assert sys.argv[2].endswith('doctor --json'), sys.argv\n"
        "if sys.argv[1] not in answers:\n"
        "    sys.exit('ssh: Could not resolve hostname')\n"
        "print(json.dumps(answers[sys.argv[1]]))\n"
    )
    monkeypatch.setattr(hosts, "SSH", (sys.executable, str(program)))
    return told


def look(folder: Path, answers: dict[str, Any], *listed: dict[str, Any]) -> list[tuple[str, str, str]]:
    (folder / "answers.json").write_text(json.dumps(answers))
    (folder / "hosts.json").write_text(json.dumps({"backend": "ring", "hosts": listed}))
    return [(check.name, check.level, check.text) for check in hosts.look(folder / "hosts.json")]


def host(name: str, *ips: str) -> dict[str, Any]:
    return {"ssh": name, "ips": list(ips)}


def test_hosts_that_are_well(tmp_path: Path, answers: dict[str, Any]) -> None:
    answers["mac1"] = {"facts": FACTS, "checks": []}
    answers["mac2"] = {"facts": FACTS, "checks": [{"name": "memory", "level": STOP}]}
    found = look(tmp_path, answers, host("mac1", "10.0.0.1"), host("mac2", "10.0.0.2"))
    text = "Apple M4 (GPU), 16.0 GB, MLX 0.32.4"
    assert found == [("host mac1", OK, text), ("host mac2", OK, text)]


def test_what_is_wrong_is_said_of_each(tmp_path: Path, answers: dict[str, Any]) -> None:
    answers["mac1"] = {"facts": FACTS, "checks": []}
    answers["mac2"] = {"facts": {**FACTS, "mlx": "0.31.0"}, "checks": [{"name": "mlx", "level": STOP}]}
    listed = host("mac1"), host("mac2", "10.0.0.2"), host("gone", "10.0.0.3")
    found = {name: (level, text) for name, level, text in look(tmp_path, answers, *listed)}
    assert {name: level for name, (level, _) in found.items()} == {
        **{"host mac1": STOP, "host mac2": STOP, "host gone": STOP},
        "hosts": WARNING,
    }
    assert "no ips" in found["host mac1"][1]
    assert "would stop a run: mlx" in found["host mac2"][1]
    assert "Could not resolve" in found["host gone"][1]
    assert "0.31.0, 0.32.4" in found["hosts"][1]


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"ips": []}]'])
def test_what_is_no_hostfile(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts.json").write_text(text)
    with pytest.raises(InputError, match=r"hosts\.json"):
        hosts.look(tmp_path / "hosts.json")
