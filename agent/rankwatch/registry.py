"""The watches of this process that are not closed, and how they end when nobody closes them."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from .errors import RankwatchError


class Endable(Protocol):
    """Something that ends with the process at the latest."""

    def end(self) -> None: ...
    def end_by(self, error: BaseException) -> None: ...


_open: weakref.WeakSet[Any] = weakref.WeakSet()
# Weak: a watch lives as long as its model, whose hooks hold it, and not longer.

_previous_excepthook: Callable[..., Any] | None = None


def prepare() -> None:
    """Sees to it that exceptions that reach the top are told, and end the process with their own exit code."""
    global _previous_excepthook
    if _previous_excepthook is None:
        _previous_excepthook = sys.excepthook
        sys.excepthook = _excepthook
        atexit.register(_close_all)


def remember(watch: Endable) -> None:
    """Ends ``watch`` with the process, unless it is forgotten before."""
    _open.add(watch)


def forget(watch: Endable) -> None:
    _open.discard(watch)


def open_watches() -> Iterator[Any]:
    """The open watches; closing them while iterating is fine."""
    yield from tuple(_open)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        for watch in open_watches():
            watch.end_by(error)
    finally:
        (_previous_excepthook or sys.__excepthook__)(kind, error, trace)
    if isinstance(error, RankwatchError):
        raise SystemExit(error.exit_code)  # which the interpreter takes from an excepthook, where it would end with 1


def _close_all() -> None:
    for watch in open_watches():
        watch.end()
