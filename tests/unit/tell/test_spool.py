"""The spool: bounded, in order, and it never drops a trip or a BYE."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.types import messages
from rankwatch.shared.types.notice import NoticeKind
from rankwatch.tell.spool import MOST, Spool


def add_batch(spool: Spool, number: int) -> None:
    spool.append(lambda seq: messages.Batch(seq, makers.summary(number)), makers.table())


def add_notice(spool: Spool, label: str, batch: int = 0) -> None:
    spool.append(lambda seq: messages.Noticed(seq, makers.notice(label=label, batch=batch)))


def numbers(spool: Spool) -> list[int]:
    return [spooled.message.seq for spooled in spool]


def test_due_messages_are_the_unsent_ones() -> None:
    spool = Spool()
    for batch in range(3):
        add_batch(spool, batch)
    spool.sent = 1
    assert [spooled.message.seq for spooled in spool.due()] == [2, 3]
    assert spool.is_behind
    spool.sent = 3
    assert (spool.due(), spool.is_behind, len(spool)) == ([], False, 3)
    spool.acknowledge(2)
    assert (numbers(spool), spool.wait_until_empty(0)) == ([3], False)
    spool.acknowledge(3)
    assert spool.wait_until_empty(0)
    add_batch(spool, 4)
    assert not spool.wait_until_empty(0)


def test_urgent_is_a_trip_that_was_not_sent() -> None:
    spool = Spool()
    spool.append(lambda seq: messages.Tripped(seq, makers.trip()))
    assert [message.seq for message in spool.urgent()] == [1]
    spool.sent = 1
    assert spool.urgent() == []


def test_only_batches_that_were_never_sent_count_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST, messages.Batch, 2)
    spool = Spool()
    for batch in range(4):
        add_batch(spool, batch)
        spool.sent = min(spool.sent + 1, 1)
    assert (numbers(spool), spool.dropped) == ([3, 4], 1)


def test_a_later_notice_of_the_same_reading_replaces_the_earlier_one() -> None:
    spool = Spool()
    for label, batch in (("output", 1), ("input[0]", 1), ("output", 2)):
        add_notice(spool, label, batch)
    spool.append(lambda seq: messages.Noticed(seq, makers.notice(NoticeKind.UNDERFLOW)))
    assert numbers(spool) == [2, 3, 4]


def test_notices_are_bounded_apart_from_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST, messages.Noticed, 2)
    spool = Spool()
    add_batch(spool, 0)
    for label in "abcb":
        add_notice(spool, label)
    assert [message.notice.label for s in spool if isinstance(message := s.message, messages.Noticed)] == ["c", "b"]
    assert (len(spool), spool.dropped) == (3, 0)


@given(st.lists(st.sampled_from(["batch", "trip", "a", "b", "c", "send", "let go"]), max_size=60), st.data())
def test_in_order_within_bounds_and_with_every_trip(steps: list[str], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MOST, messages.Batch, 3)
        patch.setitem(MOST, messages.Noticed, 2)
        spool, last, acknowledged = Spool(), 0, 0
        trips: list[int] = []
        for step in steps:
            if step == "send":
                spool.sent = data.draw(st.integers(spool.sent, last))
                continue
            if step == "let go":
                acknowledged = data.draw(st.integers(acknowledged, max(acknowledged, spool.sent)))
                spool.acknowledge(acknowledged)
                continue
            last += 1
            if step == "batch":
                add_batch(spool, last)
            elif step in "abc":
                add_notice(spool, step)
            else:
                spool.append(lambda seq: messages.Tripped(seq, makers.trip()))
                trips.append(last)
        kept = [spooled.message for spooled in spool]
        assert [message.seq for message in kept] == sorted({message.seq for message in kept})
        assert sum(isinstance(message, messages.Batch) for message in kept) <= 3
        assert sum(isinstance(message, messages.Noticed) for message in kept) <= 2
        assert {seq for seq in trips if seq > acknowledged} <= {message.seq for message in kept}
        assert all(message.seq > acknowledged for message in kept)
