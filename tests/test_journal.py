"""The resume journal: numbers, acknowledgements, bounds, honest losses, tokens, the grace period."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_voicechat.server.journal import Attachment, Journal, JournalLost


def _filled(count: int, most_bytes: int = 10_000, size: int = 10) -> Journal:
    journal = Journal(most_bytes)
    for number in range(1, count + 1):
        assert journal.number() == number
        journal.write(number, f"{number:0{size}d}")
    return journal


def _numbers(journal: Journal, last_received: int) -> list[int]:
    return [entry.number for entry in journal.after(last_received)]


def test_a_client_gets_what_came_after() -> None:
    journal = _filled(5)
    assert _numbers(journal, 0) == [1, 2, 3, 4, 5]
    assert _numbers(journal, 3) == [4, 5]
    assert _numbers(journal, 5) == []
    assert journal.after(4)[0].text == "0000000005"


def test_what_is_acknowledged_is_dropped() -> None:
    journal = _filled(5)
    journal.acknowledge(3)
    assert (len(journal), journal.size_bytes) == (2, 20)
    assert _numbers(journal, 3) == [4, 5]
    journal.acknowledge(2)
    journal.acknowledge(99)
    assert len(journal) == 2
    with pytest.raises(JournalLost) as lost:
        journal.after(2)
    assert (lost.value.code, lost.value.last_received) == ("journal_gap", 2)


@pytest.mark.parametrize("number", [-1, 6])
def test_a_number_that_was_never_sent_is_a_gap(number: int) -> None:
    with pytest.raises(JournalLost) as lost:
        _filled(5).after(number)
    assert lost.value.code == "journal_gap"


def test_what_had_no_room_is_an_overflow_only_for_who_needs_it() -> None:
    journal = _filled(10, most_bytes=55)
    assert (len(journal), journal.size_bytes) == (5, 50)
    assert _numbers(journal, 5) == [6, 7, 8, 9, 10]
    with pytest.raises(JournalLost) as lost:
        journal.after(4)
    assert lost.value.code == "journal_overflow"


def test_an_event_larger_than_the_journal() -> None:
    journal = _filled(1, most_bytes=5)
    assert (len(journal), journal.size_bytes) == (0, 0)
    assert _numbers(journal, 1) == []
    with pytest.raises(JournalLost, match="journal_overflow"):
        journal.after(0)


def test_sizes_are_bytes_of_the_wire() -> None:
    journal = Journal()
    journal.write(journal.number(), "ü")
    assert journal.size_bytes == 2


STEPS = st.lists(st.tuples(st.sampled_from(["write", "acknowledge", "resume"]), st.integers(0, 60)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(1, 200))
def test_a_replay_is_complete_or_refused(steps: list[tuple[str, int]], most_bytes: int) -> None:
    journal, sent, acknowledged = Journal(most_bytes), 0, 0
    for what, number in steps:
        if what == "write":
            sent += 1
            journal.write(journal.number(), "x" * number)
        elif what == "acknowledge":
            acknowledged = max(acknowledged, number if number <= sent else 0)
            journal.acknowledge(number)
        else:
            try:
                replayed = _numbers(journal, number)
            except JournalLost:
                assert number > sent or number < acknowledged or number < sent - len(journal)
            else:
                assert replayed == list(range(number + 1, sent + 1))
        assert journal.size_bytes <= most_bytes
        assert journal.last_number == sent


def test_tokens_rotate_and_generations_count() -> None:
    attachment = Attachment()
    first = attachment.token
    assert first.startswith("rt_")
    assert len(first) > 30
    assert attachment.accepts(first)
    for forged in ("", first[:-1], first + "x", "\ud800", None, 7, first.encode()):
        assert not attachment.accepts(forged)
    second = attachment.attach()
    assert second != first
    assert (attachment.accepts(first), attachment.accepts(second), attachment.generation) == (False, True, 2)
    assert Attachment().token != Attachment().token


def test_the_grace_period_on_a_clock_of_ours() -> None:
    now = 100.0
    attachment = Attachment(grace_seconds=30, now=lambda: now)
    assert (attachment.detached, attachment.expired, attachment.expires_at) == (False, False, None)
    attachment.detach()
    now = 129.9
    attachment.detach()
    assert (attachment.detached, attachment.expired, attachment.expires_at) == (True, False, 130)
    now = 130.0
    assert attachment.expired
    attachment.attach()
    assert (attachment.detached, attachment.expired) == (False, False)
