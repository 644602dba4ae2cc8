"""Two models of the same processes are two runs: the verdict on one explains how the other one ended."""

from __future__ import annotations

from typing import Any

import pytest

import makers
from desk import Desk
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.ledger import Disconnected, Received
from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.decide.ending.rules import EXCUSED

STOPPED = "run job-0 of the same processes was stopped"


def peer(model: int, rank: int) -> bytes:
    return f"{model}-{rank}".encode()


def two_models(**of_second: Any) -> Desk:
    desk = Desk()
    for model in (0, 1):
        for rank in (0, 1):
            changes = {"job": "job", "model": model, "start": "one", **(of_second if model else {})}
            desk.handle(Received(peer(model, rank), makers.hello(rank, 2, **changes)))
    return desk


def trip(desk: Desk) -> None:
    """Rank 1 goes bad in the first model, and the run is aborted."""
    desk.handle(Received(peer(0, 1), messages.Tripped(1, makers.trip())))
    desk.wait(3.0)
    first, _ = desk.ledger.runs.values()
    assert first.report().outcome is Outcome.ABORTED


def leave(desk: Desk, model: int, rank: int, outcome: str, text: str = "") -> None:
    desk.handle(Received(peer(model, rank), messages.Bye(2, outcome, text)))
    desk.handle(Disconnected(peer(model, rank)))


def end_of_second(desk: Desk) -> tuple[Outcome, str]:
    _, second = desk.ledger.runs.values()
    return second.report().outcome, second.report().reason


@pytest.mark.parametrize("of_rank_0", ["failed", "aborted", "lost", "ended"])
def test_however_its_ranks_end_it_was_stopped_with_the_other_one(of_rank_0: str) -> None:
    desk = two_models()
    trip(desk)
    leave(desk, 1, 1, "aborted")
    if of_rank_0 == "lost":
        desk.handle(Disconnected(peer(1, 0)))
    else:
        leave(desk, 1, 0, of_rank_0, "RuntimeError: Connection closed by peer")
    desk.end(1)
    assert end_of_second(desk) == (Outcome.ABORTED, STOPPED)


def test_a_rank_that_fails_before_any_other_is_heard() -> None:
    desk = two_models()
    trip(desk)
    leave(desk, 1, 0, "failed", "RuntimeError: Connection closed by peer")
    desk.end(1)
    assert end_of_second(desk) == (Outcome.ABORTED, STOPPED)


def test_a_training_that_caught_the_abort_ends_for_reasons_of_its_own() -> None:
    desk = two_models()
    trip(desk)
    for _ in range(int(EXCUSED) + 1):
        for rank in (0, 1):
            desk.handle(Received(peer(1, rank), makers.beat(0, 0, 0)))
        desk.wait(1.0)
    leave(desk, 1, 0, "failed", "KeyError: 'label'")
    assert end_of_second(desk) == (Outcome.FAILED, "rank 0 of 2 (node0, local rank 0) failed: KeyError: 'label'")


def test_it_may_finish() -> None:
    desk = two_models()
    trip(desk)
    for rank in (0, 1):
        leave(desk, 1, rank, "finished")
    desk.end(0)
    assert end_of_second(desk) == (Outcome.FINISHED, "")


@pytest.mark.parametrize("other", [{"start": "two", "pid": 900}, {"start": "two", "host": "elsewhere"}])
def test_other_processes_are_left_alone(other: dict[str, Any]) -> None:
    desk = two_models(**other)
    trip(desk)
    leave(desk, 1, 0, "failed", "RuntimeError: Connection closed by peer")
    assert end_of_second(desk)[0] is Outcome.FAILED


def test_no_run_is_said_to_be_stopped_by_one_that_was_itself_only_stopped() -> None:
    desk = two_models()
    for rank in (0, 1):
        desk.handle(Received(peer(2, rank), makers.hello(rank, 2, job="job", model=2, start="one")))
    desk.handle(Received(peer(0, 1), messages.Tripped(1, makers.trip())))
    desk.wait(3.0)
    leave(desk, 1, 1, "aborted")
    desk.wait(1.0)
    leave(desk, 2, 0, "failed", "RuntimeError: Connection closed by peer")
    desk.end(1)
    assert [run.report().reason for run in desk.ledger.runs.values()][1:] == [STOPPED, STOPPED]
