"""When an optimizer step was skipped. ``trainings/alone/engines.py`` has the trainings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.judge.steps.cadence import FRUITLESS, REPEATED, USUAL, Cadence


def trained(*steps: int, found: Cadence | None = None) -> Cadence:
    """``steps``: the batches whose gradients each step had."""
    found = found or Cadence()
    for batches in steps:
        batch(found, batches)
        found.step()
    return found


def batch(found: Cadence, times: int = 1) -> list[bool]:
    """Forwards with their backwards; a backward may reach a batch twice."""
    said = []
    for _ in range(times):
        said.append(found.forward())
        found.backward(found.batch + 1)
        found.backward(found.batch)
    return said


@given(st.integers(1, 8), st.integers(1, 5))
def test_a_forward_where_a_step_was_due_says_that_it_was_skipped(accumulated: int, skipped: int) -> None:
    found = trained(*[accumulated] * USUAL)
    for number in range(skipped):
        assert batch(found, accumulated) == [number > 0] + [False] * (accumulated - 1)
        found.is_told(found.batch)  # a gradient was bad
    assert found.forward()
    assert not found.forward()


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40))
def test_no_step_is_skipped_where_each_has_as_many_batches_as_the_last_or_fewer(steps: list[int]) -> None:
    found = Cadence()
    for batches in sorted(steps, reverse=True):
        assert not any(batch(found, batches))
        found.step()


def test_a_training_that_accumulates_irregularly_is_looked_at_a_few_times() -> None:
    found, looks = trained(*[2] * USUAL), 0
    for _ in range(10):
        looks += sum(batch(found, 4))
        found.step()
        trained(*[2] * USUAL, found=found)
    assert looks == FRUITLESS


@pytest.mark.parametrize(("bad", "told"), [((5, 6, 7), [5]), ((5, 5 + REPEATED, 6 + REPEATED), [5, 5 + REPEATED])])
def test_it_is_told_once_in_many_batches(bad: tuple[int, ...], told: list[int]) -> None:
    found = Cadence()
    assert [number for number in bad if found.is_told(number)] == told
    assert (found.first, found.skipped) == (5, len(bad))
