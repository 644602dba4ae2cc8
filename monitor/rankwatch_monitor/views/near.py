"""One rank of a run, or one of its batches, seen from near: what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.cause import Trip
from rankwatch.shared.frame import Frame, FrameSpec, Reading, ReadingSpec

from ..decide.report import RankRow, RankStanding, Report


class Place(NamedTuple):
    """A reading that a digest names."""

    frame: int
    spec: FrameSpec
    reading: ReadingSpec


class PartDigest(NamedTuple):
    """The digest of a part of a batch.

    ``headroom`` is how many times ``nearest`` could double before it reached its dtype's largest number (inf: all are zero);
    ``bad`` readings are inf or nan, the first of them ``first_bad``. The places are None where the frame table is not kept.
    """

    batch: int
    step: int
    started: float
    ended: float
    first_frame: int
    frames: int
    headroom: float
    nearest: Place | None
    bad: int
    first_bad: Place | None


class SpanReading(NamedTuple):
    """A reading over the ranks, and which have its extremes (None: no rank has a number); ``state_rank`` has the state."""

    reading: Reading
    low_rank: int | None
    high_rank: int | None
    state_rank: int | None


class SpanFrame(NamedTuple):
    """A frame over so many ranks."""

    frame: int
    spec: FrameSpec
    ranks: int
    readings: tuple[SpanReading, ...]


@dataclass(frozen=True, slots=True)
class RankCloseup:
    """A rank: ``standing`` where it is while the run goes on, ``parts`` of its last batches, and the batches kept as sent."""

    report: Report
    row: RankRow
    standing: RankStanding | None
    trip: Trip | None
    parts: list[PartDigest]
    kept: list[int]


@dataclass(frozen=True, slots=True)
class BatchCloseup:
    """A batch of a rank: its ``frames`` as far as they are kept, the last ``by_trip`` of them as it told when it tripped.

    ``kept`` are the rank's batches that are kept as sent; ``spans`` the batch over the ranks, where it is not one of them.
    """

    report: Report
    row: RankRow
    batch: int
    parts: list[PartDigest]
    frames: list[Frame]
    by_trip: int
    kept: list[int]
    spans: list[SpanFrame]
