"""Finds trainable parameters that have a gradient, and that no optimizer step changes: each rank sees this alone.

They are in no optimizer, or they are of 16 bits, and each update is rounded away. Silent: parameters without a gradient, or with
a zero one; those that an optimizer steps with a learning rate that still grows, or is 0; those of an optimizer that has not
stepped at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..judge.steps.optimizer_steps import OptimizerSteps
from ..measure.extremes import local
from ..measure.modules import NamedModule, class_name, parameters_of
from ..measure.tape import Event, to_host
from ..shared.types.notice import Notice, NoticeKind
from .lanes import UNKNOWN, Lanes, Pair, beginning
from .meshes import LaidParameter

STEPS = 32
"""Optimizer steps without a change before anything is said."""

LOOK_EVERY = 4
"""Steps between two looks at the gradients. In the first ones, most parameters change, and are never looked at."""

LOOKS = 3
"""Looks that must have found a gradient that is not zero."""

MOST = 64
"""The parameters whose gradients are looked at. Of a model that is not trained at all, some are enough."""

SEARCH_EVERY = 16
"""Steps between two searches for optimizers in memory, which take tenths of a second."""


@dataclass(eq=False, slots=True)
class _Unmoved:
    """A trainable parameter that has its first values.

    Args:
        batch: the one in which the model came to be as it is.
        since: the optimizer steps done when the count began.
        graded: the looks, since then, at a gradient that was not zero.
        rate: the highest learning rate so far.
        holders: the optimizers that have stepped and have it; None: not known yet.
    """

    named: NamedModule
    name: str
    laid: LaidParameter
    batch: int
    since: int
    first: Pair | None = None
    graded: int = 0
    rate: float = 0.0
    holders: list[ref[Optimizer]] | None = None

    @property
    def parameter(self) -> Any:
        return self.named.module._parameters.get(self.name)


class Unmoving:
    """The parameters of one model that have not changed yet."""

    def __init__(self, steps: OptimizerSteps, notify: Callable[[Notice], None]) -> None:
        self._steps = steps
        self._notify = notify
        self._known: dict[str, _Unmoved] = {}
        self._grown: list[tuple[list[_Unmoved], Tensor, Event | None]] = []  # whether gradients are not zero, on their way
        self._checks: list[tuple[list[_Unmoved], Lanes]] = []
        self._looked_at = -1
        self._searched_at = -SEARCH_EVERY

    @property
    def parameters(self) -> list[LaidParameter]:
        return [one.laid for one in self._known.values()]

    def begin(self, parameters: Sequence[LaidParameter], modules: Sequence[NamedModule], batch: int) -> None:
        """The model is as it is from now on."""
        places = {label: (named, name, value) for label, named, name, value in parameters_of(modules)}
        known = self._known
        self._known = {}
        for laid in parameters:
            name = laid.row.parameter
            if laid.row.is_trainable and name in places and (own := laid.own()) is not None and own.numel():
                named, label, value = places[name]
                one = known.get(name)
                if one is None or one.parameter is not value:
                    one = _Unmoved(named, label, laid, batch, self._steps.done)
                one.laid = laid
                self._known[name] = one

    def see(self, parameters: Sequence[LaidParameter], pairs: Sequence[Pair]) -> None:
        """Takes the checksums of parameters between two steps."""
        for laid, pair in zip(parameters, pairs, strict=True):
            one = self._known.get(laid.row.parameter)
            if one is None or one.laid is not laid:
                continue
            if one.first is None and pair != UNKNOWN:
                one.first = pair
            elif one.first != pair:
                del self._known[laid.row.parameter]

    def before_step(self, optimizer: Optimizer) -> None:
        """Looks at the gradients that an optimizer is about to step upon."""
        done = self._steps.done
        if not self._known or done < LOOK_EVERY or done % LOOK_EVERY:
            return
        is_first, self._looked_at = done != self._looked_at, done
        rates = {id(value): rate_of(group) for group in optimizer.param_groups for value in group["params"]}
        found: dict[torch.device, list[tuple[_Unmoved, Tensor]]] = {}
        for one in [*self._known.values()][:MOST]:
            rate = rates.get(id(one.parameter))
            if rate is None and not is_first:
                continue
            if rate is not None and (rate > one.rate or not rate):
                one.rate = max(rate, one.rate)
                one.since, one.graded = done, 0
            gradient = values_of(getattr(one.parameter, "grad", None))
            if gradient is not None and gradient.numel():
                found.setdefault(gradient.device, []).append((one, gradient.any()))
        for group in found.values():
            flags, event = to_host(torch.stack([flag for _, flag in group]))
            self._grown.append(([one for one, _ in group], flags, event))

    def after_step(self, optimizer: Optimizer, batch: int) -> None:
        """Looks at what has come, and at parameters that are suspected."""
        self._collect()
        self._say(batch)
        long_ago = self._steps.done - STEPS
        ripe = [
            one for one in self._known.values() if one.graded >= LOOKS and one.since <= long_ago and one.first is not None
        ]
        unsearched = [one for one in ripe if one.holders is None]
        if unsearched and self._steps.done - self._searched_at >= SEARCH_EVERY:
            self._searched_at = self._steps.done
            self._find_holders(unsearched)
        checked = [
            one
            for one in ripe
            if one.holders is not None and (not one.holders or any(other() is optimizer for other in one.holders))
        ]
        if checked:
            lanes = Lanes.of([one.laid.own() for one in checked])
            lanes.send()
            self._checks.append((checked, lanes))
            self._say(batch)

    def _find_holders(self, ripe: list[_Unmoved]) -> None:
        """An optimizer that has not stepped yet may change its parameters later."""
        held = [(other, {id(value) for group in other.param_groups for value in group["params"]}) for other in optimizers()]
        for one in ripe:
            parameter = one.parameter
            holders = [other for other, values in held if id(parameter) in values]
            one.holders = [ref(other) for other in holders if self._steps.of(other)]
            # Of more than 16 bits, what is rounded away is next to nothing.
            is_precise = parameter is not None and parameter.dtype.itemsize > 2
            if (holders and not one.holders) or (one.holders and is_precise):
                self._known.pop(one.laid.row.parameter, None)
                one.holders = None

    def _collect(self) -> None:
        while self._grown and ((event := self._grown[0][2]) is None or event.query()):
            looked_at, flags, _ = self._grown.pop(0)
            for one, has_gradient in zip(looked_at, flags.tolist(), strict=True):
                one.graded += has_gradient

    def _say(self, batch: int) -> None:
        while self._checks and self._checks[0][1].is_ready:
            checked, lanes = self._checks.pop(0)
            for one, pair in zip(checked, lanes.pairs(), strict=True):
                name = one.laid.row.parameter
                if self._known.pop(name, None) is not None and pair == one.first:
                    about = one.named.names[0], class_name(one.named.module), one.name, one.laid.row.dtype
                    step = float(self._steps.number)
                    self._notify(Notice(NoticeKind.NEVER_CHANGED, *about, one.batch, batch, step, 0.0))


def values_of(gradient: Any) -> Tensor | None:
    """Some of a gradient's values on this rank."""
    if not isinstance(gradient, Tensor):
        return None
    values = local(gradient.detach())
    return beginning(values) if values.layout is torch.strided else None


def optimizers() -> list[Optimizer]:
    """All optimizers of the process, also those that have not stepped. (isinstance() would ask objects that pose as others.)"""
    found = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return [one for one in found if isinstance(getattr(one, "param_groups", None), list)]


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a group; 1 if the host does not know it."""
    rate = group.get("lr", 1.0)
    return 1.0 if isinstance(rate, Tensor) and not rate.is_cpu else float(rate)
