"""One handle a response: its audio, its words, how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from mlx_voicechat.client.duplex_events import AudioDelta, DuplexEvent, ListenDecision, ResponseCreated, ResponseDone
from mlx_voicechat.client.errors import DuplexSessionClosedError
from mlx_voicechat.client.session_config import AudioFormat
from mlx_voicechat.errors import ServerError

MOST_UNCLAIMED = 64  # handles that nobody asked for
MOST_UNCLAIMED_BYTES = 16 << 20  # and their audio: six minutes at 24 kHz


class ResponseHandle:
    """One response of the assistant, while it comes and after.

    `decision` is "speak" or "listen" (then it is finished, and empty); `played_ms` is how much of its audio `audio()`
    has given out.
    """

    def __init__(self, created: DuplexEvent, form: AudioFormat) -> None:
        self.created_event: DuplexEvent | None = created if isinstance(created, ResponseCreated) else None
        self.done_event: ResponseDone | None = None
        self.response_id = created.response_id
        self.decision = "listen" if isinstance(created, ListenDecision) else "speak"
        self.transcript = ""
        self.text = ""
        self.played_ms = 0.0
        self.audio_bytes_waiting = 0
        self._form = form
        self._chunks: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._ended = asyncio.Event()
        self._fault: ServerError | None = None
        if self.decision == "listen" and self.response_id is None:
            self._ended.set()

    @property
    def finished(self) -> bool:
        return self._ended.is_set()

    @property
    def status(self) -> str | None:
        """completed, cancelled or failed; None until then."""
        return self.done_event.status if self.done_event else None

    async def audio(self) -> AsyncIterator[bytes]:
        """The audio in order, as it comes. Raises what ended the session before the response."""
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self.audio_bytes_waiting -= len(chunk)
                self.played_ms += self._form.milliseconds(len(chunk))
                yield chunk
            if self.finished:
                if self._fault is not None:
                    raise self._fault
                return
            self._more.clear()
            await self._more.wait()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until the response is over. Raises TimeoutError, and what ended the session before it."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise TimeoutError(f"The response has not ended within {timeout_s:g} s.") from None
        if self._fault is not None:
            raise self._fault

    def take(self, event: DuplexEvent) -> None:
        """An event of this response."""
        if isinstance(event, AudioDelta):
            if event.sample_rate_hz is not None and event.sample_rate_hz != self._form.sample_rate_hz:
                self._form = AudioFormat(self._form.format, event.sample_rate_hz)
            if chunk := event.audio:
                self._chunks.append(chunk)
                self.audio_bytes_waiting += len(chunk)
        elif event.type == "response.output_audio_transcript.delta":
            self.transcript += event.text
        elif event.type == "response.output_text.delta":
            self.text += event.text
        elif isinstance(event, ListenDecision):
            self.decision = "listen"
        elif isinstance(event, ResponseDone):
            self.done_event = event
            self._ended.set()
        self._more.set()

    def end(self, fault: ServerError) -> None:
        """The session ended before the response."""
        if not self.finished:
            self._fault = fault
            self._ended.set()
            self._more.set()


class Responses:
    """The handles of one connection: those under way, and those that wait to be asked for."""

    def __init__(self, form: AudioFormat) -> None:
        self.form = form
        self._open: dict[str, ResponseHandle] = {}
        self._waiting: deque[ResponseHandle] = deque()
        self._more = asyncio.Event()
        self._ended = False
        self._fault: ServerError | None = None

    def take(self, event: DuplexEvent) -> None:
        handle = self._open.get(event.response_id or "")
        if handle is not None:
            handle.take(event)
            if handle.finished:
                del self._open[event.response_id or ""]
        elif isinstance(event, ResponseCreated | ListenDecision):
            handle = ResponseHandle(event, self.form)
            if not handle.finished and handle.response_id:
                self._open[handle.response_id] = handle
            self._waiting.append(handle)
            self._more.set()
        self._bound()

    async def next(self) -> ResponseHandle | None:
        """The next one that nobody was given; None when the session has ended as asked."""
        while not self._waiting:
            if self._fault is not None:
                raise self._fault
            if self._ended:
                return None
            self._more.clear()
            await self._more.wait()
        return self._waiting.popleft()

    def end(self, fault: ServerError | None) -> None:
        """No more comes; only the first end counts."""
        if self._ended:
            return
        self._ended, self._fault = True, fault
        for handle in self._open.values():
            handle.end(fault or DuplexSessionClosedError("The session was closed before the response ended."))
        self._open.clear()
        self._more.set()

    def _bound(self) -> None:
        """Let go of the oldest that nobody asks for."""
        while len(self._waiting) > MOST_UNCLAIMED or (
            len(self._waiting) > 1 and sum(h.audio_bytes_waiting for h in self._waiting) > MOST_UNCLAIMED_BYTES
        ):
            self._waiting.popleft()
