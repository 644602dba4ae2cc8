"""The line of the user's code that called an operator: the innermost one on the stack outside of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ..shared.types.trip import Source
from ..touch.stack import outwards
from ..touch.whose_code import owner_of, text_of

_F = TypeVar("_F", bound=Callable[..., Any])
_boundaries: list[CodeType] = []


def boundary(function: _F) -> _F:
    """Marks a function of ours that runs the user's code again: what is outside of it on the stack has called us.

    The mark is the function's code, whatever the function is called.
    """
    _boundaries.append(function.__code__)
    return function


def _is_boundary(frame: FrameType) -> bool:
    return any([frame.f_code is code for code in _boundaries])


class Caller(NamedTuple):
    """A line of code, read only when it is needed."""

    code: CodeType
    line: int

    @property
    def source(self) -> Source:
        return Source(self.code.co_filename, self.line, self.code.co_name, text_of(self.code.co_filename, self.line))


def caller_of(*, within_run: bool = False) -> Caller | None:
    """The innermost line of the user's on the stack; None if there is none.

    ``within_run``: of the lines within a rerun (see ``boundary``).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # not by ``outwards``: in each forward of a root
        if owner_of(frame.f_code.co_filename) == "user":
            return Caller(frame.f_code, frame.f_lineno)
        if within_run and _is_boundary(frame):
            return None
        frame = frame.f_back
    return None


def modules_within_run() -> tuple[nn.Module, ...]:
    """The modules whose call is on the stack, the innermost first, within a rerun."""
    found: list[nn.Module] = []
    for frame in outwards(sys._getframe(1)):
        if _is_boundary(frame):
            return tuple(found)
        if frame.f_code.co_name == "_call_impl" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.append(module)
    return ()
