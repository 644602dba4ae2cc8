"""What memory a rank took, by its heartbeats."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import makers
from desk import connected
from rankwatch.shared.types.action import Action
from rankwatch_monitor.decide.core.ledger import RankExited
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.standing import standing_of_rank
from rankwatch_monitor.decide.ending.memory import GIB, MIB, MOST, MemoryTaken
from rankwatch_monitor.decide.next.next_action import next_action

LOST_AFTER = Options().lost_after


def memory(sizes: Sequence[float], apart: int = 10) -> MemoryTaken:
    taken = MemoryTaken()
    for number, size in enumerate(sizes):
        taken.take(number * apart, int(size))
    return taken


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([0.1 * GIB] + [0.4 * GIB + 80 * MIB * number for number in range(200)], "0.4 GiB -> 15.9 GiB, +8 MiB a batch"),
        ([0.4 * GIB, 0.4 * GIB, 2 * GIB, 2 * GIB, 2 * GIB, 2.1 * GIB], "2.1 GiB"),  # a cache, filled once
        ([0.4 * GIB] * 9, "0.4 GiB"),
        ([2 * GIB] * 20 + [0.1 * GIB], "2 GiB"),
        ([3 * MIB, 3 * MIB], "3 MiB"),
        ([0.4 * GIB], ""),  # before its first batch
        ([], ""),
    ],
)
def test_growth_is_told_where_it_lasts(sizes: Sequence[float], told: str) -> None:
    assert memory(sizes).describe() == told


def test_a_rank_of_many_batches_keeps_few_readings_and_its_first_one() -> None:
    taken = memory([GIB + MIB * number for number in range(5000)])
    assert len(taken._used) <= MOST
    assert (taken._used[0].batch, taken._used[-1].batch) == (10, 49990)


def test_while_it_runs_its_standing_has_its_memory_and_how_it_grows() -> None:
    desk = connected(2)
    for batch in range(1, 40):
        desk.receive(0, makers.beat(batch, 0, 1, memory=GIB))
        desk.receive(1, makers.beat(batch, 0, 1, memory=GIB + batch * 100 * MIB))
    steady, grows = (standing_of_rank(desk.run.ranks[rank], desk.now) for rank in (0, 1))
    assert (steady.memory, steady.device_memory, steady.leak) == (GIB, 0, "")
    assert grows.leak == "memory 1.1 GiB -> 4.81 GiB, +100 MiB a batch"


def test_a_rank_that_was_killed_as_it_had_grown_says_so_and_is_not_simply_started_again() -> None:
    desk = connected(2)
    for batch in range(1, 40):
        desk.receive(0, makers.beat(batch, 0, 1, memory=GIB))
        desk.receive(1, makers.beat(batch, 0, 1, memory=GIB + batch * 100 * MIB))
        desk.wait(0.5)
    desk.handle(RankExited("train-0", 1, makers.hello(1, 2).incarnation, "killed by SIGKILL"))
    desk.disconnect(1)
    desk.keep_hearing(0, makers.beat(40, 0, 1, memory=GIB), times=20, every=LOST_AFTER / 10)
    desk.leave(0, "aborted")
    desk.end(1)
    told = desk.reports[-1]
    assert "; memory 1.1 GiB -> 4.81 GiB, +100 MiB a batch" in told.reason
    advice = next_action(told)
    assert advice is not None
    assert advice.action is Action.STOP
    assert "keeps the tensors of earlier batches" in advice.reason
