"""When backwards, steps and forwards are counted as a standstill. ``trainings/alone/still.py`` has the trainings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.replicas.standstill import BACKWARDS, TIMES, UNTRIED, USUAL, BackwardCount, SkippedForwards


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_as_many_backwards_as_before_are_no_standstill(accumulated: list[int]) -> None:
    found, batch = BackwardCount(), 0
    for backwards in accumulated:
        for _ in range(backwards):
            assert found.add(batch)
            assert not found.add(batch)  # a second backward of one batch
            batch += 1
        assert found.since == batch - backwards
        found.step()
        assert found.limit == max(BACKWARDS, TIMES * found.most)


def test_where_no_step_was_seen_more_backwards_may_come() -> None:
    found = BackwardCount()
    assert found.limit == UNTRIED
    for batch in range(UNTRIED):
        found.add(batch)
    found.allow()
    assert found.limit == TIMES * UNTRIED


def skips(*events: int, after: int = USUAL) -> list[tuple[int, int]]:
    """``events``: a batch's forward, or, negative, its backward. Before, ``after`` batches had both."""
    found, said = SkippedForwards(), []
    for event in [*(one for batch in range(1, after + 1) for one in (batch, -batch)), *events]:
        if event < 0:
            found.backward(-event)
        elif found.forward(event):
            said.append((found.first, found.count))
    return said


N = USUAL + 1


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((N, N + 1, -N - 1, N + 2, -N - 2), [(N, 1)]),
        ((N, N + 1, -N - 1, N + 2, N + 3, -N - 3, N + 4), [(N, 1), (N, 2)]),
        ((N, N + 1, -N - 1, -N, N + 2), []),  # one backward of two forwards
        ((N, N + 1, N + 2, -N - 2, -N - 1, -N, N + 3, -N - 3, N + 4), []),
        ((N, -N, N + 1), []),  # the last one has none yet
        ((N, N, -N, N + 1, -N - 1), []),
    ],
)
def test_a_forward_without_a_backward_is_known_after_the_next_ones(
    events: tuple[int, ...], said: list[tuple[int, int]]
) -> None:
    assert skips(*events) == said


def test_where_forwards_often_have_none_nothing_is_odd() -> None:
    assert skips(N, N + 1, -N - 1, N + 2, after=USUAL - 2) == []
