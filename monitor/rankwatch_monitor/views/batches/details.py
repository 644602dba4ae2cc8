"""One rank of a run, or one batch of a rank: what its record knows of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rankwatch.errors import UsageError
from rankwatch.shared.types import messages
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import Frame, FrameSpec, FrameTable, Reading, ReadingSpec, State
from rankwatch.shared.types.spent import NOT_SPENT, Spent
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.words.text import format_spans

from ...decide.core.report import RankRow, RankState, Report
from ...decide.core.standing import RankStanding
from ...decide.trip.skipped import is_left_out
from ...record import replay
from ...record.numbers.layout import NO_ROW
from ...record.numbers.rows import DigestBlock, EnvelopePart
from ...record.reader import RunRecord

M = TypeVar("M", messages.Tripped, messages.LookedCloser)

LAST_BATCHES = 10
"""Batches of a rank whose digests are shown."""


class DigestReading(NamedTuple):
    """A reading that a digest names."""

    frame: int
    spec: FrameSpec
    row: ReadingSpec


class PartDigest(NamedTuple):
    """The digest of a part of a batch.

    ``headroom`` is how many times ``nearest`` can double until it reaches its dtype's largest number (inf: all are zero).
    ``bad`` readings are inf or nan; ``first_bad`` is the first of them. Both are None if the frame table is not stored.
    ``norm`` is that of the gradients of the last optimizer step before the batch; ``memory`` is in MiB. NO_LOSS, NO_NORM and
    NO_MEMORY: not known.
    """

    batch: int
    step: int
    started: float
    ended: float
    first_frame: int
    frames: int
    headroom: float
    nearest: DigestReading | None
    bad: int
    first_bad: DigestReading | None
    loss: float
    norm: float
    memory: int


class SpanReading(NamedTuple):
    """A reading over all ranks, and the ranks with its extremes (None: no rank has a number) and with its state."""

    reading: Reading
    low_rank: int | None
    high_rank: int | None
    state_rank: int | None


class SpanFrame(NamedTuple):
    """A frame over all ``ranks`` that sent it."""

    frame: int
    spec: FrameSpec
    ranks: int
    readings: tuple[SpanReading, ...]


@dataclass(frozen=True, slots=True)
class RankDetails:
    """A rank. ``parts`` are of its last batches; ``stored`` are its batches that are stored as it sent them.

    ``closeup`` is what it found when it ran again what tripped in it; None: none has arrived. ``spent``: where its time
    went.
    """

    report: Report
    row: RankRow
    standing: RankStanding | None
    spent: Spent
    trip: Trip | None
    closeup: CloseUp | None
    parts: list[PartDigest]
    stored: list[int]


@dataclass(frozen=True, slots=True)
class BatchDetails:
    """A batch of a rank: its ``frames`` if they are stored; the last ``by_trip`` of them came with the rank's trip.

    ``stored`` are the rank's batches that are stored as it sent them. ``spans`` are the frames over all ranks, if this batch
    is not one of them.
    """

    report: Report
    row: RankRow
    batch: int
    parts: list[PartDigest]
    frames: list[Frame]
    by_trip: int
    stored: list[int]
    spans: list[SpanFrame]


def of_rank(record: RunRecord, rank: int) -> RankDetails:
    """What is known of a rank.

    Raises:
        UsageError: the run has no such rank.
        StoreError: the record cannot be read.
    """
    report, is_over = replay.take(record)
    row = _row(report, rank)
    last = next((standing for standing in record.standings().ranks if standing.rank == rank), None)
    standing, spent = None if is_over else last, NOT_SPENT if last is None else last.spent
    parts = list(_digests(record.last_digests(rank, LAST_BATCHES)))
    trip = next((said.trip for said in reversed(_said(record, rank, messages.Tripped))), None)
    closeup = _closeup(report, rank, trip, _said(record, rank, messages.LookedCloser))
    return RankDetails(report, row, standing, spent, trip, closeup, parts, record.sent_batches(rank))


def _closeup(report: Report, rank: int, trip: Trip | None, said: list[messages.LookedCloser]) -> CloseUp | None:
    """Of this trip. A rank that left out steps has one of each."""
    if trip is not None and is_left_out(trip):  # the culprit's alone is kept with its step
        steps = [one for one in report.skipped if (one.verdict.tripped, one.batch) == (rank, trip.position.batch)]
        return steps[-1].closeup if steps else None
    return said[-1 if report.skipped else 0].closeup if said else None


def of_batch(record: RunRecord, batch: int, rank: int | None) -> BatchDetails:
    """What is known of a batch of a rank (None: the culprit's rank, or rank 0). Raises as ``of_rank`` does.

    Raises:
        UsageError: nothing is known of the batch.
    """
    report, _ = replay.take(record)
    if rank is None:
        rank = report.verdict.tripped if report.verdict else 0
    row = _row(report, rank)
    frames = record.frames(rank, batch)
    by_trip = [frame for part in record.tripped(rank) if part.batch == batch for frame in part.frames()]
    spans = [] if frames or by_trip else [frame for part in record.envelopes(batch) for frame in _span_frames(part)]
    parts = list(_digests(record.digests_of(rank, batch)))
    batches = record.sent_batches(rank)
    if not (frames or by_trip or spans or parts):
        raise UsageError(f"nothing is on record of batch {batch} of rank {rank}: {_why(row, batch, batches)}")
    return BatchDetails(report, row, batch, parts, frames + by_trip, len(by_trip), batches, spans)


def _row(report: Report, rank: int) -> RankRow:
    if rank >= report.world_size:
        raise UsageError(f"no rank {rank}: run {report.run} has ranks 0 to {report.world_size - 1}")
    return report.ranks[rank]


def _why(row: RankRow, batch: int, batches: list[int]) -> str:
    if row.state is RankState.MISSING:
        return "this rank never connected"
    there = f"kept as sent are {format_spans(batches)}" if batches else "none of this rank is kept as sent"
    return f"its last is batch {row.last_batch}; {there}" if batch > row.last_batch >= 0 else there


def _said(record: RunRecord, rank: int, kind: type[M]) -> list[M]:
    """The messages of this kind from the rank."""
    events = record.events(kind.__name__.lower())
    return [fact for _, (_, by, fact) in events if isinstance(fact, kind) and by == rank]


def _digests(block: DigestBlock) -> Iterator[PartDigest]:
    """In the order of the batches."""
    names = block.digests.dtype.names or ()
    digests: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in block.digests.tolist()]
    for digest in sorted(digests, key=lambda digest: (digest["batch"], digest["first_frame"])):
        table = block.tables.get(digest["table"])
        nearest, first_bad = (_reading_at(table, digest["first_frame"], digest[name]) for name in ("row", "bad_row"))
        yield PartDigest(
            **{name: digest[name] for name in PartDigest._fields if name in names}, nearest=nearest, first_bad=first_bad
        )


def _reading_at(table: FrameTable | None, first_frame: int, row: int) -> DigestReading | None:
    """The row of this number, in the table of a part that begins with this frame."""
    if table is None or row >= table.rows:  # NO_ROW is larger
        return None
    for frame, spec in enumerate(table.specs, first_frame):
        if row < len(spec.readings):
            return DigestReading(frame, spec, spec.readings[row])
        row -= len(spec.readings)
    return None


def _span_frames(part: EnvelopePart) -> Iterator[SpanFrame]:
    envelope = part.envelope
    columns = (envelope.low, envelope.high, envelope.state, envelope.low_rank, envelope.high_rank, envelope.state_rank)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for frame, spec in enumerate(part.table.specs, part.first_frame):
        readings = []
        for of, (low, high, state, *ranks) in zip(spec.readings, rows, strict=False):
            by_low, by_high, by_state = (None if rank == NO_ROW else rank for rank in ranks)
            low, high = (math.nan if by is None else value for value, by in ((low, by_low), (high, by_high)))
            # A nan is never an extreme of an envelope, but it is the worst reading.
            high = math.nan if state == State.NAN else high
            readings.append(
                SpanReading(Reading(of.label, of.kind, of.dtype, low, high, State(state)), by_low, by_high, by_state)
            )
        yield SpanFrame(frame, spec, envelope.ranks, tuple(readings))
