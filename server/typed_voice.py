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

from ..audio import INPUT_RATE_HZ, Samples, read_all
from ..errors import AudioError, InputError, VoiceChatError

log = logging.getLogger("mlx_voicechat.server")

SECONDS = 30.0  # of the process; both programs speak a thousand characters in one or two
OUTPUT_BYTES = 16 << 20  # six minutes of PCM16 at 22,050 Hz
COMPLAINT_BYTES = 4096
MAX_CHARACTERS = 4_000
POLL_SECONDS = 0.05
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
        with tempfile.TemporaryDirectory(prefix="mlx-voicechat-") as folder:
            wav = Path(folder, "speech.wav")
            await self._run(words, Path(folder, "text.txt"), wav)
            return await asyncio.to_thread(self._decoded, wav)

    def _decoded(self, wav: Path) -> Samples:
        try:
            return read_all(wav, INPUT_RATE_HZ)
        except AudioError as fault:
            raise TypedVoiceError(f"{self.name} gave no usable WAV: {fault.message}") from None

    async def _run(self, text: str, text_file: Path, wav: Path) -> None:
        await asyncio.to_thread(text_file.write_text, text, encoding="utf-8")
        paths = {TEXT_FILE: str(text_file), WAV_FILE: str(wav)}
        try:
            with open(text_file, "rb") as source:
                process = await asyncio.create_subprocess_exec(
                    *(paths.get(word, word) for word in self.command),
                    stdin=source,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,  # so that what it starts ends with it
                )
        except OSError as fault:
            raise TypedVoiceError(f"{self.name} does not start: {fault.strerror or fault}.") from None
        try:
            complaint = await asyncio.wait_for(self._collect(process, wav), self.seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise TypedVoiceError(f"{self.name} did not finish within {self.seconds:g} s.") from None
        finally:
            await _end(process)
        if process.returncode:
            raise TypedVoiceError(f"{self.name} failed (exit code {process.returncode}){complaint}.")

    async def _collect(self, process: asyncio.subprocess.Process, wav: Path) -> str:
        """Read and watch the process to its end; what it complained of, as the end of a sentence."""
        assert process.stdout is not None
        assert process.stderr is not None
        data, complaint, _ = await asyncio.gather(
            self._output(process.stdout), _complaint(process.stderr), self._watched(process, wav)
        )
        if WAV_FILE not in self.command:
            await asyncio.to_thread(wav.write_bytes, data)
        return complaint

    async def _output(self, stream: asyncio.StreamReader) -> bytes:
        data = bytearray()
        while piece := await stream.read(1 << 16):
            data += piece
            self._check_size(len(data))
        return bytes(data)

    async def _watched(self, process: asyncio.subprocess.Process, wav: Path) -> None:
        """Wait for the end of the process, looking at the size of a file that it writes."""
        ended = asyncio.ensure_future(process.wait())
        while not ended.done():
            await asyncio.wait({ended}, timeout=POLL_SECONDS)
            with suppress(FileNotFoundError):
                self._check_size(wav.stat().st_size)

    def _check_size(self, size: int) -> None:
        if size > self.output_bytes:
            raise TypedVoiceError(f"{self.name} wrote more than {self.output_bytes:,} bytes.")


def spoken(text: str) -> str:
    """Text without what a synthesiser would take for a command ("[[" opens one in both) or cannot be written."""
    plain = "".join(character if character.isprintable() or character == "\n" else " " for character in text)
    while "[[" in plain:
        plain = plain.replace("[[", "[ [")
    return plain.strip()


async def _complaint(stream: asyncio.StreamReader) -> str:
    """The last line of standard error, as the end of a sentence."""
    tail = b""
    while piece := await stream.read(COMPLAINT_BYTES):
        tail = (tail + piece)[-COMPLAINT_BYTES:]
    lines = tail.decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "").rstrip(".")
    return f": {said[:200]}" if said else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process and what it started, and take its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
