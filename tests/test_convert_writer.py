"""A conversion that fails or is killed leaves no target, or a complete one, and nothing else for long."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import GOLDEN

from mlx_voicechat.convert import conversion, plans, writer
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.errors import InputError, VoiceChatError

SOURCE = GOLDEN / "tiny-4bit"
STEPS = ("write", "flush", "rename", "make_folder")
# A conversion whose process is killed in or after a step.
KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_voicechat.convert import conversion, plans, writer
from mlx_voicechat.convert.source import open_source

source, target, step, wanted = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
plain, done = getattr(writer, step), []

def killed(*arguments):
    plain(*arguments)
    done.append(step)
    if len(done) == wanted:
        os.kill(os.getpid(), signal.SIGKILL)

setattr(writer, step, killed)
with open_source(source) as opened:
    conversion.run(conversion.prepare(opened, plans.find("4bit")), target)
"""


def convert(target: Path) -> None:
    with open_source(str(SOURCE)) as opened:
        conversion.run(conversion.prepare(opened, plans.find("4bit")), writer.check_target(target))


def sibling(target: Path) -> Path:
    return target.with_name(writer.SIBLING.format(target.name))


def fail(step: str, wanted: int, number: int, late: bool = True) -> Callable[..., None]:
    """A writer's function whose call number `wanted` raises, after its work if `late`."""
    plain, calls = getattr(writer, step), []

    def failing(*arguments: Any) -> None:
        calls.append(step)
        if len(calls) != wanted or late:
            plain(*arguments)
        if len(calls) == wanted:
            raise OSError(number, os.strerror(number))

    return failing


def count(target: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a conversion takes each step."""
    calls = dict.fromkeys(STEPS, 0)
    with monkeypatch.context() as patch:
        for step in STEPS:

            def counted(*arguments: Any, step: str = step, plain: Any = getattr(writer, step)) -> None:  # noqa: B008
                calls[step] += 1
                plain(*arguments)

            patch.setattr(writer, step, counted)
        convert(target)
    return calls


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "out"
    convert(target)
    return contents(target)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def absent_or_complete(target: Path, whole: dict[str, bytes]) -> bool:
    if target.exists():
        assert contents(target) == whole
    return target.exists()


def test_failing_after_every_step(tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flush and rename; of the writes of tensors, which are alike, some (benchmarks/convert_faults.py: all)."""
    counted = count(tmp_path / "counted", monkeypatch)
    assert counted["rename"] == counted["make_folder"] == 1
    assert counted["flush"] == len(whole) + 2  # every file, the folder, its parent
    assert counted["write"] > 400
    target = tmp_path / "out"
    writes = {*range(1, 8), *range(8, counted["write"], 150), *range(counted["write"] - 3, counted["write"] + 1)}
    cases = [(step, wanted) for step in STEPS[1:] for wanted in range(1, counted[step] + 1)]
    for step, wanted in cases + [("write", wanted) for wanted in sorted(writes)]:
        with monkeypatch.context() as patch:
            patch.setattr(writer, step, fail(step, wanted, errno.EIO, late=step != "make_folder"))
            with pytest.raises(VoiceChatError) as caught:
                convert(target)
        named = step == "rename" or (step == "flush" and wanted >= counted["flush"] - 1)  # folder and parent
        assert absent_or_complete(target, whole) == named, (step, wanted)
        assert str(target) in str(caught.value)
        assert not sibling(target).exists()
        shutil.rmtree(target, ignore_errors=True)
    assert {path.name for path in tmp_path.iterdir()} == {"counted"}


@pytest.mark.parametrize("name", ["EINVAL", "ENOTSUP", "ENOSYS"])
def test_a_disk_that_cannot_flush_folders(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Network shares answer so, at the end of hours: the work is done nevertheless."""
    number, plain = getattr(errno, name), os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    convert(tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_what_is_complete_stays_though_it_cannot_be_flushed(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = count(tmp_path / "counted", monkeypatch)["flush"]
    for wanted in (flushes - 1, flushes):
        with monkeypatch.context() as patch:
            patch.setattr(writer, "flush", fail("flush", wanted, errno.EIO, late=False))
            with pytest.raises(VoiceChatError, match="complete, but may not outlive a power cut: Input/output"):
                convert(tmp_path / "out")
        assert contents(tmp_path / "out") == whole
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("name", ["ENOLCK", "ENOTSUP", "ENOSYS", "EINVAL"])
def test_a_disk_without_locks(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A folder that another conversion left, or writes, cannot be told apart: that is said before any work."""
    number = getattr(errno, name)

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer.fcntl, "flock", flock)
    target = tmp_path / "out"
    with writer.folder(target) as folder:
        writer.write_file(folder / "here", b"1")
        with pytest.raises(InputError, match="no locks that would tell whether it runs") as caught:
            convert(target)
        assert str(sibling(target)) in caught.value.message
        assert "Remove that folder" in caught.value.remedy
    assert contents(target) == {"here": b"1"}
    shutil.rmtree(target)
    convert(target)
    assert contents(target) == whole


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, late in (("write", False), ("make_folder", False)):
        with monkeypatch.context() as patch:
            patch.setattr(writer, step, fail(step, 1, errno.ENOSPC, late))
            with pytest.raises(VoiceChatError, match="The disk is full") as caught:
                convert(tmp_path / "out")
        assert caught.value.exit_code == 1
        assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "wanted"), [("write", 200), ("rename", 1)])
def test_killed(tmp_path: Path, whole: dict[str, bytes], step: str, wanted: int) -> None:
    target = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(SOURCE), str(target), step, str(wanted)]
    done = subprocess.run(command, cwd=tmp_path, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert absent_or_complete(target, whole) == (step == "rename")
    assert sibling(target).exists() == (step == "write")
    shutil.rmtree(target, ignore_errors=True)
    convert(target)
    assert contents(target) == whole
    assert list(tmp_path.iterdir()) == [target]


def test_a_conversion_that_runs_keeps_its_folder(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with writer.folder(target) as folder:
        writer.write_file(folder / "here", b"1")
        with pytest.raises(InputError, match="Another conversion is writing"):
            convert(target)
        assert (folder / "here").exists()
    assert contents(target) == {"here": b"1"}


def test_targets_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    cases = {"used": "not an empty folder", "used/file": "not an empty folder", "no/such": "There is no folder"}
    for name, words in cases.items():
        with pytest.raises(InputError, match=words):
            writer.check_target(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no permission"):
        writer.check_target(tmp_path / "new")


def test_empty_folders_and_links_to_them_are_filled(tmp_path: Path, whole: dict[str, bytes]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    convert(tmp_path / "link")
    assert contents(tmp_path / "empty") == whole
    assert (tmp_path / "link").is_symlink()


def test_too_small_a_disk_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"needs .* MB, the disk has 0.0 MB"):
        convert(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
