"""Each invariant of a run can fail, so checking the invariants after every event is worth something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import makers
from desk import peer
from invariants import INVARIANTS, CheckedLedger, check_invariants
from rankwatch.shared.types import messages
from rankwatch.shared.types.trip import LeftOut
from rankwatch_monitor.decide.core.journal import Decided
from rankwatch_monitor.decide.core.ledger import Received
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import Outcome, RankState, Stall
from rankwatch_monitor.decide.core.run import Run
from rankwatch_monitor.decide.trip.skipped import SkippedStep
from rankwatch_monitor.decide.trip.verdict import Certainty, Verdict


def a_run() -> Run:
    """Three of its four ranks have connected, and one of them has tripped: an election waits for the others. One is on a step
    that another one has left out before."""
    ledger = CheckedLedger(Options(decision_window=60.0))
    for rank in range(3):
        ledger.handle(Received(peer(rank), makers.hello(rank, 4)), 0.0)
    left_out = replace(makers.trip(at=(1, 0, 7), step=1), left_out=LeftOut())
    ledger.handle(Received(peer(1), messages.Tripped(1, left_out)), 0.0)
    ledger.handle(Received(peer(0), messages.Tripped(1, makers.trip(at=(3, 0, 7)))), 0.0)
    return ledger.runs["train-0"]


def become(part: object, **changes: object) -> None:
    for name, value in changes.items():
        setattr(part, name, value)


def end(run: Run, **changes: object) -> None:
    run.ending.state = replace(run.ending.state, **changes)  # type: ignore[arg-type]


def verdict_of(run: Run) -> Verdict:
    found, _ = run.trips.election.hold(run.ranks, 99.0, final=True)
    assert found is not None
    return found


LOST = Decided(Outcome.LOST, "because", False)

SPOILED: dict[str, list[Callable[[Run], object]]] = {
    "ranks are known by their numbers, which lie in the world": [
        lambda run: run.ranks.update({3: run.ranks[1]}),
        lambda run: become(run, world_size=2),
    ],
    "the running ranks are those in that state": [
        lambda run: run.books.running.discard(1),
        lambda run: run.books.running.add(3),
        lambda run: setattr(run.ranks[1], "state", RankState.LOST),
    ],
    "an abort is unacknowledged by the running ranks that have not acknowledged it": [
        lambda run: run.ending.abort.unacknowledged.discard(1),
        lambda run: setattr(run.ranks[1], "acknowledged_at", 1.0),
    ],
    "a run that is over has an outcome": [lambda run: become(run.books, over=True)],
    "a report is published of a run that has an outcome": [lambda run: become(run.ending, is_published=True)],
    "ranks are sent an abort when one was decided": [
        lambda run: end(run, aborts=True),
        lambda run: run.ending.abort.begin(messages.Abort("because", 0, 0.0, 1.0), 0.0),
    ],
    "an abort that was decided leaves an outcome": [lambda run: end(run, aborts=True)],
    "an election is held when a rank has tripped": [
        lambda run: end(run, is_tripped=False),
        lambda run: setattr(run.trips.election, "target", None),
        lambda run: setattr(run.ranks[0], "trip", None),
    ],
    "a verdict names a rank that tripped, and aborts": [lambda run: become(run.books, verdict=verdict_of(run))],
    "a complete verdict rests on an answer of every rank": [
        lambda run: become(run.books, verdict=replace(verdict_of(run), certainty=Certainty.COMPLETE)),
        lambda run: become(run.books, verdict=replace(verdict_of(run), certainty=Certainty.COMPLETE, missing=())),
    ],
    "the ranks whose trip ends the run are known": [lambda run: run.trips.election.trips.update({1: makers.trip()})],
    "an election on a step that was left out waits for the ranks that may still trip earlier": [
        lambda run: run.skips.open[1, 0].election._waited_for.discard(3),
        lambda run: run.skips.open[1, 0].election._waited_for.add(1),
    ],
    "a step that was left out is told once": [
        lambda run: run.skips.told.update({(1, 0): SkippedStep(1, verdict_of(run))}),
    ],
    "a close-up is of a rank that tripped": [
        lambda run: setattr(run.ranks[1], "closeup", makers.closeup()),
        lambda run: setattr(run.ranks[1], "closeup_due", 9.0),
    ],
    "an election waits for the ranks that may still trip earlier": [
        lambda run: run.trips.election._waited_for.discard(3),
        lambda run: run.trips.election._waited_for.add(0),
        lambda run: run.ranks[1].take(3, 3, 0, 9),
    ],
    "no failure is waived where the others are stopped": [lambda run: end(run, waived=LOST)],
    "no message is in the record before it was taken": [lambda run: setattr(run.ranks[1], "stored", 5)],
    "a stall is of ranks that connected": [
        lambda run: setattr(run.stalls.watch, "stall", Stall((3,), (), "rank 3 stalled", 1, 0))
    ],
}


def test_all_hold_of_a_run_and_of_one_that_is_decided() -> None:
    run = a_run()
    check_invariants(run)
    end(run, decided=LOST)
    run.books.over = True
    check_invariants(run)


@pytest.mark.parametrize(("name", "spoil"), [(name, spoil) for name, spoils in SPOILED.items() for spoil in spoils])
def test_each_can_fail(name: str, spoil: Callable[[Run], object]) -> None:
    run = a_run()
    spoil(run)
    assert not INVARIANTS[name](run)


def test_each_is_spoiled_here() -> None:
    assert SPOILED.keys() == INVARIANTS.keys()
