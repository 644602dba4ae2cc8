"""Until when a stopped rank stays, and when its training counts as stuck, over a fake clock."""

from __future__ import annotations

from rankwatch.tell.departure import IDLE_SHARE, STUCK_AFTER, Leave, Stuck

GRACE = 10.0


def stopped() -> Leave:
    leave = Leave()
    leave.stop(GRACE, 100)
    return leave


def test_one_that_was_not_stopped_may_leave() -> None:
    leave = Leave()
    leave.hear_nothing()
    assert leave.left(0) == 0


def test_without_a_word_of_the_collector_it_stays_for_the_grace() -> None:
    leave = stopped()
    assert [leave.left(now) for now in (100, 104, 111)] == [10, 6, 0]


def test_a_collector_that_has_its_farewell_and_says_nothing_waits_for_nobody() -> None:
    leave = stopped()
    leave.hear_nothing()
    assert leave.left(100) == 0


def test_it_stays_as_long_as_it_is_told() -> None:
    leave = stopped()
    leave.tell(300, 101)
    leave.hear_nothing()
    assert leave.left(101) == 300
    leave.tell(0, 102)
    assert leave.left(102) == 0


def test_when_the_collector_is_gone_it_stays_for_the_grace_at_most() -> None:
    leave = stopped()
    leave.tell(300, 101)
    leave.lose(102)
    assert leave.left(102) == GRACE
    leave.tell(4, 103)
    leave.lose(104)
    assert leave.left(104) == 3


def test_a_training_that_waits_and_uses_no_core_is_stuck() -> None:
    stuck = Stuck()
    assert [stuck.look(now, 5.0, waits=True) for now in (0, STUCK_AFTER / 2, STUCK_AFTER)] == [False, False, True]


def test_one_that_computes_or_comes_back_is_not() -> None:
    stuck = Stuck()
    busy = [stuck.look(now, now, waits=True) for now in range(5)]
    assert busy == [False] * 5
    assert [stuck.look(now, 5.0, waits=now != 6) for now in (5, 5.9, 6, 6.1, 7, 7.2)] == [False] * 5 + [True]


def test_a_little_work_beside_it_is_that_of_other_threads() -> None:
    stuck = Stuck()
    assert [stuck.look(now, now * IDLE_SHARE, waits=True) for now in (0, 0.5, 1)] == [False, False, True]
