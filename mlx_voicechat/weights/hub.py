"""A checkpoint of the Hugging Face hub: the local cache when it is complete, else a download that can be repeated.

`huggingface_hub` is imported at the first use, so that programs which name a folder never load it. It lists a
repository; its files are fetched by `transfer`: one of 5 GB (the original: 41 GiB) goes on where it stopped.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, HubError, InputError
from . import hub_cache, proxies, transfer
from .config_file import check_config
from .hub_cache import BASE_PATTERNS, COMMIT, NEEDED, ORIGINAL_PATTERNS, PATTERNS, REPEAT, matches
from .shards import SINGLE_FILE
from .transfer import RemoteFile, sha256

__all__ = [
    "BASE_PATTERNS",
    "ORIGINAL_PATTERNS",
    "PATTERNS",
    "fetch",
    "gigabytes",
    "is_repository_id",
    "locate",
    "sha256",
]

WEIGHTS = ("model*.safetensors",)
REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[\w][\w./+-]*")
ELSEWHERE = "Name a folder that holds a checkpoint instead, or the model `tiny`, which is built in."
LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN."
CHECK = "Check HF_ENDPOINT, proxy and network: one that asks for a login first answers in the hub's place."
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def print_notice(text: str) -> None:
    print(text, file=sys.stderr)


def is_repository_id(name: str) -> bool:
    """Whether `name` has the form of a hub id, `organisation/name`."""
    return REPOSITORY_ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def locate(repository: str, say: Callable[[str], None]) -> Path:
    """The folder of a hub checkpoint that this program loads, every file of it present and whole.

    A config that is another model's, half a model's or the original's stops it before any weights are fetched.
    Otherwise `fetch`.
    """
    check_config(folder := fetch(repository, None, ["config.json"], lambda _: None))
    return fetch(repository, None, hub_cache.patterns_for(folder), say)


def fetch(
    repository: str,
    revision: str | None = None,
    patterns: Sequence[str] = PATTERNS,
    say: Callable[[str], None] = print_notice,
) -> Path:
    """The snapshot's folder of a repository at a branch, tag or commit, with all its files that match `patterns`.

    What is complete in the cache (`hub_cache.fault`) is used without any network call, a branch or tag at the commit
    that the cache knows. Otherwise it is downloaded, going on where an earlier attempt stopped; before that `say` gets
    its size and the licence. config.json is needed if a pattern matches it, so is tokenizer.json, and weights must be
    whole. Raises HubError (network, access, disk), CheckpointError (files that are none), InputError (no revision).
    """
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise InputError(f"{revision!r} is no revision.", "A revision is a branch, a tag or a commit.")
    folder = hub_cache.snapshot(repository, revision)
    fault = hub_cache.fault(folder, patterns) if folder else None
    if folder and fault is None:
        return folder
    folder = _download(repository, revision, patterns, say, fault)
    if (fault := hub_cache.fault(folder, patterns)) is not None:
        raise fault
    return folder


def gigabytes(size: int) -> str:
    """Bytes for a person to read."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _download(
    repository: str,
    revision: str | None,
    patterns: Sequence[str],
    say: Callable[[str], None],
    fault: CheckpointError | None,
) -> Path:
    """Download what the cache lacks; what makes a snapshot complete comes last, the weights at the very end."""
    from huggingface_hub import constants, errors

    try:
        info = _listing(repository, revision)
        folder = hub_cache.folder_of(repository) / "snapshots" / info.sha
        listed = {file.rfilename: file for file in info.siblings or [] if matches(file.rfilename, patterns)}
        _check_listing(repository, listed, patterns)
        wanted = [transfer.remote_file(repository, info.sha, file) for _, file in sorted(listed.items(), key=_rank)]
        lacking = [file for file in wanted if not file.is_at(folder / file.name)]
        fault = fault or CheckpointError(f"{_count(lacking)} still to come.")
        if lacking:
            say(_notice(repository, lacking, info, constants.ENDPOINT))
        _check_space(hub_cache.root(), sum(file.to_come for file in lacking))
        _note_commit(repository, revision or "main", info.sha)
        for file in lacking:
            transfer.fetch(repository, info.sha, file, say)
        return folder
    # httpx and requests errors are neither OSError nor ValueError throughout; ImportError is a SOCKS proxy's.
    except (errors.HTTPError, OSError, ValueError, RuntimeError, ImportError) as error:
        raise _explain(repository, revision, error, fault) from error


def _listing(repository: str, revision: str | None) -> Any:
    """What the hub says of a repository: commit, files, card."""
    from huggingface_hub import HfApi, constants

    try:
        info: Any = HfApi().model_info(repository, revision=revision, files_metadata=True)
        known = COMMIT.fullmatch(info.sha or "") is not None
    except (KeyError, TypeError, AttributeError):  # JSON of something else
        known = False
    if not known:
        raise HubError(f"{constants.ENDPOINT} does not answer like a hub.", CHECK)
    return info


def _check_listing(repository: str, wanted: Mapping[str, Any], patterns: Sequence[str]) -> None:
    absent = [name for name in NEEDED if matches(name, patterns) and name not in wanted]
    if absent:
        raise CheckpointError(f"The repository {repository} has no {' and no '.join(absent)}: it is not a checkpoint.")
    if matches(SINGLE_FILE, patterns) and not any(matches(name, WEIGHTS) for name in wanted):
        raise CheckpointError(f"The repository {repository} has no weights (model*.safetensors): it is no checkpoint.")


def _rank(item: tuple[str, Any]) -> tuple[int, str]:
    """Optional files first, needed ones then, weights last: what looks complete is."""
    name = item[0]
    return (2 if matches(name, WEIGHTS) else 1 if name in NEEDED else 0), name


def _note_commit(repository: str, revision: str, commit: str) -> None:
    """Let the cache know which commit a branch or tag is, as huggingface_hub does."""
    if COMMIT.fullmatch(revision):
        return
    ref = hub_cache.folder_of(repository) / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    partial = ref.with_name(f"{ref.name}.{secrets.token_hex(4)}")
    partial.write_text(commit, encoding="ascii")
    partial.replace(ref)


def _notice(repository: str, files: Sequence[RemoteFile], info: Any, endpoint: str) -> str:
    """What a user should know before a download: how much, where to, and under which licence."""
    card = info.card_data or {}
    named = [str(card.get(key)) for key in ("license_name", "license", "license_link") if card.get(key)]
    if len(named) > 1 and card.get("license") == "other":
        named.remove("other")
    unknown = any(file.size is None for file in files)
    size = ("at least " if unknown else "") + gigabytes(sum(file.to_come for file in files))
    licence = f" ({', '.join(named)})" if named else ""
    return (
        f"Downloading {repository}: {_count(files)}, {size}, into {hub_cache.root()}.\n"
        f"The model has its own licence{licence}: see its model card, {endpoint}/{repository}"
    )


def _count(files: Sequence[Any]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


def _check_space(cache: Path, needed: int) -> None:
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{gigabytes(needed)} needed, {gigabytes(free)} free", str(cache))


def _explain(repository: str, revision: str | None, error: Exception, fault: CheckpointError | None) -> HubError:
    """One message and one remedy for each way in which the hub fails."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    response = getattr(error, "response", None)
    if response is not None:
        return _refused(repository, revision, error, response.status_code)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return HubError(
            f"The disk is too full for {repository}: {error}.", "Free some space, or set HF_HOME elsewhere."
        )
    if getattr(error, "errno", None) in UNWRITABLE:
        return HubError(f"The cache cannot be written: {error}.", "Set HF_HOME to a folder that is yours.")
    if isinstance(error, json.JSONDecodeError):
        return HubError(f"{constants.ENDPOINT} does not answer like a hub.", CHECK)
    if "Consistency check failed" in str(error):
        return HubError(f"A file of {repository} did not arrive whole.", REPEAT)
    if isinstance(error, ValueError | ImportError) and (wrong := proxies.fault_of(error)) is not None:
        return HubError(*wrong)
    offline = isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE
    proxy = None if offline else proxies.proxy_of(constants.ENDPOINT)
    silent = "the hub does not answer" if proxy is None else f"the hub does not answer through the proxy {proxy}"
    reason = "HF_HUB_OFFLINE is set" if offline else f"{silent} ({_first_line(error)})"
    if fault is not None:
        return HubError(f"The copy of {repository} in the cache is incomplete and {reason}. {fault.message}", REPEAT)
    at = f" at revision {revision}" if revision else ""
    return HubError(f"{repository} is not in the cache{at} and {reason}.", ELSEWHERE)


def _refused(repository: str, revision: str | None, error: Exception, status: int) -> HubError:
    """What an answer of the hub means that is not the file."""
    from huggingface_hub import constants, errors, get_token

    proxy = proxies.proxy_of(constants.ENDPOINT)
    if status == 407:
        return HubError(
            f"The proxy {proxy} asks for a name and a password (407).", "Write it as http://NAME:PASSWORD@..."
        )
    if status == 511:
        return HubError("This network asks for a login first (511).", f"Log in with a browser. {REPEAT}")
    page = f"{constants.ENDPOINT}/{repository}"
    token = get_token()
    source = "HF_TOKEN in the environment" if os.environ.get("HF_TOKEN") else "the token that `hf auth login` saved"
    if isinstance(error, errors.GatedRepoError) and (token is None or status != 401):
        first = "" if token else LOG_IN + " "
        return HubError(f"{repository} is gated.", f"{first}Accept its licence at {page}, then repeat the command.")
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{repository} has no revision {revision}.", f"Its branches, tags and commits: {page}/tree/main"
        )
    if status == 401 and token is not None:
        return HubError(f"The hub does not accept your token ({source}).", "Make a new one, or remove it.")
    if status == 401:
        return HubError(
            f"There is no public repository {repository} and no such folder here.", f"If it is private: {LOG_IN}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(f"There is no repository {repository} and no such folder here.", f"Check the spelling: {page}")
    if status == 403:
        rights = f"Your token ({source}) may lack the right to read it: see {constants.ENDPOINT}/settings/tokens"
        return HubError(f"The hub denies access to {repository} (403).", rights if token else LOG_IN)
    if status == 429:
        sooner = "" if token else f" Who is logged in may ask more often: {LOG_IN}"
        return HubError("The hub has had too many requests from here (429).", f"Wait some minutes. {REPEAT}{sooner}")
    kept = f"Try again later: what has arrived is kept. {ELSEWHERE}"
    by = "The hub" if proxy is None else f"The hub, or the proxy {proxy},"
    return HubError(f"{by} answered {status} for {repository}.", kept)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
