"""Finds trained modules that no gradient ever reaches, as what they return is cut off before another trained module uses it.

Silent: modules whose output nobody uses (a pooler, an auxiliary head), that run under ``no_grad``, that are not called, or that
no optimizer holds: these are mostly meant. So one forward is looked at, function by function: where a float comes of what has a
gradient, and has none itself, it is cut off, and so is what is made of it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..judge.batch import BatchOrigin
from ..judge.events import ForwardBegan, OutputsCame, RootRaised, UpdateBegins
from ..judge.steps.optimizer_steps import OptimizerSteps
from ..measure.modules import Modules, NamedModule, class_name
from ..measure.walk import leaves
from ..shared.types.notice import Notice, NoticeKind
from ..touch.unseen import OutsideOfGraph
from .unmoving import rate_of

LOOK_EVERY = 8
"""Optimizer steps between two looks."""

LOOKS = 8
"""Looks that must have found no gradient, before one forward is looked at."""

UNTIL = 4 * LOOKS * LOOK_EVERY
"""Optimizer steps after which nothing is looked at any more, as each look goes through all parameters."""


class Ungraded:
    """The parameters of one model that never had a gradient as their optimizer stepped.

    Args:
        guard: catches errors of ours.
        is_on: whether weights are looked at.
    """

    events = (UpdateBegins, ForwardBegan, OutputsCame, RootRaised)

    def __init__(
        self,
        model: Modules,
        steps: OptimizerSteps,
        notify: Callable[[Notice], None],
        guard: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        is_on: bool,
    ) -> None:
        self._model = model
        self._steps = steps
        self._notify = notify
        self._guard = guard
        self._is_on = is_on
        self._looks: dict[int, int] = {}
        """By ``id`` of a parameter, the looks that found no gradient; -1: it had one."""
        self._optimizer = ""
        self._handles: list[RemovableHandle] = []
        self._cuts: _Cuts | None = None
        """Of the forward that is looked at."""
        self._first: NamedModule | None = None
        """The first module that was called in it, and never had a gradient."""
        self._fed: NamedModule | None = None
        """The first trained one after it that was given only what was cut off."""

    def on(self, event: UpdateBegins | ForwardBegan | OutputsCame | RootRaised) -> None:
        if not self._is_on:
            return
        match event:
            case UpdateBegins(optimizer):
                if self._steps.done % LOOK_EVERY == 0:
                    self._look(optimizer)
            case ForwardBegan(batch):
                if not self._optimizer or self._handles:
                    return
                if batch.origin is BatchOrigin.TRAINING and batch.is_streamed and torch.is_grad_enabled():
                    self._listen()
            case OutputsCame(part):
                if self._handles:
                    self._end(part.batch.position.batch)
            case RootRaised():
                self.remove()

    def _look(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for value in group["params"] if rate_of(group) else ():
                looks = self._looks.get(id(value), 0)
                if looks >= 0 and value.requires_grad:
                    self._looks[id(value)] = looks + 1 if value.grad is None else -1
        known = self._looks.values()
        if max(known, default=0) >= LOOKS and -1 in known and not self._model.may_be_compiled:
            self._optimizer = type(optimizer).__name__
        elif self._steps.done >= UNTIL:
            self._is_on = False

    def _listen(self) -> None:
        for named in self._model.modules:
            called = OutsideOfGraph(self._guard(lambda args, kwargs, named=named: self._see(named, args, kwargs)))
            self._handles.append(named.module.register_forward_pre_hook(called, with_kwargs=True))
        self._cuts = _Cuts(self._guard)
        self._cuts.__enter__()  # type: ignore[no-untyped-call]

    def _see(self, named: NamedModule, args: Any, kwargs: Any) -> None:
        looks = [self._looks.get(id(value), 0) for value in named.module._parameters.values() if value is not None]
        if any(one >= LOOKS for one in looks):
            if self._first is None and torch.is_grad_enabled():
                self._first = named
        elif self._first is not None and self._fed is None and -1 in looks and self._cuts is not None:
            given = _floats([args, kwargs])
            if any(map(self._cuts.has, given)) and not any(leaf.requires_grad for leaf in given):
                self._fed = named

    def _end(self, batch: int) -> None:
        """The forward is over: one is enough."""
        self.remove()
        self._is_on = False
        if self._first is not None and self._fed is not None:
            self._tell(self._first, self._fed, batch)

    def _tell(self, first: NamedModule, fed: NamedModule, batch: int) -> None:
        count = sum(looks >= LOOKS for looks in self._looks.values())
        name, value = next(
            (name, value)
            for name, value in first.module._parameters.items()
            if value is not None and self._looks.get(id(value), 0) >= LOOKS
        )
        also = f" (nor had {count - 1} more)" if count > 1 else ""
        module = f"{fed.names[0]} ({class_name(fed.module)})"
        why = f"it never had a gradient{also}, though {self._optimizer} holds it: what {module} is given was cut off"
        about = first.names[0], class_name(first.module), name, str(value.dtype).removeprefix("torch.")
        self._notify(Notice(NoticeKind.NO_GRADIENT, *about, 0, batch, float(self._steps.number), 0.0, why))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        cuts, self._cuts = self._cuts, None
        if cuts is not None:
            cuts.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Cuts(TorchFunctionMode):
    """What is cut off from its gradient while this is on."""

    def __init__(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._cut: dict[int, ref[Tensor]] = {}
        self._known: dict[int, ref[Tensor]] = {}
        """Both by ``id``, which may be another tensor's later."""
        self._is_read = False
        """Whether NumPy or Python has read what has a gradient: what no function of torch made may come from there."""
        self._look = guard(self._see)

    def has(self, value: Tensor) -> bool:
        return _has(self._cut, value) or (self._is_read and not _has(self._known, value))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._look(func, [args, kwargs], output)
        return output

    def _see(self, func: Any, given: Any, output: Any) -> None:
        read, made = _floats(given), _floats(output)
        has_gradient = any(leaf.requires_grad for leaf in read) and torch.is_grad_enabled()
        if has_gradient or any(map(self.has, read)):
            self._is_read |= getattr(func, "__name__", "") in _READ
            self._cut.update({id(leaf): ref(leaf) for leaf in made if not leaf.requires_grad})
        else:
            self._known.update({id(leaf): ref(leaf) for leaf in made})


_READ = ("numpy", "__array__", "tolist")


def _has(known: dict[int, ref[Tensor]], value: Tensor) -> bool:
    found = known.get(id(value))
    return found is not None and found() is value


def _floats(values: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(values, "") if isinstance(leaf, Tensor) and leaf.is_floating_point()]
