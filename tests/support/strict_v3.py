"""A scripted session under the rules of strict-v3, on a clock that only moves when told; and checks of traces."""

from __future__ import annotations

import base64
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_voicechat.events import (
    FunctionApplied,
    FunctionCall,
    FunctionFailed,
    SettleTimeout,
    TextDelta,
    TranscriptDelta,
    TurnClosed,
    TurnOpened,
)
from mlx_voicechat.server.strict_v3_codes import FRAME_BYTES
from mlx_voicechat.server.strict_v3_core import StrictV3
from mlx_voicechat.server.strict_v3_events import Terms
from mlx_voicechat.server.strict_v3_order import Order
from mlx_voicechat.server.strict_v3_requests import (
    BeginTurn,
    EndTurn,
    Give,
    Hear,
    Mark,
    Open,
    Opened,
    OpeningFailed,
    Refuse,
    Request,
    ResultRefused,
)
from mlx_voicechat.server.strict_v3_work import Spoken

LOUD = (np.sin(np.arange(FRAME_BYTES // 2) / 5) * 8000).astype("<i2").tobytes()
QUIET = bytes(FRAME_BYTES)
SPEECH = np.full(1764, 0.25, np.float32)
HUSH = np.zeros(1764, np.float32)
WEATHER = {"name": "get_weather", "description": "", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Call:
    """A call of the script, on the frame that takes the BOS or some frames after it."""

    after: int = 0
    names: tuple[str, ...] = ("get_weather",)  # several are one list
    fails: str = ""  # with this reason
    frames_to_apply: int = 0
    wrong_ids: bool = False  # the results of another call are applied


@dataclass
class Answer:
    """What the session does with one turn."""

    words: tuple[str, ...] = (" Good", " day.")
    frames: int = 6
    settle: int = 3  # frames before the BOS
    settles: bool = True
    calls: tuple[Call, ...] = ()
    reason: str = "eos"
    opens: bool = True  # a BOS comes
    silent: int = 0  # last frames without sound
    heard: str = " Hello"


class ScriptedSession:
    """A Host, and the session behind it. `run` does what was asked; frames of an answer follow the zeros it hears."""

    def __init__(self, terms: Terms | None = None, answers: Iterable[Answer] = (), **options: Any) -> None:
        terms = terms or Terms("fake", **{"typed_input": True, **options})
        self.time = 100.0
        self.events: list[dict[str, Any]] = []
        self.closed: int | None = None
        self.asked: list[Request] = []
        self.answers = deque(answers)
        self.jobs: list[tuple[str, str]] = []
        self.stopped = 0
        self.cancels = True  # whether a response can be ended
        self.refusals: list[str] = []  # for the next results
        self.opening_failures: list[str] = []
        self.on_frame: Callable[[int], object] = lambda frame: None
        self.frames = 0
        self._queue: deque[Request] = deque()
        self._turn = False
        self._answer: Answer | None = None  # the agent's turn
        self._said = 0
        self._calls = deque[Call]()
        self._cycle: tuple[Call, list[str], set[str]] | None = None
        self._apply_in = 0
        self._owed = False
        self._numbers = 0
        self._zero_at = 0.0
        self.core = StrictV3(terms, self, "s")

    # -- the host ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.time

    def send(self, event: dict[str, Any]) -> None:
        json.dumps(event)
        assert self.closed is None, f"{event['type']} after the closing"
        self.events.append(event)

    def close(self, code: int) -> None:
        assert self.closed is None
        self.closed = code

    def put(self, request: Request) -> None:
        assert self.closed is None
        self.asked.append(request)
        self._queue.append(request)

    def synthesise(self, job_id: str, text: str) -> None:
        self.jobs.append((job_id, text))

    def stop_synthesis(self) -> None:
        self.stopped += 1

    # -- driving -------------------------------------------------------------------------------------------------

    def say(self, kind: str, **fields: Any) -> None:
        """A client message, and what it leads to at once."""
        self.core.receive({"text": json.dumps({"type": kind, **fields})})
        self.run()

    def append(self, pcm: bytes = LOUD, **fields: Any) -> None:
        audio = base64.b64encode(pcm).decode()
        form = {"encoding": "pcm16", "sample_rate": 16000, "channels": 1}
        self.say("input_audio_buffer.append", **{**form, "audio": audio, **fields})

    def configure(self, **session: Any) -> None:
        self.core.greet()
        self.say("session.update", session={"protocol_version": 3, **session})

    def start(self, number: int, event_id: str = "start") -> None:
        self.say("input_audio_buffer.turn_start", event_id=event_id, client_turn_id=number)

    def commit(self, number: int, event_id: str = "commit") -> None:
        self.say("input_audio_buffer.commit", event_id=event_id, client_turn_id=number)

    def turn(self, number: int, frames: int = 3) -> None:
        self.start(number, f"start{number}")
        for _ in range(frames):
            self.append()
        self.commit(number, f"commit{number}")

    def result(self, call_id: str, output: str = "sunny", **fields: Any) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": output, **fields}
        self.say("conversation.item.create", event_id="result", item=item)

    def wait(self, seconds: float) -> None:
        """Let time pass, with what it brings."""
        end = self.time + seconds
        self.run()
        while (at := self._next()) is not None and at <= end:
            self.time = max(self.time, at)
            if self.core.deadline is not None and self.core.deadline <= self.time:
                self.core.tick()
            else:
                self._zero_at = self.time + 0.08
                self._frame()
            self.run()
        self.time = end

    def _next(self) -> float | None:
        """When something happens next: a deadline, or a frame of zeros while the agent's turn is open."""
        open_ = self.closed is None and (self._answer is not None or self._cycle is not None)
        times = [self.core.deadline, self._zero_at if open_ else None]
        return min((time for time in times if time is not None), default=None)

    def speak(self, frames: int = 2) -> None:
        """Finish the synthesis of the last job."""
        self.core.synthesised(self.jobs[-1][0], LOUD * frames)
        self.run()

    def run(self) -> None:
        """Do what was asked, in order."""
        while self._queue and self.closed is None:
            request = self._queue.popleft()
            if isinstance(request, Mark):
                self.core.observe(request)
            elif isinstance(request, Open):
                failure = self.opening_failures.pop(0) if self.opening_failures else ""
                self.core.observe(OpeningFailed(failure) if failure else Opened())
            elif isinstance(request, Hear):
                self._frame(request.pcm != QUIET)
            elif isinstance(request, BeginTurn):
                self._begin()
            elif isinstance(request, EndTurn):
                self._end()
            else:
                self._give(request)

    # -- kinds and their events ----------------------------------------------------------------------------------

    def of(self, kind: str, **want: Any) -> list[dict[str, Any]]:
        found = [event for event in self.events if event["type"] == kind]
        return [event for event in found if all(event.get(key) == value for key, value in want.items())]

    @property
    def kinds(self) -> list[str]:
        """What was sent, in short and without metrics."""
        return [short(event) for event in self.events if event["type"] != "voicechat.metrics"]

    def errors(self) -> list[tuple[str, bool]]:
        return [(event["error"]["code"], event["error"]["fatal"]) for event in self.of("error")]

    # -- the session ---------------------------------------------------------------------------------------------

    def tell(self, *events: Any) -> None:
        for event in events:
            self.core.observe(event)

    def _spoken(self, samples: np.ndarray, bos: bool = False) -> None:
        self.frames += 1
        self.tell(Spoken(samples, 0.01, bos))
        self.on_frame(self.frames)

    def _frame(self, loud: bool = False) -> None:
        if self._turn:
            if loud:
                self.tell(TranscriptDelta(self.frames, " Hello", ""))
            self._spoken(HUSH)
        elif self._cycle is not None:
            self._cycle_frame()
        elif self._owed and self._answer is not None and self._answer.opens:
            self._owed = False
            self._spoken(HUSH, bos=True)
        else:
            self._answer_frame()

    def _answer_frame(self) -> None:
        answer = self._answer
        if answer is None or self._owed:
            self._spoken(HUSH)
            return
        if self._calls and self._said >= self._calls[0].after:
            self._open_cycle()
            self._spoken(HUSH)
            return
        if self._said < len(answer.words):
            self.tell(TextDelta(self.frames, 7, answer.words[self._said], ""))
        self._said += 1
        loud = self._said <= answer.frames - answer.silent
        last = self._said >= answer.frames
        self._spoken(SPEECH if loud else HUSH)
        if last:
            self._close(answer.reason)

    def _close(self, reason: str) -> None:
        self._answer, self._cycle, self._owed = None, None, False
        self._calls.clear()
        self.tell(TurnClosed(self.frames, reason))

    def _begin(self) -> None:
        if self._answer is not None and self.cancels:
            for _ in range(4):
                self._spoken(HUSH)
            self._close("cancelled")
        self._turn = True

    def _end(self) -> None:
        self._turn = False
        answer = self.answers.popleft() if self.answers else Answer()
        for _ in range(answer.settle):
            self._spoken(HUSH)
        if not answer.settles:
            self.tell(SettleTimeout(self.frames))
            return
        self._answer, self._said, self._calls = answer, 0, deque(answer.calls)
        self._zero_at = self.time + 0.08
        at_the_boundary = bool(self._calls) and self._calls[0].after == 0
        if at_the_boundary or answer.opens:
            self.tell(TurnOpened(self.frames, ""))
        self._spoken(HUSH, bos=answer.opens and not at_the_boundary)
        if at_the_boundary:
            self._owed = True
            self._open_cycle()

    def _open_cycle(self) -> None:
        call = self._calls.popleft()
        ids = []
        for name in call.names:
            self._numbers += 1
            ids.append(f"call_{self._numbers:024x}")
            if call.fails and name == call.names[-1]:
                self.tell(FunctionFailed(self.frames, ids[-1], call.fails, "<"))
                continue
            self.tell(FunctionCall(self.frames, ids[-1], name, {"city": "Paris", "a": 1}, ""))
        waiting = set(ids[:-1] if call.fails else ids)
        self._cycle = (call, ids, waiting)

    def _give(self, request: Give | Refuse) -> None:
        if isinstance(request, Give) and self.refusals:
            self.tell(ResultRefused(request.call_id, self.refusals.pop(0)))
            return
        if self._cycle is not None:
            self._cycle[2].discard(request.call_id)
            self._apply_in = self._cycle[0].frames_to_apply

    def _cycle_frame(self) -> None:
        assert self._cycle is not None
        call, ids, open_ids = self._cycle
        if open_ids or self._apply_in > 0:
            self._apply_in -= not open_ids
            self._spoken(HUSH)
            return
        self._cycle, self._owed = None, True
        results = ("",) * len(ids)
        self.tell(FunctionApplied(self.frames, ("call_other",) if call.wrong_ids else tuple(ids), results))
        self._spoken(HUSH)


def short(event: dict[str, Any]) -> str:
    """An event's type and what else tells it apart, for lists in tests."""
    kind: str = event["type"]
    for key in ("status", "disposition", "reason"):
        if kind != "response.done" and key in event:
            return f"{kind}:{event[key]}"
    if kind == "response.done":
        return f"{kind}:{event['status']}:{event['reason']}"
    return f"{kind}:{event['error']['code']}" if kind == "error" else kind


@dataclass
class Trace:
    """A finished connection's events: what must hold of every one of them."""

    events: list[dict[str, Any]]
    closed: int | None = None
    texts: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """The order of the table, ids used once, sums of deltas, one terminal of each thing."""
        order, ids = Order(), set()
        for number, event in enumerate(self.events, 1):
            order.take(event)
            assert event["event_id"] == f"evt_{event['session_id']}_{number}"
            assert event["event_id"] not in ids
            ids.add(event["event_id"])
            self._sum(event)
        self._check_terminals()

    def _sum(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        key = event.get("response_id") or event.get("turn_id") or ""
        if kind == "response.output_text.delta":
            self.texts[key] = self.texts.get(key, "") + event["delta"]
            assert event["text"] == self.texts[key]
        elif kind == "conversation.item.input_audio_transcription.delta":
            self.texts[key] = self.texts.get(key, "") + event["delta"]
            assert event["transcript"] == self.texts[key]
        elif kind == "response.output_text.done":
            assert event["text"] == self.texts.get(key, "")
            assert event["empty"] == (not event["text"])
        elif kind == "conversation.item.input_audio_transcription.completed":
            assert event["transcript"] == self.texts.get(key, "")
            assert event["empty"] == (not event["transcript"])

    def _check_terminals(self) -> None:
        """At most one end of everything, exactly one unless a fatal error cut the connection off."""
        fatal = [
            event["error"]["code"] for event in self.events if event["type"] == "error" and event["error"]["fatal"]
        ]
        assert len(fatal) <= 1
        cut = self.closed is None or bool(fatal)
        calls = self._ids("call_id", "response.function_call_arguments.done")
        ends = ("conversation.item.function_call_output.applied", "response.function_call.failed")
        pairs = (
            (self._ids("turn_id", "input_audio_buffer.speech_started"), self._ids("turn_id", COMPLETED)),
            (self._ids("response_id", "response.created"), self._ids("response_id", "response.done")),
            (self._ids("job_id", "input_text.accepted"), self._ids("job_id", "input_text.injection_finished")),
            (calls, Counter({k: n for k, n in self._ids("call_id", *ends).items() if k in calls})),
        )
        for begun, ended in pairs:
            assert all(count == 1 for count in (*begun.values(), *ended.values()))
            assert set(ended) <= set(begun)
            assert cut or set(begun) == set(ended)

    def _ids(self, key: str, *kinds: str) -> Counter[str]:
        return Counter(event[key] for event in self.events if event["type"] in kinds)


COMPLETED = "conversation.item.input_audio_transcription.completed"
