"""The parts of a module, in torch's order, whatever its attributes are called.

A module may have an attribute of its own where torch has a method, as ``buffers`` of Megatron's DistributedDataParallel: then
torch's method cannot be called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn

_Value = TypeVar("_Value", bound=Tensor)


def modules_in(root: nn.Module, _known: set[int] | None = None) -> Iterator[nn.Module]:
    """The module itself, and each one within it once."""
    known = set() if _known is None else _known
    if id(root) in known:
        return
    known.add(id(root))
    yield root
    for child in root._modules.values():
        if child is not None:
            yield from modules_in(child, known)


def parameters_in(root: nn.Module) -> Iterator[nn.Parameter]:
    """Each once, also where modules share it."""
    return _each_once(value for module in modules_in(root) for value in module._parameters.values())


def buffers_in(root: nn.Module) -> Iterator[Tensor]:
    """Each once, also where modules share it."""
    return _each_once(value for module in modules_in(root) for value in module._buffers.values())


def _each_once(values: Iterable[_Value | None]) -> Iterator[_Value]:
    known: set[int] = set()
    for value in values:
        if value is not None and id(value) not in known:
            known.add(id(value))
            yield value
