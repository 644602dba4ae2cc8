"""In a notebook a cell is run again: it makes a new model under the name of the old one, whose watch stays open.

The old model is often alive all the same: the notebook keeps what its cells have shown, and the hooks of the watch refer to the
model. So this looks for a name that leads to it, through attributes, items and closures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

STEPS = 4
"""From a name to the model: ``trainer.models["policy"]`` has three."""

MOST = 1000
"""Items of one container that are looked at."""

MOST_VALUES = 200_000
"""Where there are more, the model counts as found."""

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), Tensor, nn.Parameter})
"""What leads to nothing: of data there may be very much."""

_OF_THE_NOTEBOOK = frozenset({"In", "Out"})


def is_gone(model: nn.Module) -> bool:
    """Whether no name of an interactive session, or of a function that runs, leads to this model any more."""
    if not hasattr(sys, "ps1"):
        return False
    seen: set[int] = set()
    found: Iterable[Any] = chain.from_iterable(_namespaces())
    for _ in range(STEPS):
        some = list(islice(found, MOST_VALUES))
        values = [value for value in some if type(value) not in _PLAIN and id(value) not in seen]
        seen.update(map(id, values))
        if len(some) == MOST_VALUES or any(_has(value, model) for value in values):
            return False
        found = chain.from_iterable(islice(_parts(value), MOST) for value in values)
    return True


def _namespaces() -> Iterator[Iterable[Any]]:
    session = vars(sys.modules["__main__"])
    yield [value for name, value in session.items() if not name.startswith("_") and name not in _OF_THE_NOTEBOOK]
    for frame in sys._current_frames().values():
        above = frame
        while above is not None:
            if above.f_locals is not above.f_globals and not _is_ours(above.f_globals.get("__name__")):
                yield list(above.f_locals.values())
            above = above.f_back  # type: ignore[assignment]


def _has(value: Any, model: nn.Module) -> bool:
    # By its type: isinstance would wake up lazy imports.
    return value is model or (issubclass(type(value), nn.Module) and any(part is model for part in value.modules()))


def _parts(value: Any) -> Iterator[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        yield from tuple(value.values())
    elif issubclass(kind, (list, tuple, set, frozenset)):
        yield from tuple(value)
    elif kind is FunctionType:
        yield from value.__closure__ or ()
    elif kind is CellType:
        with suppress(ValueError):  # it is empty
            yield value.cell_contents
    elif kind is MethodType:
        yield value.__self__
    elif not issubclass(kind, (type, ModuleType)) and not _is_ours(kind.__module__):
        with suppress(AttributeError):
            own = tuple(object.__getattribute__(value, "__dict__").items())
            # Of a module, its registered parts were looked at already.
            yield from [part for name, part in own if not (issubclass(kind, nn.Module) and name.startswith("_"))]


def _is_ours(module: Any) -> bool:
    return str(module).partition(".")[0] == __package__
