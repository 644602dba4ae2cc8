"""The modules of a model with their names, without the wrappers of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..touch.parts import buffers_in, parameters_in
from ..touch.whose_code import is_installed

# The attributes under which FSDP, torch.compile and the checkpoint wrapper hold the user's module.
_WRAPPED_AS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")

_HELD_AS = ("_forward_module", "_module", "trainable_module")
"""Those of Lightning's Fabric, of Opacus, and of timm's tasks. A module of the user's own may have such a name, too."""


@dataclass(slots=True)
class NamedModule:
    """A module and its qualified names, without wrapper prefixes. Reports use the first one. The root's name is empty."""

    module: nn.Module
    names: list[str]
    number: int = 0
    """The modules of a model are numbered, so that work can be spread over them."""

    def label(self, name: str) -> str:
        """The qualified name of its parameter of this name."""
        return f"{self.names[0]}.{name}" if self.names[0] else name


class Modules(Protocol):
    """The modules of a model, as far as they are known, and which of them are watched."""

    @property
    def root(self) -> nn.Module: ...
    @property
    def modules(self) -> list[NamedModule]: ...
    @property
    def watched(self) -> list[NamedModule]: ...
    @property
    def may_be_compiled(self) -> bool:
        """Whether some of them may be in compiled graphs."""

    def running(self) -> NamedModule:
        """The one whose forward is innermost on the caller's stack."""

    def awake(self) -> list[NamedModule]:
        """Those that are watched, once the hooks are back that were taken off for a forward."""


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module without its wrappers (DDP, DataParallel, FSDP, DeepSpeed, compiled, checkpointed)."""
    *_, inner = wrapped_in(module)
    return inner


def wrapped_in(module: nn.Module) -> Iterator[nn.Module]:
    """A module and what it wraps, down to the user's module."""
    inner: nn.Module | None = module
    while inner is not None:
        yield inner
        inner = _wrapped(inner)


def named_modules(root: nn.Module, name: str = "") -> dict[int, NamedModule]:
    """The modules under ``root`` in the order of ``nn.Module.named_modules``, by ``id``. ``name`` is the root's own name."""
    found: dict[int, NamedModule] = {}
    _collect(unwrap(root), name, found, frozenset())
    return found


def parameters_of(modules: Iterable[NamedModule]) -> Iterator[tuple[str, NamedModule, str, nn.Parameter]]:
    """The parameters of modules: each by its qualified name, its module, and its name there. A shared one comes repeatedly."""
    for named in modules:
        for name, value in named.module._parameters.items():
            if value is not None:
                yield named.label(name), named, name, value


def advise(given: object) -> str:
    """For an error text: what was given as a model, and what to give instead."""
    what = f"not {type(given).__name__}"
    if isinstance(given, type):
        return f"not the class {given.__name__}: make the model first, {given.__name__}(...)"
    if callable(given):
        return f"{what}: give the model whose forward it calls; one that is called in a compiled function is watched as well"
    if isinstance(given, Iterable):
        return f"{what}: give one model, or watch each by itself"
    return f"{what}: give the model itself"


def class_name(module: nn.Module) -> str:
    """The name of the user's class, of which ``fully_shard`` makes a subclass."""
    cls = type(module)
    if len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
        cls = cls.__bases__[1]
    return cls.__name__


def _collect(module: nn.Module, name: str, found: dict[int, NamedModule], above: frozenset[int]) -> None:
    if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
        return
    if id(module) in found:
        found[id(module)].names.append(name)
    else:
        found[id(module)] = NamedModule(module, [name], len(found))
    if id(module) in above:  # a module that contains itself
        return
    for child_name, child in _children(module):
        _collect(child, f"{name}.{child_name}" if name else child_name, found, above | {id(module)})


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None:
            yield name, unwrap(child)
    for name, child in vars(module).items():
        if isinstance(child, nn.Module) and _is_held_aside(module, child):
            yield name, unwrap(child)


def _is_held_aside(module: nn.Module, child: nn.Module) -> bool:
    """Whether a module is a part that torch does not know as a child, as TorchRL's networks: the other has its parameters."""
    own = {id(parameter) for parameter in parameters_in(module)}
    theirs = [id(parameter) for parameter in parameters_in(child)]
    return bool(theirs) and own.issuperset(theirs)


def _wrapped(module: nn.Module) -> nn.Module | None:
    is_engine = any(cls.__name__ == "DeepSpeedEngine" for cls in type(module).__mro__)  # found without importing deepspeed
    is_parallel = is_engine or isinstance(module, (DataParallel, DistributedDataParallel))
    for name in ("module",) if is_parallel else _WRAPPED_AS:
        inner = dict(module.named_children()).get(name) if name in module._modules else None
        if inner is not None:
            return inner
    inner = next((module._modules[name] for name in _HELD_AS if name in module._modules), None)
    return inner if inner is not None and _only_holds(module, inner) else None


def _only_holds(module: nn.Module, inner: nn.Module) -> bool:
    """Whether a module of an installed package has nothing beside the inner one that is trained or measured."""
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    if not file or not is_installed(file):
        return False
    known = {id(value) for value in (*parameters_in(inner), *buffers_in(inner))}
    return all(id(value) in known for value in (*parameters_in(module), *buffers_in(module)))
