"""A ledger that checks the invariants of each of its runs after every event."""

from __future__ import annotations

from collections.abc import Callable

from rankwatch_monitor.decide.core.effects import Effect
from rankwatch_monitor.decide.core.ledger import Event, Ledger
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.decide.core.run import Run
from rankwatch_monitor.decide.ending.rules import Situation
from rankwatch_monitor.decide.trip.election import Election
from rankwatch_monitor.decide.trip.verdict import Certainty, has_answered, is_waited_for, logical_time_of


def _waited_for(run: Run, election: Election) -> set[int]:
    """The ranks that an election must wait for, computed rank by rank."""
    assert election.target is not None
    return {
        number
        for number in election._unsure
        if number not in run.ranks or is_waited_for(run.ranks[number].witness(election.trips.get(number)), election.target)
    }


def _rests_on_all(run: Run) -> bool:
    verdict = run.verdict
    if verdict is None or verdict.certainty is Certainty.PARTIAL:
        return True
    target = logical_time_of(verdict.trip, run.ranks[verdict.tripped].hello.stage)
    trips = dict(verdict.all_tripped)
    answered = all(has_answered(rank.witness(trips.get(number)), target) for number, rank in run.ranks.items())
    return answered and len(run.ranks) == run.world_size and not verdict.missing and not verdict.uneven


INVARIANTS: dict[str, Callable[[Run], bool]] = {
    "ranks are known by their numbers, which lie in the world": lambda run: (
        all(rank.number == number for number, rank in run.ranks.items()) and run.ranks.keys() <= set(range(run.world_size))
    ),
    "the running ranks are those in that state": lambda run: (
        run.books.running == {number for number, rank in run.ranks.items() if rank.state is RankState.RUNNING}
    ),
    "an abort is unacknowledged by the running ranks that have not acknowledged it": lambda run: (
        run.ending.abort.unacknowledged
        == {number for number in run.books.running if run.ranks[number].acknowledged_at is None}
    ),
    "a run that is over has an outcome": lambda run: not run.over or run.ending.state.outcome is not None,
    "a report is published of a run that has an outcome": lambda run: (
        not run.ending.is_published or run.ending.state.outcome is not None
    ),
    "ranks are sent an abort when one was decided": lambda run: (
        (run.ending.abort.message is not None) == run.ending.state.aborts
    ),
    "an abort that was decided leaves an outcome": lambda run: (
        not run.ending.state.aborts or run.ending.state.outcome is not None
    ),
    "an election is held when a rank has tripped": lambda run: (
        (run.trips.election.target is not None) == run.ending.state.is_tripped
        and (not run.ending.state.is_tripped or run.trips.trips > 0)
    ),
    "a verdict names a rank that tripped, and aborts": lambda run: (
        run.verdict is None
        or (
            run.ranks[run.verdict.tripped].trip is not None
            and run.ending.abort.message is not None
            and (run.ending.state.is_tripped or bool(run.skips.stops))
        )
    ),
    "a complete verdict rests on an answer of every rank": _rests_on_all,
    "the ranks whose trip ends the run are known": lambda run: (
        run.trips.election.trips.keys() <= {number for number, rank in run.ranks.items() if rank.trip is not None}
    ),
    "an election on a step that was left out waits for the ranks that may still trip earlier": lambda run: all(
        ballot.verdict is not None or ballot.election._waited_for == _waited_for(run, ballot.election)
        for ballot in run.skips.open.values()
    ),
    "a step that was left out is told once": lambda run: not run.skips.open.keys() & run.skips.told.keys(),
    "a close-up is of a rank that tripped": lambda run: all(
        rank.trip is not None or (rank.closeup is None and rank.closeup_due < 0) for rank in run.ranks.values()
    ),
    "an election waits for the ranks that may still trip earlier": lambda run: (
        run.ending.state.situation is not Situation.ELECTION
        or run.trips.election._waited_for == _waited_for(run, run.trips.election)
    ),
    "no failure is waived where the others are stopped": lambda run: (
        run.ending.state.waived is None or not run.options.abort_on_lost
    ),
    "no message is in the record before it was taken": lambda run: all(r.stored <= r.seq for r in run.ranks.values()),
    "a stall is of ranks that connected": lambda run: (
        run.stalls.watch.stall is None or set(run.stalls.watch.stall.ranks) <= run.ranks.keys()
    ),
}


def check_invariants(run: Run) -> None:
    for name, holds in INVARIANTS.items():
        assert holds(run), f"run {run.id}: {name}"


class CheckedLedger(Ledger):
    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        for run in self.runs.values():
            check_invariants(run)
        return effects
