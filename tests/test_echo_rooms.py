"""Whole conversations with the demonstration model through loudspeakers: nine rooms, four of them interrupted.

Slow: run with `pytest -m slow tests/test_echo_rooms.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

import mlx_voicechat
from mlx_voicechat import AudioFrame
from mlx_voicechat.voicechat import VoiceChat
from tests.support.rooms import Room, nine

pytest.importorskip("livekit", reason="the package livekit is not installed")

from mlx_voicechat.sound.echo import EchoCanceller

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"
INPUT_SAMPLES, OUTPUT_SAMPLES = 1280, 1764
BUFFER_FRAMES = 2  # between the model and the loudspeaker
ONSET_SECONDS = 3.4  # of the second speaker in barge_in.wav
NINE = nine(seed=2031)
LABELS = [f"{room.loudness:.0%}, {room.path_ms:.0f} ms, {room.reverberation_ms} ms" for room in NINE]


@dataclass
class Talk:
    """What came of a conversation. `ends` are the seconds at which the assistant ended a turn."""

    transcript: str
    text: str
    ends: list[float]


@pytest.fixture(scope="module")
def model() -> VoiceChat:
    return mlx_voicechat.load("tiny", compile=True)


def recording(name: str, silence_seconds: float) -> np.ndarray:
    samples = soundfile.read(EXAMPLES / name, dtype="float32")[0]
    return np.concatenate([samples, np.zeros(round(silence_seconds * 16000), np.float32)])


def converse(model: VoiceChat, user: np.ndarray, room: Room | None, canceller: EchoCanceller | None) -> Talk:
    """Frame by frame: what the assistant says is played two frames later, and comes back with what the user says."""
    session, echo = model.session(), room.echo() if room else None
    downsample = soxr.ResampleStream(22050, 16000, 1, dtype="float32", quality="QQ")
    noise = np.random.default_rng(0).normal(0, 3e-4, len(user)).astype(np.float32)
    playing = [np.zeros(OUTPUT_SAMPLES, np.float32)] * BUFFER_FRAMES
    ends: list[float] = []

    def observe(frame: Any) -> None:
        if frame.text_id == model.config.eos_id:
            ends.append(session.frames * model.config.frame_seconds)

    session.observe(observe)
    for start in range(0, len(user) - INPUT_SAMPLES + 1, INPUT_SAMPLES):
        played = playing.pop(0)
        near = user[start : start + INPUT_SAMPLES] + noise[start : start + INPUT_SAMPLES]
        if echo:
            heard = echo.hear(downsample.resample_chunk(played))
            near[len(near) - len(heard) :] += heard
        if canceller:
            canceller.far(played)
            near = canceller.near(near)
        for event in session.push(near):
            if isinstance(event, AudioFrame):
                playing.append(event.samples)
        playing = playing or [np.zeros(OUTPUT_SAMPLES, np.float32)]
    return Talk(session.transcript, session.text, ends)


@pytest.fixture(scope="module")
def with_headphones(model: VoiceChat) -> Talk:
    talk = converse(model, recording("conversation.wav", 1), None, None)
    assert talk.transcript == "Turn on the kitchen lights. What color is the sky?"
    assert talk.text == "The kitchen lights are on.The sky is blue."
    return talk


def test_without_a_canceller_it_answers_itself(model: VoiceChat, with_headphones: Talk) -> None:
    talk = converse(model, recording("conversation.wav", 1), NINE[4], None)
    assert len(talk.ends) > len(with_headphones.ends) + 2


@pytest.mark.parametrize("room", NINE, ids=LABELS)
def test_a_room_is_as_headphones(model: VoiceChat, with_headphones: Talk, room: Room) -> None:
    talk = converse(model, recording("conversation.wav", 1), room, EchoCanceller())
    assert (talk.transcript, talk.text) == (with_headphones.transcript, with_headphones.text)


def test_headphones_are_as_before(model: VoiceChat, with_headphones: Talk) -> None:
    talk = converse(model, recording("conversation.wav", 1), None, EchoCanceller())
    assert (talk.transcript, talk.text) == (with_headphones.transcript, with_headphones.text)
    talk = converse(model, recording("barge_in.wav", 2), None, EchoCanceller())
    assert talk.transcript == "Tell me a joke. Stop the music."
    assert talk.text.endswith("The music has stopped.")


@pytest.mark.parametrize("room", NINE[1::2], ids=LABELS[1::2])
def test_who_interrupts_is_heard(model: VoiceChat, room: Room) -> None:
    """Who speaks over it at normal loudness ends its turn and gets an answer; not always word for word."""
    talk = converse(model, recording("barge_in.wav", 2), room, EchoCanceller())
    assert talk.transcript.startswith("Tell me a joke.")
    assert ONSET_SECONDS < talk.ends[0] < ONSET_SECONDS + 1.2
    assert len(talk.text) > len("Why did the chicken cross the road? To get to the other side.")
