"""strict-v3: turns, responses, calls, typed text, settings and endings, over a scripted session on its own clock."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mlx_voicechat.server.strict_v3_codes import FATES, REJECTIONS, STATUSES
from mlx_voicechat.server.strict_v3_events import SERVER_TURNS
from mlx_voicechat.server.strict_v3_floor import REASONS, TOO_MANY
from mlx_voicechat.server.strict_v3_requests import BeginTurn, Broken, EndTurn, Give, Hear, Limited, Open, Refuse
from mlx_voicechat.server.strict_v3_work import Spoken
from tests.support.strict_v3 import HUSH, LOUD, QUIET, WEATHER, Answer, Call, ScriptedSession, Trace

AUDIO, TEXT = "response.output_audio.delta", "response.output_text.delta"
DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
STARTED, STOPPED = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"
TURN_STARTED, COMMITTED = "input_audio_buffer.turn_started", "input_audio_buffer.committed"
CREATED, DONE_TEXT, DONE_AUDIO = "response.created", "response.output_text.done", "response.output_audio.done"
CALL, FAILED = "response.function_call_arguments.done", "response.function_call.failed"
APPLIED = "conversation.item.function_call_output.applied"
COMPLETE = "response.done:completed:model_or_turn_taking"

_sessions: list[ScriptedSession] = []


@pytest.fixture(autouse=True)
def traces() -> Iterator[None]:
    """Every trace of every test goes through the checker."""
    yield
    while _sessions:
        session = _sessions.pop()
        Trace(session.events, session.closed).check()


def session(
    *answers: Answer, tools: list[Any] | None = None, update: dict[str, Any] | None = None, **options: Any
) -> ScriptedSession:
    """A session that is configured."""
    made = ScriptedSession(answers=answers, **options)
    _sessions.append(made)
    made.configure(**({} if tools is None else {"tools": tools}), **(update or {}))
    return made


def outline(made: ScriptedSession, start: int = 2) -> list[str]:
    """The kinds of events from `start` on, runs of the same kind as one."""
    kinds = made.kinds[start:]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]


def failure(made: ScriptedSession) -> tuple[str, int, bool]:
    """The fatal error, the closing code, and whether session.closed was told."""
    code, fatal = made.errors()[-1]
    assert fatal
    assert made.closed is not None
    assert made.core.ended
    return code, made.closed, made.kinds[-1] == "session.closed:failed"


# The opening


def test_the_greeting() -> None:
    made = session(tools=[WEATHER], update={"instructions": "Be brief."})
    created, updated = made.events
    assert created["protocol"] == updated["protocol"] == {"name": "voicechat.realtime", "version": 3}
    assert created["session"] == {
        "id": "s",
        "input_audio_format": "pcm16",
        "input_audio_sample_rate": 16000,
        "output_audio_format": "pcm16",
        "output_audio_sample_rate": 22050,
        "frame_duration_ms": 80,
        "checkpoint": "fake",
    }
    assert updated["session"] == {
        "id": "s",
        "protocol_version": 3,
        "instructions": "Be brief.",
        "tools": [WEATHER],
        "input_audio_format": "pcm16",
        "input_audio_sample_rate": 16000,
        "output_audio_format": "pcm16",
        "output_audio_sample_rate": 22050,
        "capabilities": {"function_output_model_output": None},
    }
    assert {key: created[key] for key in ("event_id", "session_id")} == {"event_id": "evt_s_1", "session_id": "s"}


def test_the_capabilities() -> None:
    made = session()
    assert made.events[0]["capabilities"] == {
        "server_turn_detection": None,
        "input_turn_detection": "client_smart_turn_v1",
        "input_transcription": True,
        "function_calling": True,
        "typed_input": True,
        "settings_mutable_until": "first_model_input_frame",
        "single_client": True,
        "function_call_timeout_seconds": 30,
        "function_output_max_bytes": 16384,
        "function_output_max_tokens": 128,
        "function_output_recovery_max_frames": 256,
        "function_output_ack_timeout_seconds": 30,
        "max_function_calls_per_response": 8,
        "function_event_emit_timeout_seconds": 5,
        "max_session_model_frames": 12000,
        "binary_audio": False,
        "function_output_model_output": {"mode": "client_authored_v1"},
    }


def test_the_capabilities_follow_the_server() -> None:
    made = session(single_client=False, typed_input=False, function_seconds=1.5, most_frames=100)
    got = made.events[0]["capabilities"]
    assert (got["single_client"], got["typed_input"]) == (False, False)
    assert (got["function_call_timeout_seconds"], got["max_session_model_frames"]) == (1.5, 100)


def test_settings_are_kept_cleared_and_defaulted() -> None:
    made = session(tools=[WEATHER], instructions="Default.", default_tools=(WEATHER,))
    assert made.events[-1]["session"]["instructions"] == "Default."
    made.say("session.update", session={"instructions": "Mine."})
    assert made.events[-1]["session"]["tools"] == [WEATHER]
    made.say("session.update", session={"tools": None})
    assert (made.events[-1]["session"]["instructions"], made.events[-1]["session"]["tools"]) == ("Mine.", [])
    made.say("session.update", session={"instructions": None})
    assert made.events[-1]["session"]["instructions"] == "Default."
    opened = [(r.instructions, r.tools) for r in made.asked if isinstance(r, Open)]
    assert opened == [("Default.", (WEATHER,)), ("Mine.", (WEATHER,)), ("Mine.", ()), ("Default.", ())]


def test_an_update_that_changes_nothing_prefills_nothing() -> None:
    made = session(tools=[WEATHER])
    made.say("session.update", session={"tools": [WEATHER]})
    assert made.kinds == ["session.created", "session.updated", "session.updated"]
    assert sum(isinstance(request, Open) for request in made.asked) == 1


def test_updates_that_come_during_a_prefill_are_answered_one_by_one() -> None:
    made = session()
    made.core.receive({"text": json.dumps({"type": "session.update", "session": {"instructions": "A"}})})
    made.core.receive({"text": json.dumps({"type": "session.update", "session": {"instructions": "B"}})})
    start = {"type": "input_audio_buffer.turn_start", "event_id": "e", "client_turn_id": 1}
    made.core.receive({"text": json.dumps(start)})
    made.run()
    assert outline(made, 1) == ["session.updated", STARTED, TURN_STARTED]
    assert [event["session"]["instructions"] for event in made.of("session.updated")] == [None, "A", "B"]


def test_settings_lock_when_the_first_turn_begins() -> None:
    for begin in (lambda made: made.start(1), lambda made: made.say("input_text.request", job_id="a", text="Hi")):
        made = session()
        begin(made)
        made.say("session.update", event_id="late", session={"protocol_version": 3})
        assert made.errors() == [("settings_locked", False)]
        assert made.events[-1]["error"]["client_event_id"] == "late"


def test_a_prefill_that_fails_can_be_tried_again() -> None:
    made = ScriptedSession()
    _sessions.append(made)
    made.opening_failures = ["The prompt is too long."]
    made.configure()
    made.append()
    assert made.errors() == [("invalid_session_update", False), ("session_not_configured", False)]
    made.say("session.update", session={"protocol_version": 3})
    made.turn(1)
    assert made.kinds[-2:] == [CREATED, AUDIO]


def test_a_wrong_version_ends_the_first_update_and_no_later_one() -> None:
    made = ScriptedSession()
    _sessions.append(made)
    made.core.greet()
    made.say("session.update", session={"protocol_version": 2})
    assert made.kinds[1:] == ["error:unsupported_protocol_version", "session.closed:failed"]
    assert made.closed == 1002
    later = session()
    later.say("session.update", session={"protocol_version": 2})
    assert later.errors() == [("unsupported_protocol_version", False)]
    assert later.closed is None


# A microphone turn


def test_a_turn() -> None:
    made = session()
    made.turn(7)
    made.wait(3)
    assert outline(made) == [
        STARTED,
        TURN_STARTED,
        DELTA,
        COMMITTED,
        STOPPED,
        COMPLETED,
        CREATED,
        AUDIO,
        TEXT,
        AUDIO,
        TEXT,
        AUDIO,
        DONE_TEXT,
        DONE_AUDIO,
        COMPLETE,
    ]
    turn = {"turn_id": "turn_s_1"}
    assert made.of(STARTED)[0] | {"correlation": 7, "source": "microphone", "job_id": None} == made.of(STARTED)[0]
    assert made.of(TURN_STARTED, client_event_id="start7", client_turn_id=7, **turn)
    assert made.of(COMMITTED, client_event_id="commit7", client_turn_id=7, **turn)
    assert made.of(COMPLETED, transcript="Hello Hello Hello", empty=False, source="microphone", **turn)
    response = {**turn, "response_id": "response_s_1"}
    assert made.of(DONE_TEXT, text="Good day.", empty=False, **response)
    assert made.of(DONE_AUDIO, empty=False, **response)
    audio = made.of(AUDIO)[0]
    assert (audio["encoding"], audio["sample_rate"], audio["channels"]) == ("pcm16", 22050, 1)


def test_a_step_gives_its_events_in_order() -> None:
    made = session(Answer(words=(" One.",), frames=1))
    made.turn(1)
    made.wait(0.085)
    last = [event["type"] for event in made.events[-6:]]
    assert last == [TEXT, AUDIO, "voicechat.metrics", DONE_TEXT, DONE_AUDIO, "response.done"]


def test_onset_audio_runs_before_what_follows() -> None:
    made = session()
    for frame in [QUIET] * 4 + [LOUD] * 2:
        made.append(frame)
    assert not any(isinstance(request, Hear) for request in made.asked)  # nothing is open: the model stands still
    made.start(1)
    heard = [request.pcm for request in made.asked if isinstance(request, Hear)]
    assert heard == [QUIET, QUIET, LOUD, LOUD]
    assert made.kinds[2:4] == [STARTED, TURN_STARTED]


def test_odd_packets_and_a_padded_tail() -> None:
    made = session()
    made.append(LOUD[:1000])
    made.start(1)
    made.append(LOUD[1000:2400])
    made.append(LOUD[2400:] + LOUD[:500])
    made.commit(1)
    heard = [request.pcm for request in made.asked if isinstance(request, Hear)]
    assert heard == [LOUD, LOUD[:500].ljust(2560, b"\0")]


def test_a_commit_without_speech_is_answered() -> None:
    made = session(Answer(words=(), frames=2))
    made.start(1)
    made.commit(1)
    made.wait(1)
    assert made.of(COMPLETED, transcript="", empty=True)
    assert made.of(DONE_TEXT, text="", empty=True)
    assert outline(made)[-3:] == [DONE_TEXT, DONE_AUDIO, COMPLETE]


def test_audio_while_the_agent_speaks_is_kept_for_the_next_turn() -> None:
    made = session(Answer(frames=10))
    made.turn(1)
    asked = len(made.asked)
    for _ in range(20):
        made.append()
    assert len(made.asked) == asked
    made.wait(3)
    made.start(2)
    assert sum(isinstance(request, Hear) for request in made.asked[asked:]) == 12


def test_a_turn_cancels_the_response() -> None:
    made = session(Answer(frames=50))
    made.turn(1)
    made.wait(0.4)
    sent = len(made.of(AUDIO))
    made.start(2)
    assert outline(made)[-5:] == [DONE_TEXT, DONE_AUDIO, "response.done:cancelled:client_vad", STARTED, TURN_STARTED]
    assert len(made.of(AUDIO)) == sent  # what the end of a cancelled response gives is not sent
    made.append()
    made.commit(2)
    made.wait(2)
    assert made.kinds[-1] == COMPLETE


def test_a_response_that_cannot_be_cancelled() -> None:
    made = session(Answer(frames=50))
    made.cancels = False
    made.turn(1)
    made.start(2)
    assert failure(made) == ("response_cancel_timeout", 1011, False)


def test_a_transcript_that_does_not_settle() -> None:
    made = session(Answer(settles=False))
    made.turn(1)
    assert failure(made) == ("input_turn_settle_timeout", 1011, False)
    assert made.of(COMMITTED) == []


def test_a_response_that_does_not_begin() -> None:
    made = session(Answer(opens=False))
    made.turn(1)
    made.wait(1)
    assert failure(made) == ("missing_terminal_bos", 1011, False)


@pytest.mark.parametrize("reason", [*REASONS, "eos"])
def test_why_a_response_ended(reason: str) -> None:
    made = session(Answer(reason=reason))
    made.turn(1)
    made.wait(2)
    expected = REASONS.get(reason, "model_or_turn_taking")
    assert made.kinds[-1] == f"response.done:{STATUSES[expected]}:{expected}"


def test_silence_after_text_is_not_sent() -> None:
    made = session(Answer(frames=40, silent=34))
    made.turn(1)
    made.wait(6)
    assert len(made.of(AUDIO)) == 1 + 6 + 12  # BOS, speech, and the first silent frames
    assert made.kinds[-1] == COMPLETE


def test_silence_without_text_is_sent() -> None:
    made = session(Answer(words=(), frames=20, silent=20))
    made.turn(1)
    made.wait(6)
    assert len(made.of(AUDIO)) == 21


def test_a_client_that_only_sends_audio_has_signs_of_life() -> None:
    made = session()
    for _ in range(100):
        made.append()
        made.time += 1.0
    signs = made.of("voicechat.metrics")
    assert len(signs) == 6
    assert signs[0]["input_audio"]["peak"] > 0.2
    assert signs[0]["output_audio"] == {"samples": 0, "rms": 0.0, "rms_dbfs": None, "peak": 0.0}
    assert {sign["turn_state"] for sign in signs} == {"idle"}


def test_metrics_of_a_frame() -> None:
    made = session()
    made.start(1)
    made.append()
    metrics = made.of("voicechat.metrics")[0]
    assert (metrics["frame"], metrics["transport_frame"], metrics["turn_state"]) == (0, 1, "user")
    assert (metrics["inference_ms"], metrics["budget_ms"], metrics["over_budget"]) == (10.0, 80, False)
    assert metrics["input_audio"]["samples"] == 1280
    assert metrics["input_audio"]["peak"] == pytest.approx(8000 / 32768, abs=1e-3)
    assert metrics["output_audio"] == {"samples": 1764, "rms": 0.0, "rms_dbfs": None, "peak": 0.0}
    made.commit(1)
    made.wait(0.2)
    states = [event["turn_state"] for event in made.of("voicechat.metrics")]
    assert (states[0], states[-1]) == ("user", "assistant")
    assert [event["frame"] for event in made.of("voicechat.metrics")] == list(range(len(states)))
    assert made.of("voicechat.metrics")[-1]["transport_frame"] == 1  # zeros are not the client's


def test_a_slow_step_is_over_budget() -> None:
    made = session()
    made.start(1)
    made.core.receive(
        {
            "text": json.dumps(
                {
                    "type": "input_audio_buffer.append",
                    "encoding": "pcm16",
                    "sample_rate": 16000,
                    "channels": 1,
                    "audio": "A" * 3416,
                }
            )
        }
    )
    made.time += 0.2
    made.run()
    metrics = made.of("voicechat.metrics")[-1]
    assert (metrics["server_step_ms"], metrics["over_budget"]) == (200.0, True)


# Repetitions


def test_messages_sent_twice_are_acknowledged_twice() -> None:
    made = session()
    made.start(1, "a")
    made.start(1, "a")
    made.start(1, "b")
    made.append()
    made.commit(1, "c")
    made.commit(1, "d")
    made.wait(2)
    made.commit(1, "c")
    made.start(1, "a")
    assert [event["client_event_id"] for event in made.of(TURN_STARTED)] == ["a", "a", "b", "a"]
    assert [event["client_event_id"] for event in made.of(COMMITTED)] == ["c", "d", "c"]
    assert {event["turn_id"] for event in made.of(TURN_STARTED) + made.of(COMMITTED)} == {"turn_s_1"}
    assert len(made.of(CREATED)) == 1
    assert made.errors() == []


def test_a_repetition_never_overtakes_the_first_acknowledgement() -> None:
    made = session(Answer(frames=50))
    made.turn(1)
    for _ in range(2):
        start = {"type": "input_audio_buffer.turn_start", "event_id": "x", "client_turn_id": 2}
        made.core.receive({"text": json.dumps(start)})
    assert made.of(TURN_STARTED, client_turn_id=2) == []
    made.run()
    assert len(made.of(TURN_STARTED, client_turn_id=2)) == 2
    assert made.kinds[-1] == made.kinds[-2] == TURN_STARTED


def test_ids_may_come_in_any_order() -> None:
    made = session()
    for number in (5, 3, 9, 2**70):
        made.turn(number)
        made.wait(2)
    assert [event["client_turn_id"] for event in made.of(COMMITTED)] == [5, 3, 9, 2**70]


def test_sixteen_turns_back_is_a_repetition_and_seventeen_is_a_new_turn() -> None:
    made = session()
    for number in range(1, 18):
        made.turn(number)
        made.wait(2)
    made.start(2)
    made.commit(2)
    assert len(made.of(CREATED)) == 17
    made.start(1, "again")
    assert made.of(TURN_STARTED, client_event_id="again", turn_id="turn_s_18")
    made.commit(1)
    made.wait(2)
    assert len(made.of(CREATED)) == 18


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda made: made.start(2), "input_turn_conflict"),
        (lambda made: made.commit(2), "input_turn_conflict"),
        (lambda made: made.start(0), "invalid_client_turn_id"),
        (lambda made: made.start(2, ""), "invalid_event_id"),
    ],
)
def test_a_wrong_barrier_ends_the_connection(wrong: Callable[[ScriptedSession], None], code: str) -> None:
    made = session()
    made.start(1)
    wrong(made)
    assert failure(made) == (code, 1002, False)
    made.append()  # and nothing is answered any more
    assert made.kinds[-1] == f"error:{code}"


def test_a_commit_out_of_turn() -> None:
    made = session()
    made.commit(1, "e")
    assert failure(made) == ("input_turn_conflict", 1002, False)
    assert made.events[-1]["error"]["client_event_id"] == "e"


# Function calls


def called(*answers: Answer, **options: Any) -> tuple[ScriptedSession, str]:
    """A session whose first turn led to a call; its id."""
    made = session(*(answers or (Answer(calls=(Call(),)),)), tools=[WEATHER], **options)
    made.turn(1)
    made.wait(0.5)
    return made, made.of(CALL)[0]["call_id"]


@pytest.mark.parametrize("after", [0, 1])
def test_a_call_at_the_boundary_and_one_after_it(after: int) -> None:
    made, call_id = called(Answer(calls=(Call(after),)))
    made.result(call_id)
    made.wait(3)
    kinds = [kind for kind in outline(made) if kind not in (AUDIO, TEXT)]
    assert kinds[3:] == [COMMITTED, STOPPED, COMPLETED, CREATED, CALL, APPLIED, DONE_TEXT, DONE_AUDIO, COMPLETE]
    call = made.of(CALL)[0]
    assert (call["name"], call["arguments"]) == ("get_weather", '{"a":1,"city":"Paris"}')
    assert call["response_id"] == made.of(CREATED)[0]["response_id"]
    assert made.of(DONE_TEXT, text="Good day.")


def test_a_call_keeps_the_clock_running() -> None:
    made, _ = called()
    before = made.frames
    made.wait(8.0)
    assert made.frames - before == 100


def test_wrong_results() -> None:
    made, call_id = called()
    made.result("call_other")
    made.result(call_id, "x" * 16_385)
    made.say("conversation.item.create", item={"type": "message"})
    made.refusals = ["The result has 200 tokens, at most 128 may be."]
    made.result(call_id, "too long")
    made.result(call_id, "right")
    made.result(call_id, "again")
    made.wait(3)
    made.result(call_id, "late")
    codes = ["invalid_function_call_output"] * 2 + ["invalid_conversation_item"] + ["invalid_function_call_output"] * 3
    assert made.errors() == [(code, False) for code in codes]
    assert [request.result for request in made.asked if isinstance(request, Give)] == ["too long", "right"]
    assert made.of("error")[3]["error"]["client_event_id"] == "result"
    assert made.kinds[-2] == COMPLETE


def test_results_without_tools() -> None:
    made = session(tools=[])
    made.result("call_1")
    assert made.errors() == [("tools_not_set", False)]


def test_what_the_model_gets_may_be_the_client_s_own() -> None:
    capabilities = {"function_output_model_output": "client_authored_v1"}
    made = session(Answer(calls=(Call(),)), tools=[WEATHER], update={"capabilities": capabilities})
    assert made.events[1]["session"]["capabilities"] == capabilities
    made.turn(1)
    made.result(made.of(CALL)[0]["call_id"], "long", model_output="short")
    assert [request.result for request in made.asked if isinstance(request, Give)] == ["short"]
    without, call_id = called()
    without.result(call_id, "long", model_output="short")
    assert without.errors() == [("invalid_function_call_output", False)]


def test_input_waits_for_the_end_of_a_cycle() -> None:
    made, call_id = called()
    made.turn(2)
    made.wait(2)
    assert len(made.of(STARTED)) == 1
    made.result(call_id)
    made.wait(3)
    kinds = [kind for kind in outline(made)[7:] if kind not in (AUDIO, TEXT, DELTA)]
    assert kinds[:6] == [CALL, APPLIED, DONE_TEXT, DONE_AUDIO, "response.done:cancelled:client_vad", STARTED]
    assert made.of(COMPLETED)[-1]["transcript"] == "Hello Hello Hello"
    assert made.kinds[-1] == COMPLETE


def test_what_waits_is_bounded() -> None:
    made, _ = called()
    made.start(2)
    count = 0
    while made.closed is None:
        made.append(LOUD * 16)
        count += 1
    assert failure(made) == ("deferred_input_overflow", 1002, False)
    assert count == 2**20 // (16 * 2560 * 4 // 3) + 1  # base64 and a few words beside it


def test_what_waited_out_of_order_ends_the_connection() -> None:
    made, call_id = called()
    made.commit(5)
    made.result(call_id)
    made.wait(1)
    assert failure(made) == ("deferred_input_lifecycle_failure", 1011, False)


def test_repetitions_do_not_wait_for_a_cycle() -> None:
    made, _ = called()
    made.commit(1, "once more")
    assert made.kinds[-1] == COMMITTED


def test_a_turn_that_waits_twice_begins_once() -> None:
    made, call_id = called()
    made.start(2, "a")
    made.start(2, "a")
    made.result(call_id)
    made.wait(1)
    assert [event["client_event_id"] for event in made.of(TURN_STARTED)] == ["start1", "a", "a"]


def test_a_turn_before_the_call_was_sent_suppresses_it() -> None:
    made = session(Answer(calls=(Call(),)), tools=[WEATHER])
    made.start(1)
    made.append()
    for kind, number in (("commit", 1), ("turn_start", 2)):
        message = {"type": f"input_audio_buffer.{kind}", "event_id": "e", "client_turn_id": number}
        made.core.receive({"text": json.dumps(message)})
    made.run()
    assert made.of(CALL) == []
    assert outline(made) == [STARTED, TURN_STARTED, DELTA, COMMITTED, STOPPED, COMPLETED, STARTED, TURN_STARTED]
    made.append()
    made.commit(2)
    made.wait(2)
    assert made.kinds[-1] == COMPLETE


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_no_result_in_time_where_a_bos_is_owed(seconds: float) -> None:
    made, call_id = called(function_seconds=seconds)
    made.wait(seconds - 0.6)
    assert made.closed is None
    made.wait(0.7)
    assert made.of(FAILED, call_id=call_id, reason="function_call_output_timeout")
    assert failure(made) == ("function_call_output_timeout", 1011, False)


def test_no_result_in_time_in_an_open_response() -> None:
    made, call_id = called(Answer(calls=(Call(2),)), function_seconds=1.0)
    made.wait(1.1)
    assert made.of(FAILED, call_id=call_id, reason="function_call_output_timeout")
    assert any(isinstance(request, Refuse) for request in made.asked)
    made.result(call_id)
    made.wait(2)
    assert made.errors() == [("invalid_function_call_output", False)]
    assert made.of(APPLIED) == []
    assert made.kinds[-1] == COMPLETE


@pytest.mark.parametrize("frames", [255, 256])
def test_a_result_that_is_not_taken_in_time(frames: int) -> None:
    made, call_id = called(Answer(calls=(Call(frames_to_apply=frames),)))
    made.result(call_id)
    made.wait(30)
    if frames == 255:
        assert made.of(APPLIED)
        assert made.closed is None
    else:
        assert failure(made) == ("function_output_apply_timeout", 1011, False)


def test_no_bos_after_a_cycle() -> None:
    made, call_id = called(Answer(calls=(Call(),), opens=False))
    made.result(call_id)
    made.wait(2)
    assert failure(made) == ("missing_post_fc_terminal_bos", 1011, False)


def test_results_of_another_call() -> None:
    made, call_id = called(Answer(calls=(Call(wrong_ids=True),)))
    made.result(call_id)
    made.wait(1)
    assert failure(made) == ("function_cycle_mismatch", 1011, False)


def test_a_call_before_the_end_of_the_turn() -> None:
    from mlx_voicechat.events import FunctionCall

    made = session(tools=[WEATHER])
    made.start(1)
    made.tell(FunctionCall(1, "call_1", "get_weather", {}, ""))
    assert failure(made) == ("pre_eou_function_activity", 1011, False)


def test_a_call_that_cannot_be_read() -> None:
    made = session(Answer(calls=(Call(fails="bad_json"),)), tools=[WEATHER])
    made.turn(1)
    made.wait(3)
    kinds = [kind for kind in outline(made) if kind not in (AUDIO, TEXT)]
    assert kinds[6:] == [CREATED, f"{FAILED}:bad_json", DONE_TEXT, DONE_AUDIO, COMPLETE]


def test_eight_calls_and_no_ninth() -> None:
    made, _ = called(Answer(calls=tuple(Call() for _ in range(9))))
    for _ in range(8):
        made.result(made.of(CALL)[-1]["call_id"])
        made.wait(0.5)
    assert len(made.of(CALL)) == len(made.of(APPLIED)) == 8
    limit = "function_call_loop_limit"
    ends = [DONE_TEXT, DONE_AUDIO, f"response.done:failed:{limit}", f"error:{limit}", "session.closed:failed"]
    assert made.kinds[-5:] == ends
    assert made.of(DONE_TEXT, text="", empty=True)
    assert made.closed == 1011


def test_the_session_s_own_loop_limit() -> None:
    made = session(Answer(calls=(Call(fails=TOO_MANY),)), tools=[WEATHER])
    made.turn(1)
    made.wait(1)
    assert made.errors() == [("function_call_loop_limit", True)]
    assert made.closed == 1011


def test_a_turn_has_its_own_eight_calls() -> None:
    made, _ = called(Answer(calls=tuple(Call() for _ in range(8))), Answer(calls=(Call(),)))
    for _ in range(8):
        made.result(made.of(CALL)[-1]["call_id"])
        made.wait(0.3)
    made.wait(3)
    made.turn(2)
    made.wait(0.3)
    made.result(made.of(CALL)[-1]["call_id"])
    made.wait(3)
    assert len(made.of(APPLIED)) == 9
    assert made.kinds[-1] == COMPLETE


def test_calls_of_one_list_come_one_by_one() -> None:
    made, first = called(Answer(calls=(Call(names=("get_weather", "get_time")),)))
    assert len(made.of(CALL)) == 1
    made.result(first)
    assert made.kinds[-2:] == [APPLIED, CALL]
    second = made.of(CALL)[-1]
    assert second["name"] == "get_time"
    made.result(second["call_id"])
    made.wait(3)
    assert [event["call_id"] for event in made.of(APPLIED)] == [first, second["call_id"]]
    assert made.kinds[-1] == COMPLETE


@pytest.mark.parametrize("fails", ["bad_arguments", "unknown_tool"])
def test_a_call_of_a_list_that_cannot_be_made(fails: str) -> None:
    made, first = called(Answer(calls=(Call(names=("get_weather", "get_time"), fails=fails),)))
    made.result(first)
    made.wait(3)
    kinds = [kind for kind in outline(made) if kind not in (AUDIO, TEXT)]
    assert kinds[7:] == [CALL, APPLIED, f"{FAILED}:{fails}", DONE_TEXT, DONE_AUDIO, COMPLETE]


def test_the_server_s_own_tools_are_not_the_client_s() -> None:
    made = session(Answer(calls=(Call(),)), default_tools=(WEATHER,))
    assert made.events[1]["session"]["tools"] == [WEATHER]
    made.turn(1)
    made.wait(60)  # its time limit is the server's own matter
    made._cycle[2].clear()  # type: ignore[index]
    made.wait(3)
    assert made.of(CALL) == made.of(APPLIED) == []
    assert made.kinds[-1] == COMPLETE


def test_a_failed_call_of_the_server_s_own_tools_is_not_told() -> None:
    made = session(Answer(calls=(Call(fails="malformed"),)), default_tools=(WEATHER,))
    made.turn(1)
    made.wait(3)
    assert made.of(FAILED) == []
    assert made.kinds[-1] == COMPLETE


# Typed text


def typed(made: ScriptedSession, job_id: Any = "job", text: Any = "Hello.") -> None:
    made.say("input_text.request", event_id="typed", job_id=job_id, text=text)


def test_typed_text() -> None:
    made = session()
    typed(made)
    assert made.jobs == [("job", "Hello.")]
    made.speak(20)
    made.wait(3)
    kinds = [kind for kind in outline(made) if kind not in (AUDIO, TEXT)]
    assert kinds == [
        "input_text.accepted",
        "input_text.injection_started",
        STARTED,
        DELTA,
        STOPPED,
        COMPLETED,
        CREATED,
        "input_text.injection_finished:completed",
        DONE_TEXT,
        DONE_AUDIO,
        COMPLETE,
    ]
    for kind in (STARTED, DELTA, STOPPED, COMPLETED):
        assert made.of(kind)[0]["source"] == "typed"
        assert made.of(kind)[0]["job_id"] == "job"
    assert made.of(STARTED)[0]["correlation"] == "job"
    assert sum(r.pcm == LOUD for r in made.asked if isinstance(r, Hear)) == 20


def test_typed_text_is_not_paced() -> None:
    made = session()
    typed(made)
    begun = made.time
    made.speak(200)
    assert made.of(CREATED)
    assert made.time == begun


def test_typed_text_cancels_the_response() -> None:
    made = session(Answer(frames=50))
    made.turn(1)
    typed(made)
    made.wait(0.2)
    made.speak()
    made.wait(3)
    kinds = outline(made)
    ends = ["response.done:cancelled:typed_input", "input_text.injection_started", STARTED]
    at = kinds.index(ends[0])
    assert kinds[at : at + 3] == ends
    assert kinds[-1] == COMPLETE


def test_a_job_that_waits_is_replaced() -> None:
    made = session()
    typed(made, "a")
    typed(made, "b")
    made.core.synthesised("a", LOUD)  # too late
    made.speak()
    made.wait(3)
    jobs = [event for event in made.kinds if event.startswith("input_text")]
    assert jobs == [
        "input_text.accepted",
        "input_text.injection_finished:replaced",
        "input_text.accepted",
        "input_text.injection_started",
        "input_text.injection_finished:completed",
    ]
    assert made.stopped == 1
    assert [event["job_id"] for event in made.of("input_text.injection_finished")] == ["a", "b"]


def test_a_job_that_has_begun_is_not_replaced() -> None:
    made = session()
    typed(made, "a")
    made.core.synthesised("a", LOUD * 3)
    typed(made, "b")
    made.speak()
    made.wait(3)
    assert [(e["job_id"], e["disposition"]) for e in made.of("input_text.injection_finished")] == [
        ("a", "completed"),
        ("b", "completed"),
    ]
    assert len(made.of(CREATED)) == 2


@pytest.mark.parametrize(
    ("reason", "job_id", "text"),
    [
        ("invalid_job_id", "", "Hi"),
        ("invalid_job_id", "x" * 129, "Hi"),
        ("invalid_job_id", None, "Hi"),
        ("empty_text", "a", " \n"),
        ("empty_text", "a", None),
        ("text_too_long", "a", "x" * 1001),
    ],
)
def test_requests_that_are_rejected(reason: str, job_id: Any, text: Any) -> None:
    made = session()
    typed(made, job_id, text)
    assert made.kinds[2:] == [f"input_text.rejected:{reason}"]
    typed(made, "x" * 128, "x" * 1000)
    assert made.kinds[-1] == "input_text.accepted"


def test_rejections_by_state() -> None:
    unopened = ScriptedSession()
    unopened.core.greet()
    typed(unopened)
    without = session(typed_input=False)
    typed(without)
    turned = session()
    turned.start(1)
    typed(turned)
    cycling, _ = called()
    typed(cycling)
    twice = session()
    typed(twice)
    typed(twice)
    made = (unopened, without, turned, cycling, twice)
    reasons = [session.of("input_text.rejected")[-1]["reason"] for session in made]
    assert reasons == [
        "session_not_configured",
        "typed_input_unavailable",
        "input_turn_active",
        "function_cycle_active",
        "duplicate_job_id",
    ]
    assert set(reasons) | {"invalid_job_id", "empty_text", "text_too_long"} == set(REJECTIONS)
    assert all(not session.errors() for session in made)


def test_a_voice_that_fails_before_the_first_frame() -> None:
    made = session()
    typed(made)
    made.core.synthesis_failed("job", "espeak-ng ended with 1.")
    assert made.kinds[2:] == ["input_text.accepted", "input_text.injection_finished:error", "error:typed_input_failed"]
    assert made.errors() == [("typed_input_failed", False)]
    made.turn(1)
    made.wait(3)
    assert made.kinds[-1] == COMPLETE


def test_a_failure_after_the_first_frame() -> None:
    made = session()
    typed(made)
    made.core.synthesised("job", LOUD * 3)
    made.core.observe(Broken("The model failed."))
    assert made.kinds[-2:] == ["input_text.injection_finished:error", "error:typed_input_failed"]
    assert made.errors() == [("typed_input_failed", True)]
    assert made.closed == 1011


def test_a_turn_during_typed_text() -> None:
    made = session()
    typed(made)
    made.start(1)
    assert failure(made) == ("input_turn_conflict", 1002, False)
    assert made.kinds[-2] == "input_text.injection_finished:error"


def test_microphone_audio_during_typed_text_is_dropped() -> None:
    made = session()
    made.append()
    typed(made)
    made.append()
    made.speak(5)
    made.wait(3)
    made.start(1)
    assert sum(r.pcm == LOUD for r in made.asked if isinstance(r, Hear)) == 5


def test_a_typed_question_with_a_tool() -> None:
    made = session(Answer(calls=(Call(),)), tools=[WEATHER])
    typed(made)
    made.speak()
    made.wait(0.5)
    made.result(made.of(CALL)[0]["call_id"])
    made.wait(3)
    assert made.of("input_text.injection_finished", disposition="completed")
    assert made.kinds[-1] == COMPLETE


def test_typed_text_and_a_turn_during_a_cycle() -> None:
    """The text is rejected until the result is applied; its client then sends it first, and holds the turn."""
    made, call_id = called()
    typed(made)
    assert made.kinds[-1] == "input_text.rejected:function_cycle_active"
    made.result(call_id)
    made.wait(0.2)
    typed(made, "next")
    made.speak()
    made.wait(3)
    made.turn(2)
    made.wait(3)
    assert [event["source"] for event in made.of(STARTED)] == ["microphone", "typed", "microphone"]


# Endings


def test_stopping_between_turns() -> None:
    made = session()
    made.say("session.stop")
    assert made.kinds[-1] == "session.closed:completed"
    assert (made.events[-1]["reason"], made.closed) == ("client_stop", 1000)


@pytest.mark.parametrize("at", ["greeting", "turn", "response", "call", "typed", "injecting"])
def test_stopping_ends_what_is_open(at: str) -> None:
    if at == "call":
        made, _ = called()
    else:
        made = ScriptedSession(answers=[Answer(frames=50)])
        _sessions.append(made)
        made.core.greet()
    if at not in ("greeting", "call"):
        made.say("session.update", session={"protocol_version": 3})
    if at == "turn":
        made.start(1)
        made.append()
    elif at == "response":
        made.turn(1)
        made.wait(0.3)
    elif at in ("typed", "injecting"):
        typed(made)
        if at == "injecting":
            made.core.synthesised("job", LOUD)
    made.say("session.stop")
    ends = {
        "greeting": ["session.created"],
        "turn": [STOPPED, COMPLETED],
        "response": [DONE_TEXT, DONE_AUDIO, "response.done:cancelled:client_stop"],
        "call": [f"{FAILED}:client_stop", DONE_TEXT, DONE_AUDIO, "response.done:cancelled:client_stop"],
        "typed": ["input_text.injection_finished:cancelled"],
        "injecting": ["input_text.injection_finished:cancelled"],
    }[at]
    assert made.kinds[-len(ends) - 1 :] == [*ends, "session.closed:completed"]
    assert made.closed == 1000


@pytest.mark.parametrize("during", ["turn", "response"])
def test_the_last_frame_of_a_session(during: str) -> None:
    made = session(Answer(frames=500), most_frames=20)
    made.start(1)
    if during == "turn":
        while made.closed is None:
            made.append()
        ends = [STOPPED, COMPLETED]
    else:
        made.append()
        made.commit(1)
        made.wait(30)
        ends = [DONE_TEXT, DONE_AUDIO, "response.done:failed:session_position_limit"]
    assert made.frames == 20
    assert made.kinds[-len(ends) - 2 :] == [*ends, "error:session_position_limit", "session.closed:failed"]
    assert (made.events[-1]["reason"], made.closed) == ("session_position_limit", 1000)


def test_the_session_s_own_limit() -> None:
    made = session()
    made.start(1)
    made.core.observe(Limited("The session's limit is reached."))
    assert made.kinds[-2:] == ["error:session_position_limit", "session.closed:failed"]
    assert made.closed == 1000


def test_a_model_that_fails() -> None:
    made = session()
    made.turn(1)
    made.core.observe(Broken("The model failed: ValueError."))
    assert made.kinds[-2:] == ["error:internal_error", "session.closed:failed"]
    assert made.closed == 1011


def test_a_defect_of_our_own() -> None:
    made = session()
    made.core.broke("The server failed.")
    assert made.kinds[-2:] == ["error:internal_error", "session.closed:failed"]


def test_no_room() -> None:
    made = ScriptedSession()
    event = made.core.busy("All sessions are in use.")
    assert (event["event_id"], event["type"]) == ("evt_s_1", "error")
    assert event["error"] == {"code": "server_busy", "message": "All sessions are in use.", "fatal": True}
    assert (FATES["server_busy"].close_code, made.core.ended) == (1013, True)


def test_a_silent_client() -> None:
    made = session(Answer(frames=50))
    made.turn(1)
    assert made.core.waits
    made.core.hang_up("idle_timeout", 1008)
    assert made.kinds[-2:] == ["response.done:cancelled:client_stop", "session.closed:failed"]
    assert (made.events[-1]["reason"], made.closed) == ("idle_timeout", 1008)


def test_nothing_is_said_after_the_end() -> None:
    made = session(Answer(frames=50))
    made.turn(1)
    made.say("session.stop")
    count = len(made.events)
    for event in (Broken("x"), Limited("x")):
        made.core.observe(event)
    made.core.tick()
    made.core.synthesised("job", LOUD)
    made.core.synthesis_failed("job", "x")
    made.core.hang_up("idle_timeout", 1008)
    made.core.broke("x")
    assert len(made.events) == count


def test_recoverable_errors_leave_everything_as_it_was() -> None:
    made = session()
    made.start(1)
    made.core.receive({"bytes": b"\0\0"})
    made.core.receive({"text": "no json"})
    made.core.receive({"text": "[]"})
    made.say("response.create", event_id="x")
    made.append(b"")
    made.append(sample_rate=8000)
    made.append()
    made.commit(1)
    made.wait(3)
    assert [code for code, fatal in made.errors()] == [
        "binary_audio_unsupported",
        "invalid_json",
        "invalid_event",
        "unsupported_event",
        "empty_audio",
        "unsupported_sample_rate",
    ]
    assert made.of("error")[3]["error"]["client_event_id"] == "x"
    assert "client_event_id" not in made.of("error")[0]["error"]
    assert made.kinds[-1] == COMPLETE


# Turns that the model finds


def test_the_older_mode_says_so_and_refuses_barriers() -> None:
    made = session(turns=SERVER_TURNS)
    got = made.events[0]["capabilities"]
    assert (got["server_turn_detection"], got["input_turn_detection"]) == ("rnnt", "server_rnnt")
    made.start(1)
    made.commit(1)
    assert made.errors() == [("unsupported_event", False)] * 2


def test_the_older_mode_hears_all_audio() -> None:
    from mlx_voicechat.events import TranscriptDelta, TurnClosed, TurnOpened

    made = session(turns=SERVER_TURNS)
    for _ in range(3):
        made.append(QUIET)
    assert sum(isinstance(request, Hear) for request in made.asked) == 3
    made.tell(TranscriptDelta(3, " Hello", ""), TurnOpened(4, ""), Spoken(HUSH, 0.01, bos=True))
    assert made.kinds[2:] == [STARTED, DELTA, STOPPED, COMPLETED, CREATED, AUDIO]
    assert made.of(STARTED)[0]["correlation"] is None
    made.tell(TurnClosed(9, "eos"))
    made.tell(TurnOpened(12, ""), Spoken(HUSH, 0.01, bos=True))  # without anything heard
    assert made.kinds[8:] == [DONE_TEXT, DONE_AUDIO, COMPLETE, STARTED, STOPPED, COMPLETED, CREATED, AUDIO]
    assert made.of(COMPLETED)[-1]["empty"] is True


def test_the_tests_see_every_request() -> None:
    made = session()
    made.turn(1)
    kinds = {type(request) for request in made.asked}
    assert {Open, BeginTurn, Hear, EndTurn} <= kinds
    assert np.frombuffer(LOUD, "<i2").max() > 7000
