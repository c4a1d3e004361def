"""Which published client does what with a server of this project: the table of docs/clients.md.

    python benchmarks/clients.py ENVIRONMENTS --checks FOLDER [--only openai,livekit] [--rounds 2] [--at-once 2]

ENVIRONMENTS is a folder: an environment for each client is made in it, where it is not there yet. FOLDER has the
checks: a script a client, which takes --url, --mode, --wav, --answer ..., prints one line and leaves with 0 or 1. The
server is `mlx-voicechat serve -m tiny --max-sessions 4`, or the one at --url. Leaves with 1 when a check failed in its
last round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.server import serve_process

ROOT = Path(__file__).parents[1]
FRANCE, PARIS, HELLO = "capital of france", "paris", "how can i help you"
STRICT_V3 = "?protocol=strict-v3"


@dataclass(frozen=True)
class Client:
    """A client, its check, and what its environment needs; `shown` is the package whose version counts."""

    shown: str
    script: str
    modes: str
    needs: tuple[str, ...] = ()  # for pip; none: for npm, by the checks' own package.json
    alone: tuple[str, ...] = ()  # for pip, without what they depend on
    environment: str = ""  # where it is another client's too
    query: str = ""


CLIENTS = {
    "openai": Client(
        "openai", "openai_py.py", "update vad commit interrupt cancel g711 beta tool text", ("openai[realtime]",)
    ),
    "agents": Client(
        "openai-agents", "openai_agents_py.py", "vad commit barge interrupt tool text", ("openai-agents",)
    ),
    "pipecat": Client(
        "pipecat-ai",
        "pipecat_openai.py",
        "vad semantic manual interrupt tool greet",
        ("pipecat-ai[openai]", "websockets"),
    ),
    "livekit": Client(
        "livekit-plugins-openai",
        "livekit_openai.py",
        "vad semantic interrupt say_stop tool greet",
        ("livekit-plugins-openai",),
    ),
    "vllm": Client(
        "vllm-omni",
        "vllm_duplex.py",
        "session native preset commit cancel vad resume tool",
        ("websockets", "pybase64"),
        ("vllm-omni",),
    ),
    "agents-node": Client("@openai/agents-realtime", "node/agents_node.mjs", "vad barge interrupt tool text"),
    "beta-node": Client("openai-realtime-api", "node/beta_node.mjs", "commit vad cancel tool"),
    "strict-v3": Client(
        "websockets",
        "strict_v3.py",
        "turn turns cancel retry typed wrong empty tool",
        environment="openai",
        query=STRICT_V3,
    ),
}


@dataclass
class Row:
    """What one client did."""

    name: str
    version: str
    lines: dict[str, list[tuple[bool, str]]] = field(default_factory=dict)  # of each mode, one a round

    @property
    def failed(self) -> list[str]:
        """The modes that failed in the last round."""
        return [mode for mode, rounds in self.lines.items() if not rounds[-1][0]]

    def __str__(self) -> str:
        def shown(mode: str, rounds: list[tuple[bool, str]]) -> str:
            passed = sum(good for good, _ in rounds)
            return mode if passed == len(rounds) else f"{mode} ({passed} of {len(rounds)})"

        modes = ", ".join(shown(mode, rounds) for mode, rounds in self.lines.items())
        return f"| {self.name}: `{CLIENTS[self.name].shown}` {self.version} | {modes} |"


def runner(name: str, folder: Path, checks: Path) -> list[str]:
    """The command that a client's check is run with; its environment is made where it is not there."""
    client = CLIENTS[name]
    if client.script.endswith(".mjs"):
        node = folder / "node"
        if not node.exists():
            shutil.copytree(checks / "node", node, ignore=shutil.ignore_patterns("node_modules"))
        if not (node / "node_modules").exists():
            run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(node))
        return ["node", str(node / Path(client.script).name)]
    where = client.environment or name
    python, needed = folder / where / "bin" / "python", CLIENTS[where]
    if not python.exists():
        venv.create(folder / where, with_pip=True)
        run(str(python), "-m", "pip", "install", "-q", *needed.needs)
        if needed.alone:
            run(str(python), "-m", "pip", "install", "-q", "--no-deps", *needed.alone)
    return [str(python), "-W", "ignore", str(checks / client.script)]


def run(*command: str) -> str:
    print("$", *command, file=sys.stderr)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def version(name: str, folder: Path, python: str) -> str:
    """Of the package that is shown."""
    package = CLIENTS[name].shown
    if python == "node":
        about = folder / "node" / "node_modules" / package / "package.json"
        return str(json.loads(about.read_text(encoding="utf-8"))["version"])
    return run(python, "-c", f"from importlib.metadata import version; print(version({package!r}))").strip()


def recordings(mode: str) -> list[str]:
    """What is said in a mode, and what must be heard and answered."""

    def wav(name: str) -> str:
        return str(ROOT / "examples" / f"{name}.wav")

    second = ["--wav2", wav("what_is_two_plus_two"), "--answer2", "four"]
    if mode == "tool":
        tool = ["--tool", "get_weather", "--tool-output", '{"weather": "sunny"}']
        return ["--wav", wav("what_is_the_weather_in_paris_f4"), "--answer", "sunny in paris", *tool, *second]
    typed = mode in ("text", "typed")  # "Hello."
    return ["--wav", wav("question"), "--transcript", FRANCE, "--answer", HELLO if typed else PARIS, *second]


def checked(command: list[str], url: str, mode: str, seconds: int) -> tuple[bool, str]:
    """Whether one check passed, and its line."""
    line = [*command, "--url", url, "--mode", mode, *recordings(mode), "--timeout", str(seconds)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=seconds + 60)
    except subprocess.TimeoutExpired:
        return False, f"{mode}: did not end"
    said = done.stdout.strip().splitlines() or [f"{mode}: said nothing: {done.stderr[-300:]!r}"]
    return done.returncode == 0, said[-1]


@contextmanager
def served(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with serve_process("-m", "tiny", "--max-sessions", "4") as server:
        yield server.ws_url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path, help="folder of the clients' environments")
    parser.add_argument("--checks", type=Path, required=True, help="folder of the check scripts")
    parser.add_argument("--only", default=",".join(CLIENTS), help="names, separated by commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each check is run")
    parser.add_argument("--at-once", type=int, default=1, help="clients at once")
    parser.add_argument("--url", help="a server that runs already: ws://HOST:PORT/v1/realtime")
    parser.add_argument("--timeout", type=int, default=60, help="seconds of one check")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(CLIENTS):
        parser.error(f"--only knows {', '.join(CLIENTS)}, not {', '.join(unknown)}")
    if not (options.checks / "common.py").exists():
        parser.error(f"--checks {options.checks}: no check scripts are there")
    options.environments.mkdir(parents=True, exist_ok=True)
    commands = {name: runner(name, options.environments, options.checks) for name in names}
    rows = [Row(name, version(name, options.environments, commands[name][0])) for name in names]

    with served(options.url) as url:

        def talk(row: Row) -> None:
            client = CLIENTS[row.name]
            for mode in client.modes.split():
                result = checked(commands[row.name], url + client.query, mode, options.timeout)
                row.lines.setdefault(mode, []).append(result)
                print(result[1], file=sys.stderr, flush=True)

        for _ in range(options.rounds):
            with ThreadPoolExecutor(options.at_once) as pool:
                list(pool.map(talk, rows))

    print("| client | what it did |", "|---|---|", *rows, sep="\n")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
