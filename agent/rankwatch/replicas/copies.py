"""Finds the optimizer that steps upon copies of a model's parameters, as engines do: flat shards, or weights of 32 bits.

No parameter of it is the model's. What shows is that a backward of the model comes, then its step, and that the weights have
changed when the next forward begins: the engine has written them by then. From then on its steps are those of the model.
Silent where the model has an optimizer of its own, and so long as none changes its weights.
"""

from __future__ import annotations

from torch.optim import Optimizer

from ..judge.events import BackwardEnded, BackwardReached, ForwardComes, OtherStepDone
from ..judge.steps.optimizer_steps import OptimizerSteps
from ..measure.modules import Modules
from .lanes import Lanes
from .weight_sums import weights_of

TRIES = 64
"""Steps of other optimizers that changed nothing of the model, after which nothing is looked for: they belong to another one."""


class Copies:
    """The optimizers of copies of one model's parameters. It is told of a forward before those that count steps by it.

    Args:
        is_on: whether weights are looked at.
    """

    events = (ForwardComes, BackwardReached, BackwardEnded, OtherStepDone)

    def __init__(self, model: Modules, steps: OptimizerSteps, *, is_on: bool) -> None:
        self._model = model
        self._steps = steps
        self._left = TRIES if is_on else 0
        self._reached = -1
        """The batch whose backward came last."""
        self._before: Lanes | None = None
        """The weights since the first backward after the last step."""
        self._stepped: list[Optimizer] = []

    def on(self, event: ForwardComes | BackwardReached | BackwardEnded | OtherStepDone) -> None:
        if not self._left:
            return
        match event:
            case BackwardReached(part):
                self._reached = part.batch.position.batch
            case BackwardEnded():
                if self._reached >= 0 and self._before is None:
                    self._before = weights_of(self._model)
            case OtherStepDone(optimizer):
                values = [value for group in optimizer.param_groups for value in group["params"]]
                if self._before is not None and any(value.grad is not None for value in values):
                    self._stepped.append(optimizer)
            case ForwardComes():
                if self._steps.done:
                    self._forget(0)
                elif self._stepped:
                    self._look()

    def _look(self) -> None:
        if self._before is not None and self._before.pairs() != weights_of(self._model).pairs():
            for optimizer in dict.fromkeys(self._stepped):
                self._steps.adopt(optimizer, self._reached)
        self._forget(0 if self._steps.done else self._left - 1)

    def _forget(self, left: int) -> None:
        self._left, self._reached, self._before, self._stepped = left, -1, None, []
