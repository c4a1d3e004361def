"""Faults of clients: vanishing at any moment, malformed messages, reading nothing, talking past the limit.

    python benchmarks/server_faults.py tests/golden/tiny-f32 [vanish] [messages] [slow] [limit]
        [--clients 500] [--messages 10000] [--stalled 60] [--seconds 600] [--seed 0]

Each part starts `mlx-voicechat serve` and sees that it still serves afterwards. Prints JSON; leaves with 1 when
a claim does not hold. Linux, which tells memory, threads and descriptors in /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.faults import MOMENTS, Fuzzer, audio, stalled, usage, vanish
from tests.support.server import ServerProcess, serve_process

WARM = 30  # clients before memory is looked at
MB = 2**20


def health(server: ServerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        body: dict[str, Any] = json.load(answer)
    return body


def free_after(server: ServerProcess) -> float:
    """Seconds until no slot is taken."""
    begin = time.perf_counter()
    while health(server)["sessions"]["active"]:
        time.sleep(0.005)
    return time.perf_counter() - begin


def whole_session(server: ServerProcess) -> bool:
    """Whether a conversation of one second goes well from beginning to end."""
    with connect(server.ws_url, compression=None) as socket:
        socket.recv()
        socket.send(json.dumps({"type": "session.update", "session": {"seed": 1}}))
        socket.recv()
        socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio(16000)}))
        socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        kinds = []
        try:
            while True:
                kinds.append(json.loads(socket.recv())["type"])
        except ConnectionClosed as closed:
            normal = closed.rcvd is not None and closed.rcvd.code == 1000
    return normal and kinds.count("response.audio.delta") == 13 and kinds[-1] == "response.done"


def vanishing(server: ServerProcess, clients: int, seed: int) -> dict[str, Any]:
    rng, pid = random.Random(seed), server.process.pid
    freed: dict[str, float] = dict.fromkeys(MOMENTS, 0.0)
    before = usage(pid)
    for index in tqdm(range(WARM + clients), disable=not sys.stderr.isatty()):
        if index == WARM:
            time.sleep(1)
            before = usage(pid)
        moment = rng.choice(MOMENTS)
        vanish(server.ws_url, moment, rng)
        freed[moment] = max(freed[moment], free_after(server))
    time.sleep(2)
    after = usage(pid)
    return {
        "clients": clients,
        "most_seconds_until_free": {moment: round(seconds, 3) for moment, seconds in freed.items()},
        "grown": {name: after[name] - before[name] for name in after},
        "claims": {
            "the slot is free within a second": max(freed.values()) < 1,
            "no thread or descriptor is left": after["threads"] <= before["threads"]
            and after["files"] <= before["files"],
            "memory grows by less than 5 MB": after["resident"] - before["resident"] < 5 * MB,
        },
    }


def malformed(server: ServerProcess, count: int, seed: int) -> dict[str, Any]:
    fuzzer = Fuzzer(server.ws_url, seed)
    with tqdm(total=count, disable=not sys.stderr.isatty()) as bar:
        fuzzer.run(count, lambda: bar.update() and None)
    return {
        "messages": fuzzer.sent,
        "malformed": fuzzer.malformed,
        "codes": dict(Counter(fuzzer.codes)),
        "connections": fuzzer.connections,
        "wrong": fuzzer.wrong[:10],
        "claims": {"each malformed message gets one error event with its code": not fuzzer.wrong},
    }


def not_reading(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """One client stops reading, paced and then as fast as it can, while another talks in real time."""
    result: dict[str, Any] = {}
    for name, fast in (("paced", False), ("fast", True)):
        before, most, stop = usage(server.process.pid)["resident"], 0, threading.Event()
        waits: list[float] = []
        other = threading.Thread(target=_talk, args=(server.ws_url, stop, waits))
        other.start()
        told: list[Any] = []
        stalling = threading.Thread(target=lambda f=fast, t=told: t.extend(stalled(server.ws_url, seconds, f)))  # type: ignore[misc]
        stalling.start()
        while stalling.is_alive():
            most = max(most, usage(server.process.pid)["resident"] - before)
            time.sleep(0.25)
        stop.set()
        other.join()
        result[name] = {
            "last_event_and_code": told,
            "grown_bytes": most,
            "other_session_worst_ms": round(max(waits[5:]) * 1000, 1),
            "other_session_p50_ms": round(float(np.median(waits)) * 1000, 1),
        }
    grown = max(part["grown_bytes"] for part in result.values())
    result["claims"] = {
        "it is told slow_consumer and closed with 1008": all(
            result[name]["last_event_and_code"] == ["slow_consumer", 1008] for name in ("paced", "fast")
        ),
        "memory grows by less than 10 MB": grown < 10 * MB,
    }
    return result


def _talk(url: str, stop: threading.Event, waits: list[float]) -> None:
    with connect(url, compression=None) as socket:
        socket.recv()
        socket.send(json.dumps({"type": "session.update"}))
        socket.recv()
        begin, count = time.perf_counter(), 0
        while not stop.is_set():
            time.sleep(max(0.0, begin + count * 0.08 - time.perf_counter()))
            sent = time.perf_counter()
            socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio(1280)}))
            while json.loads(socket.recv())["type"] != "response.audio.delta":
                pass
            waits.append(time.perf_counter() - sent)
            count += 1


def past_the_limit(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Ask for more than the server gives, and talk for two seconds longer than that."""
    begin = time.perf_counter()
    frames, errors, done, code = asyncio.run(_talk_on(server.ws_url, seconds))
    expected = round(seconds / 0.08)
    return {
        "frames": frames,
        "errors": errors,
        "done": done,
        "close": code,
        "took_seconds": round(time.perf_counter() - begin, 1),
        "claims": {
            "it ends at the server's limit": frames == done == expected,
            "with inference_error, an error for each append": [e[0] for e in errors] == ["inference_error"] * 2,
            "and can be committed": code == 1000,
        },
    }


async def _talk_on(url: str, seconds: float) -> tuple[int, list[list[str]], int | None, int | None]:
    """As fast as is taken, reading meanwhile -> frames, errors, the number in response.done, closing code."""
    frames, errors, done = 0, [], None
    bar = tqdm(total=round(seconds / 0.08), disable=not sys.stderr.isatty())
    async with connect_async(url, compression=None, ping_timeout=None) as socket:
        await socket.recv()
        await socket.send(json.dumps({"type": "session.update", "session": {"max_streaming_seconds": 100_000}}))
        await socket.recv()

        async def send() -> None:
            for index in range(round(seconds) + 2):
                message = {"type": "input_audio_buffer.append", "audio": audio(16000), "event_id": f"second {index}"}
                await socket.send(json.dumps(message))
            await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))

        sender = asyncio.create_task(send())
        async for message in socket:
            event = json.loads(message)
            if event["type"] == "response.audio.delta":
                frames += 1
                bar.update()
            elif event["type"] == "error":
                errors.append([event["error"]["code"], event["error"].get("event_id"), event["error"]["message"]])
            elif event["type"] == "response.done":
                done = event["frame_index"]
        await sender
    bar.close()
    return frames, errors, done, socket.close_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("parts", nargs="*", default=["vanish", "messages", "slow", "limit"])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--stalled", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    works = {
        "vanish": lambda server: vanishing(server, arguments.clients, arguments.seed),
        "messages": lambda server: malformed(server, arguments.messages, arguments.seed),
        "slow": lambda server: not_reading(server, arguments.stalled),
        "limit": lambda server: past_the_limit(server, arguments.seconds),
    }
    report: dict[str, Any] = {}
    for part in arguments.parts:
        sessions, limit = ("2" if part in ("slow", "messages") else "1"), f"{arguments.seconds:g}"
        with serve_process(
            "-m",
            arguments.model,
            "--max-sessions",
            sessions,
            "--max-audio-seconds",
            limit,
            "--setup-seconds",
            "1e6",
            "--log-level",
            "warning",
        ) as server:
            announced = len(server.stderr)
            report[part] = works[part](server)
            free_after(server)
            alive = server.process.poll() is None and whole_session(server)
        said = "".join(server.stderr[announced:])
        report[part]["log"] = said[-1000:]
        report[part]["claims"] |= {
            "a session works afterwards": alive,
            "the log has no traceback": "Traceback" not in said,
        }
    print(json.dumps(report, indent=2))
    return 0 if all(all(part["claims"].values()) for part in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
