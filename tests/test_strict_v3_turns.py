"""strict-v3: remembered turns, the audio before a turn, messages that wait, the order table by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_voicechat.server.strict_v3_codes import Refused
from mlx_voicechat.server.strict_v3_messages import Append
from mlx_voicechat.server.strict_v3_order import JOB_ORDER, ORDER, Order, OutOfOrder
from mlx_voicechat.server.strict_v3_turns import Blocks, Deferred, PreRoll, TurnMemory, level_of, samples_of
from tests.support.strict_v3 import LOUD, QUIET


def tone(dbfs: float) -> bytes:
    return np.full(1280, round(32768 * 10 ** (dbfs / 20)), "<i2").tobytes()


def test_sixteen_turns_are_remembered() -> None:
    memory = TurnMemory()
    for number in range(1, 18):
        memory.add(number, f"turn_{number}")
    assert memory.find(1) is None
    assert [memory.find(number) for number in (2, 17)] == ["turn_2", "turn_17"]


@given(st.lists(st.integers(1, 3000), max_size=12))
def test_any_packets_become_the_same_frames(sizes: list[int]) -> None:
    whole = np.arange(sum(sizes), dtype="<i2").tobytes()
    blocks, at, got = Blocks(), 0, []
    for size in sizes:
        got += blocks.push(whole[2 * at : 2 * (at + size)])
        at += size
    assert all(len(frame) == 2560 for frame in got)
    tail = blocks.padded()
    assert b"".join(got + tail) == whole + bytes(-len(whole) % 2560)
    assert blocks.padded() == []


def test_the_onset_begins_two_frames_before_the_first_loud_one() -> None:
    frames = [tone(-60 - n) for n in range(5)] + [tone(-40), tone(-70)]
    preroll = PreRoll()
    for frame in frames:
        preroll.push(frame)
    assert preroll.take() == frames[3:]
    assert preroll.take() == []


def test_an_onset_that_is_quiet_all_over_is_whole() -> None:
    preroll = PreRoll()
    for number in range(20):
        preroll.push(tone(-80) if number % 2 else QUIET)
    assert len(preroll.take()) == 12


def test_twelve_frames_are_kept() -> None:
    preroll = PreRoll()
    frames = [LOUD, *[np.full(1280, number + 1, "<i2").tobytes() for number in range(12)]]
    for frame in frames:
        preroll.push(frame)
    assert preroll.take() == frames[1:]


@pytest.mark.parametrize(("dbfs", "loud"), [(-49.5, True), (-50.5, False)])
def test_the_gate_is_at_minus_fifty(dbfs: float, loud: bool) -> None:
    preroll = PreRoll()
    for frame in [QUIET] * 4 + [tone(dbfs)]:
        preroll.push(frame)
    assert len(preroll.take()) == (3 if loud else 5)


def test_levels() -> None:
    level = level_of(samples_of(tone(-20)))
    assert (level.samples, round(level.peak, 2)) == (1280, 0.1)
    assert level.dbfs == pytest.approx(-20, abs=0.01)
    assert level_of(samples_of(QUIET)).dbfs is None
    assert level_of(np.zeros(0)).samples == 0


def test_a_mebibyte_of_messages_waits() -> None:
    deferred, append = Deferred(), Append(b"", "a")
    deferred.push(append, 2**20)
    with pytest.raises(Refused) as refused:
        deferred.push(append, 1)
    assert (refused.value.code, refused.value.event_id) == ("deferred_input_overflow", "a")
    assert deferred.pop() is append
    deferred.push(append, 2**20)
    assert bool(deferred)


def test_an_event_out_of_order_is_a_defect() -> None:
    order = Order()
    with pytest.raises(OutOfOrder, match=r"session\.updated while new"):
        order.take({"type": "session.updated"})
    order.take({"type": "session.created"})
    order.take({"type": "session.updated"})
    order.take({"type": "input_text.accepted", "job_id": "a"})
    with pytest.raises(OutOfOrder, match="of a job that is accepted"):
        order.take({"type": "input_text.accepted", "job_id": "a"})
    with pytest.raises(OutOfOrder, match="audio"):
        order.take({"type": "response.output_audio.delta"})


def test_every_state_can_be_reached_and_left() -> None:
    states = {state for state, _ in ORDER} | set(ORDER.values())
    assert set(ORDER.values()) | {"new"} == states
    assert {state for state, _ in ORDER} == states - {"announced"}
    assert {state for state, _ in JOB_ORDER} | {"finished"} == set(JOB_ORDER.values())
