"""A step that was skipped for a gradient that was not finite: whose it was.

Where the optimizer has copies of the parameters, an engine takes the gradients away as they come: they are looked at before.
Else a rank's own batch is run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...judge.lifecycle import Life
from ...judge.steps.cadence import Cadence
from ...measure.extremes import dtype_name
from ...measure.modules import NamedModule, class_name
from ...measure.weights import mark_shard
from ...rerun.arguments import state_of_tensor
from ...rerun.backward_rerun import RootRun
from ...rerun.careful import Careful
from ...rerun.limit import Limit
from ...shared.types.frame import State
from ...shared.types.notice import Notice, NoticeKind
from ...shared.types.trip import MAX_RERUN
from ...touch.parts import buffers_in, parameters_in
from ..hooks import Hooks


class BadGradient(NamedTuple):
    """``is_searched_for``: a loss scaler, of an engine's own, comes upon such gradients as it looks for its scale."""

    named: NamedModule
    label: str
    dtype: str
    state: State

    @property
    def is_searched_for(self) -> bool:
        return self.dtype == "float16" and self.state is State.INF


def bad_gradient_of(run: RootRun, model: Hooks) -> BadGradient | None:
    """The first bad gradient on the way back from the loss; None: there is none, or the batch cannot be run again."""
    root = next((named for named in model.modules if named.module is run.entry.module), None)
    for handed in run.gradients if root is not None else ():
        for gradient in handed.values():
            if (state := state_of_tensor(gradient)) is not State.FINITE and root is not None:
                return BadGradient(root, "grad_output", dtype_name(gradient.dtype), state)
    module = run.entry.module
    ran = run.again(Careful([*buffers_in(module)], Limit(time.monotonic() + MAX_RERUN)))
    known: dict[int, Tensor | None] = dict(zip(map(id, parameters_in(module)), ran.values or (), strict=False))
    with torch.no_grad():
        for named in reversed(model.modules):
            for name, value in named.module._parameters.items():
                made = known.get(id(value))
                if value is not None and made is not None and (state := state_of_tensor(made)) is not State.FINITE:
                    return BadGradient(named, mark_shard(f"{name}.grad", value), dtype_name(value.dtype), state)
    return None


class PassingGradients:
    """This rank's own gradients as they come, before they are reduced or taken away: the largest number of each.

    Args:
        life: the batches, of which one runs its backward.
        guard: makes a function that catches the errors of its body.
    """

    def __init__(self, model: Hooks, life: Life, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self._life = life
        self._of_batch: dict[int, Tensor] = {}
        self._largest: dict[int, Tensor] = {}
        """By the number of the parameter, in the order in which they came."""
        self._places = [
            (named, name, value)
            for named in model.modules
            for name, value in named.module._parameters.items()
            if value is not None and value.requires_grad
        ]
        see = guard(self._see)
        self._handles = [value.register_hook(partial(see, number)) for number, (*_, value) in enumerate(self._places)]

    def _see(self, number: int, gradient: Tensor) -> None:
        if gradient.layout is torch.strided and gradient.numel():
            largest = torch.linalg.vector_norm(gradient.detach(), torch.inf)
            before = self._largest.get(number)
            self._largest[number] = largest if before is None else torch.maximum(before, largest)
            before = self._of_batch.setdefault(batch := self._life.of_backward.position.batch, largest)
            if before.device == largest.device:
                self._of_batch[batch] = torch.maximum(before, largest)

    def first_bad(self) -> tuple[BadGradient, int] | None:
        """With its batch."""
        for number, largest in self._largest.items():
            if (state := state_of_tensor(largest)) is not State.FINITE:
                named, name, value = self._places[number]
                bad = [batch for batch, one in self._of_batch.items() if state_of_tensor(one) is not State.FINITE]
                found = BadGradient(named, mark_shard(f"{name}.grad", value), dtype_name(largest.dtype), state)
                return found, min(bad, default=max(self._of_batch))
        return None

    def forget(self) -> None:
        """The next step begins."""
        self._largest.clear()
        self._of_batch.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def notice_of(found: BadGradient, batch: int, cadence: Cadence) -> Notice:
    where = found.named.names[0], class_name(found.named.module), found.label, found.dtype
    return Notice(NoticeKind.SKIPPED_STEP, *where, cadence.first, batch, float(cadence.skipped), 0.0, found.state.word)
