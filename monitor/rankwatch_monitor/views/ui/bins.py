"""Batches in bins, no more than a screen shows: the bins are wider the more batches there are. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...record.numbers.layout import Array


class Bins:
    """At most ``count`` bins; bin ``b`` has the ``step`` batches from ``first + b * step`` on."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.first, self.step = 0, 1
        self._low, self._high = 0, -1

    def of(self, batches: Array) -> Array:
        """The bins of these batches, for which there is room."""
        found: Array = (batches - self.first) // self.step
        return found

    @property
    def used(self) -> int:
        """How many bins there are up to the last batch."""
        return (self._high - self.first) // self.step + 1 if self._high >= self._low else 0

    def fit(self, low: int, high: int) -> Array | None:
        """Makes room for these batches. Returns the new bin of each old one; None: they are where they were."""
        is_empty = self._high < self._low
        self._low, self._high = (low, high) if is_empty else (min(low, self._low), max(high, self._high))
        step = self.step
        while self._high // step - self._low // step >= self.count:
            step *= 2
        first = self._low // step * step
        if (step, first) == (self.step, self.first):
            return None
        moved: Array = (self.first + self.step * np.arange(self.count) - first) // step
        self.step, self.first = step, first
        return None if is_empty else moved


def moved(before: Array, to: Array, fold: Any, empty: float) -> Array:
    """An array whose last axis are bins, in their new places; ``fold`` is the ufunc that joins two bins."""
    after = np.full_like(before, empty)
    fits = (to >= 0) & (to < before.shape[-1])
    fold.at(after.T, to[fits], before.T[fits])
    return after
