"""A checkpoint of the Hugging Face hub: the local cache when it is complete, else a download that can be repeated.

`huggingface_hub` is imported at the first use, so that programs which name a folder never load it.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import read_config
from .errors import CheckpointError, HubError
from .shards import verify

PATTERNS = [
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
]
NEEDED = ("config.json", "tokenizer.json")
REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ELSEWHERE = (
    "Name a folder that holds a checkpoint instead (`--model FOLDER`), or try `--model tiny`, which is built in."
)
REPEAT = "Repeat the command: files that are complete are kept."


def is_repository_id(name: str) -> bool:
    """Whether `name` has the form of a hub id, `organisation/name`."""
    return REPOSITORY_ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def locate(repository: str, say: Callable[[str], None]) -> Path:
    """The folder of a hub checkpoint, every file of it present and whole.

    A complete snapshot in the cache is used without any network call. Before a download `say` gets its size and the
    model's licence. Raises HubError (network, access, disk) and CheckpointError (files that are no checkpoint).
    """
    cached = _cached(repository, "config.json")
    fault = _fault(cached.parent) if cached else None
    if cached and fault is None:
        return cached.parent
    folder = _fetch(repository, say, fault)
    if (fault := _fault(folder)) is not None:
        raise fault
    return folder


def _cached(repository: str, file: str, revision: str | None = None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, file, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _fault(folder: Path) -> CheckpointError | None:
    """What keeps a snapshot from being complete, None if nothing does."""
    absent = [name for name in NEEDED if not (folder / name).is_file()]
    if absent:
        return CheckpointError(f"{folder} lacks {', '.join(absent)}.", REPEAT)
    try:
        verify(folder)
    except CheckpointError as error:
        return error
    return None


def _fetch(repository: str, say: Callable[[str], None], fault: CheckpointError | None) -> Path:
    """Download what the cache lacks of a repository; a config that this program cannot read stops it early."""
    from huggingface_hub import HfApi, constants, errors, hf_hub_download, snapshot_download

    try:
        info: Any = HfApi().model_info(repository, files_metadata=True)
        wanted = {f.rfilename: f.size or 0 for f in info.siblings or [] if _is_needed(f.rfilename)}
        if "config.json" not in wanted:
            raise CheckpointError(f"The repository {repository} has no config.json: it is not a checkpoint.")
        read_config(Path(hf_hub_download(repository, "config.json")).parent)
        lacking = {name: size for name, size in wanted.items() if _size(repository, name, info.sha) != size}
        fault = fault or CheckpointError(f"{_count(lacking)} still to come.")
        say(_notice(repository, lacking, info, Path(constants.HF_HUB_CACHE), constants.ENDPOINT))
        _check_space(Path(constants.HF_HUB_CACHE), sum(lacking.values()))
        for name in lacking:
            if _cached(repository, name, info.sha):  # there, but cut off: a snapshot download would keep it
                hf_hub_download(repository, name, force_download=True)
        return Path(snapshot_download(repository, allow_patterns=PATTERNS))
    # httpx and requests errors are neither OSError nor ValueError throughout; RuntimeError is what hf_xet raises.
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise _explain(repository, error, fault) from error


def _is_needed(file: str) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in PATTERNS) and "/" not in file


def _size(repository: str, file: str, revision: str) -> int | None:
    path = _cached(repository, file, revision)
    return path.stat().st_size if path and path.exists() else None


def _notice(repository: str, lacking: dict[str, int], info: Any, cache: Path, endpoint: str) -> str:
    """What a user should know before a download: how much, where to, and under which licence."""
    card = info.card_data or {}
    named = [str(card.get(key)) for key in ("license_name", "license", "license_link") if card.get(key)]
    if len(named) > 1 and card.get("license") == "other":
        named.remove("other")
    licence = f" ({', '.join(named)})" if named else ""
    return (
        f"Downloading {repository}: {_count(lacking)}, {_gigabytes(sum(lacking.values()))}, into {cache}.\n"
        f"The model has its own licence{licence}: see its model card, {endpoint}/{repository}"
    )


def _count(files: dict[str, int]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _check_space(cache: Path, needed: int) -> None:
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{_gigabytes(needed)} needed, {_gigabytes(free)} free", str(cache))


def _explain(repository: str, error: Exception, fault: CheckpointError | None) -> HubError:
    """One message and one remedy for each way in which the hub fails."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    page = f"{constants.ENDPOINT}/{repository}"
    token = get_token()
    response = getattr(error, "response", None)
    status = response.status_code if response is not None else None
    log_in = "Log in with `hf auth login`, or set HF_TOKEN."
    if isinstance(error, errors.GatedRepoError) and (token is None or status != 401):
        first = "" if token else log_in + " "
        return HubError(f"{repository} is gated.", f"{first}Accept its licence at {page}, then repeat the command.")
    if status == 401 and token is not None:
        source = "HF_TOKEN in the environment" if os.environ.get("HF_TOKEN") else "the token that `hf auth login` saved"
        return HubError(f"The hub does not accept your token ({source}).", "Make a new one, or remove it.")
    if status == 401:
        return HubError(
            f"There is no public repository {repository} and no such folder here.", f"If it is private: {log_in}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(f"There is no repository {repository} and no such folder here.", f"Check the spelling: {page}")
    if status is not None:
        return HubError(f"The hub answered {status} for {repository}.", f"Try again later. {ELSEWHERE}")
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return HubError(
            f"The disk is too full for {repository}: {error}.", "Free some space, or set HF_HOME elsewhere."
        )
    offline = isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set" if offline else f"the hub does not answer ({_first_line(error)})"
    if isinstance(error, json.JSONDecodeError):
        return HubError(f"{constants.ENDPOINT} does not answer like a hub.", "Check HF_ENDPOINT, proxy and network.")
    if fault is not None:
        return HubError(f"The copy of {repository} in the cache is incomplete and {reason}. {fault.message}", REPEAT)
    return HubError(f"{repository} is not in the cache and {reason}.", ELSEWHERE)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
