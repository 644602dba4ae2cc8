"""The frames of a batch -> a frame table and a batch summary for each of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..measure.recorder import PendingFrame
from ..measure.sweep import Look
from ..rerun.backward_rerun import RootRun
from ..rerun.forward import RootEntry
from ..rerun.loss_graph import LossOrigin
from ..shared.bounded import BoundedDict
from ..shared.types.frame import NO_NORM, NOWHERE, BatchSummary, FrameSpec, FrameTable, Moment, Position, pack

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


class LossScaling(NamedTuple):
    """The loss scale of a backward. ``absorbs``: a loss scaler is expected to deal with its non-finite gradients.

    ``since`` is the first of the batches in a row whose bad gradients the scaler has absorbed before; -1: none.
    """

    value: float = 0.0
    absorbs: bool = False
    since: int = -1


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
        self.began = position
        """The position of the first frame of its forward."""
        self.is_run_again = False
        """Whether its forward was run again, as only the root was measured."""
        self.root_inputs: PendingFrame | None = None
        self.entry: RootEntry | None = None
        """The root's forward as it began, until it is judged."""
        self.run: RootRun | None = None
        """The root's forward with the gradients that were handed to its outputs, until the optimizer step."""
        self.steep: Callable[[], str] | None = None
        """Describes the operators of its loss that may have an infinite slope."""
        self.root_call: tuple[Any, Any] | None = None
        """The args and kwargs of the root, as it leaves."""
        self.norm: Callable[[], float] = lambda: NO_NORM
        """The norm of the gradients of the last optimizer step before it."""
        self.scaling: LossScaling | None = None
        """The loss scaling when its backward began; None: it has not begun."""
        self.part = BatchPart(self)

    @contextmanager
    def holding(self, given: tuple[Any, Any] | None) -> Iterator[None]:
        """Has the args and kwargs of the root at hand meanwhile; None: it is called by itself, and goes on."""
        before, self.root_call = self.root_call, given
        try:
            yield
        finally:
            self.root_call = before

    def add(self, *frames: PendingFrame) -> None:
        self.part.frames += frames
        self.pass_frames(len(frames))

    def pass_frames(self, count: int = 1) -> None:
        batch, evaluation, number = self.position
        self.position = Position(batch, evaluation, number + count)

    def cut(self) -> BatchPart:
        """The frames since the last cut."""
        part, self.part = self.part, BatchPart(self)
        return part


class BatchPart:
    """The frames of a batch that are judged and sent together: its forward's, or its backward's."""

    def __init__(self, batch: BatchInProgress) -> None:
        self.batch = batch
        self.loss_of: BatchPart | None = None
        """The forward whose loss this is: judged apart from it, and sent with it."""
        self.values: list[Any] | None = None
        """The values of the loss."""
        self.loss_origin: LossOrigin | None = None
        """Where the loss came from, if it is bad."""
        self.awaits_loss = False
        """Whether it is sent with a loss that may come."""
        self.is_held = not batch.is_sure
        """Whether it is sent only if a backward reaches it."""
        self.is_judged = False
        self.is_cut = False
        """Whether it ends at its first bad frame, up to which it was run again: it is not sent as a batch."""
        self.is_printed = False
        """Whether its trace was printed."""
        self.look: Look | None = None
        """A look at all parameters when it began."""
        self.frames: list[PendingFrame] = []
        self._started_at = time.time()
        self._ended_at = 0.0
        self._memory = 0

    @property
    def first(self) -> Position:
        """The position of its first frame; without frames, the batch's."""
        frames = self.frames
        return frames[0].position if frames else self.batch.position

    @property
    def moment(self) -> Moment:
        """The moment of its first frame; where the root alone was measured, of the first frame that may show in a rerun."""
        first = self.first if self.batch.is_full else min(self.first, self.batch.began)
        return Moment(self.batch.optimizer_step, *first)

    @property
    def end(self) -> Position:
        """The position after its last frame."""
        batch, evaluation, frame = self.frames[-1].position if self.frames else NOWHERE
        return Position(batch, evaluation, frame + 1)

    def close(self, memory: int) -> None:
        """No module adds a frame any more. ``memory``: bytes of tensors on the device; 0: not told."""
        self._ended_at, self._memory = time.time(), memory

    def finish(self, tables: Tables) -> tuple[FrameTable, BatchSummary]:
        table = tables.of([frame.spec for frame in self.frames])
        cells = [cell for frame in self.frames for cell in frame.cells]
        return table, BatchSummary(
            batch=self.first.batch,
            first_frame=self.first.frame,
            optimizer_step=self.batch.optimizer_step,
            started_at=self._started_at,
            ended_at=self._ended_at,
            traced=self.batch.traced,
            table_id=table.id,
            abs_min=pack(table.typecode, [cell.low for cell in cells]),
            abs_max=pack(table.typecode, [cell.high for cell in cells]),
            states=bytes([cell.state or 0 for cell in cells]),
            gradient_norm=self.batch.norm(),
            memory=self._memory,
        )
