"""Counts optimizer steps, without the user's help."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from ...touch.parts import parameters_in
from ..events import Steps
from .updates import Updates

ASKED_AGAIN = 16
"""Questions about an optimizer of another model until its parameters are looked at again: one may have come to the model since.
Each step of each optimizer asks three times."""


class OptimizerSteps:
    """Counts the steps of the optimizers that have a parameter of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.done = 0
        """The steps that were counted."""
        self.offset = 0
        """The number of the first counted step, where the training has a count of its own."""
        self.updates = Updates()
        self._model = model
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._foreign: WeakKeyDictionary[Optimizer, tuple[list[int], int]] = WeakKeyDictionary()
        """Optimizers of other models, with the sizes of their groups, and how often they were asked for since the last look."""
        self._of_copies: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Those that have copies of the parameters, with the batch of the last step that was counted."""
        self._users: dict[int, int] = {}
        """The optimizer that was the last to begin with a parameter, both by ``id``."""

    @property
    def number(self) -> int:
        """The number of the step that comes next."""
        return self.done + self.offset

    @property
    def now(self) -> Steps:
        return Steps(self.done, self.number)

    def count_from(self, number: int) -> None:
        """The next step is of this number. The numbers never fall: they order the ranks."""
        self.offset = max(self.offset, number - self.done)

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has a parameter of the model."""
        if optimizer in self._steps:
            return True
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known, asked = self._foreign.get(optimizer, ([], 0))
        if sizes == known and asked % ASKED_AGAIN:
            self._foreign[optimizer] = known, asked + 1
            return False
        ours = {id(parameter) for parameter in parameters_in(self._model)}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            self._foreign.pop(optimizer, None)
            return True
        self._foreign[optimizer] = sizes, 1
        return False

    def have_begun(self) -> bool:
        """Whether there is an optimizer that has a parameter of the model. For trips: it looks through all objects."""
        found = (thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer))  # isinstance wakes lazy imports
        return bool(self._steps) or any(map(self.is_ours, found))

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of the groups of all optimizers that have stepped."""
        groups = [group for optimizer in self._steps for group in optimizer.param_groups]
        return tuple([float(group["lr"]) for group in groups if "lr" in group])

    def has(self, parameter: Tensor) -> bool:
        """Whether an optimizer has stepped that has this parameter."""
        return id(parameter) in self._users

    @property
    def has_several(self) -> bool:
        """Whether several optimizers have stepped."""
        return len(self._steps) > 1

    def of(self, optimizer: Optimizer) -> int:
        """The steps that this optimizer has done."""
        return self._steps.get(optimizer, 0)

    @property
    def are_of_copies(self) -> bool:
        """Whether an optimizer has copies of the parameters, and an engine writes them back."""
        return bool(self._of_copies)

    def adopt(self, optimizer: Optimizer, batch: int) -> None:
        """An optimizer has stepped upon copies of the parameters: see ``Copies``."""
        self._of_copies[optimizer] = -1
        self._steps[optimizer] = self.done
        self.count(optimizer, batch)

    def count(self, optimizer: Optimizer, batch: int) -> None:
        if not self.is_ours(optimizer):
            return
        if (last := self._of_copies.get(optimizer)) is not None:  # an engine may call it once for each of its groups
            if last == batch:
                return
            self._of_copies[optimizer] = batch
        # The parameters may be divided between several optimizers: one step of each is one step of the training.
        before = self._steps.get(optimizer)
        self._steps[optimizer] = (self._start_of(optimizer) if before is None else before) + 1
        self.done = max(self.done, self._steps[optimizer])

    def _start_of(self, optimizer: Optimizer) -> int:
        """What an optimizer counts from that steps for the first time: it may be the successor of another one."""
        parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        held = [id(value) for value in vars(optimizer).values()]  # it may also call another one's step in its own
        has_others = any((other := self._users.get(one)) is not None and other not in held for one in parameters)
        self._users.update(dict.fromkeys(parameters, id(optimizer)))
        return self.done if has_others else max(0, self.done - 1)


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether an optimizer's ``step`` was given a function that computes the loss and the gradients."""
    return _closure(args, kwargs) is not None


def after_closure(args: Any, kwargs: Any, then: Callable[[], None]) -> tuple[Any, Any]:
    """The arguments of ``step`` with a closure after which ``then`` is called: before the update."""
    closure = _closure(args, kwargs)

    def both() -> Any:
        result = closure()
        then()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": both}
    return (args[0], both, *args[2:]), kwargs


def _closure(args: Any, kwargs: Any) -> Any:
    """``args`` begins with the optimizer itself."""
    found = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found if callable(found) else None
