"""`mlx-voicechat download`: a checkpoint into the Hugging Face cache, ahead of its first use; and what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mlx_voicechat.errors import InputError

from .render import Output, note

if TYPE_CHECKING:
    from mlx_voicechat.weights.hub_cache import CachedModel

REVISION_DIGITS = 12  # of a commit, in the list


def download(
    model: Annotated[
        str | None,
        Argument(
            metavar="[4bit|8bit|bf16|ORG/NAME]", show_default=False, help="What to fetch; the 11B in 4 bits if absent."
        ),
    ] = None,
    revision: Annotated[
        str | None, Option(metavar="R", show_default=False, help="A branch, tag or commit; the main branch if absent.")
    ] = None,
    as_list: Annotated[bool, Option("--list", help="Show what the cache holds; nothing is fetched.")] = False,
) -> None:
    """Fetch a checkpoint, and print the folder it is in.

    A download that was interrupted goes on where it stopped. What is complete needs no network.
    """
    from mlx_voicechat.weights import hub_cache

    if as_list:
        if model or revision:
            raise InputError("--list shows everything: it takes no model and no --revision.")
        return Output().write(table(hub_cache.checkpoints()))
    Output().write(f"{_fetch(hub_cache.PUBLISHED.get(model or '4bit', model or ''), revision)}\n")
    return None


def _fetch(repository: str, revision: str | None) -> str:
    """The folder of a repository's checkpoint, downloaded if need be."""
    from mlx_voicechat.weights import hub, hub_cache
    from mlx_voicechat.weights.config_file import check_config, check_parts, read_json

    if not hub.is_repository_id(repository):
        known = ", ".join(hub_cache.PUBLISHED)
        raise InputError(f"{repository} is neither {known} nor a hub id such as ORG/NAME.")
    here = hub_cache.look_up(repository, revision)
    if here.state == "complete" and here.folder and hub_cache.layout(here.folder):
        note(f"{repository} is complete already: {hub.gigabytes(here.bytes)}, revision {here.revision}.")
        folder = here.folder
    else:
        folder = hub.fetch(repository, revision, ["config.json"], lambda _: None)
        if hub_cache.layout(folder) == "nvidia":
            check_parts(read_json(folder), str(folder / "config.json"))
        else:
            check_config(folder)  # another model's, or newer than this program: stop before its weights
        folder = hub.fetch(repository, revision, hub_cache.patterns_for(folder), note)
    if hub_cache.layout(folder) == "nvidia":
        note(f"this is NVIDIA's original, to convert: mlx-voicechat convert --source {repository} --output FOLDER")
    return str(folder)


def table(rows: Sequence[CachedModel]) -> str:
    """What the cache holds, a line each: repository, state, size, revision, and what its config says it is."""
    from mlx_voicechat.weights.hub import gigabytes

    width = max(len(row.repository) for row in rows)
    lines = [
        f"{row.repository:<{width}}  {row.state:<8}  {gigabytes(row.bytes) if row.bytes else '-':>8}  "
        f"{row.revision[:REVISION_DIGITS] or '-':<{REVISION_DIGITS}}  {row.kind}"
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"
