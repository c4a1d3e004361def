"""Memory and speed of a conversion: a random original of 2 GB, its largest tensor 100 MB, to bf16.

    python benchmarks/convert_speed.py FOLDER [--plan bf16]

FOLDER is on the disk to measure and needs 6 GB; all that is written there is removed. Copies of the original and
conversions alternate, three of each, both flushed to the disk; a conversion is a process of its own, as a user runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.originals import random_original

from mlx_voicechat.weights import assets
from mlx_voicechat.weights.shards import places

ROUNDS = 3
PIECE = 2**24
# Pattern and widths of an LLM whose weights are 2 GB in float32, the embedding and an MLP matrix 100 MB each.
LLM = {
    "vocab_size": 6000,
    "hidden_size": 4096,
    "intermediate_size": 5952,
    "num_hidden_layers": 11,
    "hybrid_override_pattern": "M-*-M-*-M-*",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 4,
    "ssm_state_size": 64,
}
# Runs a command and prints the largest resident memory of its process.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
size = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(size if sys.platform == "darwin" else size * 1024)
"""


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plan", default="bf16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        measure(Path(name).resolve(), options.plan)


def measure(folder: Path, plan: str) -> None:
    """Make the original, then alternate."""
    raw: dict[str, Any] = json.loads((assets.CONFIGS / "random.json").read_text(encoding="utf-8"))
    raw["text_config"] |= LLM
    raw["audio_config"]["output_dim"] = LLM["hidden_size"]
    original = random_original(raw, folder / "original")
    os.sync()
    weights = original / "model.safetensors"
    size = weights.stat().st_size
    largest = max(_count(shape) * 4 for shape, _, _ in places(weights).values())
    print(f"original: {size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB")
    bare = resident([sys.executable, "-c", "pass"])
    imported = "import mlx_voicechat.convert.conversion, mlx_voicechat.cli.app"
    idle = resident([sys.executable, "-c", imported])
    copies, conversions, memory = [], [], []
    for _ in range(ROUNDS):
        copies.append(_timed(lambda: copy(weights, folder / "copy")))
        (folder / "copy").unlink()
        out = folder / "out"
        command = [sys.executable, "-m", "mlx_voicechat.cli.main", "convert"]
        command += ["-s", str(original), "-o", str(out), "--plan", plan]
        conversions.append(_timed(lambda: memory.append(resident(command))))  # noqa: B023
        shutil.rmtree(out)
        os.sync()
    copied, converted = (size / statistics.median(times) / 1e6 for times in (copies, conversions))
    print(f"copy: {_seconds(copies)} s, median {copied:,.0f} MB/s")
    print(f"{plan}: {_seconds(conversions)} s, median {converted:,.0f} MB/s, {converted / copied:.2f} of the copy")
    print(
        f"resident memory: {max(memory) / 1e6:.0f} MB; an idle interpreter {bare / 1e6:.0f} MB, "
        f"with the program imported {idle / 1e6:.0f} MB; so {(max(memory) - bare) / 1e6:.0f} MB beyond the first"
    )


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _seconds(times: list[float]) -> str:
    return " ".join(f"{seconds:.2f}" for seconds in times)


def resident(command: list[str]) -> int:
    """Bytes of the largest resident memory of a process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], check=True, capture_output=True, text=True, cwd="/"
    )
    return int(done.stdout)


def copy(source: Path, target: Path) -> None:
    """In pieces, flushed."""
    with source.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(PIECE):
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())


if __name__ == "__main__":
    main()
