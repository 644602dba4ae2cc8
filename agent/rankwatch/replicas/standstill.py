"""Finds a model that stands still: backwards come, or optimizer steps, and no weight changes.

Engines that skip a step whose gradient is not finite say nothing, nor do thresholds, schedules that have reached 0, or an
optimizer that has the parameters of a copy. What changes weights need not be an optimizer of torch's: the weights decide.
Silent: trainings in which another model's optimizer steps upon gradients, as in turns; a process without any optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from ..judge.batch import BatchOrigin
from ..judge.events import BackwardEnded, BackwardReached, OtherStepDone, OutputsCame, StepDone
from ..judge.steps.optimizer_steps import OptimizerSteps
from ..measure.modules import Modules, class_name
from ..measure.shards import is_bad
from ..shared.types.notice import Notice, NoticeKind
from .lanes import Lanes, Pair
from .unmoving import optimizers, rate_of, values_of
from .weight_sums import are_same, some_of, weights_of

BACKWARDS = 32
"""BackwardCount without an optimizer step before anything is said,"""

USUAL = 16
"""Forwards in a row, each with its backward, before one without is odd."""

TIMES = 4
"""and so many times as many as ever came between two steps: gradients are accumulated."""

UNTRIED = 128
"""BackwardCount before anything is said where no step was ever seen."""

STEPS = 32
"""Optimizer steps between two looks at the weights. Two looks in a row must find them as they were."""


@dataclass(slots=True)
class BackwardCount:
    """Counts the backwards since the last step. Pure."""

    most: int = 0
    """The most that came between two steps."""
    count: int = 0
    since: int = -1
    """The batch of the first of them."""
    batch: int = -1
    has_stepped: bool = False

    @property
    def limit(self) -> int:
        return max(BACKWARDS if self.has_stepped else UNTRIED, TIMES * self.most)

    def add(self, batch: int) -> bool:
        """Whether a backward of another batch came than the last one."""
        if batch == self.batch:
            return False
        self.since = batch if not self.count else self.since
        self.count, self.batch = self.count + 1, batch
        return True

    def step(self) -> None:
        self.most, self.count, self.has_stepped = max(self.most, self.count), 0, True

    def allow(self) -> None:
        """The weights have changed without a step: as many backwards again may come."""
        self.most = max(self.most, self.count)


@dataclass(slots=True)
class SkippedForwards:
    """Finds forwards that no backward follows, after many of which each had one. Pure.

    A backward may belong to several forwards, and reach an earlier one later: whether one was skipped is known once the next
    one's backward is over.
    """

    streak: int = 0
    returned: int = -1
    reached: int = -1
    missed: int = -1
    """The last forward of which no backward was seen when the next one returned."""
    first: int = -1
    count: int = 0

    def forward(self, batch: int) -> bool:
        """The forward of a batch has returned; whether an earlier one is now known to have been skipped."""
        if batch == self.returned:
            return False
        is_known = self.missed >= 0 and self.reached == self.returned > self.missed
        if is_known:
            self.first = self.missed if not self.count else self.first
            self.count += 1
        was_reached = self.returned < 0 or self.reached == self.returned
        is_odd = not was_reached and self.streak >= USUAL
        self.streak = self.streak + 1 if was_reached or is_odd else 0
        self.missed = self.returned if is_odd else -1
        self.returned = batch
        return is_known

    def backward(self, batch: int) -> None:
        if batch == self.missed:
            self.missed, self.streak = -1, 0
        self.reached = max(self.reached, batch)


class Standstill:
    """The model of one watch.

    Args:
        is_on: whether weights are looked at.
    """

    events = (OutputsCame, BackwardReached, BackwardEnded, StepDone, OtherStepDone)

    def __init__(self, model: Modules, steps: OptimizerSteps, notify: Callable[[Notice], None], *, is_on: bool) -> None:
        self._model = model
        self._steps = steps
        self._notify = notify
        self._is_on = is_on
        self._backwards = BackwardCount()
        self._skips = SkippedForwards()
        self._reached = -1
        self._before: Lanes | None = None
        """The weights when half of the backwards had come."""
        self._label = ""
        self._idle = ""
        """The class of an optimizer that steps, and none of whose parameters has a gradient."""
        self._looks: list[tuple[int, int, Lanes]] = []
        """The weights at looks after steps, with the step and the batch."""
        self._first: list[Pair] | None = None
        """The weights at the first look."""

    def on(self, event: OutputsCame | BackwardReached | BackwardEnded | StepDone | OtherStepDone) -> None:
        if not self._is_on:
            return
        match event:
            case OutputsCame(part):
                skips, batch = self._skips, part.batch.position.batch
                if part.batch.origin is BatchOrigin.TRAINING and skips.forward(batch):
                    self._say(NoticeKind.SKIPPED, skips.first, batch - 2, skips.count, "backward")
            case BackwardReached(part):
                if part.batch.origin.is_training:
                    self._reached = part.batch.position.batch
                    self._skips.backward(self._reached)
            case BackwardEnded():
                if self._reached >= 0 and self._backwards.add(self._reached):
                    self._look_for_steps()
            case OtherStepDone(optimizer):
                if any(value.grad is not None for group in optimizer.param_groups for value in group["params"]):
                    self._backwards.step()
                else:
                    self._idle = type(optimizer).__name__
            case StepDone(optimizer, batch):
                self._backwards.step()
                if self._steps.done % STEPS == 0 and (not self._looks or self._looks[-1][0] != self._steps.done):
                    self._look_for_change(optimizer, batch)

    # --- no step ------------------------------------------------------------------------------------------------------

    def _look_for_steps(self) -> None:
        found = self._backwards
        if found.count == found.limit // 2:
            self._before = weights_of(self._model)
        elif found.count == found.limit and self._before is not None:
            before, now = self._before.pairs(), weights_of(self._model).pairs()
            self._before = None
            if not are_same(before, now):
                found.allow()
            elif found.has_stepped or optimizers():
                self._label = self._why_no_step()
                self._say(NoticeKind.NO_STEP, found.since, found.batch, found.count, self._label)
        elif found.count > found.limit and self._label and found.count % BACKWARDS == 0:
            self._say(NoticeKind.NO_STEP, found.since, found.batch, found.count, self._label)

    def _why_no_step(self) -> str:
        for named in self._model.modules:
            for name, parameter in named.module._parameters.items():
                gradient = values_of(getattr(parameter, "grad", None))
                if gradient is not None and is_bad(gradient):
                    return (
                        f"the gradient of {named.label(name)} ({class_name(named.module)}) is not finite, and whatever takes "
                        "the steps skips such a step in silence"
                    )
        if self._idle:
            return f"none of the parameters that {self._idle} steps upon has a gradient, and none is this model's: a copy's?"
        if not self._backwards.has_stepped:
            return "no optimizer of this process has ever stepped"
        return "the gradients that were looked at are finite: a threshold or a condition of the code skips the steps"

    # --- steps that change nothing ------------------------------------------------------------------------------------

    def _look_for_change(self, optimizer: Optimizer, batch: int) -> None:
        looks = self._looks
        if looks and not looks[-1][2].is_ready:
            return
        weights = weights_of(self._model)
        looks.append((self._steps.done, batch, weights))
        if self._first is None:
            self._first = weights.pairs()
        if len(looks) < 3:
            return
        (step, since, first), (_, _, second) = looks[0], looks[1]
        was, is_same = first.pairs(), are_same(first.pairs(), second.pairs())
        del looks[0]
        if is_same and are_same(was, weights.pairs()):
            looks.clear()
            if (why := self._why_no_change(optimizer, has_changed=not are_same(self._first, was))) and not self._label:
                self._label = why
                self._say(NoticeKind.STOPPED, since, batch, step, why)

    def _why_no_change(self, optimizer: Optimizer, *, has_changed: bool) -> str:
        """Empty: it was never otherwise, with a rate of 0, or with gradients, which ``unmoving`` tells by parameter."""
        if not any(rate_of(group) for group in optimizer.param_groups):
            return "the learning rate is 0" if has_changed else ""
        graded = [values_of(value.grad) for value in some_of(self._model)]
        known = [one for one in graded if one is not None and one.numel()]
        if not known:
            return "none of its parameters has a gradient as the optimizer steps"
        if not any(bool(one.any()) for one in known):
            return "all of its gradients are exactly 0"
        return "its updates are rounded away, or the optimizer has other tensors than the model" if has_changed else ""

    # --- both ---------------------------------------------------------------------------------------------------------

    def _say(self, kind: NoticeKind, since: int, batch: int, value: float, why: str) -> None:
        root = class_name(self._model.root)
        self._notify(Notice(kind, "", root, "", "", since, batch, float(value), 0.0, why))
