"""Fetching from the hub, against a stand-in server on this machine: no test reaches a real network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import GOLDEN
from support.hub_server import COMMIT, Hub, Refusal, serve

from mlx_voicechat import hub

ROOT = Path(hub.__file__).parents[1]
# A process of its own: huggingface_hub reads its environment once, at import.
PROGRAM = """
import json, sys
from mlx_voicechat import hub
from mlx_voicechat.errors import VoiceChatError
said = []
try:
    print(json.dumps({"folder": str(hub.locate(sys.argv[1], said.append)), "said": said}))
except VoiceChatError as error:
    print(json.dumps({"code": error.code, "message": error.message, "remedy": error.remedy, "said": said}))
"""


def locate(repository: str, home: Path, url: str, **environment: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    ours = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repository],
        env=kept | ours | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    repositories: dict[str, Path | Refusal] = {
        "org/small": GOLDEN / "tiny-4bit",
        "org/original": GOLDEN / "tiny-nvidia",
        "org/gated": GOLDEN / "tiny-4bit",
        "org/gated-anonymous": GOLDEN / "tiny-4bit",
        "org/private": Refusal(401, "RepoNotFound", "Invalid username or password."),
        "org/token": Refusal(401, "", "Invalid credentials in Authorization header"),
        "org/down": Refusal(503),
    }
    card = {"license": "other", "license_name": "a-model-licence", "license_link": "https://licence.example/text"}
    locked = {
        "org/gated": Refusal(403, "GatedRepo", "Access to model org/gated is restricted."),
        "org/gated-anonymous": Refusal(401, "GatedRepo", "Access to model org/gated-anonymous is restricted."),
    }
    with serve(Hub(repositories, locked, card)) as running:
        yield running


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
    fetched = {request.split("/")[-1] for request in server.requests if request.startswith("GET /org/small/resolve")}
    assert fetched == {absent.name, cut.name}
    assert cut.read_bytes() == whole
    assert COMMIT in again["folder"]


def test_no_network_and_no_cache(dead_port: str, tmp_path: Path) -> None:
    error = locate("org/small", tmp_path, dead_port)
    assert error["code"] == "hub_error"
    assert "not in the cache and the hub does not answer" in error["message"]
    assert "--model tiny" in error["remedy"]
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
        ("org/down", "", ["answered 503", "--model tiny"]),
    ],
)
def test_refusals_have_messages_of_their_own(
    server: Hub, tmp_path: Path, repository: str, token: str, words: list[str]
) -> None:
    error = locate(repository, tmp_path, server.url, **({"HF_TOKEN": token} if token else {}))
    text = f"{error['message']} {error['remedy']}"
    assert error["code"] == "hub_error"
    assert all(word in text for word in words), text
    assert "hf_x" not in text
    assert error["said"] == []
    assert not token or "hf auth login" not in text


def test_nvidias_original_is_refused_before_its_weights_are_fetched(server: Hub, tmp_path: Path) -> None:
    server.requests.clear()
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
