"""The frames of a batch -> a frame table and a batch summary for each of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ..shared.bounded import BoundedDict
from ..shared.types.frame import NO_NORM, NOWHERE, BatchSummary, FrameSpec, FrameTable, Moment, Position, pack

if TYPE_CHECKING:  # none of this is used here: the life of a batch is decided, and tested, without torch
    from ..measure.recorder import PendingFrame
    from ..measure.sweep import Look
    from ..rerun.backward_rerun import RootRun
    from ..rerun.forward import RootEntry
    from ..rerun.loss_backward import LossBackward
    from ..rerun.loss_graph import LossOrigin
    from ..shared.types.messages import Counts

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


class BatchOrigin(Enum):
    """How a batch begins: with a forward of the root or with direct calls of its modules, in training mode or in eval mode."""

    TRAINING = "root", "training"
    EVALUATING = "root", "eval"
    TRAINING_CALLS = "calls", "training"
    EVALUATING_CALLS = "calls", "eval"

    @property
    def is_root(self) -> bool:
        return self.value[0] == "root"

    @property
    def is_training(self) -> bool:
        return self.value[1] == "training"

    @staticmethod
    def of_root(is_training: bool) -> BatchOrigin:
        return BatchOrigin.TRAINING if is_training else BatchOrigin.EVALUATING

    @staticmethod
    def of_calls(is_training: bool) -> BatchOrigin:
        return BatchOrigin.TRAINING_CALLS if is_training else BatchOrigin.EVALUATING_CALLS


class BatchState(Enum):
    """What a forward is; see ``lifecycle``. What is no batch and no candidate is judged, and never sent."""

    OUTSIDE = "calls outside of any batch"
    EVAL = "a forward without gradients"
    REHEARSAL = "a pipeline learns shapes: nothing is measured"
    CANDIDATE = "a batch if a backward comes, without a number"
    RESERVED = "a batch if a backward comes, for which the next number is reserved"
    BATCH = "a batch"


_CANDIDATES = (BatchState.CANDIDATE, BatchState.RESERVED)

MOVES = {
    BatchState.CANDIDATE: (BatchState.RESERVED,),
    BatchState.RESERVED: (BatchState.BATCH,),
}
"""The moves of a batch. From states that are not here there is none."""


class PartState(Enum):
    """How far a part is; see ``lifecycle``."""

    OPEN = "frames are added"
    CLOSED = "no module adds a frame any more"
    JUDGED = "nothing in it trips"
    TRIPPED = "a reading in it trips"
    SENT = "it was sent, or there was nothing to send"


PART_MOVES = {
    PartState.OPEN: (PartState.CLOSED,),
    PartState.CLOSED: (PartState.JUDGED, PartState.TRIPPED),
    PartState.JUDGED: (PartState.SENT,),
    PartState.TRIPPED: (PartState.SENT,),
    PartState.SENT: (),
}


EVERY = 8
"""Batches, of which one is looked at for what changes slowly: see ``health``."""


class Gate(Enum):
    """What a judged part waits for before it is sent."""

    LOSS = "the loss that it is sent with"
    BACKWARD = "a backward, which makes its forward a batch"


def no_norm() -> float:
    """The norm of gradients where none was taken."""
    return NO_NORM


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
        state: BatchState,
        origin: BatchOrigin = BatchOrigin.TRAINING,
        traced: bool = False,
        is_full: bool = True,
    ) -> None:
        self.position = position
        self.optimizer_step = optimizer_step
        self.state = state
        self.origin = origin
        self.traced = traced
        self.is_full = is_full and state is not BatchState.REHEARSAL
        """Whether all modules are measured, or only the root's output."""
        self.is_first_full = False
        """Whether it is the first such batch since the last number that EVERY divides."""
        self.is_compiled = False
        """Whether a compiled graph began it."""
        self.began = position
        """The position of the first frame of its forward."""
        self.is_run_again = False
        """Whether its forward was run again, as only the root was measured."""
        self.root_inputs: PendingFrame | None = None
        self.is_probe: bool | None = None
        """Whether it came before a training, and of an input that is no data; None: not looked at."""
        self.entry: RootEntry | None = None
        """The root's forward as it began, until it is judged."""
        self.run: RootRun | None = None
        """The root's forward with the gradients that were handed to its outputs, until the optimizer step."""
        self.loss_backward: LossBackward | None = None
        """What its loss handed on in its backward."""
        self.root_call: tuple[Any, Any] | None = None
        """The args and kwargs of the root, as it leaves."""
        self.norm: Callable[[], float] = no_norm
        """The norm of the gradients of the last optimizer step before it."""
        self.scaling: LossScaling | None = None
        """The loss scaling when its backward began; None: it has not begun."""
        self.part = BatchPart(self)

    @property
    def is_sure(self) -> bool:
        """Whether no backward has to show what it is."""
        return self.state not in _CANDIDATES

    @property
    def is_streamed(self) -> bool:
        """Whether its summaries are sent, if a backward comes: not those of what is no batch."""
        return self.state is BatchState.BATCH or self.state in _CANDIDATES

    def move(self, state: BatchState) -> None:
        """Moves to another state, of which ``MOVES`` must know."""
        if state is not self.state:
            assert state in MOVES.get(self.state, ()), (self.state, state)
            self.state = state

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
        self.loss_labels: tuple[str, ...] = ()
        """The outputs of the root that may be a loss."""
        self.state = PartState.OPEN
        self.gates = set[Gate]() if batch.is_sure else {Gate.BACKWARD}
        self.is_cut = False
        """Whether it ends at its first bad frame, up to which it was run again: it is not sent as a batch."""
        self.look: Look | None = None
        """A look at all parameters when it began."""
        self.frames: list[PendingFrame] = []
        self._started_at = time.time()
        self._ended_at = 0.0
        self._memory = 0
        self.calls: Counts = ()
        """The collectives of this process when it was closed."""

    @property
    def is_judged(self) -> bool:
        return self.state not in (PartState.OPEN, PartState.CLOSED)

    @property
    def is_sent_now(self) -> bool:
        """Whether nothing keeps it from being sent."""
        return not self.gates and self.state in (PartState.JUDGED, PartState.TRIPPED)

    def move(self, state: PartState) -> None:
        """Moves to another state, of which ``PART_MOVES`` must know."""
        assert state in PART_MOVES[self.state], (self.state, state)
        self.state = state

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

    def close(self, memory: int, calls: Counts = ()) -> None:
        """No module adds a frame any more. ``memory``: bytes of tensors on the device; 0: not told."""
        self.move(PartState.CLOSED)
        self.calls = calls
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
