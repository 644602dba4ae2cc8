"""Weights that grow between the steps of an optimizer: other code writes to them, a decay of the wrong sign or an average.

At a few steps of each optimizer (``is_looked_at``) the largest number of each weight is taken before the step, after it
and before the next one. Between the last two of these a weight is bit by bit as it was, unless other code writes to it.
A weight that no optimizer has, such as a teacher's, is written by other code in any case: there the question is whether
it has outgrown those that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...measure import norms
from ...measure.extremes import local
from ...measure.modules import Modules, NamedModule, class_name
from ...shared.types.trip import GrownWeight
from ..events import StepDone, UpdateBegins
from ..outside import Outside
from .optimizer_steps import OptimizerSteps
from .updates import is_looked_at

FEWEST = 2
"""Looks that show a habit: a checkpoint that is loaded changes the weights once."""

GREW = 1.25
"""A weight has grown if it is so many times what it was."""

OUTGREW = 1.1
"""No average of trained weights is larger than these ever were, but for what they were between two looks. They are those of the
same name and shape."""


class Growth:
    """Observes the optimizers of one model. ``outside``: has the modules that are no part of the model."""

    events = (UpdateBegins, StepDone)

    def __init__(self, model: Modules, steps: OptimizerSteps, outside: Outside) -> None:
        self._model, self._steps, self._outside = model, steps, outside
        self._looks: WeakKeyDictionary[Optimizer, _Looks] = WeakKeyDictionary()

    def on(self, event: UpdateBegins | StepDone) -> None:
        if self._steps.are_of_copies:
            return
        looks = self._looks.get(event.optimizer)
        if looks is None:
            looks = self._looks[event.optimizer] = _Looks()
        if looks.is_due(is_done=isinstance(event, StepDone)):
            looks.take([*self._weights(event.optimizer)], event.batch if isinstance(event, StepDone) else -1)

    def found(self) -> tuple[GrownWeight, float] | None:
        """The weight that other code has made larger most, and by how much a step of its optimizer did so at most."""
        all_found = [one for looks in self._looks.values() for one in looks.found()]
        return max(all_found, key=lambda one: one[0].now / one[0].before, default=None)

    def _weights(self, optimizer: Optimizer) -> Iterator[_Weight]:
        own = {id(value) for group in optimizer.param_groups for value in group["params"]}
        for named in (*self._model.modules, *_parts(self._outside.modules)):
            for name, value in named.module._parameters.items():
                is_own = id(value) in own
                if value is not None and (is_own or not self._steps.has(value)) and (part := local(value)).numel():
                    yield named, name, part.detach(), is_own


def _parts(modules: Iterable[NamedModule]) -> Iterator[NamedModule]:
    for one in modules:
        for path, module in one.module.named_modules(prefix=one.names[0]):
            yield NamedModule(module, [path])


_Weight = tuple[NamedModule, str, Tensor, bool]
"""The module, the name, the values, and whether the optimizer has it."""


class _Looks:
    """At the weights of one optimizer, and at those of none. Nothing here waits for a device, but ``found``."""

    def __init__(self) -> None:
        self._steps = self._count = 0
        self._weights: list[tuple[str, str, str, torch.Size, bool]] = []
        self._batch = -1
        self._taken: list[Tensor] = []
        """Of the look that is under way: before the step, and after it."""
        self._first = self._last = self._most = self._grew = self._reach = torch.empty(0)

    def is_due(self, *, is_done: bool) -> bool:
        """Whether to look now: a step is done, or is about to begin."""
        if is_done:
            return len(self._taken) == 1
        self._steps += 1
        return bool(self._taken) or is_looked_at(self._steps)

    def take(self, weights: list[_Weight], batch: int) -> None:
        """``batch``: of the step that is done; -1: it is about to begin."""
        names = [(one.names[0], class_name(one.module), name, value.shape, is_own) for one, name, value, is_own in weights]
        try:
            highs = torch.stack([one.float() for one in norms.largest([value for _, _, value, _ in weights])])
        except (RuntimeError, TypeError):  # on several devices, or of a kind that this does not know: nothing is said
            self._taken = []
            return
        if names != self._weights:
            self._weights, self._taken, self._count, self._batch = names, [], 0, -1
            self._last = self._most = self._grew = self._reach = torch.zeros_like(highs)
        self._batch = batch if self._batch < 0 else self._batch
        if len(self._taken) < 2:
            self._taken.append(highs)
            return
        before, after = self._taken
        self._taken = []
        self._first, self._last = before if not self._count else self._first, highs
        self._count += 1
        self._most = torch.maximum(self._most, highs)
        self._grew = self._grew + (highs > after)
        self._reach = torch.maximum(self._reach, after - before)

    def found(self) -> Iterator[tuple[GrownWeight, float]]:
        if self._count < FEWEST:
            return
        columns = (one.tolist() for one in (self._first, self._last, self._grew, self._reach))
        rows = list(zip(self._weights, *columns, strict=True))
        trained: dict[tuple[str, torch.Size], float] = {}
        for (_, _, name, shape, is_own), most in zip(self._weights, self._most.tolist(), strict=True):
            if is_own:
                trained[name, shape] = max(most, trained.get((name, shape), 0.0))
        for (module, kind, name, shape, is_own), first, now, grew, reach in rows:
            is_habit = 2 * grew > self._count if is_own else now >= OUTGREW * trained.get((name, shape), math.inf)
            if is_habit and 0 < GREW * first <= now < math.inf:
                yield GrownWeight(module, kind, name, first, now, self._batch, now), max(0.0, reach) if is_own else 0.0
