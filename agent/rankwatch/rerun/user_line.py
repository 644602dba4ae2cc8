"""The line of the user's code that called an operator: the innermost one on the stack outside of torch."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..shared.types.trip import Source

_STARTED = time.time()
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO = f"{_OURS}demo.py"
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))) + os.sep
_SITE = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_STANDARD = tuple({os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})

_AROUND = (
    "torch",
    "functorch",
    "triton",
    "einops",
    "opt_einsum",
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
)
"""Packages beside torch that only call its operators, or the user's forward, in a way of their own."""


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
    while frame is not None:
        owner = owner_of(frame.f_code.co_filename)
        if owner == "user":
            return Caller(frame.f_code, frame.f_lineno)
        if within_run and _is_boundary(frame):
            return None
        frame = frame.f_back
    return None


def modules_within_run() -> tuple[nn.Module, ...]:
    """The modules whose call is on the stack, the innermost first, within a rerun."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_boundary(frame):
        if frame.f_code.co_name == "_call_impl" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.append(module)
        frame = frame.f_back
    return tuple(found) if frame is not None else ()


@lru_cache(maxsize=4096)
def owner_of(file: str) -> str:
    """Whose code it is: ``user``, ``torch`` (also Python's own libraries), or ``ours``."""
    if file.startswith("<frozen"):
        return "torch"
    path = os.path.abspath(file)
    if path.startswith(_OURS):
        return "user" if path == _DEMO else "ours"
    if path.startswith(tuple(f"{_PACKAGES}{name}{os.sep}" for name in _AROUND)):
        return "torch"
    is_installed = any(folder in path for folder in _SITE)
    if is_installed:
        package = path.rpartition(next(folder for folder in _SITE if folder in path))[2].partition(os.sep)[0]
        return "torch" if package in _AROUND else "user"
    return "torch" if path.startswith(_STANDARD) else "user"


def is_installed(file: str) -> bool:
    """Whether a file is Python's own, or of an installed package."""
    path = os.path.abspath(file)
    return path.startswith((*_STANDARD, _OURS)) or any(folder in path for folder in _SITE)


def text_of(file: str, line: int) -> str:
    """The line itself; empty if the file cannot be read, or was changed after this process began."""
    try:
        if os.path.getmtime(file) > _STARTED:
            return ""
    except OSError:  # no file: a notebook's cell, say, which linecache knows
        pass
    return linecache.getline(file, line).strip()
