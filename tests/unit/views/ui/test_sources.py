"""What the page reads from a record."""

from __future__ import annotations

import numpy as np

from rankwatch.shared.types.frame import State
from rankwatch_monitor.record.numbers.rows import Series
from rankwatch_monitor.views.ui.sources import joined


def series(*points: tuple[int, float, State]) -> Series:
    batches, highs, states = zip(*points, strict=True)
    return Series(np.array(batches), np.zeros(len(points)), np.array(highs), np.array(states, np.uint8))


def test_series_are_joined_in_the_order_of_batches_without_those_whose_numbers_were_not_measured() -> None:
    seen = State.SEEN_FINITE
    full = series((0, 1.0, State.FINITE), (3, 4.0, State.FINITE), (4, 0.0, State.EMPTY))
    between = series((1, 0.0, seen), (2, 9.0, State.INF), (5, 0.0, seen))
    found = joined([full, between])
    assert [found.batches.tolist(), found.abs_max.tolist()] == [[0, 2, 3, 4], [1.0, 9.0, 4.0, 0.0]]
    assert found.states.tolist() == [State.FINITE, State.INF, State.FINITE, State.EMPTY]
