"""Frame times and counts of this project and of the public MLX port, alternating in one run.

    python benchmarks/frame_against_peer.py CHECKPOINT AUDIO --peer-python PEER/bin/python --peer-script peer_frame.py

The peer runs in an environment of its own (mlx-vlm with mlx-audio); its script prints one JSON line with `primitives`,
`launches`, `evals` and `p50_ms`. This side is `mlx-voicechat bench --json`. Prints medians over the rounds and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any


def last_json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout.strip()
    return json.loads(text if text.startswith("{\n") else text.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("audio")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-script", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=120)
    arguments = parser.parse_args()

    ours_command = [sys.executable, "-m", "mlx_voicechat.cli.main", "bench", arguments.checkpoint]
    ours_command += ["--frames", str(arguments.frames), "--compile", "--json"]
    peer_command = [arguments.peer_python, arguments.peer_script, arguments.checkpoint, arguments.audio]
    ours, peer = [], []
    for _ in range(arguments.rounds):
        peer.append(last_json(peer_command))
        ours.append(last_json(ours_command))
    our_p50 = [run["stages"]["total"]["p50_ms"] for run in ours]
    peer_p50 = [run["p50_ms"]["total"] for run in peer]
    stages = {
        name: {
            "ours_ms": statistics.median(run["stages"][name]["p50_ms"] for run in ours),
            "peer_ms": statistics.median(run["p50_ms"][name] for run in peer),
        }
        for name in ("perception", "rnnt", "language", "tts", "codec")
    }
    print(
        json.dumps(
            {
                "p50_ms": {"ours": statistics.median(our_p50), "peer": statistics.median(peer_p50)},
                "ratios": [round(a / b, 3) for a, b in zip(our_p50, peer_p50, strict=True)],
                "ratio": round(statistics.median(our_p50) / statistics.median(peer_p50), 3),
                "stages": stages,
                "primitives": {"ours": ours[0]["primitives"], "peer": peer[0]["primitives"]},
                "launches": {"ours": ours[0]["launches"], "peer": peer[0]["launches"]},
                "evaluations": {"ours": ours[0]["evaluations"], "peer": peer[0]["evals"]},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
