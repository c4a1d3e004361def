"""Calls of `weights.hub` in processes of their own, each with its cache and environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlx_voicechat.weights import hub

MEBIBYTE = 2**20
CHUNK = 10 * MEBIBYTE  # what huggingface_hub writes at once: less than that may be lost, and is fetched again
LARGE_BYTES = 2 * CHUNK + 5 * MEBIBYTE
# A process of its own: huggingface_hub reads its environment once, at import.
PROGRAM = """
import json, sys
from mlx_voicechat.weights import hub
from mlx_voicechat.errors import VoiceChatError
said = []
name, *rest = json.loads(sys.argv[1])
try:
    print(json.dumps({"folder": str(getattr(hub, name)(*rest, said.append)), "said": said}))
except VoiceChatError as error:
    print(json.dumps({"code": error.code, "message": error.message, "remedy": error.remedy, "said": said}))
"""


def start(call: list[Any], home: Path, url: str, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """Call a function of `hub` in a process with a cache of its own, which runs the lines `before` first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    ours = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
    }
    return subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM, json.dumps(call)],
        env=kept | ours | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def locate(repository: str, home: Path, url: str, **environment: str) -> dict[str, Any]:
    return finish(start(["locate", repository], home, url, **environment))


def fetch(
    repository: str,
    home: Path,
    url: str,
    revision: str | None = None,
    patterns: list[str] = hub.PATTERNS,
    before: str = "",
) -> dict[str, Any]:
    return finish(start(["fetch", repository, revision, patterns], home, url, before))


def write_large(folder: Path) -> Path:
    """A whole safetensors file of LARGE_BYTES in one tensor, in a new folder."""
    folder.mkdir()
    data = os.urandom(LARGE_BYTES)
    entry = {"stt_model.embed_tokens.weight": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    text = json.dumps(entry).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text('{"model": {"stt": {}, "speech_generation": {}}, "data": {}}', encoding="utf-8")
    return folder
