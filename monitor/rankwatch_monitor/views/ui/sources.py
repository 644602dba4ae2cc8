"""What charts are made of, read from a record in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from rankwatch.shared.types.frame import FrameTable, Kind, State
from rankwatch.shared.types.notice import ZEROS

from ...record.numbers.digest import Columns
from ...record.numbers.layout import Array
from ...record.numbers.rows import BatchRange, Series
from ...record.reader import RunRecord
from ..jsonable import plain
from . import grids
from .by_rank import Curve
from .curves import BINS
from .grids import BAD

AT_ONCE = 32
"""Segments of digests that are taken together: few calls for many digests."""

MOST_ENVELOPES = 2000
"""Of many more envelopes than these, a chart of the gradients reads some: every second, every third, and so on."""

OF_GRID = "rank", "batch", "headroom", "bad"
"""The columns of a digest that the grid of ranks needs."""


class NewDigests:
    """These columns of the digests of a record that came since they were taken last."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._taken = 0, 0  # the last segment, and how many of its digests

    def take(self, record: RunRecord) -> Iterator[Array]:
        segment, taken = self._taken
        segments = record.segments(self._columns, since=segment)
        while some := list(islice(segments, AT_ONCE)):
            yield np.concatenate([digests[taken:] if number == segment else digests for number, digests in some])
            self._taken = max(self._taken, (some[-1][0], len(some[-1][1])))


def worst_rank(record: RunRecord, ranks: tuple[int, int], batches: BatchRange) -> int:
    """Which of these ranks came nearest to overflow in these batches; the first of them where none has any."""
    found: list[tuple[float, int]] = []
    for _, digests in record.segments(OF_GRID, batches=batches):
        is_here = (digests["batch"] >= batches[0]) & (digests["batch"] <= batches[1])
        here = digests[is_here & (digests["rank"] >= ranks[0]) & (digests["rank"] <= ranks[1])]
        if len(here):
            values = np.where(here["bad"] > 0, np.float32(BAD), here["headroom"])
            at = int(values.argmin())
            found.append((float(values[at]), int(here["rank"][at])))
    return min(found, default=(BAD, ranks[0]))[1]


def joined(some: Sequence[Series]) -> Series:
    """Several series in one, in the order of the batches."""
    whole = Series(*(np.concatenate(column) for column in zip(*some, strict=True)))
    in_order = np.argsort(whole.batches, kind="stable")
    return Series(*(column[in_order] for column in whole))


def gradients(record: RunRecord) -> list[Curve]:
    """The largest gradient of each batch: of a parameter, or where none is measured, of an output or input."""
    tables = record.tables()
    for kinds in ({Kind.GRADIENT}, {Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}):
        chosen = {number: _rows_of_kinds(table, kinds) for number, table in tables.items()}
        found = {number: rows for number, rows in chosen.items() if len(rows)}
        if not found:
            continue
        columns = {number: Columns(number, tables[number]) for number in found}
        largest: dict[int, float] = {}
        for part in record.extremes(None, columns, most=MOST_ENVELOPES):
            highs, states = part.abs_max[:, found[part.table]], part.states[:, found[part.table]]
            is_bad = (states == int(State.INF)) | (states == int(State.NAN))
            high = np.where(is_bad, np.inf, np.where(states == int(State.FINITE), highs, 0.0)).max(axis=1)
            for batch, number in zip(part.batches.tolist(), high.tolist(), strict=True):
                largest[batch] = max(largest.get(batch, 0.0), number)
        batches, numbers = np.array(sorted(largest)), np.array([largest[batch] for batch in sorted(largest)])
        states = np.where(np.isinf(numbers), int(State.INF), int(State.FINITE)).astype(np.uint8)
        thin = grids.thinned(Series(batches, numbers, numbers, states), BINS)
        name = "of a parameter" if Kind.GRADIENT in kinds else "of an output or input"
        points = [[one.batch, plain(one.abs_max), None] for one in thin]
        return [Curve(name, None, points)] if points else []
    return []


def _rows_of_kinds(table: FrameTable, kinds: set[Kind]) -> list[int]:
    rows = [reading for spec in table.specs for reading in spec.readings]
    return [row for row, reading in enumerate(rows) if reading.kind in kinds and not reading.label.endswith(ZEROS)]
