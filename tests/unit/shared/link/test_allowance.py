"""A token bucket on a fake clock."""

from __future__ import annotations

from rankwatch.shared.link.allowance import Allowance


def test_what_is_spent_in_the_long_run_is_the_rate() -> None:
    allowance, spent = Allowance(0.05, 0.25), 0.0
    for turn in range(100_000):  # a flood: it is asked a thousand times a second
        if allowance.left(turn / 1000) > 0:
            allowance.spend(0.01)
            spent += 0.01
    assert 5.0 <= spent <= 5.0 + 0.25 + 0.02


def test_it_saves_no_more_than_the_burst_and_recovers() -> None:
    allowance = Allowance(1.0, 2.0)
    assert allowance.left(1000.0) == 1.0
    assert [allowance.take(1000.0) for _ in range(3)] == [True, True, False]
    assert not allowance.take(1000.5)
    assert allowance.take(1001.0)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    allowance = Allowance(1.0, 1.0)
    assert allowance.take(5.0)
    assert not allowance.take(4.0)
    assert allowance.take(6.0)
