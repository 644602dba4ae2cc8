"""Close-ups over a fake clock: the abort never waits for one, the report waits for the culprit's, and not for long."""

from __future__ import annotations

from dataclasses import replace

import pytest

import makers
from desk import Desk
from rankwatch.shared import messages
from rankwatch.shared.trip import Trip
from rankwatch_monitor.decide.effects import Publish
from rankwatch_monitor.decide.options import Options
from rankwatch_monitor.decide.rank import CLOSEUP_MARGIN
from rankwatch_monitor.decide.report import RankState

FOUND = makers.closeup()
WITHIN = 5.0


def announced(frame: int = 0) -> Trip:
    return replace(makers.trip(at=(0, 0, frame)), closeup_within=WITHIN)


def decided(*, announces: bool = True) -> Desk:
    """Two ranks; rank 0 has tripped, and both have acknowledged the abort."""
    desk = Desk(Options(heartbeat=60.0))
    desk.connect(2)
    desk.receive(0, messages.Tripped(1, announced() if announces else makers.trip()))
    desk.receive(1, makers.beat(0, 0, 1))
    assert all(desk.sent(rank, messages.Abort) for rank in (0, 1))  # at once
    for rank in (0, 1):
        desk.receive(rank, messages.Ack(0, abort=True))
    return desk


def test_the_report_waits_for_the_closeup_that_was_announced() -> None:
    desk = decided()
    desk.wait(WITHIN)
    assert desk.reports == []
    desk.receive(0, messages.LookedCloser(2, FOUND))
    (report,) = desk.reports
    assert report.closeup == FOUND
    assert report.acknowledged_in == 0.0  # the abort did not wait


def test_the_report_does_not_wait_for_a_closeup_that_was_not_announced() -> None:
    (report,) = decided(announces=False).reports
    assert report.closeup is None


def test_the_report_waits_no_longer_than_announced_and_a_margin() -> None:
    desk = decided()
    desk.wait(WITHIN + CLOSEUP_MARGIN - 0.1)
    assert desk.reports == []
    desk.wait(0.2)
    (report,) = desk.reports
    assert report.closeup is None


def test_a_late_closeup_is_in_the_last_report() -> None:
    desk = decided()
    desk.wait(WITHIN + CLOSEUP_MARGIN + 0.1)
    desk.receive(0, messages.LookedCloser(2, FOUND), messages.Bye(3, "aborted", ""))
    desk.receive(1, messages.Bye(1, "aborted", ""))
    assert [(e.news, e.report.closeup) for e in desk.effects if isinstance(e, Publish)] == [(True, None), (False, FOUND)]


@pytest.mark.parametrize("outcome", ["aborted", "failed", "finished"])
def test_a_culprit_that_says_goodbye_sends_no_closeup_any_more(outcome: str) -> None:
    desk = decided()
    desk.receive(0, messages.Bye(2, outcome, "because"))
    (report,) = desk.reports
    assert report.closeup is None


def test_a_culprit_that_is_lost_sends_no_closeup_any_more() -> None:
    desk = Desk(Options(heartbeat=0.2))
    desk.connect(2)
    desk.receive(0, messages.Tripped(1, announced()))
    desk.receive(1, makers.beat(0, 0, 1), messages.Ack(0, abort=True))
    desk.disconnect(0)
    for _ in range(4):
        desk.wait(0.25)
        desk.receive(1, makers.beat(0, 0, 1))
    (report,) = desk.reports
    assert (report.closeup, report.ranks[0].state) == (None, RankState.LOST)
    assert desk.now < WITHIN


def test_the_end_of_the_job_ends_the_wait() -> None:
    desk = decided()
    desk.end(exit_code=1)
    assert desk.ledger.is_idle
    assert [report.closeup for report in desk.reports][:1] == [None]


def test_the_closeup_of_the_verdicts_rank_is_reported_and_no_other() -> None:
    desk = Desk(Options(heartbeat=60.0))
    desk.connect(2)
    own = makers.closeup(recurred=1)
    desk.receive(1, messages.Tripped(1, announced(frame=7)), messages.LookedCloser(2, FOUND))
    desk.receive(0, messages.Tripped(1, announced(frame=3)))
    for rank in (0, 1):
        desk.receive(rank, messages.Ack(0, abort=True))
    assert desk.verdict is not None
    assert desk.verdict.tripped == 0
    assert desk.reports == []  # rank 1's is here, and is not the one
    desk.receive(0, messages.LookedCloser(2, own))
    assert [report.closeup for report in desk.reports] == [own]


def test_a_closeup_that_comes_before_the_verdict_is_reported() -> None:
    desk = Desk(Options(heartbeat=60.0))
    desk.connect(2)
    desk.receive(0, messages.Tripped(1, announced()), messages.LookedCloser(2, FOUND))
    desk.receive(1, makers.beat(0, 0, 1))
    for rank in (0, 1):
        desk.receive(rank, messages.Ack(0, abort=True))
    assert [report.closeup for report in desk.reports] == [FOUND]


def test_the_first_closeup_counts_and_one_without_a_trip_does_not() -> None:
    desk = Desk(Options(heartbeat=60.0))
    desk.connect(2)
    desk.receive(1, messages.LookedCloser(1, FOUND))
    assert desk.ledger.runs["train-0"].ranks[1].closeup is None
    desk.receive(0, messages.Tripped(1, announced()), messages.LookedCloser(2, FOUND))
    desk.receive(0, messages.LookedCloser(3, makers.closeup(recurred=0)), messages.LookedCloser(2, makers.closeup(of=9)))
    assert desk.ledger.runs["train-0"].ranks[0].closeup == FOUND


def test_a_closeup_is_acknowledged_once_it_is_in_the_record() -> None:
    desk = decided()
    desk.take()
    desk.receive(0, messages.LookedCloser(2, FOUND))
    assert desk.sent(0, messages.Ack) == [messages.Ack(2, abort=False)]
