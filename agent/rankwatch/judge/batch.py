"""The frames of a batch -> the frame table and the summary of each of its parts."""

from __future__ import annotations

import time

from ..measure.recorder import Record
from ..shared.frame import BatchSummary, FrameSpec, FrameTable, Position, pack

MAX_TABLES = 64
"""Tables remembered. A model whose every batch looks different hashes its table each time, but stays bounded."""


class Tables:
    """The frame tables of this process, so that a batch like the last ones costs one look-up."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], FrameTable] = {}

    def of(self, specs: list[FrameSpec]) -> FrameTable:
        key = tuple(map(id, specs))  # specs are interned, and the table keeps them alive
        table = self._tables.pop(key, None) or FrameTable(tuple(specs))
        self._tables[key] = table
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        return table


class BatchInProgress:
    """One forward of the root and the backward that follows it, or frames outside of any.

    ``position`` is the next frame's. ``root_inputs`` are the readings of what the root was called with.
    """

    def __init__(
        self,
        position: Position,
        optimizer_step: int,
        *,
        traced: bool = False,
        is_told: bool = True,
        is_full: bool = True,
        is_rehearsal: bool = False,
    ) -> None:
        self.position = position
        self.optimizer_step = optimizer_step
        self.traced = traced
        self.is_full = is_full and not is_rehearsal
        """Whether all modules are recorded, or the root's output alone."""
        self.is_rehearsal = is_rehearsal
        """Whether a pipeline runs it to learn shapes: nothing of it is recorded."""
        self.is_told = is_told and position.eval == 0 and not is_rehearsal
        """Whether it is streamed: an eval forward is judged, but it is no batch."""
        self.is_compiled = False
        """Whether a compiled graph began it."""
        self.root_inputs: Record | None = None
        self.loss_scale = 0.0
        """As its backward began."""
        self.is_absorbed = False
        """Whether a loss scaler is expected to deal with a gradient of it that is not finite."""
        self.part = Part(self)

    def add(self, record: Record) -> None:
        self.part.records.append(record)
        batch, evaluation, frame = record.position
        self.position = Position(batch, evaluation, frame + 1)

    def cut(self) -> Part:
        """What was recorded since the last cut."""
        part, self.part = self.part, Part(self)
        return part


class Part:
    """The records of a batch that are judged and told together: those of its forward, or of its backward."""

    def __init__(self, batch: BatchInProgress) -> None:
        self.batch = batch
        self.records: list[Record] = []
        self._started_at = time.time()

    @property
    def first(self) -> Position:
        """That of its first frame, or where the batch stands while there is none."""
        records = self.records
        return records[0].position if records else self.batch.position

    def finish(self, tables: Tables) -> tuple[FrameTable, BatchSummary]:
        table = tables.of([record.spec for record in self.records])
        cells = [cell for record in self.records for cell in record.cells]
        return table, BatchSummary(
            batch=self.first.batch,
            first_frame=self.first.frame,
            optimizer_step=self.batch.optimizer_step,
            started_at=self._started_at,
            ended_at=time.time(),
            traced=self.batch.traced,
            table_id=table.id,
            abs_min=pack(table.typecode, [cell.low for cell in cells]),
            abs_max=pack(table.typecode, [cell.high for cell in cells]),
            states=bytes([cell.state or 0 for cell in cells]),
        )
