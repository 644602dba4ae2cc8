"""Forwards that trip, with their close-up, and where in a test file a marked line is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from notebook import Notebook, watched
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Operator, Trip


def tripped(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Trip, CloseUp]:
    """The trip of one forward, and its close-up. ``watch``: the options of the watch."""
    _, notes = watched(model, **kwargs.pop("watch", {}))
    return the_only(notes, partial(model, **kwargs), *args)


def the_only(notes: Notebook, call: Callable[..., object], *args: Any) -> tuple[Trip, CloseUp]:
    """The only trip, which this call raises, and its close-up."""
    trip, (found,) = notes.trip_of(call, *args), notes.closeups
    return trip, found


def operator_of(found: Trip | CloseUp) -> Operator:
    assert found.operator is not None
    return found.operator


def place(found: CloseUp) -> tuple[str, int]:
    """The operator of a close-up, and the line from which it was called."""
    operator = operator_of(found)
    assert operator.source is not None
    return operator.name, operator.source.line


def late(model: nn.Module, *args: Any, check: str) -> tuple[Trip, CloseUp]:
    """A bad forward; with ``async`` it is judged when the next one begins."""
    _, notes = watched(model, check=check)
    return the_only(notes, lambda: (model(*args), model(*args)))


def line_of(mark: str, file: str) -> int:
    """The line of a file that ends with this mark, as a comment."""
    lines = Path(file).read_text().split("\n")
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return line
