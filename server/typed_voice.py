"""A synthesiser for typed text: a program of the machine speaks it, and the model hears it as any other speech.

macOS has `say`, a Linux distribution `espeak-ng`; `--typed-voice COMMAND` names another, which takes the text on
standard input and gives a WAV file on standard output. The text never stands in a command line, and the process is
bounded in time and in what it writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_voicechat.errors import AudioError, InputError, VoiceChatError
from mlx_voicechat.sound.pcm import Samples
from mlx_voicechat.sound.recordings import INPUT_RATE_HZ, read_all

log = logging.getLogger("mlx_voicechat.server")

SECONDS = 30.0  # of the process; both programs speak a thousand characters in one or two
OUTPUT_BYTES = 16 << 20  # six minutes of PCM16 at 22,050 Hz
COMPLAINT_BYTES = 4096
MAX_CHARACTERS = 4_000
POLL_SECONDS = 0.02
TEXT, WAV, ERRORS = "text.txt", "speech.wav", "errors.txt"  # in a folder of each call
TEXT_FILE, WAV_FILE = "{text}", "{wav}"  # of a command that wants files: they stand for their paths
SAY = ("say", "-f", TEXT_FILE, "-o", WAV_FILE, "--file-format=WAVE", "--data-format=LEI16@22050")
ESPEAK = ("espeak-ng", "--stdin", "--stdout", "-b", "1")
NONE_FOUND = "No synthesiser for typed text was found: typed input is off. Install espeak-ng, or use --typed-voice."


class TypedVoiceError(VoiceChatError):
    """Text that could not be spoken, and why."""

    code = "typed_voice_failed"


def find_voice(command: str | None = None) -> TypedVoice | None:
    """The synthesiser that `command` names, else this machine's own; none: None, and a line in the log.

    Raises InputError for a command that is not there.
    """
    if command is not None:
        try:
            words = shlex.split(command)
        except ValueError as fault:
            raise InputError(f"--typed-voice {command!r} is no command: {fault}.") from None
        if not words or shutil.which(words[0]) is None:
            remedy = "It takes text on standard input and gives WAV on standard output."
            raise InputError(f"--typed-voice {command!r}: there is no such program.", remedy)
        return TypedVoice(words)
    for known in [SAY, ESPEAK] if sys.platform == "darwin" else [ESPEAK]:
        if shutil.which(known[0]):
            return TypedVoice(known)
    log.warning(NONE_FOUND)
    return None


@dataclass(frozen=True)
class TypedVoice:
    """A synthesiser's command, and the bounds of its process."""

    command: Sequence[str]
    seconds: float = SECONDS
    output_bytes: int = OUTPUT_BYTES

    @property
    def name(self) -> str:
        return Path(self.command[0]).name

    async def speak(self, text: str) -> Samples:
        """Text -> float32 mono (S,) at 16 kHz. Raises TypedVoiceError; a cancelled call ends its process."""
        words = spoken(text)
        if not words:
            raise TypedVoiceError("There is no text to speak.")
        if len(words) > MAX_CHARACTERS:
            raise TypedVoiceError(f"The text has {len(words):,} characters; at most {MAX_CHARACTERS:,} are spoken.")
        try:
            with tempfile.TemporaryDirectory(prefix="mlx-voicechat-") as name:
                folder = Path(name)
                await asyncio.to_thread((folder / TEXT).write_text, words, encoding="utf-8")
                await self._run(folder)
                return await asyncio.to_thread(self._decoded, folder / WAV)
        except OSError as fault:  # no folder, a full disk, no descriptor
            raise TypedVoiceError(f"There is no place for a temporary file: {fault.strerror or fault}.") from None

    def _decoded(self, wav: Path) -> Samples:
        try:
            return read_all(wav, INPUT_RATE_HZ)
        except AudioError as fault:
            raise TypedVoiceError(f"{self.name} gave no usable WAV: {fault.message}") from None

    async def _run(self, folder: Path) -> None:
        """Run the command to its end. It has files, not pipes: what it leaves running cannot hold anything up."""
        wav = str(folder / WAV)
        paths = {TEXT_FILE: str(folder / TEXT), WAV_FILE: wav}
        output = os.devnull if WAV_FILE in self.command else wav
        with open(folder / TEXT, "rb") as source, open(output, "wb") as target, open(folder / ERRORS, "wb") as errors:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(paths.get(word, word) for word in self.command),
                    stdin=source,
                    stdout=target,
                    stderr=errors,
                    start_new_session=True,  # so that what it starts ends with it
                )
            except OSError as fault:
                raise TypedVoiceError(f"{self.name} does not start: {fault.strerror or fault}.") from None
        try:
            await asyncio.wait_for(self._watched(process, folder), self.seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise TypedVoiceError(f"{self.name} did not finish within {self.seconds:g} s.") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise TypedVoiceError(f"{self.name} failed (exit code {process.returncode}){_complaint(folder)}.")

    async def _watched(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        """Wait for the end of the process, looking at the size of what it writes."""
        ended = asyncio.ensure_future(process.wait())
        while not ended.done():
            await asyncio.wait({ended}, timeout=POLL_SECONDS)
            sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.name in (WAV, ERRORS)]
            if sum(sizes) > self.output_bytes:
                raise TypedVoiceError(f"{self.name} wrote more than {self.output_bytes:,} bytes.")


def spoken(text: str) -> str:
    """Text without what a synthesiser would take for a command ("[[" opens one in both) or cannot be written."""
    plain = "".join(character if character.isprintable() or character == "\n" else " " for character in text)
    while "[[" in plain:
        plain = plain.replace("[[", "[ [")
    return plain.strip()


def _complaint(folder: Path) -> str:
    """The last line of standard error, as the end of a sentence."""
    with open(folder / ERRORS, "rb") as errors:
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - COMPLAINT_BYTES))
        lines = errors.read(COMPLAINT_BYTES).decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "").rstrip(".")
    return f": {said[:200]}" if said else ""
