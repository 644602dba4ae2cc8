"""What is read from a record: its values, and the parts and envelopes with their frame tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from rankwatch.shared.types.frame import Frame, FrameTable, State

from ...decide.core.standing import RankStanding, RunStanding
from .digest import Envelope
from .layout import Array, dtype_of, part_layout, unpack_part

BatchRange: TypeAlias = tuple[int, int]
"""The first and the last batch."""

ANY: BatchRange = (-1, 1 << 62)


class Standings(NamedTuple):
    """Where a run and its ranks were at ``time`` (Unix seconds); 0 and None when that was never stored."""

    time: float
    run: RunStanding | None
    ranks: list[RankStanding]


class DigestBlock(NamedTuple):
    """Digests, and the frame tables that they name by number (0 names none)."""

    digests: Array
    tables: dict[int, FrameTable]


class SentPart(NamedTuple):
    """A part of a batch as its rank sent it; ``number`` is its frame table's in the record.

    ``step`` and ``ended`` come from its digest: None where that was dropped.
    """

    batch: int
    rank: int
    first_frame: int
    number: int
    table: FrameTable
    step: int | None
    ended: float | None
    body: bytes

    def columns(self) -> tuple[Array, Array, Array]:
        """Abs min and abs max, of the table's dtype, and states."""
        layout = part_layout(self.table.rows, dtype_of(self.table))
        lows, highs, states = (layout.column(self.body, name) for name in ("abs_min", "abs_max", "state"))
        return lows, highs, states

    def frames(self) -> Iterator[Frame]:
        return unpack_part(self.batch, self.first_frame, self.table, self.body).frames(self.table)


class EnvelopeKey(NamedTuple):
    """Which envelope, and over how many ranks."""

    batch: int
    first_frame: int
    table: int
    ranks: int


class EnvelopePart(NamedTuple):
    """An envelope and its frame table. ``ended``: when the last of its ranks finished the part; None without digests."""

    batch: int
    first_frame: int
    number: int
    table: FrameTable
    ended: float | None
    envelope: Envelope


class PartExtremes(NamedTuple):
    """Parts of one frame table, in the order of their batches: the abs max and the states (uint8), of shape (parts, rows)."""

    batches: Array
    table: int
    abs_max: Array
    states: Array


class PartHistory(NamedTuple):
    """One part of a batch of a rank: the abs max and the state of each row of its frame table."""

    batch: int
    first_frame: int
    number: int
    table: FrameTable
    abs_max: Array
    states: Array


class Point(NamedTuple):
    """A reading in one batch."""

    batch: int
    abs_min: float
    abs_max: float
    state: State


class Series(NamedTuple):
    """A reading over batches, an array of each column of a point."""

    batches: Array
    abs_min: Array
    abs_max: Array
    states: Array

    def points(self) -> list[Point]:
        rows = zip(*(column.tolist() for column in self), strict=True)
        return [Point(batch, low, high, State(state)) for batch, low, high, state in rows]
