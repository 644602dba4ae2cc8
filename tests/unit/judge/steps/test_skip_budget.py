"""How many steps may be left out: never more than N of any M in a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankwatch.judge.steps.skip_budget import SkipBudget
from rankwatch.shared.types.bad_step import OnBadStep


@given(st.integers(1, 4), st.integers(5, 12), st.lists(st.integers(0, 60), unique=True).map(sorted))
def test_no_window_has_more_than_it_may(most: int, of: int, bad: list[int]) -> None:
    budget = SkipBudget(OnBadStep(most, of))
    spent = [step for step in bad if budget.spend(step)]
    assert all(sum(first <= step < first + of for step in spent) <= most for first in spent)
    refused = set(bad) - set(spent)
    assert all(sum(step - of < one < step for one in spent) == most for step in refused)


def test_what_is_left_grows_again() -> None:
    budget = SkipBudget(OnBadStep(1, 10))
    assert (budget.spend(3), budget.left(3), budget.left(12), budget.left(13)) == (True, 0, 0, 1)
