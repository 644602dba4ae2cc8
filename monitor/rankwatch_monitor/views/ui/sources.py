"""What charts are made of, read from a record in blocks; and what a list shows of a run beside its row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from rankwatch.shared.types.frame import FrameTable, Kind, State
from rankwatch.shared.types.notice import ZEROS

from ...decide.core.report import End
from ...record import replay
from ...record.numbers.digest import Columns
from ...record.numbers.layout import Array
from ...record.numbers.losses import RunLosses
from ...record.numbers.rows import BatchRange, Series
from ...record.reader import RunRecord
from ..jsonable import plain
from . import grids
from .by_rank import Curve, short
from .curves import BINS
from .grids import BAD

AT_ONCE = 32
"""Segments of digests that are taken together: few calls for many digests."""

MOST_ENVELOPES = 2000
"""Of many more envelopes than these, a chart of the gradients reads some: every second, every third, and so on."""

OF_GRID = "rank", "batch", "headroom", "bad"
"""The columns of a digest that the grid of ranks needs."""


SPARK, SPARK_SEGMENTS = 48, 16
"""Points of the small curve of a loss in a list of runs, and the segments of digests that are read for it, at most."""


NEWEST = 8
"""The newest envelopes in whose tables the root is looked for."""


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
    """Several series in one, in the order of the batches. A batch with SEEN_FINITE has no point: no line breaks there."""
    whole = Series(*(np.concatenate(column) for column in zip(*some, strict=True)))
    in_order = np.argsort(whole.batches, kind="stable")
    in_order = in_order[whole.states[in_order] != int(State.SEEN_FINITE)]
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


def sparks(record: RunRecord) -> list[list[tuple[int, float | None]]]:
    """Of each loss, its mean over the ranks in each of SPARK parts of the run; None: an inf or nan."""
    found = [digests for _, digests in record.some_segments(("batch", "loss", "table"), SPARK_SEGMENTS)]
    if not found:
        return []
    digests, losses = np.concatenate(found), RunLosses()
    losses.look(digests, record.table)
    first, last = int(digests["batch"].min()), int(digests["batch"].max())
    return [_spark((own["batch"] - first) * SPARK // (last - first + 1), own["loss"]) for _, own in losses.split(digests)]


def _spark(places: Array, numbers: Array) -> list[tuple[int, float | None]]:
    is_fine = np.isfinite(numbers)
    count, fine = np.bincount(places), np.bincount(places, is_fine)
    sums = np.bincount(places, np.where(is_fine, numbers, 0.0).astype(np.float64))
    return [(at, short(sums[at] / count[at]) if fine[at] == count[at] else None) for at in np.flatnonzero(count).tolist()]


def model_of(record: RunRecord) -> str:
    """The class of the model: of the root in the newest frame tables, that of a backward lacks it. Empty where there is none."""
    for number in dict.fromkeys(key.table for key in record.newest_envelopes(NEWEST)):
        for spec in record.table(number).specs:
            if not spec.module:
                return spec.module_class
    return ""


def cause_of(record: RunRecord) -> str:
    """Why a run ended, in a word: the verdict's cause, or what else ended it. Empty where its outcome says as much."""
    report = replay.restored(record).report()
    if report.verdict is not None:
        return report.verdict.cause.value
    says_more = report.end is not End.UNKNOWN and not report.outcome.value.startswith(report.end.value)
    return report.end.value if says_more else ""


def _rows_of_kinds(table: FrameTable, kinds: set[Kind]) -> list[int]:
    rows = [reading for spec in table.specs for reading in spec.readings]
    return [row for row, reading in enumerate(rows) if reading.kind in kinds and not reading.label.endswith(ZEROS)]
