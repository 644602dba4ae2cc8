"""The standings of a run that the ledger sends to live views."""

from __future__ import annotations

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Show
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.core.standing import RunStanding


def last_shown(desk: Desk) -> Show:
    return desk.asked(Show)[-1]


def test_a_run_is_shown_once_a_heartbeat_and_at_its_end() -> None:
    desk = connected(2, ranks=[0], heartbeat=1.0)
    desk.receive(0, makers.beat(3, 0, 1))
    desk.wait(3)
    shown = [effect for effect in desk.take() if isinstance(effect, Show)]
    assert len(shown) == 3
    assert shown[-1].standing == RunStanding("train", 0, 2, 0, 0, None, False, heartbeat=1.0, waiting="")
    assert [(rank.rank, rank.batch) for rank in shown[-1].standings] == [(0, 3)]
    desk.connect(2, ranks=[1])
    desk.receive((0, 1), messages.Bye(1, "finished", ""))
    (end,) = [effect for effect in desk.take() if isinstance(effect, Show)]
    assert end.standing == RunStanding("train", 0, 2, 0, 0, Outcome.FINISHED, True, heartbeat=1.0, waiting="")
    assert {rank.state for rank in end.standings} == {RankState.FINISHED}
    desk.wait(3)
    assert not desk.take()


def test_each_rank_that_tripped_is_counted_once() -> None:
    desk = connected(3)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(1, 0, 0))), messages.Tripped(2, makers.trip(at=(1, 0, 1))))
    desk.receive(1, messages.Tripped(1, makers.trip(at=(1, 0, 0))))
    desk.end(exit_code=1)
    assert (last_shown(desk).standing.tripped, last_shown(desk).standing.outcome) == (2, Outcome.ABORTED)


def test_ranks_that_stall_are_counted_until_they_go_on() -> None:
    desk = connected(2, stall_after=10)
    for _ in range(13):
        for rank, batch in enumerate((7, 6)):
            desk.receive(rank, makers.beat(batch, 0, 0))
        desk.wait(1)
    assert last_shown(desk).standing.stalled == 1
    desk.receive((0, 1), makers.beat(8, 0, 0))
    desk.wait(2)
    assert last_shown(desk).standing.stalled == 0


def test_whom_an_election_waits_for_is_shown_and_noted_while_it_waits() -> None:
    desk = connected(4, heartbeat=1.0, decision_window=10.0)
    desk.take()
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 7))))
    desk.receive(2, makers.beat(3, 0, 8))
    desk.wait(1)
    desk.receive(1, makers.beat(3, 0, 8))
    desk.wait(1.5)
    waits = ["waiting for ranks 1, 3 to pass frame 7 of batch 3", "waiting for rank 3 to pass frame 7 of batch 3"]
    assert desk.notes[1:] == [f"run train-0: {text}" for text in waits]
    shown = [effect.standing.waiting for effect in desk.take() if isinstance(effect, Show)]
    assert list(dict.fromkeys(shown)) == waits
    desk.receive(3, makers.beat(3, 0, 8))
    desk.wait(1)
    assert (last_shown(desk).standing.waiting, last_shown(desk).standing.outcome) == ("", Outcome.ABORTED)


def test_the_heartbeat_that_is_shown_is_that_of_the_run() -> None:
    desk = connected(1, heartbeat=10.0)
    desk.wait(0.1)
    assert last_shown(desk).standing.heartbeat == 10.0


def test_a_lost_rank_that_returns_during_an_election_is_waited_for_again() -> None:
    desk = connected(3, heartbeat=1.0, decision_window=60.0, abort_on_lost=False)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 7))))
    desk.disconnect(2)
    desk.keep_hearing((0, 1), makers.beat(3, 0, 7), times=4, every=1)
    assert last_shown(desk).standing.waiting == "waiting for rank 1 to pass frame 7 of batch 3"
    desk.connect(3, ranks=[2])
    desk.wait(1)
    assert last_shown(desk).standing.waiting == "waiting for ranks 1, 2 to pass frame 7 of batch 3"
    desk.receive((1, 2), makers.beat(3, 0, 8))
    assert desk.decided.missing == ()
