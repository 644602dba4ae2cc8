"""Where a gradient that is not finite came from: a rank runs its batches since the last step again, with gradients measured.

Where the reading trips, its gradient went bad. If this rank's own gradients are finite, the bad one came from elsewhere: from
another rank, mostly, or from the sum over the batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ...judge.batch import BatchInProgress
from ...judge.settler import Settler
from ...measure.extremes import dtype_name
from ...measure.modules import NamedModule
from ...measure.recorder import Call, PendingFrame, Recorder, labelled_inputs
from ...measure.tape import Cell
from ...measure.weights import mark_shard
from ...rerun.backward_rerun import OTHERWISE, OTHERWISE_COMPILED, why_gradients_differ
from ...rerun.careful import Careful, is_compiled
from ...rerun.forward import RootEntry
from ...rerun.limit import Limit
from ...shared.types.frame import OWN, SUMMED, Kind, Phase, ReadingSpec, State
from ...shared.types.trip import MAX_RERUN, OVERWRITTEN
from ...touch.parts import buffers_in, modules_in, parameters_in
from ...touch.torch_private import without_modes
from .. import backward
from ..batches import Batches
from ..hooks import Hooks
from .gradient_look import are_all_bad, is_bad

ALL_BAD = "so were all others, as clip_grad_norm_ or a bad loss makes them: which one was bad first is not known"

_OF_LOSS = "gradient within the loss"
"""The label where what the loss hands to the model's outputs is finite: a penalty of weights or gradients leads past them."""

Rows = tuple[ReadingSpec, ...]


class GradientOrigin:
    """Looks for it in one model, whose modules ``hooks`` has. A trip is raised, or waits in ``Undecided.bad_step``."""

    def __init__(self, batches: Batches, settler: Settler, recorder: Recorder, hooks: Hooks) -> None:
        self._batches = batches
        self._settler = settler
        self._undecided = settler.undecided
        self._recorder = recorder
        self._hooks = hooks
        self._calls = backward.CallGradients(self._measured, hook=_unguarded)

    def find(self, kept: list[BatchInProgress], dropped: int, reduced_by: str, present: list[Tensor]) -> None:
        """A gradient is not finite: runs the batches again, and trips.

        Args:
            kept: the batches since the last step, whose backward has come; before them, ``dropped`` others were not kept.
            reduced_by: what has summed the gradients over ranks; empty: nothing has.
            present: the gradients.
        """
        self._batches.settle()  # what the forward shows comes first
        last, why = self._batches.life.of_backward, _why_not(kept, dropped)
        if not kept and self._add_of_loss(last):
            return
        sums: dict[int, Tensor] = {}
        for batch in list(kept) if not why else ():
            if why := self._measure_again(batch, sums):
                break
            self._batches.settle()
            if self._undecided.bad_step is not None:
                return
        if not why and len(kept) > 1:
            self._measure_sums(last, sums)
            if self._undecided.bad_step is not None:
                return
        came_from, was_finite = "", not why
        if not why:
            is_compiled = self._is_compiled(kept)
            if reduced_by:
                if any(self._add_of_loss(batch, _OF_LOSS) for batch in kept):  # no other rank's, then
                    return
                came_from = reduced_by
                how = "run again eagerly (it runs compiled)" if is_compiled else "run again"
                why = f"{how}, this rank's own gradient was finite"
            else:  # of what compiled code makes, an eager run says nothing
                was_finite = not is_compiled
                why = OTHERWISE_COMPILED if is_compiled else OTHERWISE
        if are_all_bad(present):
            why = f"{ALL_BAD}; {why}"
        self._batches.life.begin_backward(last)
        self._recorder.forget()
        for named in reversed(self._hooks.modules):
            rows, gradients = _gradients(named)
            if rows:
                own, parts = _gradients(named, sums, OWN) if came_from else ((), [])
                cells = list(map(self._recorder.cell, [*parts, *gradients]))
                self._add(last, named, own + rows, cells, why, came_from, was_finite)
        self._batches.settle()

    def _add_of_loss(self, batch: BatchInProgress, label: str = "grad_output") -> bool:
        """Whether an operator of the loss was seen to hand on a bad gradient: no batch has to be run again for that.

        ``label``: of the reading that trips then.
        """
        root, loss = self._hooks.named(self._hooks.root), batch.loss_backward
        made = loss.origin()[0] if loss is not None else None
        if root is None or made is None:
            return False
        row = ReadingSpec(Kind.GRAD_OUTPUT, label, made.output.dtype)
        self._add(batch, root, (row,), [self._recorder.cell(math.nan if made.output.state is State.NAN else math.inf)])
        self._batches.settle()
        return True

    def _is_compiled(self, kept: list[BatchInProgress]) -> bool:
        """Whether compiled code made the gradients, at least in part."""
        return any(batch.is_compiled for batch in kept) or any(map(is_compiled, modules_in(self._hooks.root)))

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
        if why := _overwritten(batch, run.entry):
            return why
        self._settler.judge_again(batch, run.entry)
        if self._undecided.bad_step is not None:
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
        ran = run.again(Careful([*buffers_in(module)], Limit(time.monotonic() + MAX_RERUN)), watch)
        if ran.values is None:
            return f"not run again: {ran.note}"
        known = dict(zip(map(id, parameters_in(module)), ran.values, strict=True))
        for parameter, gradient in known.items():
            if gradient is not None:
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


def _why_not(kept: list[BatchInProgress], dropped: int) -> str:
    """Why the batches cannot be run again; empty: they can."""
    if backward.is_running():
        return "not run again: the optimizer steps within the backward"
    if not kept:
        return (
            "not run again: what the model was given is not at hand (it is called in a compiled function, or its modules are "
            "called directly)"
        )
    if dropped:
        return f"not run again: of {dropped + len(kept)} forwards of this step, only the last ones were kept"
    return ""


def _overwritten(batch: BatchInProgress, entry: RootEntry) -> str:
    """What the root was given that has other values than when its forward began, though autograd knows of no change."""
    root = batch.root_inputs
    given = [value for _, _, value in labelled_inputs(entry.args, entry.kwargs)]
    if root is None or len(given) != len(root.cells):
        return ""
    for row, cell, value in zip(root.spec.readings, root.cells, given, strict=True):
        if cell.state is not State.FINITE or type(value) is not Tensor or not value.is_floating_point():
            continue
        now = float(value.detach().abs().max())
        if not math.isclose(now, cell.high, rel_tol=1e-3):
            return f"{row.label} of the root {OVERWRITTEN}: abs max {cell.high:.2e} as the forward began, {now:.2e} now"
    return ""


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
