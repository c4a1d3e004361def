"""What a command shows: notes and progress on stderr, the conversation on stdout as it is produced."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from mlx_voicechat.errors import VoiceChatError

if TYPE_CHECKING:
    from mlx_voicechat import Event

LONGEST_RESULT = 400  # characters of a tool's result in the conversation
PREFIXES = {"user": "[user] ", "assistant": "", "function": "[function] "}
NOT_SHOWN = dict.fromkeys(
    code
    for codes in (range(0x20), range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A))
    for code in codes
    if chr(code) not in "\n\t"
)
QUIET_FRAMES = 5  # a line that was not added to for so long (0.4 s) is over
SENTENCE_END = re.compile(r"[.!?\u2026][\"')\]\u201d\u2019]*$")


def printable(text: str) -> str:
    """Without what would drive the terminal: control characters, and what turns the direction of writing."""
    return text.translate(NOT_SHOWN)


def note(message: str) -> None:
    """One line for the person at the terminal."""
    complain("note: " + " ".join(message.split()))


def complain(text: str) -> None:
    """A line on stderr; one that cannot be written (a full disk, a terminal that is gone) is lost and harms nothing."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def progress_bar(leave: bool = False, **shown: Any) -> Any:
    """A bar of `tqdm`'s, on a terminal only, that goes when its block ends, unless `leave`."""
    from tqdm import tqdm

    return tqdm(file=sys.stderr, disable=None, dynamic_ncols=True, leave=leave, **shown)


def abandon(stream: TextIO) -> None:
    """Let what the stream still holds go nowhere: the interpreter flushes it once more at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class Output:
    """Standard output whose reader may leave at any time (`| head`): then `closed` is true and nothing is written.

    Raises VoiceChatError when it fails otherwise.
    """

    def __init__(self) -> None:
        self.closed = sys.stdout is None

    def write(self, text: str) -> None:
        if self.closed:
            return
        try:
            sys.stdout.write(printable(text))
            sys.stdout.flush()
        except BrokenPipeError:
            self.closed = True
            abandon(sys.stdout)
        except OSError as fault:
            self.closed = True
            abandon(sys.stdout)
            raise VoiceChatError(f"Cannot write standard output: {fault.strerror}.") from None


def tool_lines(event: Event) -> list[str]:
    """How a tool's call, its failure or its result is shown; none for any other event."""
    from mlx_voicechat.events import FunctionApplied, FunctionCall, FunctionFailed

    if isinstance(event, FunctionCall):
        values = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in event.arguments.items())
        return [f"[call] {event.name}({values})"]
    if isinstance(event, FunctionFailed):
        return [f"[call] failed ({event.reason.value.replace('_', ' ')}) {brief(event.raw)}".rstrip()]
    if isinstance(event, FunctionApplied):
        return [f"[result] {brief(result)}" for result in event.results]
    return []


def brief(text: str) -> str:
    """A text on one line, and not a long one."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_RESULT else f"{line[:LONGEST_RESULT]}..."


class LiveText:
    """The conversation as it is produced, a line a turn, through `write`.

    One line is open at a time. What another speaker says meanwhile is held until that line has been quiet for
    QUIET_FRAMES, so that people who talk over each other do not cut each other's words. With `tools` a call and its
    result are lines of their own, in place of the text of the function channel. The assistant's turn begins where the
    session tells so; where it does not, after a pause and a sentence, with a word that no space divides from it.
    """

    def __init__(self, write: Callable[[str], object], tools: bool = False) -> None:
        self._write = write
        self.tools = tools
        self._open: str | None = None
        self._last_frame = 0
        self._last_said = (0, "")  # the assistant's last frame and words
        self._opened = False  # a turn of the assistant, of which nothing was said yet
        self._held: list[tuple[str, str, bool]] = []
        self._seen: set[str] = set()

    def take(self, event: Event) -> None:
        """Show one event of the session; audio frames carry the clock."""
        from mlx_voicechat import AudioFrame, FunctionDelta, TextDelta, TranscriptDelta
        from mlx_voicechat.events import TurnOpened

        self._opened = self._opened or isinstance(event, TurnOpened)
        if isinstance(event, AudioFrame):
            if self._held and event.frame_index - self._last_frame >= QUIET_FRAMES:
                self._release(event.frame_index)
            return
        if lines := tool_lines(event):
            self._release(event.frame_index)
            self.end_line()
            self._write("".join(line + "\n" for line in lines))
            return
        for kind, speaker in ((TranscriptDelta, "user"), (TextDelta, "assistant"), (FunctionDelta, "function")):
            if isinstance(event, kind) and not (self.tools and speaker == "function"):
                anew = speaker == "assistant" and self._begins(event.delta, event.frame_index)
                self._say(speaker, event.delta, event.frame_index, anew)

    def close(self) -> None:
        """Show what was held and end the last line; a user who was not understood has an empty line of their own."""
        self._release(self._last_frame)
        self.end_line()
        if "user" not in self._seen:
            self._write(PREFIXES["user"].rstrip() + "\n")

    def end_line(self) -> None:
        """End the line that is open, if one is."""
        if self._open is not None:
            self._write("\n")
            self._open = None

    def _begins(self, delta: str, frame_index: int) -> bool:
        """Whether these words of the assistant begin a turn."""
        if not delta:
            return False
        last_frame, last = self._last_said
        glued = SENTENCE_END.search(last) is not None and not delta[0].isspace()
        begins = self._opened or (glued and frame_index - last_frame >= QUIET_FRAMES)
        self._opened, self._last_said = False, (frame_index, delta)
        return begins

    def _say(self, speaker: str, delta: str, frame_index: int, anew: bool = False) -> None:
        if not delta:
            return
        if self._open not in (None, speaker):
            self._held.append((speaker, delta, anew))
            return
        if anew:
            self.end_line()
        if self._open is None:
            delta = delta.lstrip()
            if not delta:
                return
            delta = PREFIXES[speaker] + delta
        self._open, self._last_frame = speaker, frame_index
        self._seen.add(speaker)
        self._write(delta)

    def _release(self, frame_index: int) -> None:
        held, self._held = self._held, []
        for speaker in dict.fromkeys(name for name, *_ in held):
            self.end_line()
            for name, delta, anew in held:
                if name == speaker:
                    self._say(speaker, delta, frame_index, anew)


class Progress:
    """A bar of frames with the real-time factor (time taken / length of the audio), on a terminal only.

    A terminal that shows the conversation as it is produced shows no bar.
    """

    def __init__(self, total_seconds: float, frame_seconds: float, live: bool) -> None:
        self._frame_seconds = frame_seconds
        self._started = time.perf_counter()
        self._bar: Any = None
        if sys.stderr.isatty() and not (live and sys.stdout.isatty()):
            self._bar = progress_bar(leave=True, total=math.ceil(total_seconds / frame_seconds), unit=" frames")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def take(self, event: Event) -> None:
        """Count one event; only audio frames move the bar."""
        from mlx_voicechat import AudioFrame

        if self._bar is not None and isinstance(event, AudioFrame):
            elapsed, audio = time.perf_counter() - self._started, (event.frame_index + 1) * self._frame_seconds
            self._bar.set_postfix_str(f"real-time factor {elapsed / audio:.2f}", refresh=False)
            self._bar.update()
