"""Conversions that are killed or fail: afterwards the target is absent or complete, and the next one tidies up.

    python benchmarks/convert_faults.py FOLDER [--kills 10] [--megabytes 200]

Ten times SIGKILL at a random moment of converting a random original, each followed by what the next conversion finds;
then an error after every write, flush and rename of a small one. All that is written in FOLDER is removed.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.originals import random_original

from mlx_voicechat.convert import conversion, plans, writer
from mlx_voicechat.convert.source import open_source
from mlx_voicechat.errors import VoiceChatError
from mlx_voicechat.weights import assets

CONVERT = [sys.executable, "-m", "mlx_voicechat.cli.main", "convert"]


def main() -> None:
    """Print what was tried; an assertion fails where something is left that should not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        kill(Path(name), options.kills, options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        fail(Path(name))


def original(folder: Path, megabytes: int = 0) -> Path:
    """A random one, its LLM's vocabulary as large as it takes."""
    raw: dict[str, Any] = json.loads((assets.CONFIGS / "random.json").read_text(encoding="utf-8"))
    if megabytes:
        raw["text_config"] |= {"vocab_size": megabytes * 10**6 // 3 // 4 // 1024, "hidden_size": 1024}
        raw["audio_config"]["output_dim"] = 1024
    return random_original(raw, folder / "original")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill(folder: Path, kills: int, megabytes: int) -> None:
    """SIGKILL at random moments between the start of a conversion and its usual end."""
    command = [*CONVERT, "-s", str(original(folder, megabytes)), "-o"]
    target = folder / "out"
    sibling = target.with_name(writer.SIBLING.format(target.name))
    whole = folder / "whole"
    started = time.perf_counter()
    subprocess.run([*command, str(whole)], check=True, capture_output=True)
    usual, expected = time.perf_counter() - started, contents(whole)
    shutil.rmtree(whole)
    absent = left = 0
    for _ in range(kills):
        process = subprocess.Popen([*command, str(target)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random.uniform(0.3, 1.0) * usual)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if target.exists():
            assert contents(target) == expected
            shutil.rmtree(target)
        else:
            absent += 1
        left += sibling.exists()
        subprocess.run([*command, str(target)], check=True, capture_output=True)
        assert contents(target) == expected
        assert not sibling.exists()
        shutil.rmtree(target)
    print(f"killed {kills} times: target absent {absent}, complete {kills - absent}; {left} siblings left, all removed")


def fail(folder: Path) -> None:
    """An error after each write, flush and rename, one conversion each."""
    source, target = original(folder), folder / "out"

    def convert() -> None:
        with open_source(str(source)) as opened:
            conversion.run(conversion.prepare(opened, plans.find("bf16")), target)

    for step in ("write", "flush", "rename"):
        plain, wanted, complete = getattr(writer, step), 0, 0
        while True:
            wanted, calls = wanted + 1, 0

            def failing(*arguments: Any, plain: Any = plain, wanted: int = wanted) -> None:
                nonlocal calls
                plain(*arguments)
                calls += 1
                if calls == wanted:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            setattr(writer, step, failing)
            try:
                convert()
                break
            except VoiceChatError:
                assert not target.with_name(writer.SIBLING.format(target.name)).exists()
                complete += target.exists()
                shutil.rmtree(target, ignore_errors=True)
            finally:
                setattr(writer, step, plain)
        expected = contents(target)
        shutil.rmtree(target)
        print(f"{step}: failed after each of {wanted - 1}, target absent {wanted - 1 - complete}, complete {complete}")
        assert len(expected) == 8


if __name__ == "__main__":
    main()
