"""How long each part of a batch takes: between batches, forward, backward, step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from ..shared.types.spent import NOT_SPENT, OF, Spent
from .events import BackwardBegins, BackwardEnded, ForwardBegan, RootLeft, StepBegins, StepDone

_BETWEEN, _FORWARD, _BACKWARD, _STEP = range(4)
_ENDS = {RootLeft: _FORWARD, BackwardBegins: _FORWARD, BackwardEnded: _BACKWARD, StepBegins: _STEP, StepDone: _STEP}
"""What the time before an event was spent on. What computes a loss counts with the forward."""


class Stopwatch:
    """Of one model. The time before each event goes to what ends with it."""

    events = (ForwardBegan, RootLeft, BackwardBegins, BackwardEnded, StepBegins, StepDone)

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rows: deque[list[float]] = deque(maxlen=OF)
        self._row: list[float] = []
        """Of the batch that runs, or ran last; empty before the first."""
        self._is_known = False
        """Whether all of its time is."""
        self._between = 0.0
        self._at = 0.0
        self._is_batch = False
        """Whether the forward that began last is a batch: an evaluation is between batches."""

    def on(self, event: ForwardBegan | RootLeft | BackwardBegins | BackwardEnded | StepBegins | StepDone) -> None:
        now = self._clock()
        spent, self._at = now - self._at, now
        if isinstance(event, ForwardBegan):
            self._between += spent
            self._is_batch = event.batch.is_streamed
            if self._is_batch:
                self._begin()
            return
        part = _ENDS[type(event)]
        if self._row and (self._is_batch or part != _FORWARD):
            self._row[part] += spent
        else:
            self._between += spent

    def _begin(self) -> None:
        if self._is_known:
            self._rows.append(self._row)
        self._is_known = bool(self._row)  # the time before the first batch is the start of the process
        self._row, self._between = [self._between, 0.0, 0.0, 0.0], 0.0

    @property
    def spent(self) -> Spent:
        """For any thread."""
        rows = tuple(self._rows)
        return Spent(len(rows), *[median(column) for column in zip(*rows, strict=True)]) if rows else NOT_SPENT
