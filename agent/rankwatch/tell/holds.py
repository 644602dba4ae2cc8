"""Work that an abort must not cut, such as the save of a checkpoint: ``with rankwatch.hold():`` asks the abort to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Holds:
    """The holds of this process that are open. They nest, and any thread may open one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save, too
        self._open = 0
        self._listeners: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return self._open > 0

    def listen(self, changed: Callable[[], None]) -> None:
        """Has ``changed`` called, in the thread of the hold, when the first one opens and when the last one ends."""
        with self._lock:
            self._listeners = [*self._listeners, changed]

    def forget(self, changed: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = [listener for listener in self._listeners if listener != changed]

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, by: int) -> None:
        with self._lock:
            before, self._open = self._open, self._open + by
        if not before or not self._open:
            for changed in self._listeners:
                changed()


HOLDS = Holds()
"""Those of this process: a save concerns all its models."""


@contextmanager
def hold() -> Iterator[None]:
    """An abort that another rank causes waits until this block ends: ``with rankwatch.hold(): torch.save(...)``.

    Meanwhile nothing is raised in this process, and it is not ended; the collector's ``--hold-limit`` bounds the wait. Holds
    nest, and any thread may hold. Without a collector, or a watch, this does nothing.
    """
    with HOLDS.hold():
        yield
