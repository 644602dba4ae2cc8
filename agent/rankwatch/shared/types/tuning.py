"""The options of ``watch`` that can change while the training runs.

A new one also needs an effect in ``Detector._tune`` and an option of ``rankwatch tune``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Annotated

from ..str_enum import StrEnum
from .fields import Items, integer

MAX_PATTERNS = 256
MAX_TRACED = 10_000
MAX_EVERY = 1 << 31

Patterns = Annotated[tuple[str, ...], Items(MAX_PATTERNS)]


class Check(StrEnum):
    """When readings are read and judged."""

    FRAME = "frame"
    """After each module's forward."""
    BATCH = "batch"
    """Before the root's forward returns; on a device with the gradient guard, at the latest before the optimizer step."""
    ASYNC = "async"
    """When the numbers have reached the host, without waiting for them: a batch later at most."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Changes of options. None leaves an option as it is; an empty tuple is a value."""

    every: Annotated[int, integer(1, MAX_EVERY)] | None = None
    modules: Patterns | None = None
    ignore: Patterns | None = None
    trace_batch_nums: Annotated[tuple[int, ...], Items(MAX_TRACED)] | None = None
    check: Check | None = None

    def then(self, later: Tuning) -> Tuning:
        """Both changes; where both set an option, the later one wins."""
        names = [field.name for field in fields(Tuning)]
        return Tuning(*[getattr(self if getattr(later, name) is None else later, name) for name in names])

    def describe(self) -> str:
        """The changes in words."""
        return "; ".join(
            f"{name.replace('_batch_nums', ' batches')} {_words(value, empty)}"
            for name, empty in _EMPTY.items()
            if (value := getattr(self, name)) is not None
        )


NO_CHANGE = Tuning()


def taken_from(waiting: deque[Tuning]) -> Tuning:
    """The changes that wait, in one; none waits any more. Others may add to them meanwhile."""
    taken = NO_CHANGE
    while waiting:
        taken = taken.then(waiting.popleft())
    return taken


_EMPTY = {"every": "", "modules": "all", "ignore": "nothing", "trace_batch_nums": "none", "check": ""}
"""What an empty tuple means, in words."""


def _words(value: object, empty: str) -> str:
    if not isinstance(value, tuple):
        return str(value)
    more = f" and {len(value) - 8} more" if len(value) > 8 else ""
    return (", ".join(map(str, value[:8])) or empty) + more
