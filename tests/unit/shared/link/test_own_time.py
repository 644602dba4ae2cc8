"""A loop's own time: what passes while the loop does not run does not count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.link.own_time import OwnTime

GAPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100)), max_size=50)
"""The length of a turn, and how long the process was stopped after it."""


@given(GAPS)
def test_of_each_gap_no_more_than_the_longest_turn_counts(gaps: list[tuple[int, int]]) -> None:
    now = 1000
    own = OwnTime(now)
    begun = read = own.read(now, 2)
    for turn, stopped in gaps:
        now += turn + stopped
        before, read = read, own.read(now, 2)
        assert min(turn, 2) <= read - before <= 2
    assert read - begun == sum(min(turn + stopped, 2) for turn, stopped in gaps)


@given(st.lists(st.integers(0, 2), max_size=50))
def test_a_loop_that_turns_has_the_time_of_the_clock(turns: list[int]) -> None:
    now = 1000
    own = OwnTime(now)
    for turn in turns:
        now += turn
        assert own.read(now, 2) == now


def test_a_clock_that_went_back_does_not_take_time_away() -> None:
    own = OwnTime(5.0)
    assert own.read(4.0, 1.0) == 5.0
    assert own.read(4.5, 1.0) == 5.5
