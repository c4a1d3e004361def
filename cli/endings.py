"""How a command ends that did not end by itself: an error as one line and an exit code, and a signal."""

from __future__ import annotations

import os

DEBUG_VARIABLE = "MLX_VOICECHAT_DEBUG"
NO_FOLDER = "No usable temporary directory"  # Python's words, with the folders that it has tried


class Ended(SystemExit):
    """A signal ended the command; raised where it struck, so that temporary files are removed."""


def report(error: Exception) -> int:
    """Print `error: ...` on stderr, one line, and return the exit code; the traceback only for those who ask for it."""
    from mlx_voicechat.errors import VoiceChatError

    from .render import complain

    if os.environ.get(DEBUG_VARIABLE) == "1":
        import traceback

        complain("".join(traceback.format_exception(error)).rstrip())
    format_usage = getattr(error, "format_message", None)  # typer's own errors, whichever click it comes with
    if format_usage is not None:
        context = getattr(error, "ctx", None)
        hint = f" See '{context.command_path} --help'." if context is not None else ""
        message, code = format_usage().rstrip(".") + "." + hint, getattr(error, "exit_code", 2)
    elif isinstance(error, VoiceChatError):
        message, code = str(error), error.exit_code
    elif isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        message, code = f"{where}{error.strerror}.", 1
        if NO_FOLDER in error.strerror:
            message += " They are full, or not yours to write: set TMPDIR to a folder that is."
    else:
        message = f"Unexpected {type(error).__name__}: {error}. Set {DEBUG_VARIABLE}=1 to see where it comes from."
        code = 1
    complain("error: " + " ".join(message.split()))
    return code
