"""Leaves a bad step out, on all ranks alike (``on_bad_step="skip"``).

No collective is ever left out, only the step: a forward that trips runs on to its end, and so does its backward. Before the
optimizer changes the weights, all ranks know whether a gradient of the step is not finite. If one is, the parameters of the
optimizer lose their gradients: so it changes neither weights nor state. What the forwards of the step have written to buffers
is put back. Random state is not.

How all ranks come to know it:

- Where DDP has averaged the gradients over all ranks, each rank has the same ones: no message is needed.
- Where a loss scaler skips steps, it does so on all ranks alike. Upon such a step they ask each other whether a forward or a
  loss had tripped; else only the scale was too high, and the scaler deals with that.
- Elsewhere (shards, stages, experts, gradients that the script averages) one number is reduced before each step. Each rank
  must step alike.

What leaving out cannot mend ends the run, as a trip does without this: ``refused`` in ``Trip.left_out`` says why.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ...judge.events import ForwardComes, OtherStepBegins, StepDone
from ...judge.lifecycle import Life
from ...judge.steps.optimizer_steps import OptimizerSteps
from ...judge.steps.skip_budget import SkipBudget
from ...judge.steps.undecided import Undecided
from ...measure.counted import unheard
from ...measure.extremes import local
from ...measure.modules import Modules
from ...shared.types.bad_step import OnBadStep
from ...shared.types.trip import LeftOut
from ...touch.parts import parameters_in
from ...touch.torch_private import found_inf
from .buffer_copies import BufferCopies

MAX_FORWARDS = 64
"""Forwards after a trip without a step of an optimizer that is seen: then nothing will leave the step out."""


class Skipping:
    """Decides on the bad steps of one model.

    Args:
        undecided: has the trip that waits for its step.
    """

    events = (ForwardComes, OtherStepBegins, StepDone)

    def __init__(self, allowed: OnBadStep, model: Modules, life: Life, undecided: Undecided, steps: OptimizerSteps) -> None:
        self.is_on = allowed.skips
        self._model = model
        self._life = life
        self._undecided = undecided
        self._steps = steps
        self._allowed = allowed
        self._budget = SkipBudget(allowed)
        self._copies = BufferCopies(model)
        self._step = 0
        """The number of the step, as this counts."""
        self._is_new = True
        """Whether no forward came since the last step."""
        self._has_kept = False
        """Whether buffers were copied since then."""
        self.has_asked = False
        """Whether the other ranks were asked before the step that begins."""
        self._is_left_out = False
        """Whether the step, or one of another optimizer since the last forward, is left out."""
        self._left_out: LeftOut | None = None
        """What is told of the step, once its optimizer has stood still."""
        self._forwards = 0
        self._before: list[tuple[Optimizer, list[Any], list[dict[str, Any]]]] = []
        """Optimizers that have lost their gradients, as they were before the steps that run: one may call its parent class's."""

    def on(self, event: ForwardComes | OtherStepBegins | StepDone) -> None:
        if not self.is_on:
            return
        match event:
            case ForwardComes():
                self._forward_comes()
            case OtherStepBegins(optimizer):
                if self._undecided.bad_step is not None and not self._steps.have_begun():
                    name = type(optimizer).__name__
                    self._undecided.refuse(f"the parameters of {name} are copies of the model's")
            case StepDone(optimizer):
                self._step_done(optimizer)

    def _forward_comes(self) -> None:
        if self._undecided.bad_step is not None:
            self._forwards += 1
            if self._forwards > MAX_FORWARDS:
                self._undecided.refuse(f"no step of an optimizer of the model came in {MAX_FORWARDS} forwards")
        self._before.clear()
        if torch.is_grad_enabled() and (self._is_new or self._is_begun_anew):
            self._is_new = self._is_left_out = False
            if not self._has_kept:
                self._copies.keep(trusts_versions=True)
            self._has_kept = False

    @property
    def _is_begun_anew(self) -> bool:
        """Whether the forwards since the last step are no part of the next: a GAN's critic runs for the generator, too.

        FSDP1 has views in the place of parameters in a forward, which show no gradient.
        """
        if self._undecided.bad_step is not None or self._life.awaits_backward:
            return False
        return not any(
            value.grad is not None or not isinstance(value, nn.Parameter) for value in parameters_in(self._model.root)
        )

    # --- before a step ------------------------------------------------------------------------------------------------

    def decide(self, optimizer: Optimizer, *, is_bad: bool, is_alike: bool, has_skipped: bool) -> bool:
        """An optimizer is about to step. Returns whether its step is left out.

        Args:
            is_bad: whether a gradient of it is not finite here.
            is_alike: whether all ranks have the same gradients.
            has_skipped: whether an engine has skipped the step before this one.
        """
        if bool(torch.as_tensor(getattr(optimizer, "found_inf", None) or 0)):  # a fused optimizer skips the step by itself
            is_bad, is_alike = self._undecided.bad_step is not None, False
        is_bad = is_bad or self._is_left_out
        if not is_alike:
            self.has_asked = True
            is_bad = is_so_anywhere(is_bad)
        if not is_bad:
            self._undecided.forgive(is_skipped=has_skipped)
            return False
        if self._steps.are_of_copies:
            self._leave_out(f"the parameters of {type(optimizer).__name__} are copies of the model's")
            return False
        if not self._is_left_out:
            self._leave_out("LBFGS does not stand still without gradients" if isinstance(optimizer, LBFGS) else "")
        self._before.append((optimizer, versions_of(optimizer), [dict(group) for group in optimizer.param_groups]))
        take_gradients(optimizer)
        return True

    def stand_in(self, optimizer: Optimizer, *, is_alike: bool) -> None:
        """The detector has switched itself off: the other ranks ask this one all the same, and it steps as they do."""
        if self.is_on and not self.has_asked and not is_alike and is_so_anywhere(False):
            take_gradients(optimizer)

    def scaler_stepped(self, optimizer: Optimizer, scaler: Any) -> None:
        """A loss scaler has come to the step of an optimizer. If it has skipped the step, it did so on all ranks."""
        if self._is_new or not self.is_on or not found_inf(scaler, optimizer):
            return
        if is_so_anywhere(self._undecided.bad_step is not None):
            self._leave_out("")
            self._tell()
        self._begin_step()

    def _leave_out(self, unfit: str) -> None:
        """``unfit``: why the optimizer would not do nothing."""
        self._is_left_out = True
        restored = self._copies.put_back()
        if unfit:
            self._undecided.refuse(unfit, restored)
        elif not self._budget.spend(self._step):
            self._undecided.refuse(str(self._budget), restored)
        else:
            left = self._budget.left(self._step)
            self._left_out = LeftOut("", restored, left, self._allowed.most, self._allowed.of)

    def _tell(self) -> None:
        left_out, self._left_out = self._left_out, None
        if left_out is not None:
            self._undecided.leave_out(left_out)

    # --- after it -----------------------------------------------------------------------------------------------------

    def _step_done(self, optimizer: Optimizer) -> None:
        if self._before and self._before[-1][0] is optimizer:
            _, versions, groups = self._before.pop()
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                parameters = group["params"]
                group.clear()
                group.update(values, params=parameters)
            if versions_of(optimizer) != versions:
                self._undecided.refuse(f"{type(optimizer).__name__} has changed weights or its state without gradients")
        if not self._before:
            self._tell()
        if not self._is_new:
            self._begin_step()

    def _begin_step(self) -> None:
        self._is_new, self._forwards, self._step = True, 0, self._step + 1
        if self._model.may_be_compiled:  # a graph may write before it tells that it begins
            self._copies.keep(trusts_versions=False)
            self._has_kept = True


def take_gradients(optimizer: Optimizer) -> None:
    """Without gradients, an optimizer of torch leaves weights and state as they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def versions_of(optimizer: Optimizer) -> list[Any]:
    """What changes when a step changes a weight, or a tensor of the optimizer's state."""
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    return [(id(one), local(one)._version) if isinstance(one, Tensor) else repr(one) for one in (*weights, *states)]


def is_so_anywhere(is_so: bool) -> bool:
    """Whether it is so on any rank: each asks at the same place, before a step."""
    if (
        not (torch.distributed.is_available() and torch.distributed.is_initialized())
        or torch.distributed.get_world_size() == 1
    ):
        return is_so
    config = str(torch.distributed.get_backend_config())
    device = "cpu" if "cpu:gloo" in config or "cpu:mpi" in config else f"cuda:{torch.cuda.current_device()}"
    flag = torch.tensor(float(is_so), device=device)
    with unheard():
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
