"""`mlx-voicechat compare`: how far two checkpoints of one model are apart, in recorded conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mlx_voicechat.options import SessionOptions

from .options import EXTRA_SECONDS, Bandwidth, ExtraSeconds, Seed, SystemPrompt
from .render import Output, note, progress_bar

if TYPE_CHECKING:
    from mlx_voicechat.convert.comparison import Compared, Report

NAME_WIDTH, CELL_WIDTH = 36, 11


def compare(
    first: Annotated[str, Argument(metavar="A", show_default=False, help="A folder, a Hub repository, or tiny.")],
    second: Annotated[str, Argument(metavar="B", show_default=False, help="Another one of the same model.")],
    audio: Annotated[
        list[Path], Option(metavar="PATH", help="Recordings, or folders of them; repeat. The user's side alone.")
    ],
    system_prompt: SystemPrompt = None,
    seed: Seed = SessionOptions.seed,
    extra_decoding_seconds: ExtraSeconds = EXTRA_SECONDS,
    bandwidth: Bandwidth = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, not a table.")] = False,
) -> None:
    """Compare two checkpoints of one model: ids, both heads, words, speech, and what a frame moves.

    B hears every recording twice: told the ids that A chose, which compares frame by frame, and on its own.
    """
    from mlx_voicechat.convert.calibration import recordings
    from mlx_voicechat.convert.comparison import Comparison
    from mlx_voicechat.weights import checkpoint

    heard = recordings(audio, (system_prompt,))
    opened = [(name, checkpoint.open_model(name, note)) for name in (first, second)]
    comparison = Comparison(opened, heard, extra_decoding_seconds, seed)
    with progress_bar() as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.desc, bar.total = f"{what} checkpoint", total
            bar.update(done - bar.n)

        report = comparison.run(note, bandwidth, show)
    Output().write(json.dumps(report.as_json(), ensure_ascii=False) + "\n" if as_json else table(report))


def table(report: Report) -> str:
    """The report for a person to read."""
    lines = [_row("recording", "same text", "function", "KL text", "function", "code", "log-mel", "differs at")]
    lines += [_of_recording(each) for each in report.recordings]
    found = report.totals()
    count = len(report.recordings)
    forced = [f"{found[name]:.2%}" for name in ("same_text", "same_function")]
    apart = [f"{found[name]:.2g}" for name in ("kl_text", "kl_function")]
    lines.append(_row("all", *forced, *apart, f"{found['same_code']:.1%}", f"{found['log_mel']:.3f}"))
    lines.append("A's ids were told to B but for the last column: the first frame at which B on its own chose another.")
    lines.append(
        f"on its own: same text ids {found['own_same_text']:.2%}, function ids {found['own_same_function']:.2%}, "
        f"{found['all_equal']} of {count} conversations equal; "
        f"words that differ: transcript {found['transcript_word_errors']:.1%}, reply {found['reply_word_errors']:.1%}"
    )
    for letter, size in zip("AB", report.sizes, strict=True):
        lines.append(
            f"{letter}: {size.name}, {size.bytes / 1e9:.3g} GB; a frame moves {size.moved / 1e9:.3g} GB, "
            f"{size.floor_ms:.3g} ms at {report.bandwidth_gbps:.3g} GB/s"
        )
    return "\n".join(lines) + "\n"


def _of_recording(compared: Compared) -> str:
    forced, own = compared.forced, compared.own
    return _row(
        compared.name,
        f"{forced.same_text:.2%}",
        f"{forced.same_function:.2%}",
        f"{forced.kl_text:.2g}",
        f"{forced.kl_function:.2g}",
        f"{forced.same_code:.1%}",
        f"{forced.log_mel:.3f}",
        "-" if own.first_difference is None else str(own.first_difference),
    )


def _row(name: str, *cells: str) -> str:
    return f"{name[: NAME_WIDTH - 1]:<{NAME_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)
