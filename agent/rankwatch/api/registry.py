"""The open watches of this process. They are closed when the process ends, normally or by an exception."""

from __future__ import annotations

import atexit
import multiprocessing.util
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from ..errors import RankwatchError
from ..judge.outside import Outside
from ..shared.system.log_lines import write_lines_of_a_rank
from ..tell.departure import stay


class Endable(Protocol):
    """A watch, as far as its end is concerned."""

    def end(self) -> None: ...
    def end_by(self, error: BaseException) -> None: ...


_open: weakref.WeakSet[Any] = weakref.WeakSet()
# Weak: a watch lives as long as its model, whose hooks refer to it.

_unwanted: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models whose watch the user took off: nothing but a call of ``watch`` watches them again."""

OUTSIDE = Outside()
"""The modules of this process that no watch has, and that are not trained."""

_previous_excepthook: Callable[..., Any] | None = None

_is_ending = False

_ended: list[Any] = []
"""Watches that were closed because the process ends: their deadlines hear how long it stays."""


def prepare() -> None:
    """Installs the hooks by which an uncaught exception is reported, and ends the process with its own exit code."""
    global _previous_excepthook
    if _previous_excepthook is None:
        _previous_excepthook = sys.excepthook
        sys.excepthook = _excepthook
        atexit.register(_close_all)
        if multiprocessing.parent_process() is not None:  # of such a child, no exception comes to the hook above
            multiprocessing.util.Finalize(None, _end_child, exitpriority=0)
    write_lines_of_a_rank()


def remember(watch: Endable) -> None:
    """Ends ``watch`` with the process, unless ``forget`` is called before."""
    _open.add(watch)


def forget(watch: Endable) -> None:
    _open.discard(watch)


def open_watches() -> Iterator[Any]:
    """The open watches. They may be closed during the iteration."""
    yield from tuple(_open)


def leave(model: object) -> None:
    """The user does not want this model watched, until ``want``."""
    _unwanted.add(model)


def want(model: object) -> None:
    _unwanted.discard(model)


def is_left(model: object) -> bool:
    return model in _unwanted


def is_process_ending() -> bool:
    """Whether the watches are closed because the process ends: it may still hang on its way out."""
    return _is_ending


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _is_ending
    is_at_prompt = hasattr(sys, "ps1")  # of an interactive Python: after an error, the process and its watches go on
    _is_ending = not is_at_prompt
    try:
        for watch in () if is_at_prompt else _last_watches():
            watch.end_by(error)
    finally:
        if isinstance(error, RankwatchError):
            error.__traceback__ = trace = _without_ours(trace)
        (_previous_excepthook or sys.__excepthook__)(kind, error, trace)
    if isinstance(error, RankwatchError) and not is_at_prompt:
        raise SystemExit(error.exit_code)  # the interpreter would end with 1; of an excepthook, it takes this code


def _end_child() -> None:
    """A process of ``multiprocessing`` ends, perhaps by an exception. torch's ``spawn`` has made an exit of it."""
    global _is_ending
    _is_ending = True
    error = sys.exc_info()[1]
    while isinstance(error, SystemExit) and error.code and error.__context__ is not None:
        error = error.__context__
    for watch in _last_watches():
        watch.end() if error is None else watch.end_by(error)
    stay()


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package: they say nothing about the training."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith("rankwatch."):
            kept.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for one in reversed(kept):  # not recursive: it may be as deep as Python allows
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest


def _close_all() -> None:
    global _is_ending
    _is_ending = True
    for watch in _last_watches():
        watch.end()
    stay()


def _last_watches() -> list[Any]:
    found = list(open_watches())
    _ended.extend(found)
    return found
