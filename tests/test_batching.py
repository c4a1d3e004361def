"""Sessions that step together: each gives what it gives alone, whoever else joins, leaves or fails."""

from __future__ import annotations

import base64
import gc
import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_voicechat
from mlx_voicechat import AudioFrame, Event, FunctionApplied, LimitReached, Session, Tool
from mlx_voicechat import voicechat as together
from mlx_voicechat.errors import InputError, VoiceChatError
from mlx_voicechat.frame import ROWS, Frame, FrameRequest, PositionsRequest, SpeechRequest, groups, mapped
from mlx_voicechat.gauges.counting import counting
from mlx_voicechat.voicechat import VoiceChat
from tests.support.caller import append, calling, on_the_wire
from tests.support.checkpoints import GOLDEN
from tests.support.server import running_server

TIE, LOUDEST_NOISE = 1e-4, 1e-4
OTHER_VOICE = "Other"
PROMPT = "Be brief."
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    loaded = mlx_voicechat.load(GOLDEN / "tiny-f32")
    loaded._voices[OTHER_VOICE] = 0.5 * loaded.voice(None)
    mx.eval(loaded._voices[OTHER_VOICE])
    return loaded


@pytest.fixture
def companies(monkeypatch: pytest.MonkeyPatch) -> list[list[type]]:
    """What the sessions asked for that stepped in one evaluation, for each of several."""
    found: list[list[type]] = []
    run = together.run_together

    def counted(model: Any, requests: Any, states: Any) -> list[Frame | int]:
        found.append([type(request) for request in requests])
        return run(model, requests, states)

    monkeypatch.setattr(together, "run_together", counted)
    return found


@cache
def sound(seed: int, frames: int) -> np.ndarray:
    """Noise that rises and falls, so that there is something to transcribe: (frames, 1280)."""
    noise = np.random.default_rng(seed).normal(0, 0.2, (frames, 1280))
    return (noise * np.abs(np.sin(np.arange(frames) / 3 + seed))[:, None]).astype(np.float32)


@dataclass(frozen=True)
class Plan:
    """A conversation of so many frames that joins after some rounds; `pauses` are rounds in which it has no audio."""

    joins: int
    frames: int
    seed: int
    prompt: str = ""
    guidance: float | None = None
    voice: str | None = None
    forced: int = 0  # the frame before which the agent is made to begin
    pauses: frozenset[int] = frozenset()

    def session(self, model: VoiceChat) -> Session:
        return model.session(system_prompt=self.prompt, seed=self.seed, guidance_scale=self.guidance, voice=self.voice)

    def hear(self, session: Session, index: int) -> None:
        if index == self.forced:
            session.force(text=session.model.config.bos_id)
        session.add(sound(self.seed, self.frames)[index])


@dataclass
class Heard:
    """What a session gave."""

    frames: list[Frame] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def alone(model: VoiceChat, plan: Plan) -> Heard:
    session, heard = plan.session(model), Heard()
    session.observe(heard.frames.append)
    for index in range(plan.frames):
        plan.hear(session, index)
        heard.events += session.step()
    return heard


def in_company(model: VoiceChat, plans: list[Plan]) -> list[Heard]:
    """Rounds in which each session that is there and has audio steps, until all have ended."""
    heard = [Heard() for _ in plans]
    sessions: dict[int, Session] = {}
    done = [0] * len(plans)
    now = 0
    while any(count < plan.frames for count, plan in zip(done, plans, strict=True)):
        stepping: dict[Session, int] = {}
        for index, plan in enumerate(plans):
            if now == plan.joins:
                sessions[index] = plan.session(model)
                sessions[index].observe(heard[index].frames.append)
            if done[index] == plan.frames:
                sessions.pop(index, None)
            elif index in sessions and now not in plan.pauses:
                plan.hear(sessions[index], done[index])
                done[index] += 1
                stepping[sessions[index]] = index
        now += 1
        for session, outcome in model.step(list(stepping)):
            assert isinstance(outcome, list), outcome
            heard[stepping[session]].events += outcome
    return heard


def closest_choice(model: VoiceChat, plan: Plan, frame: int) -> float:
    """How near the two best of the nearest choice of that frame were, when the session was alone."""
    session, gaps = plan.session(model), [np.inf]
    for index in range(frame + 1):
        plan.hear(session, index)
        with pytest.MonkeyPatch.context() as patch:
            if index == frame:
                for name, best, sign in (("argmax", mx.argmax, 1), ("argmin", mx.argmin, -1)):

                    def noted(scores: mx.array, best: Any = best, sign: int = sign, **how: Any) -> mx.array:
                        two = np.sort(sign * np.array(scores, np.float64), axis=-1)[..., -2:]
                        gaps.append(float((two[..., 1] - two[..., 0]).min()))
                        return best(scores, **how)

                    patch.setattr(mx, name, noted)
            session.step()
    return min(gaps)


def same(model: VoiceChat, plan: Plan, heard: Heard) -> bool:
    """Whether the session gave what it gives alone; False from a choice on that float noise could turn."""
    lone = alone(model, plan)
    assert len(heard.frames) == len(lone.frames) == plan.frames
    for index, (mine, other) in enumerate(zip(heard.frames, lone.frames, strict=True)):
        ids = [(one.text_id, one.function_id, one.symbols, one.codes) for one in (mine, other)]
        if ids[0] != ids[1]:
            assert closest_choice(model, plan, index) <= TIE
            return False
        np.testing.assert_allclose(mine.samples, other.samples, rtol=0, atol=LOUDEST_NOISE)
    said = [[event for event in one.events if not isinstance(event, AudioFrame)] for one in (heard, lone)]
    assert said[0] == said[1]
    return True


def plans(longest: int, most: int) -> st.SearchStrategy[list[Plan]]:
    one = st.builds(
        Plan,
        joins=st.integers(0, longest // 2),
        frames=st.integers(1, longest),
        seed=st.integers(0, 5),
        prompt=st.sampled_from(["", PROMPT, "Hello there, speak slowly."]),
        guidance=st.sampled_from([None, 0, 0.3, 2]),
        voice=st.sampled_from([None, OTHER_VOICE]),
        forced=st.integers(0, longest),
        pauses=st.frozensets(st.integers(0, longest), max_size=longest // 3),
    )
    return st.lists(one, min_size=2, max_size=most)


@pytest.mark.parametrize("case", ["plain", "prompted"])
def test_a_recorded_run_in_company(model: VoiceChat, companies: list[list[type]], case: str) -> None:
    story = json.loads((GOLDEN / "expected" / "streams.json").read_text(encoding="utf-8"))[case]
    arrays = dict(np.load(GOLDEN / "expected" / f"stream_{case}.npz"))
    audio = np.load(GOLDEN / "expected" / "perception.npz")["audio"]
    replayed = lambda step: (arrays["uniform"][5 * step :][:5], arrays["normal"][5 * step :][:5])  # noqa: E731
    recorded = model.session(system_prompt=story["system_prompt"], noise=replayed)
    others = [model.session(seed=1), model.session(seed=2, guidance_scale=0, system_prompt=PROMPT)]
    frames: list[Frame] = []
    recorded.observe(frames.append)
    padded = np.pad(audio, (0, -len(audio) % 1280)).reshape(-1, 1280)
    for index, samples in enumerate(padded):
        members = [recorded, *others[: index % 7 > 1]]
        for session in members:
            session.add(samples)
        assert not [outcome for _, outcome in model.step(members) if isinstance(outcome, Exception)]
    first = story["prompt_positions"]
    assert [f.text_id for f in frames] == arrays["text_ids"][first:].tolist()
    assert [f.function_id for f in frames] == arrays["function_ids"][first:].tolist()
    assert [symbol for f in frames for symbol in f.symbols] == story["rnnt_ids"]
    np.testing.assert_array_equal([f.codes for f in frames], arrays["codes"])
    np.testing.assert_allclose([f.samples for f in frames], arrays["samples"], rtol=0, atol=1e-4)
    assert len(companies) > len(frames) / 2


@settings(max_examples=5, deadline=None)
@given(plans=plans(longest=12, most=5))
def test_whoever_joins_and_leaves(model: VoiceChat, plans: list[Plan]) -> None:
    for plan, heard in zip(plans, in_company(model, plans), strict=True):
        same(model, plan, heard)


@pytest.mark.slow
def test_two_thousand_frames_of_many_sessions(model: VoiceChat) -> None:
    random, found, frames = np.random.default_rng(0), [], 0
    while frames < 2000:
        company = [
            Plan(
                joins=int(random.integers(0, 100)),
                frames=int(random.integers(20, 200)),
                seed=int(random.integers(0, 1000)),
                prompt=str(random.choice(["", PROMPT, "Hello there, speak slowly."])),
                guidance=random.choice([None, 0, 0.3, 2]),
                voice=random.choice([None, OTHER_VOICE]),
                forced=int(random.integers(0, 100)),
                pauses=frozenset(random.integers(0, 250, 40).tolist()),
            )
            for _ in range(10)
        ]
        found += [same(model, *pair) for pair in zip(company, in_company(model, company), strict=True)]
        frames += sum(plan.frames for plan in company)
    assert found.count(False) <= len(found) / 50


def test_more_sessions_than_a_slab_has_rows(model: VoiceChat, companies: list[list[type]]) -> None:
    company = [Plan(joins=0, frames=3, seed=seed) for seed in range(11)]
    results = in_company(model, company)
    assert {len(company) for company in companies} == {3, 8}
    assert all(same(model, *pair) for pair in list(zip(company, results, strict=True))[::5])


def test_a_frame_of_several_waits_once(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.rnnt, "max_symbols", 0)
    sessions = [model.session(seed=seed) for seed in range(3)]
    for _ in range(3):
        for session in sessions:
            session.add(np.zeros(1280, np.float32))
        with counting() as count:
            for _ in model.step(sessions):
                pass
    assert count.waits == 1
    assert all(session.frames == 3 for session in sessions)


def test_nan_in_a_row_fails_that_session_alone(model: VoiceChat) -> None:
    company = [Plan(joins=0, frames=5, seed=seed) for seed in range(3)]
    sessions = [plan.session(model) for plan in company]
    heard = [Heard() for _ in company]
    for session, one in zip(sessions, heard, strict=True):
        session.observe(one.frames.append)
    failed: list[tuple[int, str]] = []
    for index in range(5):
        if index == 2:
            state = sessions[1].state
            state.leave()
            state.codec = mapped(lambda part: part * mx.nan, state.codec)
        going = [session for session in sessions if sessions.index(session) not in [number for number, _ in failed]]
        for session in going:
            company[sessions.index(session)].hear(session, index)
        for session, outcome in model.step(going):
            if isinstance(outcome, list):
                heard[sessions.index(session)].events += outcome
            else:
                assert isinstance(outcome, VoiceChatError)
                failed.append((sessions.index(session), str(outcome)))
    assert len(failed) == 1
    assert failed[0][0] == 1
    assert "NaN or infinity in frame 2" in failed[0][1]
    assert all(same(model, company[row], heard[row]) for row in (0, 2))


def test_a_frame_that_cannot_be_computed(model: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not one session's fault ends all that ran together, and not the one that ran alone."""
    sessions = [model.session(seed=seed, profile=seed == 2) for seed in range(3)]
    for session in sessions:
        session.push(sound(0, 2)[0])
        session.add(sound(0, 2)[1])
    monkeypatch.setattr(together, "_speak", lambda *arguments: 1 / 0)
    outcomes = [type(outcome) for _, outcome in model.step(sessions)]
    assert outcomes == [ZeroDivisionError, ZeroDivisionError, list]


def test_memory_returns_when_the_last_has_left(model: VoiceChat) -> None:
    def conversations() -> None:
        company = [Plan(joins=seed % 3, frames=6 + seed, seed=seed, guidance=seed % 2) for seed in range(5)]
        in_company(model, company)

    conversations()  # what is kept for the next is kept now
    model._openings.clear()
    gc.collect()  # of tests before; of these conversations nothing may need it
    before = mx.get_active_memory()
    conversations()
    model._openings.clear()
    assert mx.get_active_memory() == before


def test_one_that_has_left_holds_nothing_of_the_others(model: VoiceChat) -> None:
    """Whoever steps alone has arrays of its own, and no view of the rows that it was in."""
    sessions = [model.session(seed=seed) for seed in range(4)]
    for index in range(3):
        for session in sessions:
            session.add(sound(0, 4)[index])
        assert len(list(model.step(sessions))) == 4
    last = sessions[0]
    del session, sessions
    last.push(sound(0, 4)[3])
    with_others_gone = mx.get_active_memory()
    twin = model.session(seed=0)
    for samples in sound(0, 4):
        twin.push(samples)
    lone = mx.get_active_memory() - with_others_gone
    del twin
    del last
    held = with_others_gone - mx.get_active_memory()
    assert held <= lone + 2**16  # for a view of less than 16 kB more than itself MLX makes no copy


def test_a_tool_call_beside_conversations(companies: list[list[type]]) -> None:
    """What a function cycle asks for runs in company too, a result's positions alone; the others do not notice."""
    model = mlx_voicechat.load("tiny")
    audio = sf.read(EXAMPLES / "what_time_is_it.wav", dtype="float32")[0]
    rounds = np.pad(audio, (0, 60 * 1280 - len(audio) % 1280)).reshape(-1, 1280)
    prompt = '<AVAILABLE_TOOLS>[{"name": "get_time", "parameters": {}}]</AVAILABLE_TOOLS>'

    def run(count: int) -> list[list[Event]]:
        tool = model.session(system_prompt=prompt, tools=[Tool("get_time")])
        owned = model.session(turns="application", seed=1)
        sessions = [tool, owned, model.session(seed=2)][:count]
        events: dict[Session, list[Event]] = {session: [] for session in sessions}
        waited = 0
        for index, samples in enumerate(rounds):
            for session in sessions:
                session.add(samples)
            if index == 30 and count > 1:
                owned.end_turn()
            for session, outcome in model.step([session for session in sessions if session.runnable]):
                assert isinstance(outcome, list), outcome
                events[session] += outcome
            waited = waited + 1 if tool.calls else 0
            if waited == 3:
                tool.give(tool.calls[0].call_id, "ten past four")
        for session in sessions:
            while session.runnable:
                events[session] += session.step()
        return [without_ids(each) for each in events.values()]

    lone = run(1)[0]
    company = run(3)
    assert company[0] == lone
    assert any(isinstance(event, dict) and event["kind"] is FunctionApplied for event in lone)
    kinds = {frozenset(company) for company in companies}
    assert {frozenset({FrameRequest, each}) for each in (PositionsRequest, SpeechRequest)} <= kinds
    assert len(company[1]) > len(rounds)
    plain = model.session(seed=2)
    assert company[2] == without_ids([event for samples in rounds for event in plain.push(samples)])


def without_ids(events: list[Event]) -> list[Event]:
    """Events to compare: call ids are random, samples equal up to float noise."""
    kept: list[Any] = []
    for event in events:
        if isinstance(event, AudioFrame):
            kept.append((event.frame_index, event.codes))
        else:
            kept.append({"kind": type(event)} | {k: v for k, v in vars(event).items() if not k.startswith("call_id")})
    return kept


def test_a_limit_is_announced_in_company(model: VoiceChat) -> None:
    limited, other = model.session(max_seconds=0.16), model.session(seed=1)
    events: dict[Session, list[Event]] = {limited: [], other: []}
    for index in range(4):
        if index < 2:
            limited.add(sound(0, 4)[index : index + 2].reshape(-1)[: 1280 + index])
        other.add(sound(1, 4)[index])
        for session, outcome in model.step([limited, other]):
            assert isinstance(outcome, list)
            events[session] += outcome
    assert [type(event) for event in events[limited] if isinstance(event, LimitReached)] == [LimitReached]
    assert sum(isinstance(event, AudioFrame) for event in events[other]) == 4


def test_how_near_a_choice_was_is_seen(model: VoiceChat) -> None:
    assert 0 < closest_choice(model, Plan(joins=0, frames=2, seed=0), 1) < 1


def test_a_session_takes_one_step(model: VoiceChat) -> None:
    session = model.session()
    with pytest.raises(InputError, match="twice"):
        list(model.step([session, model.session(), session]))


def test_which_states_run_together(model: VoiceChat) -> None:
    assert ROWS == (1, 2, 4, 8)
    states = [model.session().state for _ in range(20)]
    assert [len(group) for group in groups(states)] == [8, 8, 4]
    together.Slab.of(states[4:12])
    assert groups(states)[0] == list(range(4, 12))
    assert sorted(row for group in groups(states) for row in group) == list(range(20))
    assert groups(states[:8]) == [list(range(8))]  # half of a slab keeps nobody
    slab = together.Slab.of(states[:3])
    assert groups([states[2], states[0], states[1]]) == [[1, 2, 0]]  # whatever their order
    assert together.Slab.of(states[:3]) is slab
    assert groups([states[2], states[0], states[3]]) == [[0, 1, 2]]


@pytest.mark.parametrize("batch", [True, False])
def test_four_conversations_on_a_server(model: VoiceChat, companies: list[list[type]], batch: bool) -> None:
    """Through real sockets, in company: each says what it says alone; without batching in turns."""
    rows = [np.rint(sound(seed, 12) * 32767).astype(np.int16) for seed in range(4)]
    expected = []
    for seed, frames in enumerate(rows):
        session = model.session(seed=seed, system_prompt=PROMPT if seed % 2 else None)
        events = [event for samples in frames for event in session.push((samples / 32768).astype(np.float32))]
        expected.append([on_the_wire(event) for event in [*events, *session.finish()]])
    with running_server(GOLDEN / "tiny-f32", max_sessions=4, batch=batch) as server, ExitStack() as opened:
        companies.clear()  # those of warming
        callers = [opened.enter_context(calling(server.ws_url)) for _ in rows]
        for seed, caller in enumerate(callers):
            caller.receive()
            caller.open(seed=seed, **({"system_prompt": PROMPT} if seed % 2 else {}))
        for index in range(12):
            for caller, frames in zip(callers, rows, strict=True):
                caller.send(append(frames[index]))
        for caller, lone in zip(callers, expected, strict=True):
            caller.send({"type": "input_audio_buffer.commit"})
            caller.until("response.done")
            said = [event for event in caller.events if event["type"].startswith(("response.", "conversation.item."))]
            assert [without_pcm(event) for event in said] == [without_pcm(event) for event in lone]
            heard, alone = ([pcm(event) for event in each if "audio_codes" in event] for each in (said, lone))
            assert np.abs(np.subtract(heard, alone, dtype=np.int32)).max() <= 1 + 32767 * LOUDEST_NOISE
    assert bool(companies) is batch


def without_pcm(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if "audio_codes" not in event or key != "delta"}


def pcm(event: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(event["delta"]), np.int16)


@pytest.mark.slow
@pytest.mark.skipif(
    mx.default_device().type == mx.cpu and shutil.which("g++") is None, reason="MLX compiles for a CPU with g++"
)
def test_a_warm_model_traces_nothing_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled runs as Python only while it is traced: in no frame of as many sessions as it was warmed for."""
    model = mlx_voicechat.load(GOLDEN / "tiny-f32", compile=True)
    model.warm(sessions=3)
    model.session().push(sound(0, 1)[0])  # alone, the frame at position 0
    traced: list[str] = []

    def note(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: [traced.append(name), method(*given)][1])

    for owner, name in (
        (model.perception.encoder, "step"),
        (model.language, "logits"),
        (model.tts.mog_head, "distribution"),
        (model.codec, "dequantise"),
        (model.rnnt.joint, "combine"),
    ):
        note(owner, name)
    in_company(model, [Plan(joins=seed, frames=5, seed=seed) for seed in range(3)])
    assert traced == []
    in_company(model, [Plan(joins=0, frames=2, seed=seed) for seed in range(6)])
    assert {"step", "logits", "distribution", "dequantise", "combine"} <= set(traced)  # of eight rows
