"""Bins against the batches that they were made for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankwatch_monitor.views.ui.bins import Bins, moved


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5000)), min_size=1, max_size=6))
def test_every_batch_stays_in_the_bin_that_has_it(spans: list[tuple[int, int]]) -> None:
    bins, largest = Bins(8), np.full(8, -1)
    for low, more in spans:
        to = bins.fit(low, low + more)
        if to is not None:
            largest = moved(largest, to, np.maximum, -1)
        batches = np.array([low, low + more])
        np.maximum.at(largest, bins.of(batches), batches)
    seen = [batch for low, more in spans for batch in (low, low + more)]
    assert bins.used <= 8
    assert bins.of(np.array(seen)).min() >= 0
    for at in range(8):
        first = bins.first + at * bins.step
        assert largest[at] == max((batch for batch in seen if first <= batch < first + bins.step), default=-1)
