"""The frames of a backward, where ``gradients=True`` asks for them: of calls, of parameters, and after a reduction."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..judge.batch import BatchInProgress, BatchPart
from ..judge.events import BackwardEnded, ForwardComes, StepBegins
from ..measure.collectives import Collectives
from ..measure.modules import Modules, NamedModule
from ..measure.recorder import Recorder
from ..measure.tape import Cell
from ..shared.types.frame import Phase, ReadingSpec
from .backward import CallGradients, ParameterGradients
from .batches import Batches
from .fails_open import FailsOpen
from .loss import Losses
from .reduced import ReducedGradients


class Gradients:
    """Measures the gradients of one model, until ``remove``. Without ``is_on`` it does nothing.

    Args:
        doors: catch errors of ours.
        model: the modules of the model.
    """

    events = (ForwardComes, BackwardEnded, StepBegins)

    def __init__(
        self,
        is_on: bool,
        batches: Batches,
        recorder: Recorder,
        doors: FailsOpen,
        *,
        model: Modules,
        collectives: Collectives,
        losses: Losses,
    ) -> None:
        self.is_on = is_on
        self._batches = batches
        self._recorder = recorder
        self._model = model
        self._losses = losses
        self._calls = CallGradients(recorder.cell, doors.hook)
        self._parameters = ParameterGradients(recorder, self._add, doors.hook, batches.life)
        self._reduced = ReducedGradients(recorder, self._add, model, self._parameters, collectives)

    def remove(self) -> None:
        self._parameters.remove()

    def watch_call(self, named: NamedModule, args: Any, kwargs: Any, output: Any, batch: BatchInProgress) -> None:
        """Measures the gradients of a call when its backward comes."""
        if self.is_on and torch.is_grad_enabled() and batch.is_streamed:
            self._calls.watch(args, kwargs, output, partial(self._add_call, batch.part, named))
            self._parameters.watch(named)

    def watch_compiled(self, called: list[NamedModule], batch: BatchInProgress) -> None:
        """The same for compiled calls, of which only the parameters can be measured."""
        if self.is_on and torch.is_grad_enabled() and batch.is_streamed:
            for named in called:
                self._parameters.watch(named)

    def on(self, event: ForwardComes | BackwardEnded | StepBegins) -> None:
        batch = self._batches.life.of_backward
        is_on = self.is_on and batch.is_streamed
        match event:
            case ForwardComes():
                self._reduced.forward_begins()
            case BackwardEnded(is_taken, is_own) if is_on and is_taken and is_own:
                self._reduced.backward_ends()
            case StepBegins() if is_on and batch.is_full:
                self._reduced.before_step()
                self._parameters.sweep(self._model.watched)

    def _add_call(self, part: BatchPart, named: NamedModule, rows: tuple[ReadingSpec, ...], cells: list[Cell]) -> None:
        self._batches.reach(part)
        self._add(named, rows, cells)

    def _add(self, named: NamedModule, rows: tuple[ReadingSpec, ...], cells: list[Cell]) -> None:
        self._losses.take()
        batch = self._batches.life.of_backward
        if batch.is_full:
            self._batches.add_backward(self._recorder.cells(batch.position, named, Phase.BACKWARD, rows, cells))
