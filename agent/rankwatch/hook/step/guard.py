"""The gradient guard: a gradient that is not finite never reaches the weights.

Before an optimizer step it looks at the gradients that the step would use. If one is not finite, and no loss scaler deals
with it, the rank runs its own batches again, those since the last step, with their gradients measured: where the reading
trips is where its gradient went bad. Was its own gradient finite, the gradient came from elsewhere: from another rank,
mostly. Either way the rank trips, and the step is not taken.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import TrainingAborted
from ...judge.batch import BatchInProgress, BatchPart
from ...judge.events import BackwardBegins, ForwardComes, OutputsCame, ScalerStepped, ScaleSpent, UpdateBegins
from ...judge.settler import Settler
from ...judge.steps.optimizer_steps import OptimizerSteps
from ...measure.collectives import Collectives
from ...measure.extremes import dtype_name
from ...measure.modules import NamedModule
from ...measure.recorder import Call, PendingFrame, Recorder
from ...measure.tape import Cell
from ...measure.weights import mark_shard
from ...replicas.data_parallel import is_over_all_ranks
from ...rerun.backward_rerun import OTHERWISE, OTHERWISE_COMPILED, RootRun, why_gradients_differ
from ...rerun.careful import Careful, is_compiled
from ...rerun.limit import Limit
from ...shared.types.config import Config, Policy
from ...shared.types.frame import SUMMED, Kind, Phase, ReadingSpec
from ...shared.types.trip import MAX_RERUN
from ...shared.types.tuning import Check
from ...touch.torch_private import active_ddp, comm_hooks_of, without_modes
from .. import backward
from ..batches import Batches
from ..fails_open import FailsOpen
from ..hooks import Hooks
from .gradient_look import are_all_bad, have_come, is_bad, is_of_anomaly, norms_of, parameters_of, says_of_a_loss
from .known_norms import KnownNorms
from .scaler import LossScales, Scale
from .skipping import Skipping
from .step_norm import StepNorm

log = logging.getLogger(__name__)

MAX_RUNS = 64
"""Forwards whose backward can be run again; of more in one step, the last ones."""

MAX_BYTES = 256 * 2**20
"""What may be kept alive from one forward to the next, for the sake of the earlier ones."""

ALL_BAD = "so were all others, as clip_grad_norm_ or a bad loss makes them: which one was bad first is not known"

ALL_REDUCE = "all_reduce"

NO_STEP_CAME = "the training ended before its step"
"""Why a step is not left out."""

Rows = tuple[ReadingSpec, ...]


class Guard:
    """Guards the weights of one model, until ``remove``.

    Args:
        doors: catch errors of ours.
        collectives: count the reductions that were called from Python.
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
        self._recorder = recorder
        self._scales = scales
        self._steps = steps
        self._hooks = hooks
        self._collectives = collectives
        self._reduced_before = 0
        self._known = KnownNorms(doors.guarded)
        self._calls = backward.CallGradients(self._measured, hook=_unguarded)
        self._kept: list[BatchInProgress] = []
        """The batches since the last step, whose backward has come."""
        self._dropped = 0
        self._is_over = False
        """Whether an optimizer has stepped since the last forward, and another one may still do."""
        self._reduced_by = ""
        """What reduces the gradients in DDP's backward: its own all-reduce, or what the user has registered in its place."""
        self._ddp: weakref.ref[Any] | None = None
        self._awaits_step = False
        """Whether a backward has begun, and neither a forward nor a step since."""
        self._norm = StepNorm()
        self._is_new_step = True
        """Whether the next optimizer to step is the first one since a forward."""

    def remove(self) -> None:
        self._guards = self._keeps = False
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
                self._update_begins(optimizer)

    # --- what is kept until the step --------------------------------------------------------------------------------------

    def _forward_comes(self) -> None:
        self._awaits_step = False
        held = self._settler.held_losses
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
        if ddp is not None and torch.distributed.get_world_size() > 1:
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

    def _backward_begins(self, *, is_first: bool) -> None:
        """``is_first``: no parameter has a gradient; what was kept belongs to a step that was skipped."""
        self._known.forget()
        self._awaits_step = True
        if is_first:
            self._known.begin()
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
        parameters = parameters_of(optimizer) if batch.is_streamed else []
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
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
            if not are_finite and self._settler.bad_step is None:
                self._find_origin()
        if not (self._skipping.is_on and self._is_left_out(optimizer, are_bad=looks and not are_finite)):
            self._steps.updates.begin(optimizer, batch.position.batch, are_finite=are_finite)
        self._awaits_step = False
        self._known.begin()
        if self._steps.has_several:
            self._is_over = True
        else:
            self._drop()

    def _is_left_out(self, optimizer: Optimizer, *, are_bad: bool) -> bool:
        """Whether the step is left out. ``are_bad``: the gradients of the optimizer; others of the model may be."""
        are_bad = are_bad or (self._steps.has_several and any(map(is_bad, self._gradients)))
        return self._skipping.decide(optimizer, is_bad=are_bad, is_alike=self._are_alike)

    def decide_losses(self, *, at_end: bool = False) -> None:
        """Bad losses were harmless, unless the gradients of the step are bad because of them: see ``held``.

        ``at_end``: the training has ended itself because of its loss.
        """
        if self._settler.held_losses:
            are_bad = at_end or any(map(is_bad, self._gradients))
            is_reduced = self._is_reduced and not at_end
            self._settler.decide_losses(are_bad=are_bad, is_reduced=is_reduced, is_sharded=self._is_sharded)

    def end(self) -> None:
        """The watch ends."""
        self.decide_losses()
        self._settler.refuse(NO_STEP_CAME)

    def look_back(self, error: BaseException) -> TrainingAborted | None:
        """An exception ends the training. If it came upon a bad gradient, before a step could use it, that is a trip."""
        try:
            self.decide_losses(at_end=says_of_a_loss(error))
            self._settler.refuse(NO_STEP_CAME)
        except TrainingAborted as trip:
            return trip
        if not (self._guards and self._awaits_step and self._batches.life.of_backward.is_streamed) or self._is_absorbed():
            return None
        self._awaits_step = False
        try:
            if is_of_anomaly(error) or (have_come(self._gradients) and any(map(is_bad, self._gradients))):
                self._find_origin()
                self._settler.refuse(NO_STEP_CAME)
        except TrainingAborted as trip:
            return trip
        return None

    def _is_scaled(self, optimizer: Optimizer) -> bool:
        """Whether a loss scaler is in use: it skips the steps with bad gradients by itself, in a fused optimizer too."""
        return getattr(optimizer, "found_inf", None) is not None or self._is_absorbed()

    def _is_absorbed(self) -> bool:
        scaling = self._batches.life.of_backward.scaling or self._scales.scaling(self._scales.last())
        return scaling.absorbs

    # --- where the gradient came from ----------------------------------------------------------------------------------

    def _scale_spent(self, scale: Scale, optimizer: Optimizer) -> None:
        """The scale of a loss shrinks without end: it is not the cause. The gradients tell where they are not finite."""
        batch = self._batches.life.of_backward
        is_measured = self._measures and batch.is_full
        if not (self._doors.is_off or is_measured) and self._steps.is_ours(optimizer) and batch.is_streamed:
            batch.scaling = self._scales.scaling(scale)
            self._find_origin()

    def _find_origin(self) -> None:
        """A gradient is not finite: runs the batches again, and trips."""
        self._batches.settle()  # what the forward shows comes first
        last, why = self._batches.life.of_backward, self._why_not()
        sums: dict[int, Tensor] = {}
        for batch in list(self._kept) if not why else ():
            if why := self._measure_again(batch, sums):
                break
            self._batches.settle()
            if self._settler.bad_step is not None:
                return
        if not why and len(self._kept) > 1:
            self._measure_sums(last, sums)
            if self._settler.bad_step is not None:
                return
        came_from, was_finite = "", not why
        if not why and self._is_reduced:
            came_from = self._reduced_by or ALL_REDUCE
            how = "run again eagerly (it runs compiled)" if self._is_compiled else "run again"
            why = f"{how}, this rank's own gradient was finite"
        elif not why:
            why = OTHERWISE_COMPILED if self._is_compiled else OTHERWISE
        if are_all_bad(self._gradients):
            why = f"{ALL_BAD}; {why}"
        self._batches.life.begin_backward(last)
        self._recorder.forget()
        for named in reversed(self._hooks.modules):
            rows, gradients = _gradients(named)
            if rows:
                self._add(last, named, rows, list(map(self._recorder.cell, gradients)), why, came_from, was_finite)
        self._batches.settle()

    @property
    def _gradients(self) -> list[Tensor]:
        return [value.grad for value in self._hooks.root.parameters() if value.grad is not None]

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

    @property
    def _is_compiled(self) -> bool:
        """Whether compiled code made the gradients, at least in part."""
        return any(batch.is_compiled for batch in self._kept) or any(map(is_compiled, self._hooks.root.modules()))

    def _why_not(self) -> str:
        """Why the batches cannot be run again; empty: they can."""
        if backward.is_running():
            return "not run again: the optimizer steps within the backward"
        if not self._kept:
            return (
                "not run again: what the model was given is not at hand (it is called in a compiled function, or its modules are "
                "called directly)"
            )
        if self._dropped:
            return f"not run again: of {self._dropped + len(self._kept)} forwards of this step, only the last ones were kept"
        return ""

    def _measure_sums(self, batch: BatchInProgress, sums: dict[int, Tensor]) -> None:
        """What each forward of the step made was finite: their sum may not be, in the dtype of the gradients."""
        self._recorder.forget()
        for named in reversed(self._hooks.modules):
            rows, gradients = _gradients(named, sums, SUMMED)
            if any(map(is_bad, gradients)):
                self._add(batch, named, rows, list(map(self._recorder.cell, gradients)))
        self._batches.settle()

    def _measure_again(self, batch: BatchInProgress, sums: dict[int, Tensor]) -> str:
        """Runs a batch again, and adds the frames of its backward. Returns why that was not possible, or not the same.

        ``sums``: of the gradients so far, by the ``id`` of their parameters.
        """
        run = batch.run
        if run is None:
            return "not run again: what the model was given is not at hand"
        self._settler.judge_again(batch, run.entry)
        if self._settler.bad_step is not None:
            return ""
        root = self._hooks.named(run.entry.module)
        handed = [gradient for one in run.gradients for gradient in one.values()]
        if root is not None and any(map(is_bad, handed)):
            rows = tuple([ReadingSpec(Kind.GRAD_OUTPUT, "grad_output", dtype_name(one.dtype)) for one in handed])
            self._add(batch, root, rows, list(map(self._recorder.cell, handed)))
            return ""
        found: list[tuple[NamedModule, Rows, list[Cell]]] = []

        def watch(module: nn.Module | str, call: Call) -> None:
            named = self._hooks.named(module) if isinstance(module, nn.Module) else None
            if named is not None:
                with without_modes():
                    self._calls.watch(*call, lambda *rows: found.append((named, *rows)))

        self._recorder.forget()
        module = run.entry.module
        ran = run.again(Careful([*module.buffers()], Limit(time.monotonic() + MAX_RERUN)), watch)
        if ran.values is None:
            return f"not run again: {ran.note}"
        known = dict(zip(map(id, module.parameters()), ran.values, strict=True))
        for parameter, gradient in known.items():
            if gradient is not None and len(self._kept) > 1:
                before = sums.get(parameter)
                sums[parameter] = gradient if before is None else before.add_(gradient)
        for named in reversed(self._hooks.modules):
            rows, gradients = _gradients(named, known)
            if rows:
                found.append((named, rows, list(map(self._recorder.cell, gradients))))
        for frame in found:
            self._add(batch, *frame)
        differs = why_gradients_differ(run, ran.changes)
        return f"run again, it was finite, but {differs}" if differs else ""

    def _measured(self, gradient: Tensor) -> Cell:
        with without_modes():
            return self._recorder.cell(gradient)

    def _add(
        self,
        batch: BatchInProgress,
        named: NamedModule,
        rows: Rows,
        cells: list[Cell],
        why: str = "",
        came_from: str = "",
        was_finite: bool = False,
    ) -> None:
        frame: PendingFrame = self._recorder.cells(batch.position, named, Phase.BACKWARD, rows, cells)
        frame.guarded, frame.unfound, frame.received, frame.was_finite = True, why, came_from, was_finite
        self._batches.life.begin_backward(batch)
        self._batches.add_backward(frame)


def _unguarded(body: Callable[..., Any]) -> Callable[..., Any]:
    """The rerun that calls ``body`` catches its errors."""
    return body


def _gradients(
    named: NamedModule, known: Mapping[int, Tensor | None] | None = None, mark: str = ""
) -> tuple[Rows, list[Tensor]]:
    """The rows and values of the gradients of a module's own parameters: those in ``known``, or the real ones."""
    rows, gradients = [], []
    for name, value in named.module._parameters.items():
        gradient = None if value is None else value.grad if known is None else known.get(id(value))
        if value is not None and gradient is not None:
            rows.append(ReadingSpec(Kind.GRADIENT, mark_shard(f"{name}.grad", value) + mark, dtype_name(value.dtype)))
            gradients.append(gradient)
    return tuple(rows), gradients


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def _bytes(batch: BatchInProgress) -> int:
    kept: Iterator[Tensor] = batch.run.kept if batch.run is not None else iter(())
    return sum(value.numel() * value.element_size() for value in kept)
