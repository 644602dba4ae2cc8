"""In a notebook a cell is run again: it makes a new model under the name of the old one, whose watch stays open.

The old model is often alive all the same: the notebook keeps what its cells have shown, and the hooks of the watch refer to the
model. So this looks for a name that leads to it, through attributes, items, closures and generators.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from types import CoroutineType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..rerun.user_line import is_installed

log = logging.getLogger(__name__)

STEPS = 4
"""From a name to the model: ``trainer.models["policy"]`` has three."""

MOST = 1000
"""Items of one container that are looked at."""

MOST_VALUES = 200_000
"""Where there are more, the model counts as found."""

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), Tensor, nn.Parameter})
"""What leads to nothing: of data there may be very much."""

_OF_THE_NOTEBOOK = frozenset({"In", "Out"})

_NOT_USERS = frozenset({"rankwatch", "IPython", "ipykernel", "traitlets"})
"""Packages whose objects are not looked into: they have what was shown, or what is watched, itself."""


def is_gone(model: nn.Module) -> bool:
    """Whether no name of an interactive session, or of a function that runs, leads to this model any more."""
    if not hasattr(sys, "ps1"):
        return False
    try:
        return not _is_found(model)
    except Exception:  # an object may forbid to be looked at
        log.exception("rankwatch: an error of ours while an old model was looked for: its watch stays; training goes on")
        return False


def _is_found(model: nn.Module) -> bool:
    session = vars(sys.modules["__main__"])
    seen = {id(session)}
    found: Iterable[Any] = chain.from_iterable(_namespaces(session))
    for _ in range(STEPS):
        some = list(islice(found, MOST_VALUES))
        values = [value for value in some if type(value) not in _PLAIN and id(value) not in seen]
        seen.update(map(id, values))
        if len(some) == MOST_VALUES or any(_has(value, model) for value in values):
            return True
        found = chain.from_iterable(islice(_parts(value), MOST) for value in values)
    return False


def _namespaces(session: dict[str, Any]) -> Iterator[Iterable[Any]]:
    # Copied in one go: another thread may add a name.
    yield [value for name, value in list(session.items()) if not name.startswith("_") and name not in _OF_THE_NOTEBOOK]
    for module in list(sys.modules.values()):
        if module is not sys.modules["__main__"] and _is_users(module):
            yield _named(vars(module))
    for frame in sys._current_frames().values():
        above = frame
        while above is not None:
            if above.f_locals is not above.f_globals and _is_looked_into(above.f_globals.get("__name__")):
                yield list(above.f_locals.values())
            above = above.f_back  # type: ignore[assignment]


def _has(value: Any, model: nn.Module) -> bool:
    # By its type: isinstance would wake up lazy imports.
    if value is model or not issubclass(type(value), nn.Module):
        return value is model
    return hasattr(value, "_modules") and any(part is model for part in value.modules())  # not before its __init__


def _parts(value: Any) -> Iterable[Any]:
    """What a value holds, as far as a person can reach it from there. No code of the value's own runs."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(islice(dict.values(value), MOST))
    if kind is FunctionType:
        return _of_function(value)
    if kind is MethodType:
        return [value.__self__]
    if kind is GeneratorType or kind is CoroutineType:
        frame = value.gi_frame if kind is GeneratorType else value.cr_frame
        return gc.get_referents(value) if frame is not None and _is_looked_into(frame.f_globals.get("__name__")) else ()
    if issubclass(kind, ModuleType):
        return ()
    if issubclass(kind, type):
        return _named(vars(value)) if _is_users(sys.modules.get(value.__module__)) else ()
    if issubclass(kind, nn.Module):  # its registered parts were looked at already
        return _named(object.__getattribute__(value, "__dict__"))
    return _of_object(value) if _is_looked_into(kind.__module__) else ()


def _of_function(function: FunctionType) -> list[Any]:
    if not _is_looked_into(function.__module__):
        return []
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*(function.__closure__ or ()), *defaults]


def _of_object(value: Any) -> Iterator[Any]:
    """Its attributes, slots and items."""
    for part in gc.get_referents(value):
        if type(part) is dict:  # the attributes
            yield from islice(list(part.values()), MOST)
        elif not issubclass(type(part), (type, ModuleType)):
            yield part


def _named(names: Any) -> list[Any]:
    return [value for name, value in list(names.items()) if not name.startswith("_")]


def _is_users(module: Any) -> bool:
    """Whether a module is the session, or from a file of the user's."""
    if module is sys.modules["__main__"] or not issubclass(type(module), ModuleType):
        return module is sys.modules["__main__"]
    file = vars(module).get("__file__")  # getattr would wake up a lazy import
    return isinstance(file, str) and not is_installed(file) and _is_looked_into(module.__name__)


def _is_looked_into(module: Any) -> bool:
    return str(module).partition(".")[0] not in _NOT_USERS
