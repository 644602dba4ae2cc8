"""Which rank or batch of a run a user means, and what its record knows of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankwatch.errors import UsageError
from rankwatch.shared import messages
from rankwatch.shared.cause import Trip
from rankwatch.shared.frame import FrameTable, Reading, State

from ..decide.report import RankRow, RankState, Report
from ..decide.verdict import name_spans
from ..record import kept
from ..record import reader as record
from ..record import replay as snapshot
from ..record.digest import NO_ROW
from ..record.kept import Spanned, Told
from ..record.store import FILE
from .near import BatchCloseup, PartDigest, Place, RankCloseup, SpanFrame, SpanReading

LAST_BATCHES = 10
"""Of a rank, whose digests are shown."""


def of_rank(run: Path, rank: int) -> RankCloseup:
    """What is known of a rank of the run in this folder.

    Raises:
        UsageError: the run has no such rank.
        StoreError: it has no record that can be read.
    """
    report, is_over = snapshot.take(run)
    row = _row(report, rank)
    path = run / FILE
    standings = [] if is_over else record.read_standings(path).ranks
    standing = next((standing for standing in standings if standing.rank == rank), None)
    parts = list(_digests(kept.last_told(path, rank, LAST_BATCHES)))
    return RankCloseup(report, row, standing, _trip(path, rank), parts, record.kept_batches(path, rank))


def of_batch(run: Path, batch: int, rank: int | None) -> BatchCloseup:
    """What is known of a batch of a rank, or of the culprit's rank, or of rank 0. Raises as ``of_rank`` does.

    Raises:
        UsageError: nothing is known of the batch.
    """
    report, _ = snapshot.take(run)
    if rank is None:
        rank = report.verdict.rank if report.verdict else 0
    row = _row(report, rank)
    path = run / FILE
    frames = record.read_batch(path, rank, batch)
    by_trip = [frame for part in kept.read_tripped(path, rank) if part.batch == batch for frame in part.frames()]
    spans = [] if frames or by_trip else [frame for span in kept.read_spanned(path, batch) for frame in _span_frames(span)]
    parts = list(_digests(kept.told_of(path, rank, batch)))
    batches = record.kept_batches(path, rank)
    if not (frames or by_trip or spans or parts):
        raise UsageError(f"nothing is on record of batch {batch} of rank {rank}: {_why(row, batch, batches)}")
    return BatchCloseup(report, row, batch, parts, frames + by_trip, len(by_trip), batches, spans)


def _row(report: Report, rank: int) -> RankRow:
    if rank >= report.world_size:
        raise UsageError(f"no rank {rank}: run {report.run} has ranks 0 to {report.world_size - 1}")
    return report.ranks[rank]


def _why(row: RankRow, batch: int, batches: list[int]) -> str:
    if row.state is RankState.MISSING:
        return "this rank never connected"
    there = f"kept as sent are {name_spans(batches).partition(' ')[2]}" if batches else "none of this rank is kept as sent"
    return f"its last is batch {row.last_batch}; {there}" if batch > row.last_batch >= 0 else there


def _trip(path: Path, rank: int) -> Trip | None:
    """The last trip of the rank."""
    trips = [
        fact.trip
        for _, (_, by, fact) in record.read_events(path, "tripped")
        if isinstance(fact, messages.Tripped) and by == rank
    ]
    return trips[-1] if trips else None


def _digests(told: Told) -> Iterator[PartDigest]:
    """In the order of the batches."""
    names = told.digests.dtype.names or ()
    digests: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in told.digests.tolist()]
    for digest in sorted(digests, key=lambda digest: (digest["batch"], digest["first_frame"])):
        table = told.tables.get(digest["table"])
        nearest, first_bad = (_place(table, digest["first_frame"], digest[name]) for name in ("row", "bad_row"))
        yield PartDigest(
            **{
                name: digest[name]
                for name in ("batch", "step", "started", "ended", "first_frame", "frames", "headroom", "bad")
            },
            nearest=nearest,
            first_bad=first_bad,
        )


def _place(table: FrameTable | None, first_frame: int, row: int) -> Place | None:
    """The row of this number in a table of a part that begins with that frame."""
    if table is None or row >= table.rows:  # NO_ROW is
        return None
    for frame, spec in enumerate(table.specs, first_frame):
        if row < len(spec.readings):
            return Place(frame, spec, spec.readings[row])
        row -= len(spec.readings)
    return None


def _span_frames(span: Spanned) -> Iterator[SpanFrame]:
    envelope = span.envelope
    columns = (envelope.low, envelope.high, envelope.state, envelope.low_rank, envelope.high_rank, envelope.state_rank)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for frame, spec in enumerate(span.table.specs, span.first_frame):
        readings = []
        for of, (low, high, state, *ranks) in zip(spec.readings, rows, strict=False):
            by_low, by_high, by_state = (None if rank == NO_ROW else rank for rank in ranks)
            low, high = (math.nan if by is None else value for value, by in ((low, by_low), (high, by_high)))
            # No rank's nan is an extreme, but as a reading it outdoes them all.
            high = math.nan if state == State.NAN else high
            readings.append(
                SpanReading(Reading(of.label, of.kind, of.dtype, low, high, State(state)), by_low, by_high, by_state)
            )
        yield SpanFrame(frame, spec, envelope.ranks, tuple(readings))
