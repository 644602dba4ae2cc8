"""Judges the runs under way, one at a time and now and then: in the writer's thread, which has their records."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from ...decide.core.ledger import Judged
from ...decide.core.run import Run
from ...decide.ending.judgement import FEW
from ...record.course import find_signs
from ...record.reader import RunRecord
from ...record.schema import StoreError
from .unwritten import FileWrite

log = logging.getLogger(__name__)

EVERY = 2.0
"""Seconds between two looks at one run, at least."""

SHARE = 0.01
"""Of one core, what all looks take at most. One at a run of 100,000 batches takes half a second."""

LATEST = 60.0
"""Seconds after which the next look begins, though of this one nothing was heard: the disk takes nothing."""


class RunJudge:
    """
    Args:
        record_of: the record of a run.
        write: has an action of a run done in the writer's thread, which wakes the collector afterwards.
    """

    def __init__(self, record_of: Callable[[str], Path], write: Callable[[str, FileWrite], None]) -> None:
        self._record_of, self._write = record_of, write
        self._free_at = float("-inf")
        self._looks: dict[str, tuple[float, int]] = {}
        """By run: when the last look was begun, and with how many batches."""
        self._found: deque[Judged] = deque()

    def look(self, runs: Iterable[Run], now: float) -> None:
        """Begins a look at the run whose turn it is, if one is due."""
        if now < self._free_at:
            return
        self._looks = {run.id: self._looks.get(run.id, (float("-inf"), 0)) for run in runs if run.is_open}
        due = [run for run in runs if run.is_open and now - self._looks[run.id][0] >= EVERY]
        if not due:
            return
        run = min(due, key=lambda one: self._looks[one.id][0])
        batches, before = run.batch + 1, self._looks[run.id][1]
        is_news = batches >= before + FEW
        self._looks[run.id] = now, batches if is_news else before
        if is_news:
            self._free_at = now + LATEST
            self._write(run.id, FileWrite(partial(self._judge, run.id, run.world_size, batches)))

    def found(self) -> Iterator[Judged]:
        """What the looks have found since the last call."""
        while self._found:
            yield self._found.popleft()

    def _judge(self, run: str, world_size: int, batches: int) -> None:
        begun = time.thread_time()
        try:
            with RunRecord(self._record_of(run), by_writer=True) as record:
                self._found.append(Judged(run, find_signs(record, world_size).reasons, batches))
        except StoreError as error:
            log.debug("how run %s goes is not known: %s", run, error)
        finally:
            self._free_at = time.monotonic() + (time.thread_time() - begun) / SHARE
