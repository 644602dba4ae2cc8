"""Ranks whose owner kills them once their work is done: they have ended, and are not lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import PointLatest
from rankwatch_monitor.decide.core.ledger import Received
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import Outcome, RankState

LOST_AFTER = Options().lost_after


def beat(batch: int, phase: str = "idle", *, departed: bool = False) -> messages.Beat:
    return replace(makers.beat(batch, 0, 3, phase=phase), departed=departed)


def states(desk: Desk) -> list[RankState]:
    return [row.state for row in desk.run.report().ranks]


@pytest.mark.parametrize("phase", ["idle", "backward"])  # the last beat may be older than the last step
def test_workers_of_a_command_that_ended_well_have_ended_after_the_same_batch(phase: str) -> None:
    desk = connected(2)
    desk.receive((0, 1), beat(19, phase))
    desk.disconnect(1)
    desk.disconnect(0)
    desk.end(0)
    assert (states(desk), desk.reports[-1].outcome) == ([RankState.ENDED] * 2, Outcome.FINISHED)


@pytest.mark.parametrize(("exit_code", "batches"), [(1, (19, 19)), (0, (19, 18)), (0, (-1, -1))])
def test_workers_are_lost_if_the_command_failed_or_one_was_behind(exit_code: int, batches: tuple[int, int]) -> None:
    desk = connected(2)
    for rank, batch in enumerate(batches):
        desk.receive(rank, beat(batch))
        desk.disconnect(rank)
    desk.end(exit_code)
    assert RankState.LOST in states(desk)
    assert desk.reports[-1].outcome is Outcome.LOST


def test_a_rank_that_had_left_its_group_does_not_abort_the_save_of_another() -> None:
    desk = connected(2)
    desk.receive((0, 1), beat(19, departed=True))
    desk.disconnect(1)
    desk.keep_hearing(0, beat(19, departed=True), times=20, every=LOST_AFTER / 10)
    assert states(desk) == [RankState.RUNNING, RankState.ENDED]
    assert not desk.sent(0, messages.Abort)
    desk.leave(0, "finished")
    desk.end(0)
    assert desk.reports[-1].outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    "last",
    [beat(19), beat(19, "forward", departed=True), beat(18, departed=True)],
    ids=["with its group", "amid a forward", "behind the other"],
)
def test_a_rank_that_dies_otherwise_is_lost(last: messages.Beat) -> None:
    desk = connected(2)
    desk.receive(0, beat(19, departed=True))
    desk.receive(1, last)
    desk.disconnect(1)
    desk.keep_hearing(0, beat(19, departed=True), times=20, every=LOST_AFTER / 10)
    assert states(desk)[1] is RankState.LOST
    assert desk.sent(0, messages.Abort)


@pytest.mark.parametrize("others", ["unused", "ended"])
def test_a_model_that_no_rank_trained_while_another_one_was_has_no_report(others: str) -> None:
    desk = connected(2)
    desk.receive((0, 1), beat(19))
    desk.leave(0, "unused")
    desk.leave(1, others)
    desk.end(0)
    assert len(desk.reports) == (others == "ended")
    assert states(desk) == [RankState.FINISHED, RankState.FINISHED if others == "unused" else RankState.ENDED]
    assert any("dropped: no backward ever reached this model" in note for note in desk.notes) == (others == "unused")


def test_the_latest_run_is_the_model_that_was_trained_and_not_one_that_was_only_called() -> None:
    """A student that began before its teacher."""
    desk = Desk()
    for model in (0, 1):
        desk.handle(Received(b"model %d" % model, makers.hello(0, 1, model=model)))
    desk.handle(Received(b"model 1", messages.Bye(2, "unused", "")))
    desk.handle(Received(b"model 0", messages.Bye(2, "finished", "")))
    desk.take()
    desk.end(0)
    assert desk.asked(PointLatest) == [PointLatest("train-0")]
