"""Bad losses that wait for the gradients of their step: a loss whose gradients are finite harms nothing.

All labels of a batch are ignored, say: the loss is 0/0, and its gradient is exactly 0. What a model computes as its loss, and
returns, is held like the loss itself: transformers' models do so, and speech recipes mask the rows that have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...measure.recorder import Call, PendingFrame
from ...measure.walk import leaves
from ...rerun.repetition import WRITES
from ...shared.types.closeup import CloseUp
from ...shared.types.frame import NON_FINITE, Kind, Moment, Phase, Position, State
from ...shared.types.notice import Notice, NoticeKind
from ...shared.types.trip import Trip
from ...shared.words.operators import is_own, short_name
from ..batch import BatchInProgress, BatchPart
from ..reporter import FoundTrip
from .cadence import REPEATED

WEIGHTS_ARE_BAD = "a weight or buffer is bad already, which the next steps would use as well"
"""Why a step is not left out."""

_LOSSES = ("loss", "criterion")
"""What the name of a loss has, as the class of a module, or as the key of an output."""


class HeldLoss(NamedTuple):
    """A frame with a bad loss; ``ring``: the last frames as it came."""

    frame: PendingFrame
    part: BatchPart
    call: Call | None
    ring: deque[PendingFrame]
    found: FoundTrip | None = None
    """Its trip, if it may be no loss (see ``is_placeholder`` and ``is_measure``): what made it is known already."""

    @property
    def batch(self) -> BatchInProgress:
        return self.part.batch

    @property
    def is_handed(self) -> bool:
        """Whether it was handed to a backward; else the model has returned it."""
        return self.frame.spec.readings[0].kind is Kind.LOSS


class BadStep(NamedTuple):
    """A trip that waits for its step; see ``hook/step/skipping``."""

    found: FoundTrip
    closeup: CloseUp | None

    @property
    def moment(self) -> Moment:
        return Moment(self.found.trip.optimizer_step, *self.found.trip.position)


class HeldLosses:
    """The bad losses since the last optimizer step, in order."""

    def __init__(self) -> None:
        self.all: list[HeldLoss] = []
        self._count = 0
        self._first, self._told = -1, -REPEATED

    @property
    def first(self) -> Moment | None:
        held = self.all[0] if self.all else None
        return Moment(held.batch.optimizer_step, *held.frame.position) if held is not None else None

    def may_be_loss(self, frame: PendingFrame, tripping: list[int], part: BatchPart, call: Call | None) -> bool:
        """Whether nothing of a frame is bad but a loss."""
        rows = [frame.spec.readings[row] for row in tripping]
        if all(row.kind is Kind.LOSS for row in rows):
            return True
        if frame.spec.phase is not Phase.FORWARD or not all(row.kind is Kind.OUTPUT for row in rows):
            return False
        name = frame.spec.module
        if _names_a_loss(frame.spec.module_class) or any(
            _is_within(one, part, name) for one in self.all if one.found is None
        ):
            return True
        labels = part.loss_labels if call is None else loss_labels(call[-1])
        return not name and all(row.label in labels for row in rows)

    def behind(self, batch: BatchInProgress) -> HeldLoss | None:
        """The loss from which a bad gradient of this batch came; None: a loss that was handed a finite gradient is not one."""
        if batch.run is not None and not batch.run.was_handed_bad:
            return None
        return next((one for one in self.all if one.batch is batch), None)

    def before(self, part: BatchPart) -> FoundTrip | None:
        """The trip of what was held first in this forward."""
        return next((one.found for one in self.all if one.part is part and one.found is not None), None)

    def drop_masked(self, loss: BatchPart) -> bool:
        """A loss goes to a backward. If it is finite, what was bad on the way to it was masked; returns whether any was."""
        if any(one.part is loss for one in self.all):
            return False
        before, self.all = (
            self.all,
            [one for one in self.all if one.batch is not loss.batch or one.is_handed or one.found is not None],
        )
        return len(self.all) < len(before)

    def is_told(self, held: HeldLoss) -> bool:
        """A loss has harmed nothing: counts it, and returns whether to tell of it."""
        batch = held.frame.position.batch
        self._count += 1
        is_due = batch >= self._told + REPEATED
        if is_due:
            self._first = batch if self._first < 0 else self._first
            self._told = batch
        return is_due

    def notice(self, held: HeldLoss, why: str, kind: NoticeKind) -> Notice:
        """What is told of it. ``why``: what made the loss bad; empty: that is not known."""
        spec, states = held.frame.spec, held.frame.states
        bad = next(number for number, state in enumerate(states) if state in NON_FINITE)
        row = spec.readings[bad]
        why = f"{State(states[bad]).word}{f', as {why}' if why else ''}"
        name, batch, count = row.label, held.frame.position.batch, float(self._count)
        return Notice(kind, spec.module, spec.module_class, name, row.dtype, self._first, batch, count, 0.0, why)


def is_placeholder(trip: Trip) -> bool:
    """Whether the root returns a nan that the code itself has written: where it has no number, say, beside its logits."""
    operator = trip.operator
    if operator is None or trip.frame.spec.module or trip.frame.spec.phase is not Phase.FORWARD:
        return False
    if short_name(operator) not in WRITES:  # it computes with a nan
        return False
    nans = [one.dtype for one in operator.inputs if one.state is State.NAN]
    return trip.culprit.kind is Kind.OUTPUT and bool(nans) and all(dtype == "float" for dtype in nans)


def is_measure(frame: PendingFrame, tripping: Sequence[int]) -> bool:
    """Whether nothing that trips in a frame has a gradient.

    A module may measure what the model has made, such as the accuracy of a class that is absent: 0/0.
    """
    known = frame.graded if frame.spec.phase is Phase.FORWARD else ()
    return bool(known) and all(row >= frame.weights and not known[row - frame.weights] for row in tripping)


def is_trained(ring: Iterable[PendingFrame], position: Position) -> bool:
    """Whether gradients go through what ran before, in the same forward."""
    return any(any(one.graded) for one in ring if one.position[:2] == position[:2])


def is_born_here(trip: Trip, earlier: FoundTrip | None) -> bool:
    """Whether its own module has made it, of finite numbers; and by another operator than what tripped ``earlier``."""
    made = trip.operator
    if made is None or trip.weights or not is_own(made):
        return False
    before = earlier.trip.operator if earlier is not None else None
    return before is None or (made.name, made.source) != (before.name, before.source)


def harmless(trip: Trip, kind: NoticeKind) -> Notice:
    """What is told of a trip whose step has finite gradients, or was skipped."""
    spec, row, batch = trip.frame.spec, trip.culprit, trip.position.batch
    return Notice(kind, spec.module, spec.module_class, row.label, row.dtype, batch, batch, 1.0, 0.0, row.state.word)


def harms(batch: BatchInProgress, *, gradients_are_bad: bool, is_reduced: bool, is_sharded: bool) -> bool:
    """Whether the bad loss of a batch has a part in the gradients of the step.

    A gradient that was reduced may be bad because of another rank, and of a sharded one this rank sees its part alone: there the
    gradients tell that the loss has handed to the model's outputs.
    """
    run = batch.run
    if run is None:
        return gradients_are_bad
    was_handed = run.was_handed_bad
    return (gradients_are_bad and (was_handed or not is_reduced)) or (was_handed and is_sharded)


def loss_labels(output: Any) -> tuple[str, ...]:
    """The outputs that may be a loss, single numbers with a gradient, and what is called a loss.

    Beside a loss, a number without a gradient may be a measure of it, such as its exp.
    """
    found = [(label, value) for label, value in leaves(output, "output") if isinstance(value, Tensor)]
    numbers = [(label, value) for label, value in found if value.numel() == 1]
    may_be = numbers if any(value.requires_grad for _, value in numbers) else []
    return tuple([label for label, _ in found if (label in dict(may_be)) or _names_a_loss(label)])


def _names_a_loss(name: str) -> bool:
    return any(one in name.lower() for one in _LOSSES)


def _is_within(held: HeldLoss, part: BatchPart, module: str) -> bool:
    """Whether it was held in this forward, and in a module below this one: which may return it."""
    inner = held.frame.spec.module
    return held.part is part and bool(inner) and (not module or inner.startswith(f"{module}."))
