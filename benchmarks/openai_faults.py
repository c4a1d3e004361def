"""Ten minutes with a silent client, one that floods and one that never reads, in OpenAI's vocabulary.

    python benchmarks/openai_faults.py [MODEL] [--seconds 600] [--query model=any]

Starts `mlx-voicechat serve --max-sessions 3` (MODEL: tiny). The silent client sends one update and then nothing: the
server keeps its time with zeros. The flooding one sends recorded speech as fast as the socket takes it. The third sends
speech in real time and reads nothing, so that its reason is seen in the server's count of errors alone. Prints JSON:
how each ended and after how long, errors by code, frames in all, and the server's memory. Linux, which tells memory in
/proc.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import soundfile
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.faults import usage
from tests.support.server import ServerProcess, serve_process

EXAMPLE = Path(__file__).parents[1] / "examples" / "question.wav"
PIECE_SECONDS = 0.1
GRACE_SECONDS = 600  # behind --seconds, for a machine that is slower than real time
MB = 2**20


def pieces() -> list[str]:
    """A recorded question and two seconds of silence as appends of 0.1 s at 24 kHz."""
    samples, rate_hz = soundfile.read(EXAMPLE, dtype="int16")
    import soxr

    samples = soxr.resample(samples, rate_hz, 24_000)
    data = samples.astype("<i2").tobytes() + bytes(2 * 2 * 24_000)
    size = round(2 * 24_000 * PIECE_SECONDS)
    appends = [base64.b64encode(data[at : at + size]).decode() for at in range(0, len(data), size)]
    return [json.dumps({"type": "input_audio_buffer.append", "audio": audio}) for audio in appends]


async def read(socket: ClientConnection, seen: dict[str, Any]) -> None:
    """Read to the end; counts of events, the last error and how it closed."""
    try:
        async for message in socket:
            event = json.loads(message)
            seen["events"] = seen.get("events", 0) + 1
            if event["type"] == "error":
                seen["error"] = event["error"]["code"]
    except ConnectionClosed:
        pass
    seen["close"] = socket.close_code


async def silent(url: str, seconds: float) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    async with connect(url, max_size=None, ping_interval=None) as socket:
        begin = time.monotonic()
        await socket.send(json.dumps({"type": "session.update", "session": {}}))
        await asyncio.wait_for(read(socket, seen), seconds + GRACE_SECONDS)
        seen["seconds"] = round(time.monotonic() - begin, 1)
    return seen


async def flooding(url: str, seconds: float) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    async with connect(url, max_size=None, ping_interval=None) as socket:
        begin, sent = time.monotonic(), 0
        reader = asyncio.create_task(read(socket, seen))
        recorded = pieces()
        try:
            while time.monotonic() - begin < seconds + GRACE_SECONDS and not reader.done():
                await socket.send(recorded[sent % len(recorded)])
                sent += 1
        except ConnectionClosed:
            pass
        await asyncio.wait_for(reader, 10)
        seen |= {"seconds": round(time.monotonic() - begin, 1), "audio_sent_seconds": round(sent * PIECE_SECONDS, 1)}
    return seen


async def never_reading(url: str, seconds: float) -> dict[str, Any]:
    """Its messages go out in real time; what comes is left lying until the server ends it."""
    seen: dict[str, Any] = {}
    async with connect(url, max_size=None, max_queue=1, ping_interval=None) as socket:
        begin, sent, recorded = time.monotonic(), 0, pieces()
        try:
            while time.monotonic() - begin < seconds:
                await asyncio.wait_for(socket.send(recorded[sent % len(recorded)]), 5)
                sent += 1
                await asyncio.sleep(max(0.0, begin + sent * PIECE_SECONDS - time.monotonic()))
        except (ConnectionClosed, TimeoutError):
            pass
        seen["ended_after_seconds"] = round(time.monotonic() - begin, 1)
        await asyncio.wait_for(read(socket, seen), 30)
    return seen


def counted(server: ServerProcess) -> dict[str, Any]:
    """Frames that the server's model ran so far, and its errors by code."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        "frames": sum(each.value for each in samples if each.name == "mlx_voicechat_frame_seconds_count"),
        "errors": {each.labels["code"]: each.value for each in samples if each.name == "mlx_voicechat_errors_total"},
    }


async def measured(server: ServerProcess, query: str, seconds: float) -> dict[str, Any]:
    url = f"{server.ws_url}?{query}"
    pid, memory = server.process.pid, []
    work = asyncio.gather(silent(url, seconds), flooding(url, seconds), never_reading(url, seconds))
    begin = time.monotonic()
    while not work.done():
        await asyncio.sleep(1)
        memory.append((time.monotonic() - begin, usage(pid)["resident"]))
    alone, flood, deaf = work.result()
    middle = [size for at, size in memory if at > seconds / 4]
    return {
        "silent": alone,
        "flooding": flood,
        "never_reading": deaf,
        "memory_mb": {"first": memory[5][1] / MB, "quarter": middle[0] / MB, "last": memory[-1][1] / MB},
        "most_mb": max(size for _, size in memory) / MB,
        **counted(server),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--seconds", type=float, default=600, help="audio that a conversation may hear")
    parser.add_argument("--query", default="model=any", help="model=any or duplex=1")
    options = parser.parse_args()
    limits = ("--max-audio-seconds", str(options.seconds), "--idle-seconds", str(2 * options.seconds))
    with serve_process("--model", options.model, "--max-sessions", "3", *limits) as server:
        print(json.dumps(asyncio.run(measured(server, options.query, options.seconds)), indent=1))


if __name__ == "__main__":
    main()
