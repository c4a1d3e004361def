"""What was sent and is not known to have arrived, to be sent again after a lost connection."""

from __future__ import annotations

from collections import deque

MOST_BYTES = 8 << 20  # a minute of float32 at 24 kHz in base64
ASK_BYTES = 1 << 20  # so much since the server last said what it has is reason to ask


class Outbox:
    """Messages numbered from 1, oldest first, within a bound of bytes."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._messages: deque[tuple[int, str]] = deque()
        self.last_number = 0
        self.written = 0  # the last one that was given to a socket
        self.size_bytes = 0
        self._lost = 0  # the last one that was dropped for want of room

    def number(self) -> int:
        """The number of the message that is about to be put."""
        self.last_number += 1
        return self.last_number

    def put(self, number: int, text: str) -> None:
        self._messages.append((number, text))
        self.size_bytes += len(text)
        while self.size_bytes > self._most_bytes:
            self._lost = self._drop()

    def arrived(self, number: int) -> None:
        """The server has all up to `number`."""
        while self._messages and self._messages[0][0] <= number:
            self._drop()

    def after(self, arrived: int | None) -> list[tuple[int, str]] | None:
        """What to send again where the server has all up to `arrived` (None: it does not say, what was never written).

        None where some of it is gone.
        """
        first = self.written if arrived is None else arrived
        if first < self._lost:
            return None
        return [message for message in self._messages if message[0] > first]

    def _drop(self) -> int:
        number, text = self._messages.popleft()
        self.size_bytes -= len(text)
        return number
