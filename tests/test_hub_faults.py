"""What stands between this machine and a hub: login pages, mirrors, other programs, odd disks, proxies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support.checkpoints import GOLDEN
from support.hub_client import CHUNK, fetch, finish, locate, start, write_large
from support.hub_server import Hub, serve

from mlx_voicechat.weights import hub

WEIGHTS = "model.safetensors"
LARGE = ["fetch", "org/large", None, hub.ORIGINAL_PATTERNS]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large(tmp_path_factory.mktemp("repository") / "large")


@pytest.fixture
def server(large: Path) -> Iterator[Hub]:
    with serve(Hub({"org/small": GOLDEN / "tiny-4bit", "org/large": large})) as running:
        yield running


def fetch_large(server: Hub, home: Path, before: str = "") -> dict[str, Any]:
    return fetch("org/large", home, server.url, None, hub.ORIGINAL_PATTERNS, before)


def places(large: Path, home: Path) -> tuple[Path, Path]:
    """Where the lock and the part of the large file are, both made."""
    digest, name = hub.sha256(large / WEIGHTS), "models--org--large"
    lock = home / "hub" / ".locks" / name / f"{digest}.lock"
    partial = home / "hub" / name / "blobs" / f"{digest}.partial"
    for file in (lock, partial):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return lock, partial


def transfers(server: Hub) -> list[str | None]:
    return [asked for file, asked in server.ranges if file == WEIGHTS]


@contextmanager
def answering(status: int, content: bytes) -> Iterator[str]:
    """The address of a server that answers every GET so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


# Login pages


@pytest.mark.parametrize("here", [0, 1000, CHUNK])
def test_a_login_page_in_place_of_a_weight_file(server: Hub, large: Path, tmp_path: Path, here: int) -> None:
    """It is looked at before it is kept, and takes nothing away from what has arrived."""
    _, partial = places(large, tmp_path)
    whole = (large / WEIGHTS).read_bytes()
    partial.write_bytes(whole[:here])
    server.page.add(WEIGHTS)
    error = fetch_large(server, tmp_path)
    assert f"A web page came in place of {WEIGHTS} of org/large" in error["message"]
    assert "Log in with a browser" in error["remedy"]
    assert partial.read_bytes() == whole[:here]
    server.page.clear()
    server.ranges.clear()
    assert (Path(fetch_large(server, tmp_path)["folder"]) / WEIGHTS).read_bytes() == whole
    assert transfers(server) == [f"bytes={here}-" if here else None]


@pytest.mark.parametrize("sized", [True, False])
def test_a_login_page_in_place_of_a_small_file(server: Hub, tmp_path: Path, sized: bool) -> None:
    server.page.add("config.json")
    server.sized = sized
    error = locate("org/small", tmp_path, server.url)
    assert "A web page came in place of config.json of org/small" in error["message"]
    server.page.clear()
    assert "folder" in locate("org/small", tmp_path, server.url)


@pytest.mark.parametrize("content", [b"<html>Log in</html>", b'{"message": "please log in"}', b"[]"])
def test_an_answer_that_is_no_list_of_files(tmp_path: Path, content: bytes) -> None:
    with answering(200, content) as url:
        error = locate("org/small", tmp_path, url)
    assert f"{url} does not answer like a hub" in error["message"]
    assert "login" in error["remedy"]


def test_a_network_that_says_that_it_wants_a_login(tmp_path: Path) -> None:
    with answering(511, b"") as url:
        error = locate("org/small", tmp_path, url)
    assert "login" in error["message"]
    assert "browser" in error["remedy"]


# Mirrors


@pytest.mark.parametrize("with_head", [True, False])
def test_a_mirror_without_sizes(server: Hub, tmp_path: Path, with_head: bool) -> None:
    """They are asked of the files themselves; where that is not answered either, what is here is taken as it is."""
    server.sized, server.with_head = False, with_head
    found = locate("org/small", tmp_path, server.url)
    folder = Path(found["folder"])
    assert ("at least" in found["said"][0]) != with_head
    for file in (GOLDEN / "tiny-4bit").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.resolve().write_bytes(whole[:-1000])
    again = locate("org/small", tmp_path, server.url)
    assert ("folder" in again) == with_head
    assert (shard.read_bytes() == whole) == with_head
    assert with_head or "cut off" in again["message"]


def test_a_large_file_of_a_mirror_without_sizes_goes_on(server: Hub, large: Path, tmp_path: Path) -> None:
    server.sized = False
    _, partial = places(large, tmp_path)
    partial.write_bytes((large / WEIGHTS).read_bytes()[:CHUNK])
    assert "folder" in fetch_large(server, tmp_path)
    assert transfers(server) == [f"bytes={CHUNK}-"]


# Others who fetch the same, and disks

LOCK = """
import fcntl, sys
held = open(sys.argv[1], "a")
fcntl.flock(held, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
HURRY = "import mlx_voicechat.weights.locks as l; l.STALE_SECONDS = 1.5; l.QUIET_SECONDS = 1.0\n"
WITHOUT_FLOCK = """
import errno, fcntl, os
def flock(*_):
    raise OSError(errno.{0}, os.strerror(errno.{0}))
fcntl.flock = flock
"""
WITHOUT_LINKS = """
import os
def symlink(*_, **__):
    raise PermissionError(1, "Operation not permitted")
os.symlink = symlink
"""


def test_the_lock_of_one_who_is_gone(server: Hub, large: Path, tmp_path: Path) -> None:
    """Who waits says so, and after a while without a byte what can be done; then it goes on."""
    lock, _ = places(large, tmp_path)
    command = [sys.executable, "-c", LOCK, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        process = start(LARGE, tmp_path, server.url, HURRY)
        time.sleep(6)
        assert process.poll() is None
        lock.unlink()
        found = finish(process)
        other.kill()
    assert found["said"][-2] == f"Another program is fetching {WEIGHTS}: waiting for it."
    assert found["said"][-1].endswith(f"remove the lock that was left: {lock}")
    assert "folder" in found


def test_two_who_fetch_the_same(server: Hub, large: Path, tmp_path: Path) -> None:
    """The second waits with a word, and finds the file there."""
    server.stall[WEIGHTS] = 2 * CHUNK
    first = start(LARGE, tmp_path, server.url)
    _, partial = places(large, tmp_path)
    deadline = time.monotonic() + 60
    while partial.stat().st_size == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = start(LARGE, tmp_path, server.url)
    time.sleep(5)
    server.release.set()
    assert "folder" in finish(first)
    found = finish(second)
    assert "folder" in found
    assert found["said"][-1] == f"Another program is fetching {WEIGHTS}: waiting for it."
    assert len(transfers(server)) == 2  # of the first, whose connection broke off


@pytest.mark.parametrize("name", ["ENOLCK", "ENOTSUP", "ENOSYS"])
def test_a_disk_without_locks(server: Hub, large: Path, tmp_path: Path, name: str) -> None:
    """Whoever was at a file that does not grow is no more."""
    _, partial = places(large, tmp_path)
    partial.write_bytes((large / WEIGHTS).read_bytes()[:CHUNK])
    assert "folder" in fetch_large(server, tmp_path, WITHOUT_FLOCK.format(name) + HURRY)
    assert transfers(server) == [f"bytes={CHUNK}-"]


def test_a_disk_without_symbolic_links(server: Hub, tmp_path: Path) -> None:
    folder = Path(fetch("org/small", tmp_path, server.url, before=WITHOUT_LINKS)["folder"])
    assert not any(file.is_symlink() for file in folder.iterdir())
    assert (folder / "config.json").read_bytes() == (GOLDEN / "tiny-4bit" / "config.json").read_bytes()
    asked = len(server.requests)
    assert fetch("org/small", tmp_path, server.url)["folder"] == str(folder)
    assert len(server.requests) == asked


# Proxies


@pytest.mark.parametrize(
    ("setting", "url", "words"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", ["socks5://127.0.0.1:1 (ALL_PROXY) is a SOCKS proxy", "socksio"]),
        ("http_proxy", "socks4://127.0.0.1:1", ["socks4://127.0.0.1:1 (http_proxy) is of a kind", "http://NAME:PORT"]),
        ("HTTP_PROXY", "127.0.0.1:1", ["through the proxy http://127.0.0.1:1 (HTTP_PROXY)", "refused"]),
        ("http_proxy", "http://me:secret@127.0.0.1:1", ["through the proxy http://127.0.0.1:1 (http_proxy)"]),
        ("HTTPS_PROXY", "://", ["(HTTPS_PROXY)", "http://NAME:PORT"]),
    ],
)
def test_a_proxy_that_does_not_work_is_named(tmp_path: Path, setting: str, url: str, words: list[str]) -> None:
    error = locate("org/small", tmp_path, "http://hub.example", NO_PROXY="", no_proxy="", **{setting: url})
    text = f"{error['message']} {error['remedy']}"
    assert error["code"] == "hub_error"
    assert all(word in text for word in words), text
    assert "secret" not in text


@pytest.mark.parametrize(("status", "words"), [(407, "asks for a name and a password"), (502, "answered 502")])
def test_a_proxy_that_answers_itself(tmp_path: Path, status: int, words: str) -> None:
    with answering(status, b"") as url:
        error = locate("org/small", tmp_path, "http://hub.example", NO_PROXY="", no_proxy="", http_proxy=url)
    assert f"proxy {url} (http_proxy)" in error["message"]
    assert words in error["message"]
