"""How fast a speaker is noticed who talks over an answer, in OpenAI's vocabulary.

    python benchmarks/interruption.py [MODEL] [--times 30]

Starts `mlx-voicechat serve` (MODEL: tiny), asks a recorded question in real time, and speaks again 0.7 s into the
answer. From the first loud 10 ms of that speech, when its last sample is sent: the time to `speech_started`, and to the
last piece of the answer's audio. Prints both in ms, median and 95th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from websockets.asyncio.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.server import serve_process

EXAMPLES = Path(__file__).parents[1] / "examples"
RATE_HZ, PIECE_SECONDS = 24_000, 0.02
LOUD_DBFS = -40.0
INTO_ANSWER_SECONDS = 0.7
DELTA = "response.output_audio.delta"


def recording(name: str) -> np.ndarray:
    samples, rate_hz = soundfile.read(EXAMPLES / name, dtype="float32")
    return np.asarray(soxr.resample(samples, rate_hz, RATE_HZ))


def onset_seconds(samples: np.ndarray) -> float:
    """The end of the first loud 10 ms."""
    size = RATE_HZ // 100
    blocks = samples[: len(samples) // size * size].reshape(-1, size)
    levels = 10 * np.log10(np.mean(np.square(blocks), axis=1) + 1e-12)
    return float(np.argmax(levels > LOUD_DBFS) + 1) / 100


class Microphone:
    """Sends in real time: silence, and what it is given to say."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._waiting = socket, np.zeros(0, np.float32)

    def say(self, samples: np.ndarray) -> None:
        self._waiting = np.concatenate([self._waiting, samples])

    async def run(self) -> None:
        size, at = round(RATE_HZ * PIECE_SECONDS), time.monotonic()
        while True:
            piece, self._waiting = self._waiting[:size], self._waiting[size:]
            data = (np.pad(piece, (0, size - len(piece))) * 32767).astype("<i2").tobytes()
            append = {"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()}
            await self._socket.send(json.dumps(append))
            at += PIECE_SECONDS
            await asyncio.sleep(max(0.0, at - time.monotonic()))


async def until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while True:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 60))
        if event["type"] == kind:
            return event


async def interrupted(url: str, question: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Milliseconds to speech_started and to the last delta of the answer that it ended."""
    async with connect(f"{url}?model=any", max_size=None) as socket:
        turns = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        await socket.send(json.dumps({"type": "session.update", "session": turns}))
        await until(socket, "session.updated")
        microphone = Microphone(socket)
        sending = asyncio.create_task(microphone.run())
        microphone.say(question)
        await until(socket, DELTA)
        await asyncio.sleep(INTO_ANSWER_SECONDS)
        begin = time.monotonic() + onset_seconds(second)
        microphone.say(second)
        started = last = begin
        while True:
            event = json.loads(await asyncio.wait_for(socket.recv(), 60))
            if event["type"] == "input_audio_buffer.speech_started":
                started = time.monotonic()
            elif event["type"] == DELTA:
                last = time.monotonic()
            elif event["type"] == "response.done":
                break
        sending.cancel()
        assert event["response"]["status"] == "cancelled", event["response"]
        return 1000 * (started - begin), 1000 * (max(last, begin) - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--times", type=int, default=30)
    options = parser.parse_args()
    question, second = recording("tell_me_a_joke.wav"), recording("what_is_two_plus_two.wav")
    with serve_process("--model", options.model) as server:
        pairs = [asyncio.run(interrupted(server.ws_url, question, second)) for _ in range(options.times)]
    for name, values in zip(("speech_started", "last delta"), zip(*pairs, strict=True), strict=True):
        ordered = sorted(values)
        print(
            f"{name}: p50 {statistics.median(ordered):.0f} ms, p95 {ordered[round(0.95 * (len(ordered) - 1))]:.0f} ms"
        )


if __name__ == "__main__":
    main()
