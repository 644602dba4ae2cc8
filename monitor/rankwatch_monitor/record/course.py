"""Looks in a record for how its run went: in a bounded part of its digests, and in its first and last envelopes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from rankwatch.shared.types.frame import NARROW_DTYPES

from ..decide.ending.course import Course, GrownReading, LossAt, LossCourse, NearestReading
from ..decide.ending.judgement import Signs, signs_of
from .judged import read_numbers
from .numbers.headroom import Readings, choose
from .numbers.layout import Array
from .numbers.losses import RunLosses
from .reader import RunRecord
from .store import SEGMENT

HEAD, MOST_SEGMENTS = 4, 9
"""Segments of digests in which the beginning is looked for, and at most the end: the last two batches of all ranks."""

SEGMENTS = 256
"""The newest segments of digests in which the nearest reading is looked for: a million parts of batches."""

PARTS, KINDS = 512, 8
"""The newest envelopes that are looked at, and the kinds of parts among them."""

LEAST_GROWTH = 1.05
"""A smaller factor is not told."""

_FIRST = ("rank", "batch", "first_frame", "loss", "ended", "step", "table")


def find_course(record: RunRecord, world_size: int) -> Course:
    """Raises StoreError."""
    first, last = _ends(record, world_size)
    losses, pace = _losses(record, first, last), _pace(first, last)
    steps = _steps(first, last)
    return Course(
        seconds=max(0.0, record.last_heard() - record.began()),
        pace=pace,
        first_loss=losses[0].first if losses else None,
        last_loss=losses[0].last if losses else None,
        nearest=_nearest(record),
        grown=_grown(record),
        steps=steps,
        losses=losses,
        signs=signs_of(read_numbers(record, steps), pace),
        began=record.began(),
    )


def find_signs(record: RunRecord, world_size: int) -> Signs:
    """What the numbers of a run say so far. Raises StoreError."""
    first, last = _ends(record, world_size)
    return signs_of(read_numbers(record, _steps(first, last)), _pace(first, last))


def _steps(first: Array, last: Array) -> int | None:
    return int(last["step"].max()) - int(first["step"].min()) if len(first) and len(last) else None


def pace_over_all(record: RunRecord, world_size: int) -> float | None:
    """Batches a second from the first batch to the last one; None: not known. Raises StoreError."""
    return _pace(*_ends(record, world_size))


def _ends(record: RunRecord, world_size: int) -> tuple[Array, Array]:
    """The first digests, with the columns _FIRST, and the last ones."""
    head = [digests for _, digests in islice(record.segments(_FIRST), HEAD)]
    first = np.concatenate(head) if head else np.zeros(0, [(name, np.float64) for name in _FIRST])
    return first, record.newest_digests(min(MOST_SEGMENTS, 1 + -(-2 * world_size // SEGMENT)))


def _pace(first: Array, last: Array) -> float | None:
    """Of the rank that came furthest of those that are in both, by its own clock."""
    last = last[np.isin(last["rank"], first["rank"])]
    if not len(last):
        return None
    end = last[last["batch"].argmax()]
    own = first[first["rank"] == end["rank"]]
    if not len(own):
        return None
    begin = own[own["batch"].argmin()]
    seconds, batches = float(end["ended"] - begin["ended"]), int(end["batch"] - begin["batch"])
    return batches / seconds if batches > 0 and seconds > 0 else None


def _losses(record: RunRecord, first: Array, last: Array) -> tuple[LossCourse, ...]:
    known, both = RunLosses(), np.concatenate([first, last[list(_FIRST)]])
    known.look(both, record.table)
    found = known.split(both)
    return tuple([LossCourse(known.name(which), _loss(own, min), _loss(own, max), _is_shared(own)) for which, own in found])


def _is_shared(own: Array) -> bool:
    """Whether each step has several of these losses, if the steps are known."""
    steps = len(np.unique(own["step"]))
    return steps > 1 and 2 * len(np.unique(own["batch"])) >= 3 * steps


def _loss(own: Array, which: Callable[[list[int]], int]) -> LossAt:
    """``own``: digests that have a loss."""
    batch = which(own["batch"].tolist())
    own = own[own["batch"] == batch]
    own = own[np.argsort(own["first_frame"], kind="stable")]
    _, first = np.unique(own["rank"], return_index=True)  # of several losses in a batch, the first one
    return LossAt(int(batch), float(own["loss"][first].astype(np.float64).mean()), len(first))


def _nearest(record: RunRecord) -> NearestReading | None:
    """Only of dtypes that end so early that the headroom says something."""
    best: tuple[float, int, int, int, int] | None = None
    for digests in record.last_segments(("rank", "batch", "headroom", "row", "table"), SEGMENTS):
        named = digests[digests["table"] > 0]
        if len(named):
            at = named[named["headroom"].argmin()]
            if best is None or float(at["headroom"]) < best[0]:
                best = float(at["headroom"]), int(at["table"]), int(at["row"]), int(at["rank"]), int(at["batch"])
    if best is None or not np.isfinite(best[0]):
        return None
    headroom, number, row, rank, batch = best
    rows = [(spec, reading) for spec in record.table(number).specs for reading in spec.readings]
    if row >= len(rows) or rows[row][1].dtype not in NARROW_DTYPES:
        return None
    spec, reading = rows[row]
    times = 2.0 ** min(headroom, 1000.0)
    return NearestReading(
        spec.module, spec.module_class, spec.phase, reading.label, reading.dtype, times, rank, batch
    )  # fmt: skip


def _grown(record: RunRecord) -> GrownReading | None:
    best: GrownReading | None = None
    for newest, _ in choose(record.newest_envelopes(PARTS))[:KINDS]:
        oldest = record.oldest_envelope(newest)
        if oldest.batch >= newest.batch:
            continue
        readings = Readings(newest.table, record.table(newest.table))
        now, before = record.envelope(newest), record.envelope(oldest)
        growth = readings.growth(now, before)
        if not len(growth):
            continue
        row = int(growth.argmax())
        if growth[row] >= max(LEAST_GROWTH, best.last / best.first if best is not None else 0.0):
            spec, reading = readings.rows[row]
            first, last = float(before.high[row]), float(now.high[row])
            best = GrownReading(
                spec.module, spec.module_class, spec.phase, reading.label, oldest.batch, first, newest.batch, last
            )  # fmt: skip
    return best
