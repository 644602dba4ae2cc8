"""The options of ``watch`` that can change while the training runs.

A new one also needs an effect in ``Detector._tune`` and an option of ``rankwatch tune``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from ..str_enum import StrEnum
from .fields import BatchNumber, Items, integer

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
    """Changes of options. None leaves an option as it is; an empty tuple is a value.

    The last three come from the collector itself: the K that all ranks take by their budget, the batch from which it holds, and
    the batch until which all are measured in full.
    """

    every: Annotated[int, integer(1, MAX_EVERY)] | None = None
    modules: Patterns | None = None
    ignore: Patterns | None = None
    trace_batch_nums: Annotated[tuple[int, ...], Items(MAX_TRACED)] | None = None
    check: Check | None = None
    pace: Annotated[int, integer(1, MAX_EVERY)] | None = None
    pace_from: BatchNumber | None = None
    closely_until: BatchNumber | None = None

    def then(self, later: Tuning) -> Tuning:
        """Both changes; where both set an option, the later one wins."""
        return replace(self, **later._changes())

    def describe(self) -> str:
        """The changes in words."""
        changes = self._changes().items()
        return "; ".join(f"{name.replace('_batch_nums', ' batches')} {_words(name, value)}" for name, value in changes)

    def _changes(self) -> dict[str, Any]:
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


NO_CHANGE = Tuning()


def taken_from(waiting: deque[Tuning]) -> Tuning:
    """The changes that wait, in one; none waits any more. Others may add to them meanwhile."""
    taken = NO_CHANGE
    while waiting:
        taken = taken.then(waiting.popleft())
    return taken


_EMPTY = {"modules": "all", "ignore": "nothing", "trace_batch_nums": "none"}
"""What an empty tuple means, in words."""


def _words(name: str, value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    more = f" and {len(value) - 8} more" if len(value) > 8 else ""
    return (", ".join(map(str, value[:8])) or _EMPTY[name]) + more
