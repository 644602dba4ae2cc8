"""Ends the training after a batch that the user has named: ``abort_after_batch_num``."""

from __future__ import annotations

from .batch import BatchInProgress
from .events import BackwardReached, RootReturned
from .lifecycle import Life
from .reporter import Reporter
from .settler import Settler


class BatchLimit:
    """Ends the training after the forward of batch ``last``; None: it never does."""

    events = (RootReturned, BackwardReached)

    def __init__(self, last: int | None, life: Life, settler: Settler, reporter: Reporter) -> None:
        self._last = last
        self._life = life
        self._settler = settler
        self._reporter = reporter

    def on(self, event: RootReturned | BackwardReached) -> None:
        if isinstance(event, RootReturned):
            self._check(self._life.current)
        elif event.is_new:
            self._check(event.part.batch)

    def _check(self, batch: BatchInProgress) -> None:
        if self._last is not None and batch.is_streamed and batch.is_sure and batch.position.batch >= self._last:
            self._settler.poll(wait=True)
            self._settler.expect_no_loss()
            raise self._reporter.on_limit(batch.position.batch)
