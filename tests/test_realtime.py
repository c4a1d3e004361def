"""/v1/realtime over a real socket: every message, event, error and ending of the protocol."""

import base64
import json
import re
import string
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mlx_voicechat
from mlx_voicechat import Event
from mlx_voicechat.voicechat import VoiceChat
from tests.support.caller import FRAME_SAMPLES, Caller, append, calling, greeted, on_the_wire, opened
from tests.support.checkpoints import GOLDEN
from tests.support.server import RunningServer, running_server

PCM = {"type": "pcm16"}
FORMATS = {
    "input_audio_format": {**PCM, "sample_rate": 16000},
    "output_audio_format": {**PCM, "sample_rate": 22050},
}
PROMPT = "Be concise and answer in one sentence."
COMMIT = {"type": "input_audio_buffer.commit"}
INTERRUPT = {"type": "response.interrupt"}
INVALID, INFERENCE, INITIALISATION = "invalid_request", "inference_error", "session_initialization_failed"


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load(GOLDEN / "tiny-f32")


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    """20.25 frames as int16."""
    samples = np.load(GOLDEN / "expected" / "perception.npz")["audio"][: 20 * FRAME_SAMPLES + 320]
    return np.rint(samples * 32767).astype(np.int16)


class Alone:
    """What sessions give when they run by themselves, computed before a server has the model."""

    def __init__(self, model: VoiceChat, audio: np.ndarray) -> None:
        self.heard = (audio / 32768).astype(np.float32)
        self.plain = self._run(model.session())
        self.other = self._run(model.session(system_prompt=PROMPT, seed=7))
        self.unpadded = self._run(model.session(), pad_partial=False)
        self.interrupted = self._run(model.session(), force_at=3, eos_id=model.config.eos_id)

    def _run(self, session: Any, pad_partial: bool = True, force_at: int = 0, eos_id: int = 0) -> list[dict[str, Any]]:
        split = force_at * FRAME_SAMPLES
        events: list[Event] = session.push(self.heard[:split])
        if force_at:
            session.force(text=eos_id)
        events += session.push(self.heard[split:]) + session.finish(pad_partial)
        return [on_the_wire(event) for event in events]


@pytest.fixture(scope="module")
def alone(model: VoiceChat, audio: np.ndarray) -> Alone:
    return Alone(model, audio)


@pytest.fixture(scope="module")
def server(alone: Alone) -> Iterator[RunningServer]:
    with running_server(GOLDEN / "tiny-f32", max_sessions=3, max_audio_seconds=20.0) as server:
        yield server


@pytest.fixture
def url(server: RunningServer) -> str:
    return server.ws_url


def finish(caller: Caller, **fields: Any) -> list[dict[str, Any]]:
    """Commit; the events of the flush with response.done, after which the server has closed with 1000."""
    caller.send({**COMMIT, **fields})
    assert caller.until("input_audio_buffer.committed")[-1] == {"type": "input_audio_buffer.committed"}
    events = caller.until("response.done")
    assert caller.closed() == (1000, "")
    assert caller.events[-1] == events[-1]
    return events


def spoken(caller: Caller) -> list[dict[str, Any]]:
    """The events of frames, and the last."""
    kinds = ("response.", "conversation.item.")
    return [event for event in caller.events if event["type"].startswith(kinds)]


def without_audio(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] != "response.audio.delta"]


# The seed's example, field by field


def test_the_example_exchange(url: str, alone: Alone, audio: np.ndarray) -> None:
    with calling(url) as caller:
        created = caller.receive()
        session = created["session"]
        assert re.fullmatch("sess_[0-9a-f]{16}", session["id"])
        assert created == {
            "type": "session.created",
            "session": {"id": session["id"], "state": "configuring", **FORMATS},
        }
        caller.send({"type": "session.update", "session": {"system_prompt": PROMPT, "seed": 7}})
        ready = {"id": session["id"], "state": "ready", "model": "tiny-f32", "frame_samples": 1280, **FORMATS}
        assert caller.receive() == {"type": "session.updated", "session": ready}
        for start in range(0, len(audio), FRAME_SAMPLES):
            caller.send(append(audio[start : start + FRAME_SAMPLES], sample_rate=16000))
        finish(caller)
        assert spoken(caller) == alone.other
        kinds = {event["type"] for event in caller.events}
    assert kinds == {
        "session.created",
        "session.updated",
        "response.text.delta",
        "response.function.delta",
        "response.audio.delta",
        "input_audio_buffer.committed",
        "response.done",
    } | ({"conversation.item.input_audio_transcription.delta"} & kinds)
    assert alone.other[-1] == {"type": "response.done", "frame_index": 21}


def test_an_audio_event(alone: Alone) -> None:
    frames = [event for event in alone.plain if event["type"] == "response.audio.delta"]
    assert [frame["frame_index"] for frame in frames] == list(range(21))
    for frame in frames:
        assert len(base64.b64decode(frame["delta"])) == 2 * 1764
        assert all(type(code) is int for code in frame["audio_codes"])


@pytest.mark.parametrize("size", [320, 777, 5000, 30000])
def test_appends_of_any_size(url: str, alone: Alone, audio: np.ndarray, size: int) -> None:
    with opened(url) as caller:
        for start in range(0, len(audio), size):
            caller.send(append(audio[start : start + size]))
        finish(caller)
        assert spoken(caller) == alone.plain


def test_the_order_of_a_frame(alone: Alone) -> None:
    order = ["conversation.item.input_audio_transcription.delta", "response.text.delta", "response.function.delta"]
    order += ["response.audio.delta", "response.done"]
    ranks = [(event["frame_index"], order.index(event["type"])) for event in alone.plain]
    assert ranks == sorted(ranks)


def test_pad_partial(url: str, alone: Alone, audio: np.ndarray) -> None:
    for value, expected, frames in (True, alone.plain, 21), (False, alone.unpadded, 20):
        with opened(url) as caller:
            caller.send(append(audio))
            assert finish(caller, pad_partial=value)[-1]["frame_index"] == frames
            assert spoken(caller) == expected


def test_sessions_side_by_side(url: str, alone: Alone, audio: np.ndarray) -> None:
    with opened(url) as one, opened(url, system_prompt=PROMPT, seed=7) as other, opened(url) as third:
        for start in range(0, len(audio), 2000):
            for caller in (one, other, third):
                caller.send(append(audio[start : start + 2000]))
        for caller, expected in (other, alone.other), (one, alone.plain):
            finish(caller)
            assert spoken(caller) == expected
        third.send({"type": "session.cancel"})
        assert third.until("response.cancelled")
        assert without_audio(spoken(third))[:-1] == without_audio(alone.plain)[: len(without_audio(spoken(third))) - 1]


# Beginning


def test_ping_at_any_time(url: str) -> None:
    with greeted(url) as caller:
        caller.ping()
        caller.open()
        caller.ping()


@pytest.mark.parametrize(
    "message",
    [
        append(np.zeros(1280)),
        COMMIT,
        INTERRUPT,
        {"type": "session.cancel"},
        {"type": "response.cancel"},
        {"type": "response.create"},
        {"type": "session.created"},
        {},
    ],
    ids=lambda message: str(message.get("type")),
)
def test_before_the_update(url: str, message: dict[str, Any]) -> None:
    with greeted(url) as caller:
        code, text = caller.refusal({**message, "event_id": "mine"})
        assert code == INVALID
        assert "send session.update before audio" in text.lower()
        caller.open()


@pytest.mark.parametrize(
    "session",
    [
        *({"seed": seed} for seed in (-1, 1.5, "0", True, [0], -(10**30))),
        *({"system_prompt": prompt} for prompt in (5, True, ["Be brief."], {}, "half a pair: \ud83d")),
        *({"max_streaming_seconds": seconds} for seconds in (0, -1, -0.5, "5", True, [5], float("nan"), -float("inf"))),
        *([], "Be brief.", 5, True),
    ],
    ids=lambda session: ascii(session),
)
def test_a_session_that_cannot_be_opened(url: str, session: Any) -> None:
    with greeted(url) as caller:
        code, _ = caller.refusal({"type": "session.update", "session": session, "event_id": "mine"})
        assert code == INITIALISATION
        assert caller.open()["session"]["state"] == "ready"  # it may be tried again


def test_numbers_of_thousands_of_digits(url: str) -> None:
    digits = "9" * 5000
    with greeted(url) as caller:
        for seed in (digits, f"-{digits}"):
            caller.send(f'{{"type": "session.update", "event_id": "mine", "session": {{"seed": {seed}}}}}')
            error = caller.receive()["error"]
            assert (error["code"], error["event_id"]) == (INITIALISATION, "mine")
        caller.send(f'{{"type": "session.update", "session": {{"max_streaming_seconds": {digits}}}}}')
        assert caller.receive()["type"] == "session.updated"
        caller.send(f'{{"type": "input_audio_buffer.append", "audio": "", "sample_rate": {digits}}}')
        assert caller.receive()["error"]["code"] == INFERENCE


@pytest.mark.parametrize(
    "session",
    [
        {"model": "gpt-4o"},
        {"model": 5},
        {"model": None},
        {"seed": 2**70},
        {"max_streaming_seconds": 1e300},
        {"max_streaming_seconds": float("inf")},
        {"system_prompt": ""},
        {"voice": "alloy", "turn_detection": None},
    ],
    ids=str,
)
def test_a_session_that_can(url: str, session: dict[str, Any]) -> None:
    with opened(url, **session) as caller:
        caller.ping()


def test_a_bare_update(url: str, alone: Alone, audio: np.ndarray) -> None:
    with greeted(url) as caller:
        caller.send({"type": "session.update"})
        assert caller.receive()["type"] == "session.updated"
        caller.send(append(audio))
        finish(caller)
        assert spoken(caller) == alone.plain


def test_a_second_update(url: str, alone: Alone, audio: np.ndarray) -> None:
    with opened(url) as caller:
        caller.send(append(audio[:FRAME_SAMPLES]))
        caller.frames(1)
        update = {"type": "session.update", "session": {"seed": 7}, "event_id": "again"}
        assert caller.refusal(update)[0] == INVALID
        caller.send(append(audio[FRAME_SAMPLES:]))
        finish(caller)
        assert spoken(caller) == alone.plain


# What is refused in a session, which goes on as if it had not been said


def audio_of(text: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "input_audio_buffer.append", "audio": text, **fields}


ONE = base64.b64encode(bytes(2)).decode()
BAD_APPENDS: list[dict[str, Any]] = [
    {"type": "input_audio_buffer.append"},
    *(audio_of(audio) for audio in (None, 5, True, ["AAAA"], {"data": "AAAA"})),
    *(
        audio_of(text)
        for text in ("?", "AAA", "AAA=A", "A A A", "AAAA\n", " AAAA", "-_-_", "AAA=====", "é", "=", "\ud800")
    ),
    *(audio_of(base64.b64encode(bytes(n)).decode()) for n in (1, 3, 2559)),
    *(audio_of(ONE, sample_rate=rate) for rate in (8000, 24000, 0, -16000, 16001, 10**400)),
    *(audio_of(ONE, sample_rate=rate) for rate in ("16000", 16000.5, True, None, [], {}, float("nan"), float("inf"))),
]


def test_appends_that_are_refused(url: str, alone: Alone, audio: np.ndarray) -> None:
    with opened(url) as caller:
        for number, message in enumerate(BAD_APPENDS):
            code, _ = caller.refusal({**message, "event_id": f"mine {number}"})
            assert code == INFERENCE, message
            assert caller.refusal(message)[0] == INFERENCE
        caller.send(append(audio))
        finish(caller)
        assert spoken(caller) == alone.plain


def test_empty_appends_do_nothing(url: str) -> None:
    with opened(url) as caller:
        caller.send(audio_of(""))
        caller.send(audio_of("", sample_rate=16000))
        caller.ping()
        assert finish(caller) == [{"type": "response.done", "frame_index": 0}]


def deep(opening: str, closing: str) -> str:
    return opening * 1000 + closing * 1000


NOT_OBJECTS: list[str | bytes] = [
    *(b"\x00\xff", b"", json.dumps(COMMIT).encode(), bytes(3000)),
    *("", " ", "null", "5", '"text"', "[]", "true", "NaN", "{", "{'type': 'session.ping'}", '{"type": }', "\x00", "😀"),
    *(deep("[", "]"), deep("[", ""), deep('{"a":', ""), '{"type": "session.ping"} {}', "9" * 5000, "[" * 100_000),
]


def test_frames_that_are_no_objects(url: str, alone: Alone, audio: np.ndarray) -> None:
    with greeted(url) as caller:
        for message in NOT_OBJECTS:
            assert caller.refusal(message)[0] == INVALID, message[:40]
        caller.open()
        for message in NOT_OBJECTS:
            assert caller.refusal(message)[0] == INVALID, message[:40]
        caller.send(append(audio))
        finish(caller)
        assert spoken(caller) == alone.plain


UNKNOWN: list[dict[str, Any]] = [
    *({"type": kind} for kind in ("", "response.create", "session.updated", "SESSION.PING", "x" * 5000, "\ud83d")),
    *({"type": kind} for kind in (None, 5, True, [], ["session.ping"], {"type": "session.ping"})),
    *({}, {"event_id": "e"}, {"typ": "session.ping"}, {"audio": ONE}),
    *({**COMMIT, "pad_partial": value} for value in (None, 1, 0, "true", [], {})),
]


def test_messages_that_are_refused(url: str, alone: Alone, audio: np.ndarray) -> None:
    with opened(url) as caller:
        for number, message in enumerate(UNKNOWN):
            assert caller.refusal({**message, "event_id": f"mine {number}"})[0] == INVALID, message
        deep_field = f'{{"type": "session.cancel", "x": {deep("[", "]")}'  # the object is never closed
        assert caller.refusal(deep_field)[0] == INVALID
        caller.send(append(audio))
        finish(caller)
        assert spoken(caller) == alone.plain


@pytest.mark.parametrize("name", [None, 5, True, ["e"], {}])
def test_an_event_id_that_is_no_string(url: str, name: Any) -> None:
    with greeted(url) as caller:
        event = caller.ask({"type": "no such type", "event_id": name})
        assert event["error"]["code"] == INVALID
        caller.open()


def test_errors_come_in_their_order(url: str, audio: np.ndarray) -> None:
    with opened(url) as caller:
        caller.send(append(audio[: 4 * FRAME_SAMPLES]))
        caller.send({**audio_of("?"), "event_id": "bad"})
        caller.send(append(audio[4 * FRAME_SAMPLES : 5 * FRAME_SAMPLES]))
        events = caller.frames(4)
        assert "error" not in {event["type"] for event in events}
        assert caller.receive()["error"]["event_id"] == "bad"
        assert caller.frames(1)[-1]["frame_index"] == 4


# Fuzz: any message that is not right gets one error, and the socket lives

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(["", ONE, "pcm16"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
TYPES = (
    "session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "session.ping",
    "response.interrupt",
)
FIELDS = {"audio": VALUES, "sample_rate": VALUES, "pad_partial": VALUES, "session": VALUES, "event_id": VALUES}


def is_known(message: dict[str, Any]) -> bool:
    known = (*TYPES, "session.cancel", "response.cancel")
    return isinstance(message.get("type"), str) and message["type"] in known


def is_base64(text: Any) -> bool:
    allowed = set(string.ascii_letters + string.digits + "+/=")
    return isinstance(text, str) and set(text) <= allowed


MALFORMED = st.one_of(
    st.fixed_dictionaries({}, optional={"type": VALUES, **FIELDS}).filter(lambda message: not is_known(message)),
    st.fixed_dictionaries({"type": st.just(TYPES[0])}, optional=FIELDS),  # the second update
    st.fixed_dictionaries({"type": st.just(TYPES[1]), "audio": VALUES.filter(lambda text: not is_base64(text))}),
    st.fixed_dictionaries({"type": st.just(TYPES[2]), "pad_partial": VALUES.filter(lambda x: not isinstance(x, bool))}),
    VALUES.filter(lambda value: not isinstance(value, dict)),
    st.binary(max_size=100),
    st.text(max_size=100).filter(lambda text: not text.lstrip().startswith("{")).map(lambda text: "x" + text),
)


@pytest.fixture(scope="module")
def tormented(server: RunningServer) -> Iterator[Caller]:
    with opened(server.ws_url) as caller:
        yield caller


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(message=MALFORMED)
def test_malformed_messages(tormented: Caller, message: Any) -> None:
    sent = message if isinstance(message, bytes) else json.dumps(message)
    if isinstance(message, str) and message.startswith("x"):  # no JSON at all
        sent = message
    event = tormented.ask(sent)
    appended = isinstance(message, dict) and message.get("type") == TYPES[1]
    assert event["type"] == "error"
    assert event["error"]["code"] == (INFERENCE if appended else INVALID)


def test_after_the_torment(tormented: Caller, url: str, alone: Alone, audio: np.ndarray) -> None:
    for caller in (tormented, None):
        if caller is None:
            with opened(url) as caller:
                caller.send(append(audio))
                finish(caller)
                assert spoken(caller) == alone.plain
        else:
            caller.events.clear()
            caller.send(append(audio))
            finish(caller)
            assert spoken(caller) == alone.plain


# Ending


def test_a_commit_without_audio(url: str) -> None:
    with opened(url) as caller:
        assert finish(caller) == [{"type": "response.done", "frame_index": 0}]


def test_the_slot_is_free_when_the_client_hears_it(alone: Alone, audio: np.ndarray, url: str) -> None:
    for _ in range(4):  # one more than there are slots
        with opened(url) as caller:
            caller.send(append(audio[:2000]))
            assert finish(caller)[-1]["frame_index"] == 2
    for kind in ("session.cancel", "response.cancel") * 2:
        with opened(url) as caller:
            caller.send(append(audio[: 2 * FRAME_SAMPLES + 5]))
            caller.frames(2)
            caller.send({"type": kind})
            assert caller.receive() == {"type": "response.cancelled", "frame_index": 2}
            assert caller.closed() == (1000, "")


def test_a_cancel_without_audio(url: str) -> None:
    with opened(url) as caller:
        caller.send({"type": "response.cancel"})
        assert caller.receive() == {"type": "response.cancelled", "frame_index": 0}
        assert caller.closed() == (1000, "")


def test_the_turn_is_ended_at_the_model(url: str, alone: Alone, audio: np.ndarray) -> None:
    at = 3 * FRAME_SAMPLES
    with opened(url) as caller:
        caller.send(append(audio[:at]))
        caller.frames(3)
        caller.send(INTERRUPT)
        caller.send(append(audio[at:]))
        finish(caller)
        events = spoken(caller)
    interrupted = {"type": "response.interrupted", "frame_index": 3}
    assert events.count(interrupted) == 1
    events.remove(interrupted)
    assert events == alone.interrupted
    assert alone.interrupted != alone.plain


# The limit of audio


def test_past_the_limit(url: str, alone: Alone, audio: np.ndarray) -> None:
    with opened(url, max_streaming_seconds=0.2) as caller:
        caller.send({**append(audio[: 6 * FRAME_SAMPLES]), "event_id": "long"})
        caller.frames(2)
        error = caller.receive()["error"]
        assert (error["code"], error["event_id"]) == (INFERENCE, "long")
        assert "0.2" in error["message"]
        assert caller.refusal({**append(audio[:10]), "event_id": "more"})[0] == INFERENCE
        caller.ping()
        caller.send(COMMIT)
        assert caller.until("response.done")[-1] == {"type": "response.done", "frame_index": 2}
        assert caller.closed() == (1000, "")
        frames = [event for event in spoken(caller) if event["frame_index"] < 2][:-1]
        assert frames == [event for event in alone.plain if event["frame_index"] < 2][: len(frames)]


def test_just_the_limit(url: str, audio: np.ndarray) -> None:
    with opened(url, max_streaming_seconds=0.16) as caller:
        caller.send(append(audio[: 2 * FRAME_SAMPLES]))
        assert finish(caller)[-1]["frame_index"] == 2
        assert "error" not in {event["type"] for event in caller.events}
