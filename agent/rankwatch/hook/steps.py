"""Counts optimizer steps, without the user's help."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer


class OptimizerSteps:
    """Counts the steps of the optimizers that have a parameter of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.done = 0
        """The steps that were counted."""
        self.offset = 0
        """The number of the first counted step, where the training has a count of its own."""
        self._model = model
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    @property
    def number(self) -> int:
        """The number of the step that comes next."""
        return self.done + self.offset

    def count_from(self, number: int) -> None:
        """The next step is of this number. The numbers never fall: they order the ranks."""
        self.offset = max(self.offset, number - self.done)

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has a parameter of the model."""
        if optimizer in self._steps:
            return True
        ours = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def of(self, optimizer: Optimizer) -> int:
        """The steps that this optimizer has done."""
        return self._steps.get(optimizer, 0)

    def count(self, optimizer: Optimizer) -> None:
        if not self.is_ours(optimizer):
            return
        # The parameters may be divided between several optimizers: one step of each is one step of the training.
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self.done = max(self.done, self._steps[optimizer])
