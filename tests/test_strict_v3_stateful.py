"""strict-v3: random sequences of legal and illegal messages over a scripted session; the order holds in each trace."""

import base64
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_voicechat.server.strict_v3_floor import REASONS, TOO_MANY
from mlx_voicechat.server.strict_v3_requests import Broken
from tests.support.strict_v3 import LOUD, QUIET, WEATHER, Answer, Call, ScriptedSession, Trace

MOSTLY = st.integers(0, 19).map(lambda number: number != 17)  # not the value that a search begins with
CALLS = st.builds(
    Call,
    after=st.integers(0, 3),
    names=st.sampled_from([("get_weather",), ("get_weather", "get_time"), ("a", "b", "c")]),
    fails=st.sampled_from([""] * 12 + ["bad_json", TOO_MANY]),
    frames_to_apply=st.sampled_from([0, 1, 5, 300]),
)
ANSWERS = st.builds(
    Answer,
    words=st.lists(st.sampled_from([" One", " two", "", " é"]), max_size=3).map(tuple),
    frames=st.integers(1, 40),
    settle=st.integers(0, 3),
    settles=MOSTLY,
    calls=st.lists(CALLS, min_size=0, max_size=3).map(lambda calls: tuple(sorted(calls, key=lambda call: call.after))),
    reason=st.sampled_from(["eos", *REASONS]),
    opens=MOSTLY,
    silent=st.integers(0, 30),
)
WRONG: list[Any] = [
    "no json",
    b"\0",
    [],
    {"type": "response.create", "event_id": "x"},
    {"type": "session.update", "session": {"protocol_version": 3, "tools": 5}},
    {"type": "session.update", "session": {"capabilities": {"x": 1}}},
    {"type": "session.update"},
    {"type": "input_audio_buffer.append", "encoding": "pcm16", "sample_rate": 8000},
    {"type": "conversation.item.create", "item": {"type": "message"}},
    {"type": "input_text.request", "job_id": "", "text": "x"},
    {"type": "input_text.request", "job_id": "z", "text": " "},
]


class Sequences(RuleBasedStateMachine):
    """Messages, answers of the session and time, in any order; the requests of a session wait until they are run."""

    @initialize(
        answers=st.lists(ANSWERS, min_size=2, max_size=5),
        terms=st.fixed_dictionaries({"typed_input": MOSTLY, "most_frames": st.sampled_from([40, 12_000, 12_000])}),
        cancels=MOSTLY,
        configured=MOSTLY,
    )
    def open(self, answers: list[Answer], terms: dict[str, Any], cancels: bool, configured: bool) -> None:
        self.made = ScriptedSession(answers=answers, function_seconds=3.0, **terms)
        self.made.cancels = cancels
        self.made.core.greet()
        self.started = 0
        if configured:
            self.update([WEATHER], None)
            self.made.run()

    def say(self, kind: str, **fields: Any) -> None:
        self.made.core.receive({"text": json.dumps({"type": kind, **fields})})

    @rule(tools=st.sampled_from([None, [], [WEATHER]]), instructions=st.sampled_from([None, "A", "B"]))
    def update(self, tools: Any, instructions: str | None) -> None:
        self.say("session.update", session={"protocol_version": 3, "tools": tools, "instructions": instructions})

    @property
    def free(self) -> bool:
        """Whether a turn may begin."""
        return self.made.core._open is None and not self.made.core._jobs

    @precondition(lambda self: self.free)
    @rule()
    def start(self) -> None:
        self.started += 1
        self.say("input_audio_buffer.turn_start", event_id=f"s{self.started}", client_turn_id=self.started)

    @precondition(lambda self: self.started)
    @rule()
    def commit(self) -> None:
        self.say("input_audio_buffer.commit", event_id=f"c{self.started}", client_turn_id=self.started)

    @precondition(lambda self: self.free)
    @rule(then=st.sampled_from([0.0, 0.3, 2.0]), frames=st.integers(0, 4))
    def whole_turn(self, then: float, frames: int) -> None:
        self.start()
        self.append(LOUD, frames)
        self.commit()
        self.wait(then)

    @precondition(lambda self: self.started)
    @rule(kind=st.sampled_from(["turn_start", "commit"]), back=st.integers(0, 18))
    def repeat(self, kind: str, back: int) -> None:
        """Of a message that was sent, mostly; one that was forgotten is a turn of its own."""
        number = max(1, self.started - back)
        if kind == "turn_start" or self.made.core._completed.find(number):
            self.say(f"input_audio_buffer.{kind}", event_id="again", client_turn_id=number)

    @rule(kind=st.sampled_from(["turn_start", "commit"]), number=st.sampled_from([0, 77, 78]), likely=MOSTLY)
    def wrong_barrier(self, kind: str, number: int, likely: bool) -> None:
        if not likely:
            self.say(f"input_audio_buffer.{kind}", event_id="wrong" if number else "", client_turn_id=number)

    @rule(
        pcm=st.sampled_from([LOUD, QUIET, LOUD[:640], QUIET[:2], LOUD * 16, LOUD * 3 + LOUD[:2]]),
        count=st.integers(1, 8),
    )
    def append(self, pcm: bytes, count: int) -> None:
        audio = base64.b64encode(pcm).decode()
        for _ in range(count):
            self.say("input_audio_buffer.append", encoding="pcm16", sample_rate=16000, channels=1, audio=audio)

    @rule(wrong=st.sampled_from(WRONG))
    def wrong(self, wrong: Any) -> None:
        frame = (
            {"bytes": wrong}
            if isinstance(wrong, bytes)
            else {"text": wrong if isinstance(wrong, str) else json.dumps(wrong)}
        )
        self.made.core.receive(frame)

    @rule(job_id=st.sampled_from("abcdef"))
    def type_text(self, job_id: str) -> None:
        self.say("input_text.request", job_id=job_id, text="Hello.")

    @precondition(lambda self: self.made.jobs)
    @rule(frames=st.sampled_from([1, 3, 30]), works=MOSTLY)
    def synthesised(self, frames: int, works: bool) -> None:
        if works:
            self.made.core.synthesised(self.made.jobs[-1][0], LOUD * frames)
        else:
            self.made.core.synthesis_failed(self.made.jobs[-1][0], "No voice.")

    @precondition(lambda self: self.made.of("response.function_call_arguments.done"))
    @rule(
        which=st.sampled_from([-1, -1, -1, 0]), output=st.sampled_from(["sunny", "x" * 20_000]), refused=st.booleans()
    )
    def result(self, which: int, output: str, refused: bool) -> None:
        call_id = self.made.of("response.function_call_arguments.done")[which]["call_id"]
        self.made.refusals = ["Too long."] if refused else []
        self.say(
            "conversation.item.create", item={"type": "function_call_output", "call_id": call_id, "output": output}
        )

    @rule()
    def run_session(self) -> None:
        self.made.run()

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.3, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.made.wait(seconds)

    @rule(what=st.integers(0, 30))
    def end(self, what: int) -> None:
        if what == 17:
            self.say("session.stop")
        elif what == 23:
            self.made.core.observe(Broken("The model failed."))

    @invariant()
    def in_order(self) -> None:
        if hasattr(self, "made"):
            Trace(self.made.events, self.made.closed).check()

    def teardown(self) -> None:
        """Nothing hangs: left alone, everything that is open ends, and the connection can be closed."""
        if not hasattr(self, "made"):
            return
        made = self.made
        if made.jobs:
            made.core.synthesised(made.jobs[-1][0], LOUD)
        for _ in range(6):
            made.run()
            made.wait(12)
        if made.closed is None:
            assert made.core.wire.state in ("greeted", "idle", "bare", "turn")
            assert made.core.deadline is None
            self.say("session.stop")
        assert made.closed is not None
        Trace(made.events, made.closed).check()


def search(examples: int, steps: int, number: int = 15) -> None:
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(Sequences), settings=limits)


def test_random_sequences() -> None:
    search(150, 40)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_five_thousand_random_sequences(number: int) -> None:
    """In parts: a search keeps what it has seen."""
    search(250, 40, number)
