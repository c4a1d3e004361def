"""The commands where a machine lacks something: folders that can be written, a temporary one; and files with a BOM."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
from support.checkpoints import GOLDEN, copy_of
from support.server import PROGRAM

from mlx_voicechat.convert import plans
from mlx_voicechat.weights import hub_cache

MODEL = str(GOLDEN / "tiny-4bit")
NO_TEMPORARY = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/dev/null/a', '/dev/null/b']\n"


def command(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, which runs the lines `before` first."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    line = [sys.executable, "-c", before + PROGRAM, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, env=kept | environment)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "said.wav", np.zeros(4000, np.float32), 16000)
    return tmp_path / "said.wav"


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment with no home that can be written, and a librosa whose folder cannot be (for root, neither)."""
    found = find_spec("librosa")
    assert found is not None
    assert found.submodule_search_locations is not None
    packages = tmp_path / "packages"
    source = Path(found.submodule_search_locations[0])
    copy = shutil.copytree(source, packages / "librosa", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()  # a file, so that no folder can be made there
    return {"PYTHONPATH": str(packages), "HOME": "/dev/null"}


def test_no_folder_for_what_numba_compiles(nowhere: dict[str, str], recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    arguments = ("generate", "-m", MODEL, "--audio", str(recording), "--extra-decoding-seconds", "0")
    done = command(*arguments, "--output-audio", str(out), **nowhere)
    assert done.returncode == 0, done.stderr
    plain = command(*arguments, "--output-audio", str(tmp_path / "plain.wav"))
    assert plain.returncode == 0, plain.stderr
    assert out.read_bytes() == (tmp_path / "plain.wav").read_bytes()


def test_doctor_knows_that_numba_has_no_folder(nowhere: dict[str, str], tmp_path: Path) -> None:
    done = command("doctor", **nowhere, HF_HOME=str(tmp_path / "hub"))
    (line,) = [line for line in done.stdout.splitlines() if "librosa" in line]
    assert line.split()[:2] == ["warning", "librosa"]
    assert "NUMBA_CACHE_DIR=FOLDER" in line
    kept = command("doctor", **nowhere, HF_HOME=str(tmp_path / "hub"), NUMBA_CACHE_DIR=str(tmp_path / "numba"))
    assert "librosa" not in kept.stdout


def test_no_temporary_folder(recording: Path, tmp_path: Path) -> None:
    """It is named, with what was tried, and known before the work; what needs none works."""
    done = command("doctor", before=NO_TEMPORARY, HF_HOME=str(tmp_path))
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith(("ok", "warning", "stop"))}
    line = lines["temporary"]
    assert line.startswith("warning")
    installed = find_spec("sounddevice") is not None
    assert ("See `temporary`" if installed else "pip install 'mlx-voicechat[talk]'") in lines["microphone"]
    assert "/dev/null/a" in line
    assert "TMPDIR" in line

    target = tmp_path / "out"
    arguments = ("convert", "--source", MODEL, "--output", str(target), "--plan", "4bit")
    done = command(*arguments, "--verify", "--audio", str(recording), before=NO_TEMPORARY)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "No usable temporary directory found in ['/dev/null/a', '/dev/null/b']" in done.stderr
    assert "set TMPDIR" in done.stderr
    assert not target.exists()
    done = command(*arguments, before=NO_TEMPORARY)
    assert done.returncode == 0, done.stderr


def test_a_byte_order_mark_in_every_file_that_is_read(recording: Path, tmp_path: Path) -> None:
    """Editors write one; JSON allows that it is passed over (RFC 8259, section 8.1)."""
    folder = copy_of("tiny-4bit", tmp_path)
    marked = [path for path in folder.iterdir() if path.suffix == ".json"]
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {path.name for path in marked}
    for path in marked:
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert hub_cache.layout(folder) == "runtime"
    assert hub_cache.fault(folder) is None
    plan = tmp_path / "own.toml"
    plan.write_bytes(codecs.BOM_UTF8 + b'"stt_model.lm_head" = "8/64/affine"\n')
    assert plans.find(str(plan)).name
    target = tmp_path / "out"
    done = command("convert", "--source", str(folder), "--output", str(target), "--plan", str(plan))
    assert done.returncode == 0, done.stderr
    arguments = ("generate", "--audio", str(recording), "--extra-decoding-seconds", "0", "--json")
    said = [command(*arguments, "-m", str(where)) for where in (folder, GOLDEN / "tiny-4bit", target)]
    assert [one.returncode for one in said] == [0, 0, 0], [one.stderr for one in said]
    assert json.loads(said[0].stdout)["text"] == json.loads(said[1].stdout)["text"]
