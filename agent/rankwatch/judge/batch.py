"""The frames of a batch -> a frame table and a batch summary for each of its parts."""

from __future__ import annotations

import time
from typing import NamedTuple

from ..measure.recorder import PendingFrame
from ..shared.bounded import BoundedDict
from ..shared.frame import BatchSummary, FrameSpec, FrameTable, Moment, Position, pack

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


class Style(NamedTuple):
    """How a batch begins: with a forward of the root or with direct calls of its modules, in training mode or in eval mode."""

    is_root: bool
    is_training: bool


USUAL = Style(is_root=True, is_training=True)


class BatchInProgress:
    """One forward and the backward that follows; or frames outside of any batch.

    ``position`` is the position of the next frame. ``root_inputs`` is a frame of the root's inputs.
    """

    def __init__(
        self,
        position: Position,
        optimizer_step: int,
        *,
        style: Style = USUAL,
        is_sure: bool = True,
        traced: bool = False,
        is_streamed: bool = True,
        is_full: bool = True,
        is_rehearsal: bool = False,
    ) -> None:
        self.position = position
        self.optimizer_step = optimizer_step
        self.style = style
        self.is_sure = is_sure
        """Whether it is known to be a batch; if not, its parts are held until a backward shows it."""
        self.has_number = True
        """Whether ``position`` has its own number; if not, it is that of an eval, or of loose frames."""
        self.traced = traced
        self.is_full = is_full and not is_rehearsal
        """Whether all modules are measured, or only the root's output."""
        self.is_rehearsal = is_rehearsal
        """Whether a pipeline runs it only to learn shapes: nothing is measured."""
        self.is_streamed = is_streamed and not is_rehearsal
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
        self.is_held = not batch.is_sure
        """Whether it is sent only if a backward reaches it."""
        self.is_judged = False
        self.frames: list[PendingFrame] = []
        self._started_at = time.time()

    @property
    def first(self) -> Position:
        """The position of its first frame; without frames, the batch's."""
        frames = self.frames
        return frames[0].position if frames else self.batch.position

    @property
    def moment(self) -> Moment:
        """The moment of its first frame."""
        return Moment(self.batch.optimizer_step, self.first)

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
