"""What the Hugging Face cache on this disk holds of a repository. No network; `huggingface_hub` only names the folder.

The cache's layout is the documented one: `models--ORG--NAME/{refs,snapshots/COMMIT,blobs}`.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from . import quantization
from .config_file import MODEL_TYPE, absent_parts, is_original
from .shards import SINGLE_FILE, verify

PATTERNS = [
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "text-table.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
]
ORIGINAL_PATTERNS = ["config.json", "model*.safetensors", "model.safetensors.index.json"]  # NVIDIA's: no tokenizer
BASE_PATTERNS = ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]  # no weights
NEEDED = ("config.json", "tokenizer.json")  # of these, what the patterns ask for must be there; weights see their index
ORIGINAL = "nvidia/NVIDIA-NemotronLabs-VoiceChat-11B"
PUBLISHED = {bits: f"mlx-community/NemotronLabs-VoiceChat-11B-{bits}" for bits in ("4bit", "8bit", "bf16")}
# Weights by their headers (`published.headers`), and a tokenizer of 17 MB.
DOWNLOAD_BYTES = {"4bit": 9_183_000_000, "8bit": 13_919_000_000, "bf16": 22_208_000_000}
REPEAT = "Repeat the command: what has arrived is kept."
COMMIT = re.compile(r"[0-9a-f]{40}")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
PARTIAL = ".partial"  # suffix of a blob that is still arriving
ARRIVING = (PARTIAL, ".incomplete")  # the second is huggingface_hub's own


class CachedModel(NamedTuple):
    """One revision of a repository in the cache. `state`: complete, partial or absent; `fault` says what is amiss.

    `kind` is what its config.json says that it is, for a person.
    """

    repository: str
    state: str
    bytes: int = 0
    revision: str = ""  # the commit
    folder: Path | None = None
    fault: str = ""
    kind: str = ""


def root() -> Path:
    """The cache's folder, as HF_HOME and HF_HUB_CACHE have it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def folder_of(repository: str) -> Path:
    """Where the cache keeps a repository, whether it does or not."""
    return root() / f"models--{repository.replace('/', '--')}"


def snapshot(repository: str, revision: str | None = None) -> Path | None:
    """The folder of a branch (default: main), tag or commit, complete or not; None if the cache knows none."""
    kept = folder_of(repository)
    commit = revision or "main"
    if not COMMIT.fullmatch(commit):
        try:
            commit = (kept / "refs" / commit).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    folder = kept / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def matches(file: str, patterns: Sequence[str]) -> bool:
    """Whether a file of a repository is one of those asked for; never one in a sub-folder."""
    return "/" not in file and any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def fault(folder: Path, patterns: Sequence[str] = PATTERNS) -> CheckpointError | None:
    """What keeps a snapshot from being complete, None if nothing does: needed files, and each shard's size."""
    absent = [name for name in NEEDED if matches(name, patterns) and not (folder / name).is_file()]
    if absent:
        return CheckpointError(f"{folder} lacks {', '.join(absent)}.", REPEAT)
    if matches(SINGLE_FILE, patterns):
        try:
            verify(folder)
        except CheckpointError as error:
            return error
    return None


def layout(folder: Path) -> str:
    """`nvidia` for the original, to be converted, `runtime` for what this program loads; else empty. By config.json."""
    raw = _config(folder)
    if is_original(raw):
        return "runtime" if quantization.is_stated(raw) else "nvidia"
    return "runtime" if raw.get("model_type") == MODEL_TYPE else ""


def patterns_for(folder: Path) -> list[str]:
    """What belongs to the checkpoint whose config.json is in `folder`; an original's tokenizer is the base LLM's."""
    raw = _config(folder)
    return ORIGINAL_PATTERNS if is_original(raw) and not raw.get("text_config") else PATTERNS


def kind(folder: Path) -> str:
    """What a VoiceChat checkpoint's config.json says that it is: names, bits, and which half is not there."""
    raw = _config(folder)
    stated = quantization.summary(raw)
    words = ["NVIDIA's original" if not stated else "NVIDIA's config"] if is_original(raw) else []
    absent = [f"without {part}" for part in absent_parts(raw)]
    return ", ".join([*words, *([stated] if stated else [] if words else ["not quantised"]), *absent])


def _config(folder: Path) -> dict[str, Any]:
    """`config.json`, empty when it cannot be read."""
    try:
        raw: Any = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def look_up(repository: str, revision: str | None = None) -> CachedModel:
    """How much of a repository is here, at a revision (default: main)."""
    folder = snapshot(repository, revision)
    arriving = sum(_size(file) for file in _arriving(repository))
    if folder is None:
        return CachedModel(repository, "partial" if arriving else "absent", arriving)
    wrong = fault(folder, patterns_for(folder))
    size = sum(_size(file) for file in folder.iterdir())
    found = CachedModel(repository, "complete", size, folder.name, folder, kind=kind(folder) if layout(folder) else "")
    if wrong is None:
        return found
    return found._replace(state="partial", bytes=size + arriving, fault=wrong.message)


def checkpoints() -> list[CachedModel]:
    """Every VoiceChat checkpoint of the cache, and the published ones that it lacks; each revision by itself."""
    known = [*PUBLISHED.values(), ORIGINAL]
    others = sorted(name for name in _repositories() if name not in known)
    rows = []
    for repository in [*known, *others]:
        commits = [path.name for path in _snapshots(repository) if layout(path)]
        rows += [look_up(repository, commit) for commit in commits]
        if not commits and repository in known:
            rows.append(look_up(repository))
    return rows


def known_hash(file: Path) -> str | None:
    """The hash by which the cache knows a file: 64 digits SHA-256, 40 git's SHA-1; None for a file of no cache."""
    blob = file.resolve()
    return blob.name if blob.parent.name == "blobs" and HASH.fullmatch(blob.name) else None


def _repositories() -> Iterator[str]:
    for path in root().glob("models--*--*"):
        yield path.name.removeprefix("models--").replace("--", "/", 1)


def _snapshots(repository: str) -> list[Path]:
    return sorted(path for path in (folder_of(repository) / "snapshots").glob("*") if COMMIT.fullmatch(path.name))


def _arriving(repository: str) -> list[Path]:
    return [path for path in (folder_of(repository) / "blobs").glob("*") if path.suffix in ARRIVING]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # a link to a blob that is gone
        return 0
