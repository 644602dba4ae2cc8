"""What changed a weight that is bad now: the step of its optimizer, though its gradients were finite, or other code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...measure import norms
from ...measure.extremes import dtype_name, local
from ...rerun.arguments import state_of_tensor
from ...shared.types.frame import NON_FINITE
from ...shared.types.trip import Change, UpdateFact
from ...shared.words.weight_changes import SURE

MOST_FACTS = 4

_LOOK_EVERY = 64


def is_looked_at(step: int) -> bool:
    """Whether all tensors of an optimizer are read at this step: the 1st, 2nd, 4th, ... and each 64th, as that takes time."""
    return not step & (step - 1) or not step % _LOOK_EVERY


SHORT = 1e-3
"""Of the dtype's largest number. A step that changes a finite weight by no more than this makes no inf or nan of it."""


class _Update(NamedTuple):
    """The last step of an optimizer: in which batch, and what was known as it began.

    ``are_finite``: all gradients were measured, and finite. ``rates``: the learning rates of its groups. ``found_inf``: what a
    scaler told it.
    """

    batch: int
    are_finite: bool
    rates: list[Any]
    found_inf: Any


class _StateLooks:
    """Since when tensors of an optimizer's state are not finite. Nothing here waits for a device.

    See ``is_looked_at`` for when they are.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._rows: dict[tuple[int, str], int] = {}
        """By parameter and name, the row of a tensor."""
        self._finite = self._bad = torch.empty(0)
        """Of each row, the batch of the last look that found it finite, and of the first one since that did not; -1: none did."""

    def look(self, optimizer: Optimizer, batch: int) -> None:
        self._steps += 1
        if not is_looked_at(self._steps):
            return
        states = {(id(parameter), name): one for parameter, name, one in _states(optimizer)}
        if not states:
            return
        values = list(states.values())
        try:
            is_bad = ~torch.isfinite(torch.stack([one.to(torch.float32) for one in norms.largest(values)]))
        except (RuntimeError, TypeError):  # of tensors that this does not know, nothing is said
            return
        rows = {key: row for row, key in enumerate(states)}
        if rows != self._rows:
            self._rows, self._finite = rows, torch.full(is_bad.shape, -1, device=is_bad.device)
            self._bad = self._finite.clone()
        self._finite = torch.where(is_bad, self._finite, batch)
        self._bad = torch.where(is_bad, torch.where(self._bad < 0, batch, self._bad), -1)

    def since(self, parameter: Tensor, name: str, last: int) -> str:
        """The steps one of which made it bad, the last one in batch ``last``."""
        row = self._rows.get((id(parameter), name))
        if row is None:
            return ""
        finite, bad = int(self._finite[row]), int(self._bad[row])
        if finite < 0:
            return f", and was so before the step of batch {bad}, when it was first looked at"
        until = bad - 1 if bad > finite else last
        return f", since the step of batch {finite}" + (f" or one up to batch {until}" if until > finite else "")


class Updates:
    """The last step of each optimizer."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Optimizer, _Update] = WeakKeyDictionary()
        self._looks: WeakKeyDictionary[Optimizer, _StateLooks] = WeakKeyDictionary()

    def begin(self, optimizer: Optimizer, batch: int, *, are_finite: bool) -> None:
        """An optimizer is about to step."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        if (looks := self._looks.get(optimizer)) is None:
            looks = self._looks[optimizer] = _StateLooks()
        looks.look(optimizer, batch)
        self._last[optimizer] = _Update(batch, are_finite, rates, getattr(optimizer, "found_inf", None))

    def change_of(
        self, value: Tensor, finite_in: int, before: set[str], *, is_apart: bool
    ) -> tuple[Change, tuple[UpdateFact, ...]]:
        """What made a parameter bad that was seen finite in a batch, and what is known of it.

        Args:
            before: its dtypes so far.
            is_apart: whether an optimizer may hold another tensor for it, a shard or a copy.
        """
        if others := before - {dtype_name(value.dtype)}:
            return Change.CONVERSION, (UpdateFact("dtype", min(others), dtype_name(value.dtype)),)
        if value.grad_fn is not None and not is_apart:
            return Change.HANDED, ()
        if finite_in < 0:
            return Change.UNKNOWN, ()
        owner = next(((one, *at) for one in self._last if (at := _place_of(value, one)) is not None), None)
        if owner is None:
            return (Change.UNKNOWN, ()) if is_apart or not self._last else (Change.OTHER, ())
        optimizer, number, group, parameter = owner
        update = self._last[optimizer]
        if update.batch < finite_in:
            return Change.OTHER, (UpdateFact("step", str(update.batch)),)
        name = UpdateFact("class", type(optimizer).__name__)
        if isinstance(update.found_inf, Tensor) and bool(update.found_inf.sum() > 0):
            return Change.IGNORED, (name,)
        if not update.are_finite:
            return Change.UNKNOWN, ()
        found = _facts(
            optimizer,
            group,
            parameter,
            update.rates[number] if number < len(update.rates) else None,
            lambda name: self._looks[optimizer].since(parameter, name, update.batch),
        )
        facts, reach = list(found)[:MOST_FACTS], self.reach(value, 0.0)
        can_be_bad = any(fact.row in SURE for fact in facts)
        if not can_be_bad and 0 <= reach < SHORT * torch.finfo(value.dtype).max:
            return Change.OTHER, (name, UpdateFact("reach", f"{reach:.3g}"))
        return Change.OPTIMIZER, (name, *facts)

    def reach(self, value: Tensor, before: float) -> float:
        """The most by which one step of its optimizer changes a number of a parameter whose abs max was ``before``.

        -1: not known, as of an optimizer of another class, where the gradient is gone, and of a decay that makes weights larger.
        """
        found = next(((one, at) for one in self._last if (at := _place_of(value, one)) is not None), None)
        if found is None:
            return -1.0
        optimizer, (number, group, parameter) = found
        rates, name = self._last[optimizer].rates, type(optimizer).__name__
        rate = rates[number] if number < len(rates) else None
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        if not (is_torchs and isinstance(rate, float) and name in (*_NORMED, "SGD")):
            return -1.0
        decay = abs(rate * float(group.get("weight_decay", 0.0)))
        if decay > 2.0:  # each step multiplies the weight by decay - 1
            return -1.0
        largest = _NORMED_STEP
        if name == "SGD":
            used = [parameter.grad, optimizer.state.get(parameter, {}).get("momentum_buffer")]
            # This rank's parts alone: the largest number of a DTensor is asked of all ranks, and no other one asks.
            own = [local(one) for one in used if isinstance(one, Tensor)]
            known = [one.abs().max() for one in own if one.numel()]
            all_used = [local(one.grad) for one in group["params"] if one.grad is not None]
            if not known or not any(bool(one.any()) for one in [*known, *all_used]):  # zeroed since
                return -1.0
            largest = float(sum(known))
        return abs(rate) * largest + decay * before


_NORMED, _NORMED_STEP = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), 10.0
"""They divide a gradient by its own size. The largest step, in learning rates: 0.1 / sqrt(0.001) after many gradients of 0."""


def _place_of(value: Tensor, optimizer: Optimizer) -> tuple[int, dict[str, Any], Tensor] | None:
    """The group of a parameter, with its number."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter is value:
                return number, group, parameter
    return None


def _states(optimizer: Optimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    """What an optimizer keeps of its parameters, on one device, with the parameter and its name."""
    device: Any = None
    for parameter, state in optimizer.state.items():
        for name, one in state.items() if isinstance(parameter, Tensor) and isinstance(state, dict) else ():
            is_plain = type(one) is Tensor and one.is_floating_point() and one.dtype.itemsize > 1 and one.numel() > 0
            if is_plain and one.device == (device := device or one.device):
                yield parameter, name, one


def _facts(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, rate: Any, since: Callable[[str], str]
) -> Iterator[UpdateFact]:
    """What of an optimizer's step has no finite outcome, the surest first. ``since``: when a state became bad, in words."""
    for name, number in {**group, "lr": rate}.items():
        if isinstance(number, float) and not math.isfinite(number):
            yield UpdateFact("number", name, f"{number:g}")
    state = {name: one for name, one in optimizer.state.get(parameter, {}).items() if _is_like(one, parameter)}
    for name, one in state.items():
        if (found := state_of_tensor(one)) in NON_FINITE:
            yield UpdateFact("state", name, found.word, since(name))
    bad = ~torch.isfinite(parameter.detach())
    eps = group.get("eps")
    is_zero = {name: bool((one[bad] == 0).any()) for name, one in state.items() if one.shape == parameter.shape}
    for least in [one for one in (eps if isinstance(eps, (tuple, list)) else (eps,)) if isinstance(one, float)]:
        for name, one in state.items():
            if is_zero.get(name) and name in _BELOW and not float(torch.tensor(least, dtype=one.dtype)):
                yield UpdateFact("eps", f"{least:g}", dtype_name(one.dtype), name)
    gradient = parameter.grad
    is_nan = torch.isnan(parameter.detach())  # 0 / 0 is never inf
    if gradient is not None and gradient.shape == bad.shape and bool((gradient[is_nan] == 0).any()):
        yield UpdateFact("gradient")
    if isinstance(rate, float) and rate >= 1:
        yield UpdateFact("rate", f"{rate:g}")


_BELOW = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf")
"""What torch's optimizers divide by, with their eps added."""


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0 and value.device == parameter.device
