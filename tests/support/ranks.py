"""Commands as the ranks of one run over loopback, with the environment that `mlx.launch` gives them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAM = "from mlx_voicechat.cli.main import main; main()"  # as the installed script has it
LAUNCH = "from mlx._distributed_utils.launch import main; main()"  # mlx.launch
WAIT_SECONDS = 60


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def ranks(count: int, arguments: Sequence[str], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """One process a rank; their output is in `folder`, rank-N.out and rank-N.err."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
    started: list[subprocess.Popen[str]] = []
    with ExitStack() as files:
        try:
            for rank in range(count):
                out, err = (files.enter_context(open(folder / f"rank-{rank}.{end}", "w")) for end in ("out", "err"))
                env = {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
                command = [sys.executable, "-c", PROGRAM, *arguments]
                started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env))  # type: ignore[arg-type]
            yield started
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait(WAIT_SECONDS)


def launched(count: int, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`mlx.launch -n COUNT -- mlx-voicechat ARGUMENTS`, to its end."""
    ports = ["--starting-port", str(free_ports(1)[0])]
    command = [sys.executable, "-c", LAUNCH, "-n", str(count), *ports, "--backend", "ring", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE,  # it looks there for what is typed, and an end of file is always there
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        return subprocess.CompletedProcess(process.args, process.wait(WAIT_SECONDS), out, err)
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
