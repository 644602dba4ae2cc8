"""Which ranks stand first, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.replicas.desync import Desync, DesyncPattern
from rankwatch_monitor.views.roles import in_order


def shown(desk: Desk) -> list[tuple[int, str, bool]]:
    return [(one.row.rank, one.text, one.is_cause) for one in in_order(desk.run.report())]


def fail(desk: Desk, rank: int) -> None:
    desk.receive(rank, messages.Bye(1, "failed", "RuntimeError: Connection closed by peer"))
    desk.disconnect(rank)


def test_the_culprit_stands_before_those_that_went_bad_because_of_it() -> None:
    desk = connected(4)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(5, 0, 9))))
    desk.receive(2, messages.Tripped(1, makers.trip(at=(4, 0, 2))))
    desk.wait(5.0)
    assert desk.verdict is not None
    assert shown(desk)[:2] == [(2, "culprit", True), (0, "went bad too, in batch 5", False)]


def test_a_rank_that_was_lost_stands_before_those_that_failed_because_of_it() -> None:
    desk = connected(4)
    desk.disconnect(2)
    for rank in (0, 1, 3):
        fail(desk, rank)
    desk.wait(30.0)
    after = [(rank, "failed after rank 2", False) for rank in (0, 1, 3)]
    assert shown(desk) == [(2, "the first that was lost", True), *after]


def test_of_several_that_were_lost_the_first_to_die_stands_first() -> None:
    desk = connected(4)
    for rank in (3, 1, 0, 2):
        desk.disconnect(rank)
        desk.wait(0.1)
    desk.end(1)
    assert shown(desk)[:2] == [(3, "the first that was lost", True), (1, "lost after rank 3", False)]


def test_the_first_that_failed_is_the_cause_where_none_was_lost() -> None:
    desk = connected(3)
    for rank in (2, 0):
        fail(desk, rank)
    desk.receive(1, messages.Bye(1, "aborted", ""))
    desk.wait(1.0)
    assert shown(desk) == [(2, "the first that failed", True), (0, "failed after rank 2", False), (1, "", False)]


def test_a_healthy_run_has_no_roles_and_a_replica_that_differs_is_named() -> None:
    desk = connected(3)
    assert shown(desk) == [(0, "", False), (1, "", False), (2, "", False)]
    apart = Desync(9, "layers.3.weight", (1,), 3, DesyncPattern.ONE_RANK, "node0", "", 8, source="DDP")
    found = in_order(replace(desk.run.report(), desync=(apart,)))
    assert [(one.row.rank, one.text) for one in found] == [(1, "its replica differs"), (0, ""), (2, "")]
