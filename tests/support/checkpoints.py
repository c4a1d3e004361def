"""Checkpoint folders for tests: the golden ones, and copies of them that a test may break."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

GOLDEN = Path(__file__).parents[1] / "golden"


def copy_of(name: str, where: Path) -> Path:
    """A writable copy of the golden checkpoint `name`, in `where`."""
    return Path(shutil.copytree(GOLDEN / name, where / name))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Rewrite a JSON file after `change` has altered what it holds."""
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def tensors_of(folder: Path) -> dict[str, mx.array]:
    """All tensors of a checkpoint, as stored."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= dict(mx.load(str(file)))  # type: ignore[arg-type]
    return found


def rewrite(folder: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    """Let `change` alter the tensors of a checkpoint copy; they end up in one file without an index."""
    tensors = tensors_of(folder)
    change(tensors)
    mx.eval(tensors)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
