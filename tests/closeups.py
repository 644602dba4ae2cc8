"""Forwards that trip, with their close-up, and where in a test file a marked line is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from notebook import Notebook, watched
from rankwatch.errors import OverflowDetected
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Operator, Trip


def tripped(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Trip, CloseUp]:
    """The trip of one forward, and its close-up. ``watch``: the options of the watch."""
    _, notes = watched(model, **kwargs.pop("watch", {}))
    with pytest.raises(OverflowDetected):
        model(*args, **kwargs)
    return the_only(notes)


def the_only(notes: Notebook) -> tuple[Trip, CloseUp]:
    (trip,), (found,) = notes.trips, notes.closeups
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
    with pytest.raises(OverflowDetected):
        _ = model(*args), model(*args)
    return the_only(notes)


def line_of(mark: str, file: str) -> int:
    """The line of a file that ends with this mark, as a comment."""
    lines = Path(file).read_text().split("\n")
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return line
