"""How a run ends, rule by rule: whatever happens, in whatever order."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch_monitor.decide.core.journal import Decided
from rankwatch_monitor.decide.core.report import End, Outcome
from rankwatch_monitor.decide.ending.rules import EXCUSED, JUST_BEFORE, RULES, Ending, Incident, decide

Happened: TypeAlias = tuple[Incident, str, float]

TRIP: Happened = (Incident.TRIPPED, "", 1.0)
ELECTED: Happened = (Incident.ELECTED, "rank 1 overflowed", 2.0)
FAILED: Happened = (Incident.RANK_FAILED, "rank 2 failed", 3.0)
LOST: Happened = (Incident.RANKS_LOST, "rank 3 was lost", 3.0)
DIED: Happened = (Incident.RANK_DIED, "rank 3 was lost", 3.5)
ABSENT: Happened = (Incident.RANKS_ABSENT, "rank 1 never connected", 3.5)
BACK: Happened = (Incident.RANK_RETURNED, "", 5.0)
STALLED: Happened = (Incident.STALLED, "rank 4 stalled", 3.0)
LIMIT: Happened = (Incident.LIMIT_REACHED, "stopped after batch 9", 3.0)
SIGNAL: Happened = (Incident.JOB_INTERRUPTED, "SIGTERM", 3.0)
STOPPED: Happened = (Incident.JOB_STOPPED, "SIGTERM", 4.0)
EXITED: Happened = (Incident.JOB_FAILED, "1", 4.0)
COLLECTOR: Happened = (Incident.COLLECTOR_ENDED, "", 4.0)
ORPHANED: Happened = (Incident.ORPHANED, "torchrun has ended", 3.5)
LATE: Happened = (Incident.OUTLIVED, "", SIGNAL[2] + EXCUSED + 0.1)
ALL: Happened = (Incident.ALL_ENDED, "", 9.0)
ALL_ONE_LOST: Happened = (Incident.ALL_ENDED, "rank 3 ended without a word", 9.0)

GONE_ON = "the collector was ended while the run went on"


def after(*happened: Happened, abort_on_lost: bool = True) -> Ending:
    ending = Ending()
    for incident, text, now in happened:
        ending = decide(ending, incident, text, now, abort_on_lost=abort_on_lost)
    return ending


@pytest.mark.parametrize(
    ("happened", "outcome", "reason", "abort"),
    [
        ([TRIP, ELECTED], Outcome.ABORTED, "rank 1 overflowed", True),
        ([FAILED], Outcome.FAILED, "rank 2 failed", True),
        ([LOST], Outcome.LOST, "rank 3 was lost", True),
        ([STALLED], Outcome.STALLED, "rank 4 stalled", True),
        ([SIGNAL, STALLED], Outcome.STALLED, "rank 4 stalled", True),
        ([STOPPED], Outcome.ABORTED, "stopped by SIGTERM", False),
        ([EXITED], Outcome.FAILED, "the command ended with exit code 1", False),
        ([COLLECTOR], Outcome.LOST, GONE_ON, False),
        ([SIGNAL, STOPPED], Outcome.ABORTED, "stopped by SIGTERM", False),
        ([SIGNAL, ALL], Outcome.ABORTED, "stopped by SIGTERM", False),
        ([LIMIT, SIGNAL, ALL], Outcome.ABORTED, "stopped after batch 9", False),
        ([ALL], Outcome.FINISHED, "", False),
        ([ALL_ONE_LOST], Outcome.LOST, "rank 3 ended without a word", False),
        ([LIMIT, ALL_ONE_LOST], Outcome.ABORTED, "stopped after batch 9", False),
        # What was decided first stands, and during an election nothing else decides.
        ([FAILED, LOST, STALLED, STOPPED, EXITED, COLLECTOR, TRIP, ELECTED, ALL], Outcome.FAILED, "rank 2 failed", True),
        ([TRIP, FAILED, LOST, STALLED, STOPPED, EXITED, COLLECTOR, ELECTED], Outcome.ABORTED, "rank 1 overflowed", True),
        ([LIMIT, FAILED], Outcome.FAILED, "rank 2 failed", True),
        # Ranks that fail while a signal ends the job do so because of it.
        ([SIGNAL, FAILED, LOST, STOPPED], Outcome.ABORTED, "stopped by SIGTERM", False),
        ([SIGNAL, FAILED, LOST, ALL], Outcome.ABORTED, "stopped by SIGTERM", False),
        # But a signal that some ranks do not obey does not leave them waiting for the others.
        ([SIGNAL, FAILED, LOST, LATE], Outcome.FAILED, "rank 2 failed", True),
        ([SIGNAL, LOST, LATE], Outcome.LOST, "rank 3 was lost", True),
        ([SIGNAL, LOST, STOPPED, LATE], Outcome.ABORTED, "stopped by SIGTERM", False),
        ([ORPHANED], Outcome.LOST, "torchrun has ended", True),
        ([SIGNAL, ORPHANED, STOPPED], Outcome.ABORTED, "stopped by SIGTERM", True),
        ([FAILED, ABSENT], Outcome.FAILED, "rank 2 failed; rank 1 never connected", False),
        ([FAILED, DIED], Outcome.LOST, "rank 3 was lost; then rank 2 failed", False),
        ([STALLED, DIED], Outcome.STALLED, "rank 4 stalled", True),
        ([TRIP, ELECTED, DIED, SIGNAL], Outcome.ABORTED, "rank 1 overflowed", True),
    ],
)
def test_the_outcome(happened: list[Happened], outcome: Outcome, reason: str, abort: bool) -> None:
    decided = after(*happened).decided
    assert decided is not None
    assert decided == Decided(outcome, reason, abort, decided.end)


@pytest.mark.parametrize(
    ("happened", "end"),
    [
        ([TRIP, ELECTED], End.VERDICT),
        ([FAILED], End.FAILED),
        ([SIGNAL, FAILED, LATE], End.FAILED),
        ([EXITED], End.COMMAND),
        ([LOST], End.LOST),
        ([ALL_ONE_LOST], End.LOST),
        ([FAILED, DIED], End.LOST),
        ([ORPHANED], End.LOST),
        ([STALLED], End.STALL),
        ([(Incident.DESYNCED, "rank 1 differs", 3.0)], End.DESYNC),
        ([STOPPED], End.SIGNAL),
        ([SIGNAL, ALL], End.SIGNAL),
        ([SIGNAL, ORPHANED], End.SIGNAL),
        ([FAILED, (Incident.JOB_INTERRUPTED, "SIGINT", 4.0)], End.SIGNAL),
        ([LIMIT, ALL], End.LIMIT),
        ([(Incident.SIBLING_STOPPED, "train-0", 3.0), FAILED], End.SIBLING),
        ([(Incident.RELAUNCHED, "train-1 began", 9.0)], End.RELAUNCHED),
        ([COLLECTOR], End.UNWATCHED),
        ([ALL], End.FINISHED),
    ],
)
def test_why_it_ended(happened: list[Happened], end: End) -> None:
    decided = after(*happened).decided
    assert decided is not None
    assert decided.end is end


def test_each_end_has_a_rule() -> None:
    assert {rule.why for rule in RULES} == set(End) - {End.UNKNOWN}


@pytest.mark.parametrize(
    ("happened", "outcome", "reason"),
    [
        ([FAILED, LOST, ALL], Outcome.FAILED, "rank 2 failed"),
        ([LOST, FAILED, ALL_ONE_LOST], Outcome.LOST, "rank 3 was lost"),
        ([LOST, ALL], Outcome.FINISHED, ""),  # the rank came back
        ([LIMIT, FAILED, ALL], Outcome.ABORTED, "stopped after batch 9"),
        ([FAILED, TRIP, ELECTED], Outcome.ABORTED, "rank 1 overflowed"),
        ([FAILED, STOPPED], Outcome.ABORTED, "stopped by SIGTERM"),
    ],
)
def test_with_on_lost_wait_the_others_run_on(happened: list[Happened], outcome: Outcome, reason: str) -> None:
    assert after(*happened[:1], abort_on_lost=False).decided is None
    ending = after(*happened, abort_on_lost=False)
    assert (ending.outcome, ending.reason) == (outcome, reason)


@pytest.mark.parametrize(("first", "seconds", "follows"), [
    (FAILED, JUST_BEFORE, True), (LOST, JUST_BEFORE, True), (FAILED, JUST_BEFORE + 0.1, False), (STALLED, 0.0, False),
])  # fmt: skip
def test_a_signal_explains_what_ranks_did_just_before(first: Happened, seconds: float, follows: bool) -> None:
    ending = after(first, (Incident.JOB_INTERRUPTED, "SIGINT", first[2] + seconds))
    assert ending.reason == (f"stopped by SIGINT; just before, {first[1]}" if follows else first[1])
    assert ending.aborts


def test_a_run_that_was_over_by_a_loss_is_open_again_when_the_rank_returns() -> None:
    assert after(ALL_ONE_LOST, BACK, ALL).decided == Decided(Outcome.FINISHED, "", False, End.FINISHED)
    waived = [after(LOST, ALL_ONE_LOST, BACK, ALL_ONE_LOST, abort_on_lost=False)]
    assert waived[0].reason == "rank 3 ended without a word"
    for ending in (after(LOST, BACK), after(TRIP, ELECTED, BACK), after(FAILED, DIED, BACK)):
        assert ending.decided is not None  # an abort is not taken back


def test_ranks_that_fail_right_after_a_signal_stop_no_other() -> None:
    soon = (Incident.OUTLIVED, "", SIGNAL[2] + EXCUSED)
    assert after(SIGNAL, FAILED, LOST, soon).decided is None
    assert after(SIGNAL, LATE).decided is None  # all run on
    assert after(SIGNAL, LOST, LATE, abort_on_lost=False).decided is None


def test_every_incident_but_three_has_a_rule() -> None:
    noted = {Incident.TRIPPED, Incident.LIMIT_REACHED, Incident.SIBLING_STOPPED}  # these only change what the others decide
    assert {rule.incident for rule in RULES} == set(Incident) - noted


@given(st.lists(st.tuples(st.sampled_from(Incident), st.sampled_from(["", "text"]), st.floats(0, 5))), st.booleans())
def test_whatever_happens_an_abort_stays_and_all_ended_decides(happened: list[Happened], abort_on_lost: bool) -> None:
    ending = Ending()
    for incident, text, now in sorted(happened, key=lambda each: each[2]):
        before, ending = ending, decide(ending, incident, text, now, abort_on_lost=abort_on_lost)
        assert ending.aborts >= before.aborts
        assert ending.decided is not None or not ending.aborts
        assert not (ending.decided is not before.decided and before.aborts) or incident in (
            Incident.RANK_DIED, Incident.RANKS_ABSENT, Incident.JOB_INTERRUPTED,
        )  # fmt: skip
    assert decide(ending, Incident.ALL_ENDED, "", 9.0, abort_on_lost=abort_on_lost).decided is not None
