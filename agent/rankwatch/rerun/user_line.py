"""The line of the user's code that called an operator: the innermost one on the stack outside of torch."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

from torch import nn

from ..shared.types.trip import Source
from ..touch.whose_code import owner_of, text_of

RUN = "run_again"
"""The name of the function in ``forward`` that runs a forward again."""


class Caller(NamedTuple):
    """A line of code, read only when it is needed."""

    code: CodeType
    line: int

    @property
    def source(self) -> Source:
        return Source(self.code.co_filename, self.line, self.code.co_name, text_of(self.code.co_filename, self.line))


def caller_of(*, within_run: bool = False) -> Caller | None:
    """The innermost line of the user's on the stack; None if there is none.

    ``within_run``: of the lines that ``forward.run_again`` has called. What is outside of it has called us, not the operator.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = owner_of(frame.f_code.co_filename)
        if owner == "user":
            return Caller(frame.f_code, frame.f_lineno)
        if within_run and owner == "ours" and frame.f_code.co_name == RUN:
            return None
        frame = frame.f_back
    return None


def modules_within_run() -> tuple[nn.Module, ...]:
    """The modules whose call is on the stack, the innermost first, up to ``forward.run_again``."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_name == RUN and owner_of(frame.f_code.co_filename) == "ours"):
        if frame.f_code.co_name == "_call_impl" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.append(module)
        frame = frame.f_back
    return tuple(found) if frame is not None else ()
