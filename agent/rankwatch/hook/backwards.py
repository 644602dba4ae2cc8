"""From a backward to the step of an optimizer: what torch calls around both -> events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ..judge.events import (
    BackwardBegins,
    BackwardEnded,
    Feed,
    OtherStepBegins,
    OtherStepDone,
    StepBegins,
    StepDone,
    UpdateBegins,
)
from ..judge.steps.optimizer_steps import OptimizerSteps, after_closure, has_closure
from .batches import Batches
from .fails_open import FailsOpen
from .hooks import Hooks
from .loss import losses_of, versions_of
from .running import RunningRoots, is_capturing
from .stage import is_rehearsal


class Backwards:
    """What torch calls around a backward and around the step of an optimizer; see ``BackwardListener`` and ``StepHooks``.

    Args:
        doors: catch errors of ours.
        model: the modules of the model.
        stand_in: is called before a step in the place of the detector, once that has switched itself off.
        sees_losses: whether backwards are looked at: the Hugging Face detector looks at none.
    """

    def __init__(
        self,
        doors: FailsOpen,
        feed: Feed,
        running: RunningRoots,
        batches: Batches,
        steps: OptimizerSteps,
        model: Hooks,
        stand_in: Callable[[Optimizer], None],
        *,
        sees_losses: bool,
    ) -> None:
        self._doors = doors
        self._feed = feed
        self._running = running
        self._batches = batches
        self._life = batches.life
        self._steps = steps
        self._model = model
        self._sees_losses = sees_losses
        self.before_step, self.after_step = doors.guarded(self._before_step), doors.guarded(self._after_step)
        self.backward_begins = doors.guarded(self._backward_begins)
        self.backward_ends = doors.guarded(self._backward_ends)
        self._judge_before_step = doors.hook(self._judge_step)
        self._tell = doors.hook(feed.tell)
        self._stand_in = doors.guarded(stand_in)

    def _backward_begins(self, args: Any, kwargs: Any) -> None:
        self._running.recover()
        if is_capturing() or self._doors.is_off or not self._sees_losses or is_rehearsal():
            return
        if not self._steps.done:
            self._running.find_step(is_sure=False)
        if self._running.depth:
            return
        losses, is_own = losses_of(args, kwargs), self._running.is_own()
        versions = versions_of(self._model.own) if losses and is_own else None
        self._feed.tell(BackwardBegins(losses, is_own, versions))

    def _backward_ends(self, has_returned: bool) -> None:
        self._feed.tell(BackwardEnded(has_returned and not self._doors.is_off, self._running.is_own()))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_capturing():
            return None
        self._judge_before_step(optimizer)
        if not self._steps.is_ours(optimizer):
            return None
        if has_closure(args, kwargs):  # it computes the gradients: until then they are those of an earlier step
            return after_closure(args, kwargs, partial(self._before_update, optimizer))
        self._before_update(optimizer)
        return None

    def _judge_step(self, optimizer: Optimizer) -> None:
        if not self._steps.is_ours(optimizer):
            self._feed.tell(OtherStepBegins(optimizer))
            return
        self._running.recover()
        if self._sees_losses:
            self._running.find_step(is_sure=True)
        if (candidate := self._life.candidate_before(self._steps.of(optimizer))) is not None:
            self._batches.reach(candidate)
        self._feed.tell(StepBegins(self._steps.now, optimizer))

    def _before_update(self, optimizer: Optimizer) -> None:
        self._tell(UpdateBegins(optimizer))
        if self._doors.fault:
            self._stand_in(optimizer)
        if self._doors.is_stopping:
            optimizer.zero_grad(set_to_none=True)  # without gradients it leaves the weights alone

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_capturing():
            return
        self._life.phase = "idle"
        self._steps.count(optimizer, self._life.position.batch)
        self._life.steps_done = self._steps.number
        if not self._doors.is_off:
            is_ours = self._steps.of(optimizer) > 0
            self._feed.tell(StepDone(optimizer, self._life.position.batch) if is_ours else OtherStepDone(optimizer))
