"""Fetching from the hub, against a stand-in server on this machine: no test reaches a real network."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import GOLDEN
from support.hub_client import CHUNK, fetch, locate, start, write_large
from support.hub_server import COMMIT, Hub, Refusal, serve

from mlx_voicechat.weights import hub, hub_cache

MEBIBYTE = 2**20
OTHER_COMMIT = "b" * 40


def asked(server: Hub) -> set[str]:
    """Files whose content was asked for."""
    return {
        request.split("/")[-1] for request in server.requests if request.startswith("GET") and "/resolve/" in request
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    place = tmp_path_factory.mktemp("repositories")
    large, base, empty = write_large(place / "large"), place / "base", place / "empty"
    for folder in (base, empty):
        folder.mkdir()
        (folder / "config.json").write_bytes((GOLDEN / "tiny-4bit" / "config.json").read_bytes())
    (base / "tokenizer.json").write_text("{}", encoding="utf-8")
    (base / "model-00001-of-00004.safetensors").write_bytes(b"not wanted")
    repositories: dict[str, Path | Refusal] = {
        "org/small": GOLDEN / "tiny-4bit",
        "org/original": GOLDEN / "tiny-nvidia",
        "org/gated": GOLDEN / "tiny-4bit",
        "org/gated-anonymous": GOLDEN / "tiny-4bit",
        "org/private": Refusal(401, "RepoNotFound", "Invalid username or password."),
        "org/token": Refusal(401, "", "Invalid credentials in Authorization header"),
        "org/busy": Refusal(429),
        "org/broken": Refusal(500),
        "org/down": Refusal(503),
        "org/forbidden": Refusal(403, "", "No right to read this"),
        "org/large": large,
        "org/base": base,
        "org/empty": empty,
    }
    card = {"license": "other", "license_name": "a-model-licence", "license_link": "https://licence.example/text"}
    locked = {
        "org/gated": Refusal(403, "GatedRepo", "Access to model org/gated is restricted."),
        "org/gated-anonymous": Refusal(401, "GatedRepo", "Access to model org/gated-anonymous is restricted."),
    }
    revisions = {"main": COMMIT, "v2": OTHER_COMMIT}
    with serve(Hub(repositories, locked, card, revisions)) as running:
        yield running


@pytest.fixture(autouse=True)
def forget(server: Hub) -> None:
    server.requests.clear()
    server.ranges.clear()
    server.cut.clear()
    server.stall.clear()
    server.release.clear()


@pytest.fixture
def dead_port() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_hub_ids() -> None:
    assert hub.is_repository_id("mlx-community/NemotronLabs-VoiceChat-11B-4bit")
    for name in ("plain", "/a/b", "./a/b", "a/b/c", "a/", "a/..", "~/a", "-a/b", "a b/c"):
        assert not hub.is_repository_id(name)


def test_a_download_says_size_and_licence_and_is_used_offline_afterwards(
    server: Hub, tmp_path: Path, dead_port: str
) -> None:
    first = locate("org/small", tmp_path, server.url)
    folder = Path(first["folder"])
    assert {file.name for file in folder.iterdir()} == {file.name for file in (GOLDEN / "tiny-4bit").iterdir()}
    (said,) = first["said"]
    to_come = sum(file.stat().st_size for file in folder.iterdir() if file.name != "config.json")
    assert f"6 files, {to_come / 1e6:.1f} MB" in said  # the config was read first, to see whether the rest is wanted
    assert "own licence (a-model-licence, https://licence.example/text)" in said
    assert f"{server.url}/org/small" in said

    asked = len(server.requests)
    assert locate("org/small", tmp_path, server.url) == {"folder": str(folder), "said": []}
    assert len(server.requests) == asked  # not one request
    assert locate("org/small", tmp_path, dead_port)["folder"] == str(folder)
    assert locate("org/small", tmp_path, dead_port, HF_HUB_OFFLINE="1")["folder"] == str(folder)


def test_an_interrupted_download_is_completed(server: Hub, tmp_path: Path, dead_port: str) -> None:
    folder = Path(locate("org/small", tmp_path, server.url)["folder"])
    absent, cut = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    absent.resolve().unlink()
    absent.unlink()
    whole = cut.read_bytes()
    cut.resolve().write_bytes(whole[:-1000])

    offline = locate("org/small", tmp_path, dead_port)
    assert "cache is incomplete" in offline["message"]
    assert absent.name in offline["message"]
    assert "Repeat" in offline["remedy"]
    assert "HF_HUB_OFFLINE is set" in locate("org/small", tmp_path, server.url, HF_HUB_OFFLINE="1")["message"]

    server.requests.clear()
    again = locate("org/small", tmp_path, server.url)
    assert "2 files" in again["said"][0]
    assert asked(server) == {absent.name, cut.name}
    assert cut.read_bytes() == whole
    assert COMMIT in again["folder"]


def large_transfers(server: Hub) -> list[str | None]:
    return [asked for file, asked in server.ranges if file == "model.safetensors"]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(server: Hub, tmp_path: Path) -> None:
    server.cut["model.safetensors"] = CHUNK + MEBIBYTE
    folder = Path(fetch("org/large", tmp_path, server.url, None, hub.ORIGINAL_PATTERNS)["folder"])
    assert large_transfers(server) == [None, f"bytes={CHUNK}-"]
    served = server.repositories["org/large"]
    assert isinstance(served, Path)
    assert (folder / "model.safetensors").read_bytes() == (served / "model.safetensors").read_bytes()


def test_a_killed_download_goes_on_where_it_stopped(server: Hub, tmp_path: Path, dead_port: str) -> None:
    server.stall["model.safetensors"] = 2 * CHUNK + MEBIBYTE
    process = start(["fetch", "org/large", None, hub.ORIGINAL_PATTERNS], tmp_path, server.url)
    blobs = tmp_path / "hub" / "models--org--large" / "blobs"
    deadline = time.monotonic() + 60
    while sum(file.stat().st_size for file in blobs.glob("*.partial")) < 2 * CHUNK:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.release.set()

    offline = fetch("org/large", tmp_path, dead_port, None, hub.ORIGINAL_PATTERNS)
    assert "cache is incomplete" in offline["message"]
    again = fetch("org/large", tmp_path, server.url, None, hub.ORIGINAL_PATTERNS)
    assert large_transfers(server) == [None, f"bytes={2 * CHUNK}-"]
    rest = (blobs / "x").parent.parent / "snapshots" / COMMIT / "model.safetensors"
    assert f"1 file, {(rest.stat().st_size - 2 * CHUNK) / 1e6:.1f} MB" in again["said"][0]
    served = server.repositories["org/large"]
    assert isinstance(served, Path)
    assert rest.read_bytes() == (served / "model.safetensors").read_bytes()
    assert not list(blobs.glob("*.partial"))


def test_a_transfer_that_goes_on_from_other_bytes_is_found_out(server: Hub, tmp_path: Path) -> None:
    fetch("org/large", tmp_path, server.url, None, ["config.json"])
    blobs = tmp_path / "hub" / "models--org--large" / "blobs"
    served = server.repositories["org/large"]
    assert isinstance(served, Path)
    digest = hub.sha256(served / "model.safetensors")
    (blobs / f"{digest}.partial").write_bytes(bytes(1000))
    damaged = fetch("org/large", tmp_path, server.url, None, hub.ORIGINAL_PATTERNS)
    assert "model.safetensors of org/large arrived damaged" in damaged["message"]
    assert "folder" in fetch("org/large", tmp_path, server.url, None, hub.ORIGINAL_PATTERNS)
    assert large_transfers(server) == ["bytes=1000-", None]


def test_only_what_is_asked_for_is_fetched(server: Hub, tmp_path: Path, dead_port: str) -> None:
    folder = Path(fetch("org/base", tmp_path, server.url, None, hub.BASE_PATTERNS)["folder"])
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert fetch("org/base", tmp_path, dead_port, None, hub.BASE_PATTERNS)["folder"] == str(folder)
    assert "incomplete" in fetch("org/base", tmp_path, dead_port)["message"]  # with weights it is not


def test_revisions(server: Hub, tmp_path: Path, dead_port: str) -> None:
    main, tag = fetch("org/small", tmp_path, server.url), fetch("org/small", tmp_path, server.url, "v2")
    assert (Path(main["folder"]).name, Path(tag["folder"]).name) == (COMMIT, OTHER_COMMIT)
    assert "0.0 MB" in tag["said"][0]  # the same files: linked
    for revision, folder in (("main", main), ("v2", tag), (COMMIT, main), (OTHER_COMMIT, tag)):
        assert fetch("org/small", tmp_path, dead_port, revision)["folder"] == folder["folder"]
    absent = fetch("org/small", tmp_path, server.url, "v3")
    assert (absent["code"], absent["message"]) == ("hub_error", "org/small has no revision v3.")
    assert fetch("org/small", tmp_path, server.url, "../main")["code"] == "bad_input"


def test_no_network_and_no_cache(dead_port: str, tmp_path: Path) -> None:
    error = locate("org/small", tmp_path, dead_port)
    assert error["code"] == "hub_error"
    assert "not in the cache and the hub does not answer" in error["message"]
    assert "the model `tiny`" in error["remedy"]
    assert "folder" in error["remedy"]


@pytest.mark.parametrize(
    ("repository", "token", "words"),
    [
        ("org/absent", "", ["no repository org/absent and no such folder"]),
        ("org/private", "", ["no public repository", "hf auth login"]),
        ("org/private", "hf_x", ["does not accept your token (HF_TOKEN in the environment)"]),
        ("org/token", "hf_x", ["does not accept your token"]),
        ("org/gated-anonymous", "", ["is gated", "hf auth login", "Accept its licence at", "/org/gated-anonymous"]),
        ("org/gated", "hf_x", ["is gated", "Accept its licence at", "/org/gated"]),
        ("org/forbidden", "hf_x", ["denies access to org/forbidden (403)", "Your token (HF_TOKEN in the environment)"]),
        ("org/forbidden", "", ["denies access", "hf auth login"]),
        ("org/busy", "", ["too many requests", "429", "Wait some minutes", "hf auth login"]),
        ("org/busy", "hf_x", ["too many requests", "Wait some minutes"]),
        ("org/broken", "", ["answered 500", "Try again later", "the model `tiny`"]),
        ("org/down", "", ["answered 503", "the model `tiny`"]),
        ("org/empty", "", ["org/empty has no tokenizer.json"]),
    ],
)
def test_refusals_have_messages_of_their_own(
    server: Hub, tmp_path: Path, repository: str, token: str, words: list[str]
) -> None:
    error = locate(repository, tmp_path, server.url, **({"HF_TOKEN": token} if token else {}))
    text = f"{error['message']} {error['remedy']}"
    assert error["code"] == ("bad_checkpoint" if repository == "org/empty" else "hub_error")
    assert all(word in text for word in words), text
    assert "hf_x" not in text
    assert error["said"] == []
    assert not token or "hf auth login" not in text


def test_what_the_cache_holds(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = Path(fetch("org/small", tmp_path, server.url)["folder"])
    fetch("org/large", tmp_path, server.url, None, ["config.json"])
    fetch("org/base", tmp_path, server.url, None, ["tokenizer.json"])  # no config: what it is cannot be told
    rows = {row.repository: row for row in hub_cache.checkpoints()}
    assert {row.repository for row in rows.values() if row.state == "absent"} == {
        *hub_cache.PUBLISHED.values(),
        hub_cache.ORIGINAL,
    }
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert rows["org/small"] == ("org/small", "complete", size, COMMIT, folder, "", "4 bits")
    assert (rows["org/large"].state, rows["org/large"].revision) == ("partial", COMMIT)
    assert "org/base" not in rows

    shard = folder / "model-00002-of-00002.safetensors"
    shard.resolve().write_bytes(shard.read_bytes()[:-1])
    cut = hub_cache.look_up("org/small")
    assert (cut.state, cut.bytes) == ("partial", size - 1)
    assert "is cut off" in cut.fault
    assert hub_cache.known_hash(shard) == shard.resolve().name
    assert hub_cache.known_hash(GOLDEN / "tiny-4bit" / "config.json") is None


def test_nvidias_original_is_refused_before_its_weights_are_fetched(server: Hub, tmp_path: Path) -> None:
    error = locate("org/original", tmp_path, server.url)
    assert error["code"] == "bad_checkpoint"
    assert "mlx-community" in error["remedy"]
    assert not any(request.endswith(".safetensors") for request in server.requests)


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(OSError, match=r"2\.0 GB needed, 0\.0 MB free") as caught:
        hub._check_space(tmp_path / "not" / "yet", 2_000_000_000)
    error = hub._explain("org/small", None, caught.value, None)
    assert "disk is too full" in error.message
    assert "HF_HOME" in error.remedy


def test_an_answer_that_is_no_hubs(tmp_path: Path) -> None:
    error = hub._explain("org/small", None, json.JSONDecodeError("Expecting value", "<html>", 0), None)
    assert "does not answer like a hub" in error.message
    assert "HF_ENDPOINT" in error.remedy


@pytest.mark.parametrize("fault", [NotADirectoryError(20, "Not a directory"), OSError(30, "Read-only file system")])
def test_a_cache_that_is_no_place_to_write(fault: OSError) -> None:
    error = hub._explain("org/small", None, fault, None)
    assert "cache cannot be written" in error.message
    assert "HF_HOME" in error.remedy
