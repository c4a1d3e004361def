"""`download`: a checkpoint into a cache of its own, from the stand-in hub, and the list of what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import COMMIT, Hub, serve

from mlx_voicechat.cli.download import table
from mlx_voicechat.cli.main import run
from mlx_voicechat.weights.hub_cache import PUBLISHED, CachedModel
from tests.support.checkpoints import GOLDEN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    place = tmp_path_factory.mktemp("repositories")
    original, other = place / "original", place / "other"
    for folder in (original, other):
        folder.mkdir()
    (original / "config.json").write_bytes((GOLDEN / "tiny-nvidia" / "config.json").read_bytes())
    header = b'{"stt_model.embed_tokens.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    weights = len(header).to_bytes(8, "little") + header + b"1234"
    for folder in (original, other):
        (folder / "model.safetensors").write_bytes(weights)
    (original / "model.nemo").write_bytes(b"not wanted")
    (other / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    repositories = {PUBLISHED["4bit"]: GOLDEN / "tiny-4bit", "org/original": original, "org/other": other}
    with serve(Hub(dict(repositories))) as running:
        yield running


def command(home: Path, url: str, *arguments: str) -> tuple[int, str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    ours = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-m", "mlx_voicechat.cli.main", *arguments],
        env=kept | ours,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_published_checkpoint(server: Hub, tmp_path: Path) -> None:
    code, out, err = command(tmp_path, server.url, "download", "4bit")
    folder = Path(out.strip())
    assert (code, folder.name, out.count("\n")) == (0, COMMIT, 1)
    assert (folder / "model.safetensors.index.json").is_file()
    assert err.startswith(f"note: Downloading {PUBLISHED['4bit']}: 6 files, ")
    assert err.count("\n") == 1  # no progress bar in a pipe

    server.requests.clear()
    code, again, err = command(tmp_path, server.url, "download")
    assert (code, again) == (0, out)
    assert "is complete already: 2.5 MB, revision " + COMMIT in err
    assert server.requests == []

    code, out, err = command(tmp_path, "http://127.0.0.1:9", "download", "--list")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == [PUBLISHED["4bit"], "complete", "2.5", "MB", COMMIT[:12], "4", "bits"]
    assert [line[1] for line in lines[1:]] == ["absent"] * 3

    code, out, _ = command(tmp_path, "http://127.0.0.1:9", "info", PUBLISHED["4bit"], "--hash", "--json")
    hashes = json.loads(out)["hashes"]
    assert code == 0
    assert {name for name, found in hashes.items() if found["as_fetched"]} == {file.name for file in folder.iterdir()}

    tokenizer = folder / "tokenizer.json"
    tokenizer.resolve().write_bytes(tokenizer.read_bytes().replace(b"a", b"b", 1))
    code, out, err = command(tmp_path, "http://127.0.0.1:9", "info", PUBLISHED["4bit"], "--hash")
    assert code == 2
    assert "DIFFERS from what was fetched" in next(line for line in out.splitlines() if line.startswith(tokenizer.name))
    assert "error: tokenizer.json: not what was fetched." in err
    blob = tokenizer.resolve()
    assert f"Remove {blob}, and" in err  # without its link alone it would come back as it is
    blob.unlink()
    assert command(tmp_path, server.url, "download")[0] == 0
    assert command(tmp_path, "http://127.0.0.1:9", "info", PUBLISHED["4bit"], "--hash")[0] == 0


def test_nvidias_original(server: Hub, tmp_path: Path) -> None:
    code, out, err = command(tmp_path, server.url, "download", "org/original")
    assert code == 0
    assert sorted(file.name for file in Path(out.strip()).iterdir()) == ["config.json", "model.safetensors"]
    assert "mlx-voicechat convert --source org/original" in err


def test_another_models_weights_are_not_fetched(server: Hub, tmp_path: Path) -> None:
    server.requests.clear()
    code, out, err = command(tmp_path, server.url, "download", "org/other")
    assert (code, out) == (2, "")
    assert "not a VoiceChat checkpoint" in err
    assert not any("safetensors" in request for request in server.requests)


@pytest.mark.parametrize("arguments", [["3bit"], ["/tmp"], ["4bit", "--list"], ["--list", "--revision", "main"]])
def test_bad_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["download", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")


def test_table() -> None:
    rows = [CachedModel("a/long-name", "partial", 5 * 10**9, "c" * 40), CachedModel("a/b", "absent")]
    assert table(rows).splitlines() == [
        "a/long-name  partial     5.0 GB  cccccccccccc",
        "a/b          absent           -  -",
    ]


def test_a_partial_checkpoint_is_continued_when_asked_for(server: Hub, tmp_path: Path) -> None:
    _, out, _ = command(tmp_path, server.url, "download", "4bit")
    shard = Path(out.strip()) / "model-00001-of-00002.safetensors"
    shard.resolve().unlink()
    assert command(tmp_path, "http://127.0.0.1:9", "download", "--list")[1].split()[1] == "partial"
    server.requests.clear()
    code, again, _ = command(tmp_path, server.url, "download", "4bit")
    assert (code, again) == (0, out)
    assert {request.split("/")[-1] for request in server.requests if "/resolve/" in request} == {shard.name}
