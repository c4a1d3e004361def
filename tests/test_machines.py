"""Two halves of one model against the whole: in one process over a wire of this test, and as ranks of a run."""

from __future__ import annotations

import gc
from collections import deque
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_voicechat
from mlx_voicechat import AudioFrame, Done, Event
from mlx_voicechat.frame import Frame
from mlx_voicechat.machines.messages import Kind, Message, receive
from mlx_voicechat.machines.speaker import Speaker
from mlx_voicechat.machines.thinker import Line, Thinker, remote
from mlx_voicechat.options import LoadOptions
from mlx_voicechat.voicechat import VoiceChat, load_opened
from mlx_voicechat.weights import checkpoint
from tests.support.checkpoints import GOLDEN
from tests.test_session import recorded, replayed

FOLDER = GOLDEN / "tiny-f32"


class Wire:
    """A way to a speaker in this process, which does at once what it is asked for; `late` answers wait in it."""

    def __init__(self) -> None:
        self.speaker: Speaker | None = None
        self.messages: list[Message] = []
        self._sent: deque[mx.array] = deque()
        self._answers: deque[mx.array] = deque()
        self._turned = False

    def send(self, array: mx.array) -> None:
        if self._turned:
            self._answers.append(array)
            return
        self._sent.append(array)
        words = np.array(self._sent[0]).tolist()
        if words[4] and len(self._sent) == 1:
            return  # its payload follows
        message = receive(self._other)
        self.messages.append(message)
        assert self.speaker is not None
        if (answer := self.speaker.take(message)) is not None:
            self._answers.append(answer)

    @property
    def _other(self) -> Wire:
        """This wire as the speaker has it."""
        other = Wire()
        other._answers, other._turned = self._sent, True
        return other

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, idle: bool = False) -> mx.array:
        array = self._answers.popleft()
        assert (array.shape, array.dtype) == (shape, dtype)
        return array


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@pytest.fixture(scope="module")
def halves(wire: Wire) -> VoiceChat:
    options = LoadOptions()
    speaker = load_opened("tiny-f32", checkpoint.open_folder(FOLDER), options, print, Speaker)
    assert isinstance(speaker, Speaker)
    wire.speaker = speaker
    return load_opened("tiny-f32", checkpoint.open_folder(FOLDER), options, print, partial(Thinker, Line(wire)))


@pytest.fixture(scope="module")
def whole() -> VoiceChat:
    return mlx_voicechat.load(FOLDER)


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    return np.load(GOLDEN / "expected" / "perception.npz")["audio"]


def sounds(events: list[Event]) -> list[AudioFrame]:
    return [event for event in events if isinstance(event, AudioFrame)]


@pytest.mark.parametrize("case", ["plain", "prompted"])
def test_the_recorded_run(halves: VoiceChat, audio: np.ndarray, case: str) -> None:
    story, arrays = recorded(case)
    session = halves.session(system_prompt=story["system_prompt"], noise=replayed(arrays))
    frames: list[Frame] = []
    session.observe(frames.append)
    events = list(session.feed(audio)) + session.finish()
    first = story["prompt_positions"]
    assert [f.text_id for f in frames] == arrays["text_ids"][first:].tolist()
    assert [f.function_id for f in frames] == arrays["function_ids"][first:].tolist()
    assert [symbol for f in frames for symbol in f.symbols] == story["rnnt_ids"]
    np.testing.assert_array_equal([f.codes for f in sounds(events)], arrays["codes"])
    np.testing.assert_allclose([f.samples for f in sounds(events)], arrays["samples"], rtol=0, atol=1e-4)
    assert [f.frame_index for f in sounds(events)] == list(range(story["frames"]))
    assert events[-1] == Done(story["frames"])


def test_every_event_is_that_of_one_machine_with_the_sound_a_frame_later(
    halves: VoiceChat, whole: VoiceChat, audio: np.ndarray
) -> None:
    def events(model: VoiceChat) -> list[Event]:
        session = model.session(seed=7, guidance_scale=0.5, max_seconds=2.0)
        return [*session.push(audio[: 40 * 1280]), *session.finish()]

    one, two = events(whole), events(halves)
    assert [repr(e) for e in one if not isinstance(e, AudioFrame)] == [
        repr(e) for e in two if not isinstance(e, AudioFrame)
    ]
    assert [e.codes for e in sounds(one)] == [e.codes for e in sounds(two)]
    np.testing.assert_array_equal([e.samples for e in sounds(one)], [e.samples for e in sounds(two)])


def test_a_frame_s_sound_comes_with_the_next(halves: VoiceChat, audio: np.ndarray) -> None:
    session = halves.session()
    assert sounds(session.push(audio[:1280])) == []
    (first,) = sounds(session.push(audio[1280:2560]))
    assert first.frame_index == 0
    (second,) = sounds(session.finish())
    assert second.frame_index == 1


def test_sessions_among_each_other_give_what_each_gives_alone(
    halves: VoiceChat, whole: VoiceChat, audio: np.ndarray
) -> None:
    options = [{"seed": 1}, {"seed": 2, "guidance_scale": 0.0}, {"seed": 1, "system_prompt": "Be brief."}]
    sessions = [halves.session(**each) for each in options]  # type: ignore[arg-type]
    found: list[list[Event]] = [[] for _ in sessions]
    for start in range(0, 12 * 1280, 1280):
        for events, session in zip(found, sessions, strict=True):
            events += session.push(audio[start : start + 1280])
    for events, session, each in zip(found, sessions, options, strict=True):
        events += session.finish()
        alone = whole.session(**each)  # type: ignore[arg-type]
        expected = [*alone.push(audio[: 12 * 1280]), *alone.finish()]
        assert [e.codes for e in sounds(events)] == [e.codes for e in sounds(expected)]


def test_an_answer_is_one_of_the_whole_form(halves: VoiceChat, whole: VoiceChat, audio: np.ndarray) -> None:
    one, two = (model.answer(audio[: 10 * 1280], seed=3) for model in (whole, halves))
    assert (one.text_ids, one.function_ids) == (two.text_ids, two.function_ids)
    np.testing.assert_array_equal(one.codes, two.codes)


def test_in_turns_of_the_application_the_last_sound_is_waited_for(halves: VoiceChat, audio: np.ndarray) -> None:
    session = halves.session(turns="application")
    session.begin_turn()
    session.add(audio[:1280])
    events = session.step()
    assert sounds(events) == []
    while session.runnable:
        events += session.step()
    assert len(sounds(events)) == session.frames


def test_the_speaker_forgets_conversations_that_ended(halves: VoiceChat, wire: Wire, audio: np.ndarray) -> None:
    assert wire.speaker is not None
    session = halves.session(seed=5)
    session.push(audio[: 3 * 1280])
    number = remote(session.state).number
    assert number in wire.speaker._conversations
    session.cancel()
    del session
    gc.collect()
    halves.session(seed=5)
    assert number not in wire.speaker._conversations
    assert wire.messages[-3:] == [Message(Kind.CLOSE, number), *wire.messages[-2:]]


def test_what_fails_on_the_speaking_rank_ends_its_session_alone(
    halves: VoiceChat,
    wire: Wire,
    audio: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert wire.speaker is not None
    broken, fine = halves.session(), halves.session()
    broken.push(audio[:1280])
    fine.push(audio[:1280])
    with monkeypatch.context() as patch:
        patch.setattr(wire.speaker, "_decode", lambda *_: 1 / 0)
        broken.push(audio[:1280])  # asks for what fails
    assert "ZeroDivisionError" in capfd.readouterr().err
    with pytest.raises(mlx_voicechat.VoiceChatError, match="speaks failed"):
        broken.push(audio[:1280])
    assert len(sounds(fine.push(audio[: 2 * 1280]))) == 2


def test_a_rank_reads_the_weights_of_its_half_alone() -> None:
    def loaded(make: Any) -> int:
        gc.collect()
        before = mx.get_active_memory()
        model = load_opened("tiny-f32", checkpoint.open_folder(FOLDER), LoadOptions(), print, make)
        assert model.loads
        gc.collect()
        return mx.get_active_memory() - before

    both, thinks, speaks = loaded(VoiceChat), loaded(partial(Thinker, Line(Wire()))), loaded(Speaker)
    assert thinks + speaks == pytest.approx(both, rel=0.02)  # the latents of the voices are on both
    assert max(thinks, speaks) < 0.9 * both
