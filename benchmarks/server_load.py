"""Load on a server: as many conversations in real time as `bench` announces, then more, and the latency of one.

    python benchmarks/server_load.py tests/golden/tiny-f32 [--seconds 60] [--sessions 16] [--more 2] [--only latency]

Starts `mlx-voicechat serve` and plays to it. First it measures the bare frame in this process, back to back and at one
frame in 80 ms, and what `bench --sessions` measures, and records what each conversation says alone. Prints JSON; leaves
with 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import connect

import mlx_voicechat
from mlx_voicechat import AudioFrame, Event
from mlx_voicechat.gauges.bench import faint_noise
from mlx_voicechat.gauges.company import company as company_times
from mlx_voicechat.sound.pcm import pcm16
from mlx_voicechat.voicechat import VoiceChat

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.server import serve_process

FRAME, SECONDS, RATE = 1280, 0.08, 16000
COLD = 25
ROUNDS = 4
ROUND_FRAMES = 60
MOST_BEHIND, MOST_UNEQUAL, MOST_OVERHEAD_MS = 2, 1, 3.0


def heard(seconds: float, seed: int) -> np.ndarray:
    """Noise whose loudness rises and falls, as int16 frames (n, 1280)."""
    count = round(seconds / SECONDS)
    noise = np.random.default_rng(seed).normal(size=(count, FRAME))
    loudness = 6000 * np.abs(np.sin(np.arange(count) / 9 + seed))[:, None]
    return np.clip(noise * loudness, -32768, 32767).astype("<i2")


def said(event: Event) -> tuple[Any, ...]:
    """What must be the same alone and in company."""
    if isinstance(event, AudioFrame):
        return event.frame_index, pcm16(event.samples, 32767).tobytes(), event.codes
    return event.frame_index, type(event).__name__, getattr(event, "token_id", None), getattr(event, "delta", None)


def alone(model: VoiceChat, frames: np.ndarray, seed: int) -> list[tuple[Any, ...]]:
    session = model.session(seed=seed)
    events: list[Event] = []
    for frame in frames:
        events += session.push(frame.astype(np.float32) / np.float32(32768))
    return [said(event) for event in events]


def bare(model: VoiceChat, frames: np.ndarray, paced: bool) -> np.ndarray:
    """Milliseconds of each warm frame, back to back or one in 80 ms."""
    session, times = model.session(), []
    begin = time.perf_counter()
    for index, frame in enumerate(frames):
        if paced:
            time.sleep(max(0.0, begin + index * SECONDS - time.perf_counter()))
        started = time.perf_counter()
        session.push(frame.astype(np.float32) / np.float32(32768))
        times.append((time.perf_counter() - started) * 1000)
    return np.array(times[COLD:])


@dataclass
class Call:
    """One conversation in real time: `sent` and `got` are times a frame, `events` what was said."""

    frames: np.ndarray
    seed: int
    sent: list[float] = field(default_factory=list)
    got: list[float] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    lags: list[tuple[float, float]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def behind(self) -> int:
        """Frames sent whose speech has not come."""
        return len(self.sent) - len(self.got)

    async def open(self, url: str, files: AsyncExitStack) -> None:
        connecting = connect(url, compression=None, ping_timeout=None, max_queue=None)
        self._socket = await files.enter_async_context(connecting)
        await self._socket.recv()
        await self._socket.send(json.dumps({"type": "session.update", "session": {"seed": self.seed}}))
        assert json.loads(await self._socket.recv())["type"] == "session.updated"

    async def play(self, begin: float) -> None:
        messages = [json.dumps({"type": "input_audio_buffer.append", "audio": text(frame)}) for frame in self.frames]
        reader = asyncio.create_task(self._read(self._socket, len(messages)))
        for index, message in enumerate(messages):
            await asyncio.sleep(max(0.0, begin + index * SECONDS - time.perf_counter()))
            await self._socket.send(message)
            self.sent.append(time.perf_counter())
        await reader

    async def _read(self, socket: Any, count: int) -> None:
        while len(self.got) < count:
            event = json.loads(await socket.recv())
            kind = event["type"]
            if kind == "response.audio.delta":
                self.got.append(time.perf_counter())
                pcm = base64.b64decode(event["delta"])
                self.events.append((event["frame_index"], pcm, tuple(event["audio_codes"])))
            elif kind == "session.lagging":
                self.lags.append((time.perf_counter(), event["backlog_seconds"]))
            elif kind == "error":
                self.errors.append(event["error"])
            else:
                names = {"response.text.delta": "TextDelta", "response.function.delta": "FunctionDelta"}
                name = names.get(kind, "TranscriptDelta")
                self.events.append((event["frame_index"], name, event.get("token_id"), event["delta"]))


def text(frame: np.ndarray) -> str:
    return base64.b64encode(frame.tobytes()).decode()


async def play(url: str, calls: list[Call]) -> list[list[int]]:
    """Play all at once; how far each was behind, every half second."""
    seen: list[list[int]] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            if all(0 < len(call.sent) < len(call.frames) for call in calls):
                seen.append([call.behind for call in calls])

    async with AsyncExitStack() as files:
        for call in calls:
            await call.open(url, files)
        watcher = asyncio.create_task(watch())
        begin = time.perf_counter() + 0.5
        await asyncio.gather(*(call.play(begin) for call in calls))
        watcher.cancel()
    return seen


def most_behind(call: Call) -> int:
    """The largest number of frames sent and not answered, when an answer came, its own frame not counted."""
    sent = np.array(call.sent)
    return max(int(np.searchsorted(sent, at)) - index - 1 for index, at in enumerate(call.got))


def least_apart(call: Call) -> float | None:
    times = [at for at, _ in call.lags]
    return round(float(np.min(np.diff(times))), 3) if len(times) > 1 else None


def company(url: str, model: VoiceChat, count: int, seconds: float) -> dict[str, Any]:
    calls = [Call(heard(seconds, seed), seed) for seed in range(count)]
    seen = asyncio.run(play(url, calls))
    same = [call.events == alone(model, call.frames, call.seed) for call in calls]
    return {
        "sessions": count,
        "seconds": seconds,
        "most_frames_behind": [most_behind(call) for call in calls],
        "last_backlog_frames": seen[-1],
        "most_unequal_frames": max(max(row) - min(row) for row in seen),
        "lagging_events": [len(call.lags) for call in calls],
        "least_seconds_between_them": [least_apart(call) for call in calls],
        "errors": [call.errors for call in calls],
        "same_as_alone": same,
    }


def latency(url: str, model: VoiceChat) -> dict[str, Any]:
    """From the last byte of an append to its speech, and the bare frame at the same pace, in rounds by turns."""
    served, alone_paced = [], []
    for turn in range(ROUNDS):
        alone_paced.append(bare(model, heard(8.0, turn), paced=True))
        call = Call(heard(8.0, turn), turn)
        asyncio.run(play(url, [call]))
        served.append((np.array(call.got) - np.array(call.sent))[COLD:] * 1000)
    overhead = np.median(np.concatenate(served)) - np.median(np.concatenate(alone_paced))
    return {
        "served": spread(np.concatenate(served)),
        "bare_paced": spread(np.concatenate(alone_paced)),
        "rounds_p50_ms": [
            [round(float(np.median(x)), 2) for x in pair] for pair in zip(served, alone_paced, strict=True)
        ],
        "overhead_p50_ms": round(float(overhead), 2),
    }


def spread(times: np.ndarray) -> dict[str, float]:
    return {"p50_ms": round(float(np.median(times)), 2), "p95_ms": round(float(np.percentile(times, 95)), 2)}


def claims(report: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """What must hold, of what was measured."""
    if (load := report.get("load")) is not None:
        yield "none is behind by more than two frames", max(load["most_frames_behind"]) <= MOST_BEHIND
        yield "all say what they say alone", all(load["same_as_alone"])
    if (load := report.get("overload")) is not None:
        yield "the backlog is equal within one frame", load["most_unequal_frames"] <= MOST_UNEQUAL
        yield "each is told", min(load["lagging_events"]) > 0
        yield "at most once a second", min(x or 1.0 for x in load["least_seconds_between_them"]) > 0.9
        yield "all say what they say alone, also overloaded", all(load["same_as_alone"])
    if (times := report.get("latency")) is not None:
        yield "the overhead is at most 3 ms", times["overhead_p50_ms"] <= MOST_OVERHEAD_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, default=16, help="that are tried together at most")
    parser.add_argument("--more", type=int, default=2, help="sessions above what fits, for the overload")
    parser.add_argument("--only", choices=["latency", "load", "overload"])
    arguments = parser.parse_args()

    model = mlx_voicechat.load(arguments.model, say=lambda line: None)
    quick = bare(model, heard(20.0, 0), paced=False)
    report: dict[str, Any] = {"bare": spread(quick)}
    report["together"] = company_times(model, arguments.sessions, ROUND_FRAMES, faint_noise(model.config))
    fit = max(1, report["together"]["real_time_sessions"])
    gc.collect()
    with serve_process("-m", arguments.model, "--max-sessions", "64", "--log-level", "error") as server:
        if arguments.only in (None, "latency"):
            report["latency"] = latency(server.ws_url, model)
        if arguments.only in (None, "load"):
            report["load"] = company(server.ws_url, model, fit, arguments.seconds)
        if arguments.only in (None, "overload"):
            report["overload"] = company(server.ws_url, model, fit + arguments.more, arguments.seconds)
    report["claims"] = dict(claims(report))
    print(json.dumps(report, indent=2))
    return 0 if all(report["claims"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
