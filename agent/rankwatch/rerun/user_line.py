"""The user's code on the stack: the line that called an operator (the innermost one outside of torch), and its variables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from ..measure.walk import leaves
from ..shared.types.frame import State
from ..shared.types.trip import Source
from ..touch.stack import outwards
from ..touch.whose_code import owner_of, text_of
from .arguments import state_of_tensor
from .graph_nodes import is_plain

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


def bad_variables(shape: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """The user's variables without a gradient that are not finite, and can be combined with a tensor of this shape."""
    for frame in outwards(sys._getframe(1)):
        if owner_of(frame.f_code.co_filename) != "user":
            continue
        for name, value in list(frame.f_locals.items()):
            for label, one in leaves(value, name) if isinstance(value, (Tensor, dict, tuple)) else ():
                if is_plain(one) and one.grad_fn is None and _fits(one, shape) and state_of_tensor(one) is not State.FINITE:
                    yield label, one


def _fits(value: Tensor, shape: Sequence[int]) -> bool:
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    return value.ndim <= len(shape) and all(own in (1, other) for own, other in pairs)


def tensors_with_a_graph() -> Iterator[Tensor]:
    """The variables of the user's functions that wait for the backward."""
    for frame in outwards(sys._getframe(1)):
        if owner_of(frame.f_code.co_filename) == "user":
            yield from [value for value in frame.f_locals.values() if type(value) is Tensor and value.grad_fn is not None]
