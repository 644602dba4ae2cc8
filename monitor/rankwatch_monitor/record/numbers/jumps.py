"""Which readings of a rank left their own range: columns of numbers -> jumps. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .layout import Array

PAST = 32
"""Batches that a reading is compared with: its last ones in which it did not jump."""

LEAST, YOUNG = 3, 8
"""Without LEAST earlier numbers nothing is a jump; with fewer than YOUNG only a rise above all of them is."""

RISE, YOUNG_RISE = 3.0, 5.0
"""Doublings above the median of the past from which a number may be a jump."""

WEIGHT_RISE = 6.0
"""The same for a weight: after its first step away from zero it grows, step by step, and is measured every few of them."""

SPREADS = 6.0
"""It must also be this many times as far from the median as the past's numbers usually are."""

NEWEST, ABOVE, YOUNG_ABOVE = 8, 1.0, 3.0
"""And it must lie ABOVE doublings above the largest number of the past, and twice as far from the median as that. The NEWEST do
not count: a reading that grows for some batches before it explodes has a large last number. In a short past none is left out."""

PACE = 0.5
"""Doublings for each batch before it in which a reading was not measured: it may have grown by x1.41 in each, as outputs do that
grow until they overflow. Of a number K batches after the last one, less is no jump."""

SETTLED = 16
"""A reading that stays away for so many batches has a new range."""

SLOWLY = 4
"""Batches after which the median and the spread of a long past are computed again: they change slowly."""


class Jumps(NamedTuple):
    """For each batch and reading: whether it jumped, and its doublings above the median (nan: not known)."""

    jumped: Array
    rises: Array


def find_jumps(values: Array, is_weight: Array | None = None, batches_of: Array | None = None) -> Jumps:
    """The jumps of one rank.

    Args:
        values: log2 of the abs max of each reading (column) in each batch (row), in the order of the batches; inf where it was
            not finite, nan where it was zero or not measured.
        is_weight: the readings of parameters and buffers.
        batches_of: the number of each batch; None: they follow each other.
    """
    batches, readings = values.shape
    least = np.where(np.zeros(readings, bool) if is_weight is None else is_weight, WEIGHT_RISE, 0.0)
    jumped, rises = np.zeros(values.shape, bool), np.full(values.shape, np.nan, np.float32)
    past = np.full((readings, PAST), np.nan, np.float32)
    counts, away = np.zeros(readings, np.int64), np.zeros(readings, np.int64)
    # A single spike may be a fault; of those that came and went, the second largest is a number that this reading has.
    spike, largest, known = (np.full(readings, -np.inf, np.float32) for _ in range(3))
    range_ = _Range(past, counts)
    numbers = np.arange(batches) if batches_of is None else batches_of
    last_of = np.zeros(readings, np.int64)
    for at in range(batches):
        row = values[at]
        grown = np.where(counts > 0, PACE * np.maximum(numbers[at] - last_of - 1, 0), 0.0)
        if at <= YOUNG or at % SLOWLY == 0:
            range_ = _Range(past, counts)
        with np.errstate(invalid="ignore"):
            rises[at] = row - range_.centre
            is_high = rises[at] >= np.maximum(range_.rise, least) + grown
            is_high &= row >= np.maximum(range_.top, known + ABOVE) + grown
            is_away = is_high & (counts >= LEAST)
        jumped[at] = is_away
        is_over = (away > 0) & ~is_away & np.isfinite(row)
        known = np.where(is_over, np.maximum(known, np.minimum(largest, spike)), known)
        largest = np.where(is_over, np.maximum(largest, spike), largest)
        spike = np.where(is_over, -np.inf, np.where(is_away, np.fmax(spike, row), spike))
        last_of = np.where(np.isfinite(row), numbers[at], last_of)
        away = np.where(is_away, away + 1, np.where(np.isfinite(row), 0, away))
        taken = np.flatnonzero(np.isfinite(row) & (~is_away | (away > SETTLED)))
        past[taken, :-1] = past[taken, 1:]
        past[taken, -1] = row[taken]
        counts[taken] += 1
        # What was not finite before is no news, such as a mask of -inf: nothing is a jump until it was finite again.
        reset = np.flatnonzero(np.isposinf(row) & ~is_away)
        past[reset], counts[reset] = np.nan, 0
    return Jumps(jumped, rises)


class _Range:
    """The range of each reading: the median of its past, the rise above it that is a jump, and the least such number."""

    def __init__(self, past: Array, counts: Array) -> None:
        known = np.minimum(counts, PAST)
        middle = np.maximum(known - 1, 0)[:, None] // 2
        self.centre: Array = np.take_along_axis(np.sort(past, axis=1), middle, 1)[:, 0]
        distances = np.sort(np.abs(past - self.centre[:, None]), axis=1)
        spread = np.take_along_axis(distances, middle, 1)[:, 0]
        is_young = counts < YOUNG
        older = np.where(np.isnan(past), -np.inf, past)
        # Of few numbers the oldest half counts.
        place = np.arange(PAST) - (PAST - known[:, None])
        is_older = place < np.maximum(known - NEWEST, (known + 1) // 2)[:, None]
        top = np.where(is_young[:, None] | is_older, older, -np.inf).max(axis=1, initial=-np.inf)
        self.top: Array = top + np.where(is_young, YOUNG_ABOVE, ABOVE)
        far = np.maximum(SPREADS * spread, 2.0 * (top - self.centre))
        self.rise: Array = np.maximum(np.where(is_young, YOUNG_RISE, RISE), far)
