"""Close-ups over a fake clock: the abort never waits for one, the report waits for the culprit's, and not for long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Trip
from rankwatch_monitor.decide.core.effects import Publish, Send
from rankwatch_monitor.decide.core.ledger import Tick
from rankwatch_monitor.decide.core.rank import CLOSEUP_MARGIN
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.decide.core.run import Run
from rankwatch_monitor.views.as_json import to_dict
from rankwatch_monitor.views.text import render_head

FOUND = makers.closeup()
WITHIN = 5.0


def announced(frame: int = 0) -> Trip:
    return replace(makers.trip(at=(0, 0, frame)), closeup_within=WITHIN)


def decided(*, announces: bool = True) -> Desk:
    """Two ranks; rank 0 has tripped, and both have acknowledged the abort."""
    desk = connected(2, heartbeat=60.0)
    desk.receive(0, messages.Tripped(1, announced() if announces else makers.trip()))
    desk.receive(1, makers.beat(0, 0, 1))
    assert all(desk.sent(rank, messages.Abort) for rank in (0, 1))  # at once
    desk.receive((0, 1), messages.Ack(0, abort=True))
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
    desk = connected(2, heartbeat=0.2)
    desk.receive(0, messages.Tripped(1, announced()))
    desk.receive(1, makers.beat(0, 0, 1), messages.Ack(0, abort=True))
    desk.disconnect(0)
    desk.keep_hearing(1, makers.beat(0, 0, 1), times=4, every=0.25)
    (report,) = desk.reports
    assert (report.closeup, report.ranks[0].state) == (None, RankState.LOST)
    assert desk.now < WITHIN


def test_the_end_of_the_job_ends_the_wait() -> None:
    desk = decided()
    desk.end(exit_code=1)
    assert desk.ledger.is_idle
    assert [report.closeup for report in desk.reports][:1] == [None]


def test_the_closeup_of_the_verdicts_rank_is_reported_and_no_other() -> None:
    desk = connected(2, heartbeat=60.0)
    own = makers.closeup(recurred=1)
    desk.receive(1, messages.Tripped(1, announced(frame=7)), messages.LookedCloser(2, FOUND))
    desk.receive(0, messages.Tripped(1, announced(frame=3)))
    desk.receive((0, 1), messages.Ack(0, abort=True))
    assert desk.decided.tripped == 0
    assert desk.reports == []  # rank 1's is here, and is not the one
    desk.receive(0, messages.LookedCloser(2, own))
    assert [report.closeup for report in desk.reports] == [own]


def test_a_closeup_that_comes_before_the_verdict_is_reported() -> None:
    desk = connected(2, heartbeat=60.0)
    desk.receive(0, messages.Tripped(1, announced()), messages.LookedCloser(2, FOUND))
    desk.receive(1, makers.beat(0, 0, 1))
    desk.receive((0, 1), messages.Ack(0, abort=True))
    assert [report.closeup for report in desk.reports] == [FOUND]


def test_the_first_closeup_counts_and_one_without_a_trip_does_not() -> None:
    desk = connected(2, heartbeat=60.0)
    desk.receive(1, messages.LookedCloser(1, FOUND))
    assert desk.run.ranks[1].closeup is None
    desk.receive(0, messages.Tripped(1, announced()), messages.LookedCloser(2, FOUND))
    desk.receive(0, messages.LookedCloser(3, makers.closeup(recurred=0)), messages.LookedCloser(2, makers.closeup(of=9)))
    assert desk.run.ranks[0].closeup == FOUND


def test_a_closeup_is_acknowledged_once_it_is_in_the_record() -> None:
    desk = decided()
    desk.take()
    desk.receive(0, messages.LookedCloser(2, FOUND))
    assert desk.sent(0, messages.Ack) == [messages.Ack(2, abort=False, handled=2)]


def test_a_collector_that_was_restarted_waits_for_the_closeup_too() -> None:
    first = decided()
    desk = Desk(first.options, now=1000.0)
    lag = desk.now - first.records["train-0"][-1].now
    entries = [entry._replace(now=entry.now + lag) for entry in first.records["train-0"]]
    desk.records["train-0"] = list(entries)
    desk.ledger.restore("train-0", entries, [], desk.now)
    desk.connect(2)
    desk.wait(1.0)
    assert desk.reports == []
    desk.receive(0, messages.LookedCloser(2, FOUND))
    assert [report.closeup for report in desk.reports] == [FOUND]


# --- at any moment ------------------------------------------------------------------------------------------------------

WORLD = 3
numbers = st.integers(0, WORLD - 1)
happenings = st.one_of(
    st.tuples(st.just("trips"), numbers, st.integers(0, 3).map(float)),
    st.tuples(st.just("looks closer"), numbers, st.just(0.0)),
    st.tuples(st.just("looks closer"), numbers, st.just(0.0)),
    st.tuples(st.sampled_from(["passes", "acknowledges", "leaves", "is cut off"]), numbers, st.just(0.0)),
    st.tuples(st.just("waits"), st.just(0), st.floats(0.0, 4.0)),
)


class Story:
    """A run in which things happen, with close-ups or without them."""

    def __init__(self, *, has_closeups: bool) -> None:
        self.desk = connected(WORLD)
        self._has_closeups = has_closeups
        self._seq = 0

    def tell(self, what: str, rank: int, number: float) -> None:
        self._seq += 1
        trip = makers.trip(at=(0, 0, int(number)))
        said: dict[str, messages.Message] = {
            "trips": messages.Tripped(self._seq, replace(trip, closeup_within=WITHIN) if self._has_closeups else trip),
            "passes": makers.beat(0, 0, 9),
            "acknowledges": messages.Ack(0, abort=True),
            "leaves": messages.Bye(self._seq, "aborted", ""),
        }
        closeup = messages.LookedCloser(self._seq, FOUND)
        said["looks closer"] = closeup if self._has_closeups else makers.beat(-1, 0, 0)  # the rank is heard in both
        if what in said:
            self.desk.receive(rank, said[what])
        elif what == "is cut off":
            self.desk.disconnect(rank)
        self.desk.now += number if what == "waits" else 0.0
        self.desk.handle(Tick())

    @property
    def run(self) -> Run:
        return self.desk.run

    @property
    def decided(self) -> tuple[object, ...]:
        """All that a close-up must not change."""
        verdict = self.run.verdict
        who = None if verdict is None else (verdict.tripped, verdict.cause, verdict.evidence, verdict.certainty)
        report = self.run.report()
        aborts = [e for e in self.desk.effects if isinstance(e, Send) and isinstance(e.message, messages.Abort)]
        return who, aborts, report.outcome, report.reason, report.acknowledged_in, [row.state for row in report.ranks]


@settings(derandomize=True, max_examples=100)
@given(st.lists(happenings, max_size=25))
def test_a_closeup_at_any_moment_changes_nothing_but_the_report(told: list[tuple[str, int, float]]) -> None:
    told = [("passes", 2, 0.0), *told]
    plain, looked = Story(has_closeups=False), Story(has_closeups=True)
    tripped_at: dict[int, float] = {}
    looked_at: set[int] = set()
    for what, rank, number in told:
        is_running = looked.run.ranks[rank].is_running
        plain.tell(what, rank, number)
        looked.tell(what, rank, number)
        if what == "trips" and is_running:
            tripped_at.setdefault(rank, looked.desk.now)
        if what == "looks closer" and rank in tripped_at:
            looked_at.add(rank)
        assert looked.decided == plain.decided
        verdict = looked.run.verdict
        culprit = None if verdict is None else looked.run.ranks[verdict.tripped]
        owes = (
            culprit is not None
            and culprit.is_running
            and culprit.number not in looked_at
            and looked.desk.now < tripped_at[culprit.number] + WITHIN + CLOSEUP_MARGIN
        )
        assert bool(looked.desk.reports) == (bool(plain.desk.reports) and not owes)
        if culprit is not None and culprit.number in looked_at and looked.desk.reports:
            assert looked.run.report().closeup == FOUND


def test_of_ranks_that_tripped_alike_the_fullest_closeup_is_told_and_whose_it_is() -> None:
    desk = connected(3, heartbeat=60.0)
    trip = replace(makers.trip(at=(3, 0, 1)), closeup_within=WITHIN)
    desk.receive(range(3), messages.Tripped(1, trip))
    assert (desk.decided.alike, desk.decided.tripped) == ((0, 1, 2), 0)
    desk.receive(range(3), messages.Ack(0, abort=True))
    desk.receive(0, messages.LookedCloser(2, CloseUp(note="out of memory")))
    assert desk.reports == []  # the others have yet to say what they found
    desk.receive(1, messages.LookedCloser(2, replace(FOUND, precision=(), capsule="")))
    desk.receive(2, messages.LookedCloser(2, replace(FOUND, capsule="/tmp/capsule")))
    (report,) = desk.reports
    assert (report.looked, report.closeup) == (2, replace(FOUND, capsule="/tmp/capsule"))
    report = replace(report, folder="runs/train-0")
    head = render_head(report)
    assert "  looked     rank 2 ran it again: of the ranks that tripped alike, its close-up is the fullest\n" in head
    assert head.endswith(f"  replay     rankwatch replay /tmp/capsule (on {report.ranks[2].host})\n")
    parsed = to_dict(report)["verdict"]
    assert (parsed["rank"], parsed["closeup"]["rank"]) == (0, 2)


def test_a_single_culprits_own_closeup_is_told_however_little_it_says() -> None:
    desk = connected(2, heartbeat=60.0)
    desk.receive(0, messages.Tripped(1, announced(0)))
    desk.receive(1, messages.Tripped(1, announced(4)))
    desk.receive(range(2), messages.Ack(0, abort=True))
    desk.receive(1, messages.LookedCloser(2, FOUND))
    desk.receive(0, messages.LookedCloser(2, CloseUp(note="out of memory")))
    (report,) = desk.reports
    assert (report.looked, report.closeup) == (0, CloseUp(note="out of memory"))
