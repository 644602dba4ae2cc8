"""Losses that take turns, a GAN's two, or an actor's and a critic's: whose loss a backward has.

A loss belongs to the optimizer that steps by its gradients: so several micro-batches are one loss, and so is a sum. The step
comes once the loss is sent, so the loss is told by what was before: the same lines that called ``backward()``, on a loss that was
made alike, after a step of the same optimizer. Where that has changed, there is but one loss. Optimizers are one that share a
parameter, as a training makes new ones, or a loss, by whose gradients both step.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from ..judge.events import BackwardBegins, BackwardEnded, OtherStepDone, ScalerStepped, StepDone
from ..measure.modules import class_name
from ..shared.bounded import BoundedDict
from ..shared.types.frame import LOSS_OF_SOME, OF_MODULE
from ..touch.parts import parameters_in
from ..touch.stack import outwards
from .hooks import Hooks

MOST = 8
"""Losses that are told apart. An ensemble of a hundred models is one."""

LINES = 64
"""Ways to call ``backward()`` that are remembered."""

CALLERS = 16
"""Frames of the stack that tell such a way. Between it and the line of a script lie about a dozen of a framework's."""

NODES = 4
"""Operators that tell how a loss was made: from the loss downwards."""

DOUBTS = 4
"""Losses that may be the first one of a second model: handed over in a new way, once an optimizer has stepped."""

Key = tuple[Hashable, Hashable, int]
"""The lines, how the loss was made, and who was the last to step."""
Changed = frozenset[int] | None
"""The parameters whose gradients a backward has changed, by ``id``; None: not known."""


class Whose(NamedTuple):
    """A loss that takes turns. ``label``: of its reading. ``name``: the class of the module that it trains; empty: the root's."""

    label: str = "loss"
    name: str = ""


NOT_KNOWN = Whose(LOSS_OF_SOME)
ONCE = -1
"""In the place of the owner before: there was none."""


class LossTurns:
    """Observes the backwards of one model, and the steps of all optimizers."""

    events = (BackwardBegins, BackwardEnded, StepDone, OtherStepDone, ScalerStepped)

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._key: Key | None = None
        """Of the backward that runs."""
        self._before: list[tuple[int, int] | None] | None = None
        self._is_taken = False
        self._pending = BoundedDict[Key, Changed](LINES)
        """The losses since the last step that had one."""
        self._known = BoundedDict[Key, tuple[int, int]](LINES)
        """Whose gradients were used by which owner, the last two times."""
        self._ways = BoundedDict[Hashable, None](LINES)
        """The keys of all of these, without who had stepped."""
        self._doubts = DOUBTS
        self._owners: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._of_parameter: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        """Those that have stepped and may train a part of this model."""
        self._is_spent = False
        """Whether a step has used the gradients of the last backward."""
        self._are_together = False
        """Whether another one has stepped then. (Of one optimizer, nobody asks what a backward has changed: it takes time.)"""
        self._used: frozenset[int] = frozenset()
        """What was changed by the losses that the last step has used, until another backward."""
        self._own: set[int] = set()
        """The owners with parameters of this model."""
        self._last = -1
        """The owner that was the last to step."""

    def take(self, *, is_bad: bool) -> Whose:
        """The backward that runs has reached the model: whose loss it has. A bad one is in no curve: it is never of nobody."""
        self._is_taken = True
        found = self._take()
        return Whose() if is_bad and found is NOT_KNOWN else found

    def _take(self) -> Whose:
        key, several = self._key, len(self._names)
        if key is None or not 1 <= several <= MOST:
            return Whose()
        if several == 1:
            is_new = bool(self._doubts) and key[:2] not in self._ways and self._may_have_another()
            self._doubts -= is_new
            return NOT_KNOWN if is_new else Whose()
        before, owner = self._known.get(key, (ONCE, ONCE))
        if before == ONCE:
            return NOT_KNOWN
        if before != owner:
            return Whose()
        name = self._names[owner]
        return Whose("loss" if owner == min(self._names) else f"loss{OF_MODULE}{name}", name)

    def on(self, event: BackwardBegins | BackwardEnded | StepDone | OtherStepDone | ScalerStepped) -> None:
        match event:
            case BackwardBegins():
                is_ours = event.is_own and bool(event.losses)
                self._key = (_callers(), _made(event.losses[0]), self._last) if is_ours else None
                self._before, self._is_taken = event.versions, False
                self._used, self._is_spent = frozenset(), False
            case BackwardEnded():
                if self._is_taken and self._key is not None:
                    is_asked = self._are_together or len(self._optimizers) > 1
                    self._pending[self._key] = self._changed() if is_asked else None
                self._key, self._is_taken = None, False
            case _:
                if not isinstance(event, OtherStepDone):
                    self._optimizers.add(event.optimizer)
                self._step(event.optimizer)

    def _step(self, optimizer: Optimizer) -> None:
        if not self._pending:
            self._are_together |= self._is_spent and self._owners.get(optimizer) != self._last
            if self._used and self._owners.get(optimizer) != self._last:
                self._join(optimizer)
            self._last = self._owners.get(optimizer, self._last)
            return
        owner = self._last = self._owner_of(optimizer)
        used = []
        for key, changed in list(self._pending.items()):
            if owner not in self._own or not changed or any(self._of_parameter.get(one) == owner for one in changed):
                self._known[key] = self._known.get(key, (ONCE, ONCE))[1], owner
                self._ways[key[:2]] = None
                used.append(self._pending.pop(key) or frozenset())
        self._used, self._is_spent = frozenset().union(*used), True

    def _owner_of(self, optimizer: Optimizer) -> int:
        owner = self._owners.get(optimizer)
        if owner is None:
            parameters = _parameters_of(optimizer)
            known = (self._of_parameter.get(one) for one in parameters)
            owner = next((one for one in known if one is not None), len(self._of_parameter))
            self._own_by(owner, optimizer, parameters)
        return owner

    def _own_by(self, owner: int, optimizer: Optimizer, parameters: set[int]) -> None:
        self._owners[optimizer] = owner
        self._of_parameter.update(dict.fromkeys(parameters, owner))
        if owner not in self._names:
            self._names[owner] = self._name_of(owner, parameters)

    def _join(self, optimizer: Optimizer) -> None:
        """A second optimizer steps by the gradients of a loss: it is one with the first."""
        parameters = _parameters_of(optimizer)
        if self._used.isdisjoint(parameters):
            return
        both = {self._last, self._owners.get(optimizer, self._last)}
        owner = min(both)
        self._owners.update({one: owner for one, other in self._owners.items() if other in both})
        self._of_parameter.update({one: owner for one, other in self._of_parameter.items() if other in both})
        self._known.clear()
        for one in both:
            self._names.pop(one, None)
        self._own_by(owner, optimizer, {one for one, other in self._of_parameter.items() if other == owner} | parameters)

    def _name_of(self, owner: int, parameters: set[int]) -> str:
        """What the optimizer of these parameters trains: a class of the user's, or else the name of the module."""
        for hooks in (self._hooks, *self._hooks.others):
            if found := [named.names[0] for named in hooks.modules if _has(named.module, parameters)]:
                if hooks is self._hooks:
                    self._own.add(owner)
                path, modules = _common(found), {name: named.module for named in hooks.modules for name in named.names}
                for one in _outwards(path):  # the class of the critic, not that of the layers in it
                    module = modules.get(one, hooks.root)
                    is_told = not path or not type(module).__module__.startswith("torch.")
                    if is_told and (one == path or all(id(value) in parameters for value in parameters_in(module))):
                        return self._unique(class_name(module), path or class_name(module))
                return self._unique(path, path)
        return self._unique("another model", "another model")

    def _unique(self, name: str, other: str) -> str:
        names = self._names.values()
        return name if name not in names else other if other not in names else f"{other} ({len(names) + 1})"

    def _may_have_another(self) -> bool:
        """Whether there is something to train that the only optimizer so far does not."""
        rest = (value for value in self._parameters() if id(value) not in self._of_parameter)
        return bool(self._hooks.others) or any(value.requires_grad for value in rest)

    def _parameters(self) -> Iterable[Tensor]:
        return (value for named in self._hooks.own for value in named.module._parameters.values() if value is not None)

    def _changed(self) -> Changed:
        if self._before is None:
            return None
        pairs = zip(self._parameters(), self._before)  # noqa: B905  modules may have come
        return frozenset(id(value) for value, before in pairs if _version(value) != before)


def _version(value: Tensor) -> tuple[int, int] | None:
    return None if (gradient := value.grad) is None else (id(gradient), gradient._version)


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(value) for group in optimizer.param_groups for value in group["params"]}


def _has(module: nn.Module, parameters: set[int]) -> bool:
    return any(id(value) in parameters for value in module._parameters.values() if value is not None)


def _common(paths: list[str]) -> str:
    """The module that contains these."""
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(one) > shared and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    return ".".join(parts[0][:shared])


def _outwards(path: str) -> list[str]:
    """A module, and those that contain it, but for the root."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _callers() -> Hashable:
    return tuple([(id(frame.f_code), frame.f_lineno) for frame in islice(outwards(sys._getframe(3)), CALLERS)])


def _made(loss: Tensor) -> Hashable:
    found, node = list[str](), loss.grad_fn
    while node is not None and len(found) < NODES:
        found.append(node.name())
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return tuple(found)
