"""Turns that the application owns, and those of the model, frame by frame; no model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.errors import InputError
from mlx_voicechat.events import CloseReason, Event, SettleTimeout, TurnClosed, TurnOpened
from mlx_voicechat.turns import Forced, Ids, Passed, Phase, Turns

BOS, EOS, PAD, WORD = 1, 2, 12, 65
LOUD, SILENT, DEAD = -20.0, -70.0, -95.0


class Talk:
    """Runs turns the way a session does: asks what is forced, lets a model answer, tells what passed."""

    def __init__(self, **options: bool | int | None) -> None:
        chosen = {"application": True, "tools": False, **options}
        self.turns = Turns(Ids(BOS, EOS, PAD), **chosen)  # type: ignore[arg-type]
        self.frames = 0
        self.events: list[Event] = []
        self.ids: list[int] = []
        self.zeros: list[bool] = []
        self.cancelled: list[bool] = []

    def frame(
        self,
        own: int = PAD,
        *,
        spoke: bool = False,
        loud: bool = False,
        dbfs: float = SILENT,
        cycle: bool = False,
        called: bool = False,
        function: bool = False,
        waits: bool = False,
    ) -> list[Event]:
        zero = self.turns.zero_frame(waits)
        forced = self.turns.forced(cycle and not called)
        text = forced.text if forced.text is not None else PAD if cycle else own
        if forced.text is None and forced.held_back and text == BOS:
            text = PAD
        self.cancelled.append(self.turns.cancelled)
        self.zeros.append(zero)
        self.ids.append(text)
        passed = Passed(self.frames, text, text == WORD, function, spoke, loud, zero, cycle, called)
        before, after = self.turns.took(passed, lambda: dbfs, "what was said")
        self.frames += 1
        self.events += [*before, *after]
        return [*before, *after]

    def question(self) -> None:
        """The user says something, the last of it in the last frame."""
        self.turns.begin(False)
        for _ in range(5):
            self.frame(spoke=True, loud=True)

    def until(self, kind: type, most: int = 100, **how: float) -> Event:
        for _ in range(most):
            for event in self.frame(**how):  # type: ignore[arg-type]
                if isinstance(event, kind):
                    return event
        raise AssertionError(f"no {kind.__name__}")


def test_settling_and_one_bos() -> None:
    talk = Talk()
    talk.question()
    talk.turns.end()
    opened = talk.until(TurnOpened, own=BOS)
    assert opened == TurnOpened(15, "what was said")
    assert talk.ids == [PAD] * 15 + [BOS]
    assert talk.zeros == [False] * 5 + [True] * 11
    assert talk.turns.phase == Phase.AGENT
    talk.frame(BOS)
    assert talk.ids[-1] == PAD  # one BOS a turn


def test_silence_before_the_end_counts() -> None:
    talk = Talk()
    talk.question()
    for _ in range(6):
        talk.frame()
    talk.turns.end()
    assert talk.until(TurnOpened) == TurnOpened(15, "what was said")


def test_noise_does_not_count_and_zeros_do() -> None:
    talk = Talk()
    talk.question()
    for _ in range(30):
        talk.frame(loud=True)
    talk.turns.end()
    assert talk.until(TurnOpened) == TurnOpened(45, "what was said")


def test_audio_of_the_turn_is_heard_first() -> None:
    talk = Talk()
    talk.question()
    talk.turns.end()
    talk.frame(spoke=True, loud=True, waits=True)
    assert talk.zeros[-1] is False
    assert talk.until(TurnOpened) == TurnOpened(16, "what was said")


def test_late_symbols_delay_it() -> None:
    talk = Talk()
    talk.question()
    talk.turns.end()
    for _ in range(5):
        talk.frame()
    talk.frame(spoke=True)
    assert talk.until(TurnOpened) == TurnOpened(21, "what was said")


def test_it_does_not_settle() -> None:
    talk = Talk()
    talk.question()
    talk.turns.end()
    for count in range(20):
        events = talk.frame(spoke=count % 5 == 0)
    assert events == [SettleTimeout(24)]
    assert talk.turns.phase == Phase.USER
    assert BOS not in talk.ids
    talk.turns.open()
    assert talk.until(TurnOpened, most=1) == TurnOpened(25, "what was said")


def test_an_empty_turn() -> None:
    talk = Talk()
    talk.turns.begin(False)
    talk.turns.end()
    assert talk.until(TurnOpened) == TurnOpened(10, "what was said")


def test_the_agent_is_held_back_meanwhile() -> None:
    talk = Talk(tools=True)
    for own in (BOS, WORD, BOS):
        assert talk.turns.forced(False) == Forced(None, PAD, True)
        talk.frame(own)
    assert talk.ids == [PAD, WORD, PAD]
    assert talk.events == []


def test_the_frame_of_bos_may_begin_a_call() -> None:
    talk = Talk(tools=True)
    talk.question()
    talk.turns.end()
    for _ in range(10):
        talk.frame()
    assert talk.turns.zero_frame(False)
    assert talk.turns.forced(False) == Forced(BOS, None)
    # the graph makes its text PAD
    passed = Passed(talk.frames, PAD, False, True, False, False, True, True, True)
    assert talk.turns.took(passed, lambda: SILENT, "x")[0] == [TurnOpened(15, "x")]
    talk.frames += 1
    for _ in range(5):
        assert talk.turns.forced(True) == Forced()
        talk.frame(cycle=True)
    for _ in range(4):
        assert talk.turns.forced(False) == Forced()
        talk.frame()
    talk.frame()
    assert talk.ids[-5:] == [PAD] * 4 + [BOS]
    talk.frame(BOS)
    assert talk.ids[-1] == PAD


def test_the_models_own_bos_after_a_cycle() -> None:
    talk = Talk(tools=True)
    talk.question()
    talk.turns.end()
    talk.until(TurnOpened)
    talk.frame(cycle=True, called=True)
    talk.frame(own=BOS)
    assert talk.ids[-1] == BOS
    talk.frame(own=BOS)
    assert talk.ids[-1] == PAD


def answer(talk: Talk) -> None:
    """A question, and the agent begins to say something."""
    talk.question()
    talk.turns.end()
    talk.until(TurnOpened)
    for _ in range(4):
        talk.frame(WORD, dbfs=LOUD)


def test_the_end_for_the_ear() -> None:
    talk = Talk()
    answer(talk)
    talk.frame(EOS, dbfs=LOUD)
    talk.frame(dbfs=LOUD)
    talk.frame(dbfs=SILENT)
    talk.frame(dbfs=LOUD)
    end = talk.frames
    assert talk.until(TurnClosed) == TurnClosed(end + 2, CloseReason.MODEL)
    assert talk.turns.phase == Phase.USER


def test_a_tail_that_does_not_end() -> None:
    talk = Talk()
    answer(talk)
    talk.frame(EOS, dbfs=LOUD)
    end = talk.frames - 1
    assert talk.until(TurnClosed, dbfs=LOUD) == TurnClosed(end + 25, CloseReason.MODEL)


@pytest.mark.parametrize(("dbfs", "frames"), [(SILENT, 3), (LOUD, 26)])
def test_begin_turn_while_the_agent_speaks(dbfs: float, frames: int) -> None:
    talk = Talk()
    answer(talk)
    start = talk.frames
    assert talk.turns.begin(False)
    closed = talk.until(TurnClosed, own=WORD, dbfs=dbfs)
    assert closed == TurnClosed(start + frames - 1, CloseReason.CANCELLED)
    assert frames <= 27
    assert talk.cancelled[start:] == [True] * frames
    assert talk.zeros[start:] == [True] * frames
    assert talk.ids[start:] == [EOS] + [PAD] * (frames - 1)
    talk.frame()
    assert not talk.cancelled[-1]
    talk.turns.end()
    talk.until(TurnOpened)


def test_begin_turn_in_the_tail_ends_no_turn_twice() -> None:
    talk = Talk()
    answer(talk)
    talk.frame(EOS, dbfs=LOUD)
    talk.turns.begin(False)
    closed = talk.until(TurnClosed)
    assert isinstance(closed, TurnClosed)
    assert closed.reason == CloseReason.CANCELLED
    assert talk.ids.count(EOS) == 1


def test_begin_turn_while_it_settles() -> None:
    talk = Talk()
    talk.question()
    talk.turns.end()
    talk.frame()
    assert not talk.turns.begin(False)  # the same turn of the user goes on
    for _ in range(30):
        talk.frame(BOS)
    assert talk.events == []
    assert BOS not in talk.ids


@pytest.mark.parametrize("when", ["settling", "agent"])
def test_end_turn_needs_the_users_turn(when: str) -> None:
    talk = Talk()
    talk.question()
    talk.turns.end()
    if when == "agent":
        talk.until(TurnOpened)
    with pytest.raises(InputError, match=when):
        talk.turns.end()
    with pytest.raises(InputError, match=when):
        talk.turns.open()


def test_interrupt() -> None:
    talk = Talk()
    answer(talk)
    talk.turns.interrupt()
    at = talk.frames
    assert talk.until(TurnClosed) == TurnClosed(at + 2, CloseReason.INTERRUPTED)
    assert talk.ids[at] == EOS
    talk.turns.interrupt()
    talk.frame()
    assert talk.ids[-1] == EOS


def test_interrupt_in_a_cycle() -> None:
    talk = opened(tools=True)
    talk.frame(cycle=True, called=True)
    talk.turns.interrupt(True)
    at = talk.frames
    for _ in range(6):
        talk.frame(WORD)
    assert talk.ids[at:] == [EOS, PAD, PAD, PAD, WORD, WORD]


def test_interrupt_while_it_settles() -> None:
    talk = Talk()
    talk.question()
    talk.turns.end()
    talk.turns.interrupt()
    for _ in range(30):
        talk.frame()
    assert BOS not in talk.ids


# -- watchdogs ---------------------------------------------------------------------------------------------------------


def opened(**options: bool | int | None) -> Talk:
    talk = Talk(**options)
    talk.question()
    talk.turns.end()
    talk.until(TurnOpened)
    return talk


def test_no_text() -> None:
    talk = opened()
    at = talk.frames
    assert talk.until(TurnClosed, dbfs=LOUD) == TurnClosed(at + 29 + 25, CloseReason.NO_TEXT)
    assert talk.ids.index(EOS) == at + 29  # the frame of BOS is the first of the thirty
    spared = opened()
    spared.frame(function=True)
    for _ in range(60):
        spared.frame(dbfs=LOUD)
    assert EOS not in spared.ids


def test_no_audio() -> None:
    talk = opened()
    at = talk.frames
    closed = talk.until(TurnClosed, own=WORD)
    assert isinstance(closed, TurnClosed)
    assert closed.reason == CloseReason.NO_AUDIO
    assert talk.ids.index(EOS) == at + 29


def test_decoded_silence() -> None:
    talk = opened()
    talk.frame(WORD, dbfs=LOUD)
    at = talk.frames
    for _ in range(10):
        talk.frame(dbfs=DEAD)
    talk.frame(WORD, dbfs=DEAD)
    closed = talk.until(TurnClosed, dbfs=DEAD)
    assert isinstance(closed, TurnClosed)
    assert closed.reason == CloseReason.DECODED_SILENCE
    assert talk.ids.index(EOS) == at + 10 + 1 + 20


def test_longest_turn() -> None:
    talk = opened(longest_frames=50)
    at = talk.frames
    closed = talk.until(TurnClosed, own=WORD, dbfs=LOUD)
    assert isinstance(closed, TurnClosed)
    assert closed.reason == CloseReason.LONGEST_TURN
    assert talk.ids.index(EOS) == at + 49


def test_a_cycle_is_no_silence() -> None:
    talk = opened(tools=True)
    for _ in range(200):
        talk.frame(cycle=True)
    assert EOS not in talk.ids


def test_a_model_that_owns_its_turns_has_no_watchdogs() -> None:
    talk = Talk(application=False, emitted=True)
    assert talk.frame(BOS) == [TurnOpened(0, "what was said")]
    for _ in range(100):
        talk.frame()
    assert EOS not in talk.ids
    talk.frame(EOS)
    assert talk.until(TurnClosed) == TurnClosed(103, CloseReason.MODEL)


# -- a model that owns its turns ---------------------------------------------------------------------------------------


def test_it_is_not_held_back() -> None:
    talk = Talk(application=False)
    for own in (BOS, WORD, BOS, EOS, BOS):
        assert talk.turns.forced(False) == Forced()
        talk.frame(own)
    assert talk.ids == [BOS, WORD, BOS, EOS, BOS]
    assert talk.events == []


def test_a_turn_that_follows_at_once() -> None:
    talk = Talk(application=False, emitted=True)
    for own in (BOS, WORD, EOS):
        talk.frame(own, dbfs=LOUD)
    assert talk.frame(BOS) == [TurnClosed(2, CloseReason.MODEL), TurnOpened(3, "what was said")]


@pytest.mark.parametrize(("patience", "bos"), [(0, 15), (7, 22)])
def test_end_turn_with_patience(patience: int, bos: int) -> None:
    talk = Talk(application=False)
    talk.question()
    talk.turns.end(patience)
    assert talk.until(TurnOpened) == TurnOpened(bos, "what was said")
    own = Talk(application=False)
    own.question()
    own.turns.end(patience)
    own.frame()
    assert own.frame(BOS) == [TurnOpened(6, "what was said")]
    own.frame()
    assert own.zeros[-1] is False


def test_the_session_ends() -> None:
    talk = Talk()
    assert talk.turns.close(0) == []
    answer(talk)
    assert talk.turns.close(9) == [TurnClosed(9, CloseReason.ENDED)]


CALLS = st.sampled_from(["begin", "end", "open", "interrupt", "bos", "eos", "word", "loud", "pad", "spoke"])


@settings(deadline=None)
@given(st.lists(CALLS, max_size=80), st.booleans())
def test_any_order_of_things(calls: list[str], application: bool) -> None:
    """Openings and endings alternate, an application's turns have one BOS each, and closing never takes too long."""
    talk = Talk(application=application, emitted=True)
    closing = 0
    for call in calls:
        if call == "begin":
            talk.turns.begin(False)
        elif call == "interrupt":
            talk.turns.interrupt()
        elif call in ("end", "open"):
            if talk.turns.phase == Phase.USER:
                talk.turns.end() if call == "end" else talk.turns.open()
        else:
            own = {"bos": BOS, "eos": EOS, "word": WORD}.get(call, PAD)
            talk.frame(own, spoke=call == "spoke", dbfs=LOUD if call == "loud" else SILENT)
            closing = closing + 1 if talk.turns.phase == Phase.CLOSING else 0
            assert closing < 27
    kinds = [type(event) for event in talk.events if isinstance(event, TurnOpened | TurnClosed)]
    assert kinds[::2] == [TurnOpened] * len(kinds[::2])
    assert kinds[1::2] == [TurnClosed] * len(kinds[1::2])
    if application:
        assert talk.ids.count(BOS) == kinds.count(TurnOpened)
