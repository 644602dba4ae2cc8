"""The frames of a batch -> the frame table and the summary of each of its parts."""

from __future__ import annotations

import time

from ..measure.recorder import PendingFrame
from ..shared.bounded import BoundedDict
from ..shared.frame import BatchSummary, FrameSpec, FrameTable, Position, pack

MAX_TABLES = 64
"""Tables remembered. A model whose every batch looks different hashes its table each time, but stays bounded."""


class Tables:
    """The frame tables of this process, so that a batch like the last ones costs one look-up."""

    def __init__(self) -> None:
        self._tables = BoundedDict[tuple[int, ...], FrameTable](MAX_TABLES)

    def of(self, specs: list[FrameSpec]) -> FrameTable:
        key = tuple(map(id, specs))  # specs are interned, and the table keeps them alive
        table = self._tables.pop(key, None) or FrameTable(tuple(specs))
        self._tables[key] = table
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
        is_streamed: bool = True,
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
        self.is_streamed = is_streamed and position.eval == 0 and not is_rehearsal
        """Whether it is streamed: an eval forward is judged, but it is no batch."""
        self.is_compiled = False
        """Whether a compiled graph began it."""
        self.root_inputs: PendingFrame | None = None
        self.loss_scale = 0.0
        """As its backward began."""
        self.is_absorbed = False
        """Whether a loss scaler is expected to deal with a gradient of it that is not finite."""
        self.part = BatchPart(self)

    def add(self, frame: PendingFrame) -> None:
        self.part.frames.append(frame)
        batch, evaluation, number = frame.position
        self.position = Position(batch, evaluation, number + 1)

    def cut(self) -> BatchPart:
        """What was recorded since the last cut."""
        part, self.part = self.part, BatchPart(self)
        return part


class BatchPart:
    """The frames of a batch that are judged and told together: those of its forward, or of its backward."""

    def __init__(self, batch: BatchInProgress) -> None:
        self.batch = batch
        self.frames: list[PendingFrame] = []
        self._started_at = time.time()

    @property
    def first(self) -> Position:
        """That of its first frame, or where the batch stands while there is none."""
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
