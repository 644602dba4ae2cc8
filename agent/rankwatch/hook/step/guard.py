"""The gradient guard: a gradient that is not finite never reaches the weights.

Before an optimizer step it looks at the gradients that the step would use. If one is not finite, and no loss scaler deals
with it, the rank runs its own batches again, those since the last step, with their gradients measured: where the reading
trips is where its gradient went bad. Was its own gradient finite, the gradient came from elsewhere: from another rank,
mostly. Either way the rank trips, and the step is not taken.
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import TrainingAborted
from ...judge.batch import BatchInProgress, BatchPart
from ...judge.events import BackwardBegins, ForwardComes, OutputsCame, ScalerStepped, ScaleSpent, UpdateBegins
from ...judge.settler import Settler
from ...judge.steps.cadence import Cadence
from ...judge.steps.optimizer_steps import OptimizerSteps
from ...measure.collectives import Collectives
from ...measure.recorder import Recorder
from ...measure.weights import mark_shard
from ...replicas.data_parallel import is_over_all_ranks
from ...rerun.backward_rerun import RootRun
from ...shared.types.config import Config, Policy
from ...shared.types.notice import Notice
from ...shared.types.tuning import Check
from ...touch.parts import parameters_in
from ...touch.torch_private import active_ddp, comm_hooks_of, is_reducing
from .. import backward
from ..batches import Batches
from ..fails_open import FailsOpen
from ..hooks import Hooks
from .gradient_look import graded, have_come, is_bad, is_of_anomaly, norms_of, says_of_a_loss
from .gradient_origin import GradientOrigin
from .known_norms import KnownNorms
from .scaler import LossScales, Scale
from .skipped import BadGradient, PassingGradients, bad_gradient_of, notice_of
from .skipping import Skipping
from .step_norm import StepNorm

log = logging.getLogger(__name__)

MAX_RUNS = 64
"""Forwards whose backward can be run again; of more in one step, the last ones."""

MAX_BYTES = 256 * 2**20
"""What may be kept alive from one forward to the next, for the sake of the earlier ones."""

ALL_REDUCE = "all_reduce"

NO_STEP_CAME = "the training ended before its step"
"""Why a step is not left out."""


class Awaited(enum.Enum):
    """What is to come after the last backward."""

    NOTHING = enum.auto()
    STEP = enum.auto()
    """The backward has begun, and neither a forward nor a step has come since."""
    CLEARING = enum.auto()
    """The training took no step upon it. The next backward shows whether the gradients were cleared."""


class Guard:
    """Guards the weights of one model, until ``remove``.

    Args:
        doors: catch errors of ours.
        collectives: count the reductions that were called from Python.
        notify: is told of a step that was skipped.
        skipping: is asked what becomes of a bad step.
    """

    events = (ForwardComes, OutputsCame, BackwardBegins, ScalerStepped, ScaleSpent, UpdateBegins)

    def __init__(
        self,
        config: Config,
        batches: Batches,
        settler: Settler,
        recorder: Recorder,
        scales: LossScales,
        steps: OptimizerSteps,
        hooks: Hooks,
        collectives: Collectives,
        doors: FailsOpen,
        notify: Callable[[Notice], None],
        skipping: Skipping,
    ) -> None:
        self._skipping = skipping
        self._guards = config.guard and config.policy is not Policy.OFF
        self._measures = config.gradients
        self._keeps = self._guards or (config.gradients and config.policy is not Policy.OFF)
        self._doors = doors
        self._arrived = doors.guarded(self._arrive)
        self._batches = batches
        self._settler = settler
        self._undecided = settler.undecided
        self._recorder = recorder
        self._scales = scales
        self._steps = steps
        self._hooks = hooks
        self._collectives = collectives
        self._reduced_before = 0
        self._known = KnownNorms(doors.guarded)
        self._origin = GradientOrigin(batches, settler, recorder, hooks)
        self._kept: list[BatchInProgress] = []
        """The batches since the last step, whose backward has come."""
        self._dropped = 0
        self._is_over = False
        """Whether an optimizer has stepped since the last forward, and another one may still do."""
        self._reduced_by = ""
        """What reduces the gradients in DDP's backward: its own all-reduce, or what the user has registered in its place."""
        self._ddp: weakref.ref[Any] | None = None
        self._awaited = Awaited.NOTHING
        self._norm = StepNorm()
        self._thread = 0
        """The thread of the last backward."""
        self._cadence = Cadence()
        self._passing: PassingGradients | None = None
        self._notify = notify
        self._is_new_step = True
        """Whether the next optimizer to step is the first one since a forward."""

    def remove(self) -> None:
        self._guards = self._keeps = False
        if self._passing is not None:
            self._passing.remove()
        self._drop()
        self._known.remove()

    def on(self, event: ForwardComes | OutputsCame | BackwardBegins | ScalerStepped | ScaleSpent | UpdateBegins) -> None:
        match event:
            case ForwardComes():
                self._forward_comes()
            case OutputsCame():
                self._mark(event)
            case BackwardBegins(versions=versions):
                self._backward_begins(is_first=bool(versions) and not any(versions or ()))
            case ScalerStepped(optimizer, scaler):
                if self._steps.is_ours(optimizer):
                    self.decide_losses()
                    self._skipping.scaler_stepped(optimizer, scaler)
            case ScaleSpent(scale, optimizer):
                self._scale_spent(scale, optimizer)
            case UpdateBegins(optimizer):
                self._skipping.has_asked = False
                self._update_begins(optimizer)

    # --- what is kept until the step --------------------------------------------------------------------------------------

    def _forward_comes(self) -> None:
        if self._awaited is Awaited.STEP:
            self._awaited = Awaited.NOTHING
        is_trained_here = (
            self._thread == threading.get_ident()
        )  # what is run again would take the gradients of another thread's
        if torch.is_grad_enabled() and is_trained_here and self._cadence.forward():
            self._step_was_skipped()
        if self._steps.are_of_copies and self._passing is None and self._guards:
            self._passing = PassingGradients(self._hooks, self._batches.life, self._doors.guarded)
        held = self._undecided.held_losses
        if held and (held >= MAX_RUNS or any(map(is_bad, self._gradients))):  # an engine's own step is not seen
            self.decide_losses()
        if torch.is_grad_enabled():
            self._is_new_step = True
            self._known.forget()
        if self._is_over:
            self._drop()
        size = sum(map(_bytes, self._kept))
        while self._kept and (size > MAX_BYTES or len(self._kept) >= MAX_RUNS):
            size -= _bytes(self._kept[0])
            self._kept.pop(0).run = None
            self._dropped += 1
        ddp = active_ddp()
        if ddp is not None and is_reducing(ddp):
            self._reduced_by = next((_name(hook) for hook, _ in comm_hooks_of(ddp)), ALL_REDUCE)
            self._ddp = weakref.ref(ddp)

    def _mark(self, returned: OutputsCame) -> None:
        """The gradients that the loss will hand to these outputs are kept, where the root's forward can be run again."""
        part, entry, output = returned
        run = None
        if self._keeps and entry is not None:
            run = RootRun(entry, output, is_compiled=part.batch.is_compiled)
        backward.mark_outputs(output, partial(self._arrived, part, run))

    def _arrive(self, part: BatchPart, run: RootRun | None, number: int, gradient: Tensor | None) -> None:
        """A backward hands a gradient to an output of this part's forward."""
        if self._doors.is_off:
            return
        if run is not None:
            self._keep(part.batch, run, number, gradient)  # first: a bad loss may have the forward run again
        self._batches.reach(part)
        self._cadence.backward(part.batch.position.batch)

    def _backward_begins(self, *, is_first: bool) -> None:
        """``is_first``: no parameter has a gradient; what was kept belongs to a step that was skipped."""
        self._thread = threading.get_ident()
        self._known.forget()
        if self._awaited is Awaited.CLEARING and not any(map(is_bad, self._gradients)):
            self._drop()  # if they are bad, nobody has cleared them, and what was kept made them so
        self._awaited = Awaited.STEP
        if is_first:
            self._known.begin()
            if not self._steps.are_of_copies:  # an engine takes each gradient away
                self._drop()

    def _keep(self, batch: BatchInProgress, run: RootRun, number: int, gradient: Tensor | None) -> None:
        if not self._keeps:
            return
        if batch.run is not run:
            batch.run = run
            self._kept.append(batch)
        run.keep(number, gradient)

    def _drop(self) -> None:
        for batch in self._kept:
            batch.run = None
        self._kept.clear()
        self._dropped = 0
        self._is_over = False
        self._reduced_before = self._collectives.reductions

    # --- the look before a step ----------------------------------------------------------------------------------------

    def _update_begins(self, optimizer: Optimizer) -> None:
        batch = self._batches.life.of_backward
        # On a device, async never waits: there the weights tell later.
        may_wait = self._settler.check is not Check.ASYNC or self._skipping.is_on
        parameters, gradients = graded(optimizer) if batch.is_streamed else ([], [])
        can_read = bool(gradients) and (may_wait or gradients[0].is_cpu)
        looks = self._guards and can_read and not self._is_scaled(optimizer)
        if self._is_new_step or self._norm.has(optimizer):
            self._is_new_step, self._norm = False, StepNorm()
            self._batches.norm = self._norm.value
        self._norm.begin(optimizer)
        norms = norms_of(parameters, gradients, self._known, self._norm, looks=looks)
        if may_wait and looks:
            norms.wait()
        if may_wait or can_read:
            self._settler.poll(wait=may_wait)  # what the forward shows comes first: its numbers have come with these
            self.decide_losses()
        # A norm may overflow where no gradient has, and gradients may have been mended since the norm was taken.
        are_finite = norms.are_finite if looks else self._is_absorbed()  # a scaler skips the step of others
        if looks and not are_finite:
            self._norm.drop()
            are_finite = not any(map(is_bad, gradients))
            if not are_finite and self._undecided.bad_step is None:
                self._find_origin()
        if not (self._skipping.is_on and self._is_left_out(optimizer, are_bad=looks and not are_finite)):
            self._steps.updates.begin(optimizer, batch.position.batch, are_finite=are_finite)
        self._awaited = Awaited.NOTHING
        self._cadence.step()
        self._forget_passed()
        self._known.begin()
        if self._steps.has_several:
            self._is_over = True
        else:
            self._drop()

    def _is_left_out(self, optimizer: Optimizer, *, are_bad: bool) -> bool:
        """Whether the step is left out. ``are_bad``: the gradients of the optimizer; others of the model may be."""
        are_bad = are_bad or (self._steps.has_several and any(map(is_bad, self._gradients)))
        has_passed = self._passing is not None and self._passing.first_bad() is not None  # an engine has skipped its step
        return self._skipping.decide(optimizer, is_bad=are_bad, is_alike=self._are_alike, has_skipped=has_passed)

    def decide_losses(self, *, at_end: bool = False) -> None:
        """Bad losses were harmless, unless the gradients of the step are bad because of them: see ``held``.

        ``at_end``: the training has ended itself because of its loss.
        """
        if self._undecided.held_losses:
            are_bad = at_end or any(map(is_bad, self._gradients))
            is_reduced = self._is_reduced and not at_end
            is_sharded = self._is_sharded or self._steps.are_of_copies  # an engine has the gradients
            self._undecided.decide_losses(are_bad=are_bad, is_reduced=is_reduced, is_sharded=is_sharded)

    def stand_in(self, optimizer: Optimizer) -> None:
        """Before a step, once the detector has switched itself off."""
        self._skipping.stand_in(optimizer, is_alike=self._are_alike)

    def end(self) -> None:
        """The watch ends."""
        self.decide_losses()
        self._undecided.refuse(NO_STEP_CAME)

    def look_back(self, error: BaseException) -> TrainingAborted | None:
        """An exception ends the training. If it came upon a bad gradient, before a step could use it, that is a trip."""
        try:
            self.decide_losses(at_end=says_of_a_loss(error))
            self._undecided.refuse(NO_STEP_CAME)
        except TrainingAborted as trip:
            return trip
        awaits_step = self._awaited is Awaited.STEP and self._batches.life.of_backward.is_streamed
        if not (self._guards and awaits_step) or self._is_absorbed():
            return None
        self._awaited = Awaited.NOTHING
        try:
            if is_of_anomaly(error) or (have_come(self._gradients) and any(map(is_bad, self._gradients))):
                self._find_origin()
                self._undecided.refuse(NO_STEP_CAME)
        except TrainingAborted as trip:
            return trip
        return None

    def _is_scaled(self, optimizer: Optimizer) -> bool:
        """Whether a loss scaler is in use: it skips the steps with bad gradients by itself, in a fused optimizer too."""
        return getattr(optimizer, "found_inf", None) is not None or self._is_absorbed()

    def _is_absorbed(self) -> bool:
        scaling = self._batches.life.of_backward.scaling or self._scales.scaling(self._scales.last())
        return scaling.absorbs

    def _step_was_skipped(self) -> None:
        """Tells of the bad loss or gradient of this rank for which the training, or its engine, has not taken the step."""
        known = self._gradients
        if not self._keeps or self._is_absorbed() or (any(map(_is_used, known)) and not any(map(is_bad, known))):
            return
        if self._undecided.held_losses:
            self._undecided.decide_losses(are_bad=True, is_reduced=False, is_sharded=False, is_skipped=True)
        if self._undecided.bad_step is not None and not any(map(is_bad, known)):  # what trips says more than its gradients
            self._undecided.forgive(is_skipped=True)
        elif (found := self._first_bad()) is not None and not found[0].is_searched_for and self._cadence.is_told(found[1]):
            self._notify(notice_of(*found, self._cadence))
        self._forget_passed()
        self._awaited = Awaited.CLEARING

    def _forget_passed(self) -> None:
        if self._passing is not None:
            self._passing.forget()

    def _find_origin(self) -> None:
        reduced_by = (self._reduced_by or ALL_REDUCE) if self._is_reduced else ""
        self._origin.find(self._kept, self._dropped, reduced_by, self._gradients)

    def _first_bad(self) -> tuple[BadGradient, int] | None:
        if self._passing is not None:
            return self._passing.first_bad()
        for batch in self._kept:
            found = bad_gradient_of(batch.run, self._hooks) if batch.run is not None else None
            if found is not None:
                return found, batch.position.batch
        return None

    # --- what is known of the gradients ---------------------------------------------------------------------------------

    def _scale_spent(self, scale: Scale, optimizer: Optimizer) -> None:
        """The scale of a loss shrinks without end: it is not the cause. The gradients tell where they are not finite."""
        batch = self._batches.life.of_backward
        is_measured = self._measures and batch.is_full
        if not (self._doors.is_off or is_measured) and self._steps.is_ours(optimizer) and batch.is_streamed:
            batch.scaling = self._scales.scaling(scale)
            self._find_origin()

    @property
    def _gradients(self) -> list[Tensor]:
        return [value.grad for value in parameters_in(self._hooks.root) if value.grad is not None]

    @property
    def _is_reduced(self) -> bool:
        """Whether the gradients are a sum over ranks."""
        return bool(self._reduced_by) or self._collectives.reductions != self._reduced_before

    @property
    def _are_alike(self) -> bool:
        """Whether all ranks have the same gradients: DDP has averaged them."""
        ddp = self._ddp() if self._ddp is not None else None
        return ddp is not None and is_over_all_ranks(ddp) and not self._is_sharded

    @property
    def _is_sharded(self) -> bool:
        """Whether this rank has only a part of a gradient."""
        named = [(name, value) for module in self._hooks.modules for name, value in module.module._parameters.items()]
        return any(value is not None and mark_shard(name, value) != name for name, value in named)


def _is_used(gradient: Tensor) -> bool:
    """Whether a gradient is there still: not zeroed for the next step."""
    return bool(gradient.any())


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def _bytes(batch: BatchInProgress) -> int:
    kept: Iterator[Tensor] = batch.run.kept if batch.run is not None else iter(())
    return sum(value.numel() * value.element_size() for value in kept)
