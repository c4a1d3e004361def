"""The clock of a session whose time the server keeps."""

import math

import pytest

from mlx_voicechat.server.messages import Pace
from mlx_voicechat.server.pace import PAUSE_SECONDS, Pacer

FRAME = 0.08


def pacer(**pace: float) -> Pacer:
    return Pacer(Pace(**pace), FRAME, 0.0)  # type: ignore[arg-type]


def frames(one: Pacer, until: float, audio: bool = False, speaking: bool = False) -> list[float]:
    """The moments of the frames up to a moment, each taken when it is due."""
    now, moments = 0.0, []
    while True:
        due = one.due(audio, speaking, False)
        assert due is not None
        now = max(now, due)
        if now > until:
            return moments
        moments.append(now)
        one.ran(now, audio, speaking)


def test_silence_in_real_time() -> None:
    moments = frames(pacer(), 8.0)
    assert len(moments) in (100, 101)
    assert moments == pytest.approx([n * FRAME for n in range(len(moments))])


def test_silence_waits_for_a_client_that_streams() -> None:
    one = pacer()
    one.heard(1.0)
    assert one.due(False, False, False) == 1.0 + PAUSE_SECONDS
    one.no_more(1.1)
    assert one.due(False, False, False) == 1.1


def test_audio_is_heard_at_once_while_the_agent_is_silent() -> None:
    one = pacer()
    for _ in range(100):
        assert one.due(True, False, False) == -math.inf
        one.ran(0.0, True, False)
    assert one.due(False, False, False) == pytest.approx(FRAME)  # and silence follows in real time


@pytest.mark.parametrize("audio", [False, True])
@pytest.mark.parametrize("ahead", [0.0, 0.5])
def test_speech_is_no_further_ahead(ahead: float, audio: bool) -> None:
    moments = frames(pacer(ahead_seconds=ahead), 4.0, audio=audio, speaking=True)
    assert len(moments) == pytest.approx((4.0 + ahead) / FRAME, abs=2)
    for index, moment in enumerate(moments):
        assert index * FRAME - moment <= ahead + 1e-6


def test_a_machine_that_is_late_makes_up_for_one_frame_alone() -> None:
    one = pacer()
    one.ran(10.0, False, False)
    assert one.due(False, False, False) == pytest.approx(10.0)
    one.ran(10.0, False, False)
    assert one.due(False, False, False) == pytest.approx(10.0 + FRAME)


def test_a_session_that_stands_still_when_idle() -> None:
    one = pacer(when_idle=False)
    assert one.due(False, False, False) is None
    assert one.due(False, False, True) is not None
    assert one.due(False, True, False) is not None
    assert one.due(True, False, False) is not None


def test_no_time_passes_while_it_stands_still() -> None:
    one = pacer()
    one.heard(1.0)
    one.ran(1.0, False, True)
    before = [one.due(audio, speaking, False) for audio, speaking in ((False, False), (False, True), (True, True))]
    one.stand_still(1.1)
    one.go_on(31.1)
    one.go_on(50.0)
    after = [one.due(audio, speaking, False) for audio, speaking in ((False, False), (False, True), (True, True))]
    assert after == pytest.approx([moment + 30.0 for moment in before if moment is not None])
