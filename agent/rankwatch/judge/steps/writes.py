"""Whether other code than its optimizers' steps has written to a model's weights. A fact for a loss that leaves its range.

torch counts the writes to a tensor, but for those through ``x.data``. Between two steps the counts of a training stand still.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakSet

from torch.optim import Optimizer

from ...measure.sweep import versions_of
from ..events import StepDone, UpdateBegins

QUIET = 32
"""Batches in a row without such a write, after which one is told: clipping and averages write all the time."""

SHOWN = 3
"""Writes that a line has, the last ones."""


class Writes:
    """Those to the weights of one model's optimizers."""

    events = (UpdateBegins, StepDone)

    def __init__(self) -> None:
        self.line = ""
        """``after the step of batch 79``, one such for each write; empty: nothing is known. For any thread."""
        self._told: deque[str] = deque(maxlen=SHOWN)
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._count = -1
        """Writes up to the last step; -1: not known."""
        self._batch = self._written = -1
        """Of the last step, and of the last one after which a write came, or else of the first step."""

    def on(self, event: UpdateBegins | StepDone) -> None:
        if event.optimizer not in self._optimizers:
            self._optimizers.add(event.optimizer)
            self._count = -1
        count = versions_of([value for one in self._optimizers for group in one.param_groups for value in group["params"]])
        if isinstance(event, StepDone):
            self._batch = event.batch
            self._written = self._batch if self._written < 0 else self._written
        elif count != self._count >= 0:
            self._tell()
        self._count = count

    def _tell(self) -> None:
        if self._batch - self._written >= QUIET:
            self._told.append(f"after the step of batch {self._batch}")
            self.line = "; ".join(self._told)
        self._written = self._batch
