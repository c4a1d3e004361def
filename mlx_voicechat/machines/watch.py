"""Whether the other ranks are still there: no wait for them may last for ever, and no rank stays behind alone."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LOOK_SECONDS = 0.25
ANSWER_SECONDS = 60.0  # for an answer: a first frame compiles kernels
ORDERLY_SECONDS = 5.0  # for the program to end by itself, its sessions told, after another rank is lost
PROBE_SECONDS, PROBES = 2, 3  # TCP's own question whether a silent machine is there
HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


def descriptors() -> set[int]:
    """The file descriptors that are open."""
    return {int(name) for name in os.listdir("/dev/fd")}


def connections(made_since: set[int]) -> list[socket.socket]:
    """Twins of the TCP connections among the descriptors opened since; asked by TCP whether the other side is there."""
    found = []
    for descriptor in sorted(descriptors() - made_since):
        with suppress(OSError):
            twin = socket.socket(fileno=os.dup(descriptor))
            try:
                twin.getpeername()
                _probe(twin)
            except OSError:
                twin.close()
                continue
            found.append(twin)
    return found


def _probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
    named = ((idle, PROBE_SECONDS), (getattr(socket, "TCP_KEEPINTVL", None), PROBE_SECONDS))
    for option, value in (*named, (getattr(socket, "TCP_KEEPCNT", None), PROBES)):
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Watch:
    """A thread that looks at the connections to other ranks, and at how long one of them is waited for.

    When one is gone it calls `lost`, once; if the program has not ended ORDERLY_SECONDS later, it ends it: exit code 1.
    MLX itself raises where a connection breaks while it is used, but not while nobody uses it, and never for a rank
    that stands still.
    """

    def __init__(self, watched: list[socket.socket], lost: Callable[[str], None] = lambda why: None) -> None:
        self.lost = lost
        self._watched = watched
        self._since: float | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="machines-watch", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Another rank owes something meanwhile."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def end(self) -> None:
        """The other ranks may go."""
        self._ended.set()

    def _run(self) -> None:
        poll = select.poll()
        for connection in self._watched:
            poll.register(connection.fileno(), HUNG_UP)
        while not self._ended.wait(LOOK_SECONDS):
            since = self._since
            if any(found & HUNG_UP for _, found in poll.poll(0)):
                why = "A connection to another machine of this model is broken."
            elif since is not None and time.monotonic() > since + ANSWER_SECONDS:
                why = f"Another machine of this model has not answered for {ANSWER_SECONDS:g} s."
            else:
                continue
            self.lost(why)
            if not self._ended.wait(ORDERLY_SECONDS):
                print(f"error: {why}", file=sys.stderr, flush=True)
                os._exit(1)
            return
