"""The command `mlx-voicechat`: the one place where an error or a signal becomes a line and an exit code.

Imports nothing that takes time at its top, so that Ctrl-C meets `main` at work.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from .endings import Ended, report

ENDINGS = ("SIGINT", "SIGTERM", "SIGHUP")


def main() -> None:
    """Entry point: runs `sys.argv` and leaves with the exit code."""
    try:
        _open_standard_streams()
        _catch_signals()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = _ended(signal.SIGINT)
    except Ended as ended:
        code = _ended(signal.Signals(ended.args[0] - 128))
    _flush_standard_output()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code, having said any error in one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a transcript must not fail in a terminal without its letters
    from .app import app

    try:
        code: Any = app(list(arguments), prog_name="mlx-voicechat", standalone_mode=False)
    except Exception as error:
        return report(error)
    return code if isinstance(code, int) else 0


def _open_standard_streams() -> None:
    """Put the null device where a descriptor was closed (`2>&-`): the next file opened would take its place."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def _catch_signals() -> None:
    for name in ENDINGS:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, _end)


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # sent again, it does not wait for anything
    raise Ended(128 + number)


def _ended(number: signal.Signals) -> int:
    from .render import note

    note("interrupted." if number == signal.SIGINT else f"ended by {number.name}.")
    return 128 + number


def _flush_standard_output() -> None:
    """What typer printed and could not flush (`--help > /dev/full`) must not fail again at exit."""
    from .render import abandon

    try:
        sys.stdout.flush()
    except OSError:
        abandon(sys.stdout)


if __name__ == "__main__":
    main()
