"""Notices in the ledger: each is counted once, and their number is bounded."""

from __future__ import annotations

from dataclasses import replace

import makers
from desk import connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.notice import Notice, NoticeKind
from rankwatch_monitor.decide.core.notices import MAX_NOTICES, Notices, told
from rankwatch_monitor.views.text import noticed as noticed_lines


def noticed(seq: int, kind: NoticeKind = NoticeKind.HEADROOM, **changes: object) -> messages.Noticed:
    return messages.Noticed(seq, makers.notice(kind, **changes))


def test_a_notice_is_told_once_and_its_last_word_is_kept_of_each_rank() -> None:
    desk = connected(2)
    desk.receive(0, noticed(1, value=100.0), noticed(2, value=200.0))
    desk.receive(1, noticed(1, value=300.0))
    notes = [note for note in desk.notes if "next to overflow" in note]
    assert len(notes) == 1
    assert notes[0].startswith("run train-0: rank 0 of 2 (node0, local rank 0): next to overflow: layer (Linear), output: ")
    desk.end()
    assert [(rank, notice.value) for rank, notice in desk.reports[-1].notices] == [(1, 300.0), (0, 200.0)]


def test_a_notice_is_acknowledged_by_the_next_beat_and_counts_once() -> None:
    desk = connected(1)
    desk.receive(0, noticed(4, value=1.0), noticed(4, value=2.0), makers.beat(0, 0, 1))
    assert desk.sent(0, messages.Ack) == [messages.Ack(4, abort=False, handled=4)]
    desk.end()
    assert [notice.value for _, notice in desk.reports[-1].notices] == [1.0]


def test_notices_are_bounded_and_further_ones_are_counted() -> None:
    desk = connected(2)
    for number in range(MAX_NOTICES + 3):
        desk.receive(number % 2, noticed(number + 1, module=f"m{number}"))
    desk.receive(0, noticed(9999, module="m0", value=77.0))  # a notice that found room is still updated
    desk.end()
    report = desk.reports[-1]
    assert (len(report.notices), report.notices_unkept) == (MAX_NOTICES, 3)
    assert 77.0 in {notice.value for _, notice in report.notices}


def test_a_jump_that_follows_another_ones_is_not_told() -> None:
    desk = connected(3)
    jump = NoticeKind.JUMP
    desk.receive(1, noticed(1, jump, label="input[0]", batch=80))
    desk.receive(2, noticed(1, jump, label="input[0]", batch=80))
    desk.receive(0, noticed(1, jump, label="loss", batch=81))
    desk.receive(0, noticed(2, jump, label="loss", batch=200))
    desk.end()
    told = {(rank, notice.label, notice.batch) for rank, notice in desk.reports[-1].notices}
    assert told == {(1, "input[0]", 80), (2, "input[0]", 80), (0, "loss", 200)}


def test_ranks_that_stand_still_are_told_by_their_reason() -> None:
    desk = connected(4)
    old = replace(makers.notice(NoticeKind.NO_STEP, module="", label="the learning rate is 0"), value=32.0)
    for rank, why in enumerate(["no optimizer has stepped", "no optimizer has stepped", "a threshold"]):
        desk.receive(rank, messages.Noticed(1, replace(old, label="", why=why)))
    desk.receive(0, messages.Noticed(2, replace(old, label="", why="no optimizer has stepped", value=64.0)))
    desk.receive(3, messages.Noticed(1, old))  # as an older agent sends it
    assert len([note for note in desk.notes if "stands still" in note]) == 3
    desk.end()
    lines = list(noticed_lines(desk.reports[-1]).values())
    assert [line.partition(":")[0] for line in lines] == ["ranks 0-1 (worst", "rank 2", "rank 3"]
    assert [line.rpartition("), ")[2] for line in lines] == [
        "no optimizer has stepped",
        "a threshold",
        "the learning rate is 0",
    ]


def skipped(since: int, count: float = 1.0) -> Notice:
    return Notice(NoticeKind.SKIPPED, "", "Net", "backward", "", since, since, count, 0.0)


def test_a_skipped_batch_is_told_of_single_ranks_alone() -> None:
    """Not if all ranks skipped it, nor of a rank with further forwards; and not in the log, where others are not heard yet."""
    notices = Notices()
    assert not notices.take(1, skipped(30))
    assert [one.rank for one in told(notices.all(), {0: 59, 1: 59})] == [1]
    assert told(notices.all(), {0: 59, 1: 60}) == ()  # rank 1 had one forward more, to log something, say
    assert told(notices.all(), {1: 59}) == ()
    notices.take(0, skipped(30))
    assert told(notices.all(), {0: 59, 1: 59}) == ()
    notices.take(0, skipped(30, 2.0))
    assert [one.rank for one in told(notices.all(), {0: 59, 1: 59})] == [0, 1]
