"""Which batches the ranks of a run measure in full: what the collector proposes, and when it has them look closely."""

from __future__ import annotations

import pytest

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Moment
from rankwatch.shared.types.notice import Notice, NoticeKind
from rankwatch.shared.types.spent import Cost, Spent
from rankwatch.shared.types.tuning import Tuning
from rankwatch_monitor.decide.core.ledger import Received
from rankwatch_monitor.decide.pace.pace_desk import AT_FIRST, CLOSELY, WAIT, _ordinal

SIX, EIGHT = Cost(6, 0.07, 0.01, 1.0), Cost(8, 0.09, 0.01, 1.0)
ALL = Cost(1, why="its forward communicates")
SECOND = Spent(32, 0.1, 0.3, 0.5, 0.1)


def beat(batch: int, cost: Cost) -> messages.Beat:
    return messages.Beat(Moment(batch, batch, 0, 1), "forward", 0, 0, 1000.0, spent=SECOND, cost=cost)


def told(desk: Desk, rank: int = 0) -> list[Tuning]:
    return [tune.tuning for tune in desk.sent(rank, messages.Tune)]


def jump(batch: int, label: str = "loss") -> messages.Noticed:
    return messages.Noticed(batch, Notice(NoticeKind.JUMP, "", "Net", label, "float32", batch, batch, 900.0, 8.0))


def measured(desk: Desk) -> str:
    return desk.run.report().measured


def test_the_largest_k_of_all_ranks_holds_from_a_batch_that_none_has_come_to() -> None:
    desk = connected(3)
    desk.receive(0, beat(31, SIX))
    desk.receive(1, beat(33, EIGHT))
    desk.wait(1.0)
    assert told(desk) == []  # of rank 2, nothing is known yet
    desk.receive(2, beat(30, SIX))
    desk.wait(1.0)
    expected = Tuning(pace=8, pace_from=33 + 2 + 4)
    assert [told(desk, rank) for rank in range(3)] == [[expected]] * 3
    assert measured(desk) == AT_FIRST
    desk.receive(1, beat(39, EIGHT))
    assert measured(desk) == "every 8th batch since 39"
    desk.take()
    desk.receive(1, makers.hello(1, 3))  # it reconnects
    assert told(desk, 1) == [expected]


def test_ranks_that_say_nothing_are_not_awaited_for_long() -> None:
    desk = connected(2)
    desk.receive(0, beat(31, SIX))
    desk.keep_hearing([0, 1], makers.beat(31, 0, 1), times=20, every=(WAIT + 1.0) / 20)
    assert [tuning.pace for tuning in told(desk, 1)] == [6]


def test_one_rank_whose_batch_cannot_be_run_again_has_all_measure_each() -> None:
    desk = connected(2)
    desk.receive(0, beat(31, SIX))
    desk.receive(1, beat(31, ALL))
    desk.wait(1.0)
    assert [tuning.pace for tuning in told(desk)] == [1]
    assert measured(desk) == "every batch: its forward communicates (rank 1)"
    desk.take()
    desk.receive(1, jump(40))
    desk.wait(1.0)
    assert told(desk) == []


def test_something_odd_on_one_rank_has_all_look_closely_for_a_while() -> None:
    desk = connected(2)
    desk.receive([0, 1], beat(31, EIGHT))
    desk.wait(1.0)
    desk.take()
    desk.receive([0, 1], beat(130, EIGHT))
    desk.receive(1, jump(130))
    desk.wait(1.0)
    last = 130 + 2 + 4 + CLOSELY
    assert told(desk, 0) == told(desk, 1) == [Tuning(pace=8, pace_from=37, closely_until=last)]
    assert measured(desk) == "every 8th batch since 37; all of 130-130: the loss left its range on rank 1"
    desk.take()
    desk.receive(1, jump(140))  # the same again is no news
    desk.wait(1.0)
    assert told(desk) == []
    desk.receive([0, 1], beat(150, EIGHT))
    desk.receive(0, jump(150, "input[0]"))  # another one: one span
    desk.wait(1.0)
    desk.receive(0, beat(150 + CLOSELY + 100, EIGHT))
    assert measured(desk) == f"every 8th batch since 37; all of 130-{156 + CLOSELY}: the loss left its range on rank 1"


def test_what_is_odd_before_anything_was_proposed_is_looked_at_anyway() -> None:
    desk = connected(2)
    desk.receive(1, jump(10))
    desk.wait(1.0)
    desk.receive([0, 1], beat(31, EIGHT))
    desk.wait(1.0)
    desk.receive([0, 1], beat(40, EIGHT))
    assert measured(desk) == "every 8th batch since 37"


def test_an_every_that_was_given_for_all_ranks_leaves_no_budget() -> None:
    desk = connected(2, every=4)
    desk.receive([0, 1], beat(31, EIGHT))
    desk.wait(10.0)
    assert measured(desk) == ""
    desk = connected(2)
    desk.receive([0, 1], beat(31, EIGHT))
    desk.wait(1.0)
    desk.answers(Received(b"control", messages.Tune(tuning=Tuning(every=3))))
    assert desk.run.all_tuning == Tuning(every=3)
    assert measured(desk) == ""


@pytest.mark.parametrize(
    ("every", "words"),
    [(2, "second "), (3, "third "), (4, "4th "), (11, "11th "), (21, "21st "), (42, "42nd "), (53, "53rd ")],
)
def test_it_is_told_in_words(every: int, words: str) -> None:
    assert _ordinal(every) == words
