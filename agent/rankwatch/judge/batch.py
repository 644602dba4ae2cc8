"""The frames of a batch -> a frame table and a batch summary for each of its parts."""

from __future__ import annotations

import time

from ..measure.recorder import PendingFrame
from ..shared.bounded import BoundedDict
from ..shared.frame import BatchSummary, FrameSpec, FrameTable, Position, pack

MAX_TABLES = 64
"""Frame tables cached. If every batch differs, each table is hashed anew, but memory stays bounded."""


class Tables:
    """Caches frame tables: a batch like an earlier one costs one look-up."""

    def __init__(self) -> None:
        self._tables = BoundedDict[tuple[int, ...], FrameTable](MAX_TABLES)

    def of(self, specs: list[FrameSpec]) -> FrameTable:
        key = tuple(map(id, specs))  # specs are interned, and the cached table keeps them alive
        table = self._tables.pop(key, None) or FrameTable(tuple(specs))
        self._tables[key] = table
        return table


class BatchInProgress:
    """One forward of the root and the backward that follows; or frames outside of any batch.

    ``position`` is the position of the next frame. ``root_inputs`` is a frame of the root's inputs.
    """

    def __init__(
        self,
        position: Position,
        optimizer_step: int,
        *,
        traced: bool = False,
        is_streamed: bool = True,
        is_full: bool = True,
        is_rehearsal: bool = False,
    ) -> None:
        self.position = position
        self.optimizer_step = optimizer_step
        self.traced = traced
        self.is_full = is_full and not is_rehearsal
        """Whether all modules are measured, or only the root's output."""
        self.is_rehearsal = is_rehearsal
        """Whether a pipeline runs it only to learn shapes: nothing is measured."""
        self.is_streamed = is_streamed and position.eval == 0 and not is_rehearsal
        """Whether its summaries are sent. An eval forward is judged, but is no batch."""
        self.is_compiled = False
        """Whether a compiled graph began it."""
        self.root_inputs: PendingFrame | None = None
        self.loss_scale = 0.0
        """The loss scale when its backward began."""
        self.is_absorbed = False
        """Whether a loss scaler is expected to deal with its non-finite gradients."""
        self.part = BatchPart(self)

    def add(self, frame: PendingFrame) -> None:
        self.part.frames.append(frame)
        batch, evaluation, number = frame.position
        self.position = Position(batch, evaluation, number + 1)

    def cut(self) -> BatchPart:
        """The frames since the last cut."""
        part, self.part = self.part, BatchPart(self)
        return part


class BatchPart:
    """The frames of a batch that are judged and sent together: its forward's, or its backward's."""

    def __init__(self, batch: BatchInProgress) -> None:
        self.batch = batch
        self.frames: list[PendingFrame] = []
        self._started_at = time.time()

    @property
    def first(self) -> Position:
        """The position of its first frame; without frames, the batch's."""
        frames = self.frames
        return frames[0].position if frames else self.batch.position

    def finish(self, tables: Tables) -> tuple[FrameTable, BatchSummary]:
        table = tables.of([frame.spec for frame in self.frames])
        cells = [cell for frame in self.frames for cell in frame.cells]
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
