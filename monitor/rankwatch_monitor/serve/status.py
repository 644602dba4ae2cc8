"""The status line that ``rankwatch run`` shows on a terminal: where the ranks are, the loss, and what is nearest to overflow."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rankwatch.shared.types.frame import NO_LOSS

from ..decide.core.effects import Show
from ..decide.core.report import RankState
from ..record.follow import HeadroomReader, newest_digests
from ..record.numbers.headroom import Headroom, pace_of
from ..record.reader import RunRecord
from ..record.schema import FILE, StoreError
from ..views.top.table import shorten
from ..views.top.tables import describe_most_urgent, describe_nearness, describe_pace, describe_reading, is_urgent
from .printer import size_of

log = logging.getLogger(__name__)

LEAST_NAME = 10
"""Columns that a module's name needs, or it is left out."""

LAST_READ = 2.0
"""Seconds to wait, at the end, for a read of the record."""


class Status:
    """While this is entered, a thread reads the record and draws the line for the standings that were shown last.

    Args:
        runs: where runs are recorded.
        draw: called with the line, in the thread.
    """

    def __init__(self, runs: Path, draw: Callable[[str], None]) -> None:
        self._runs = runs
        self._draw = draw
        self._changed = threading.Condition()
        self._shown: Show | None = None
        self._is_over = False
        self._known: list[str] = []
        self._headroom = HeadroomReader()
        self._thread = threading.Thread(target=self._run, name="rankwatch-status", daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(LAST_READ)

    def show(self, shown: Show) -> None:
        """Takes the standings of a run; never blocks. Of several runs the newest is shown."""
        if shown.run not in self._known:
            self._known.append(shown.run)
        if shown.run == self._known[-1]:
            with self._changed:
                self._shown = shown
                self._changed.notify()

    def _run(self) -> None:
        run = ""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._shown or self._is_over)
                shown, self._shown = self._shown, None
                if self._is_over or shown is None:
                    return
            if shown.run != run:
                run, self._headroom = shown.run, HeadroomReader()
            self._draw(describe(shown, *self._look(shown), size_of(sys.stderr).columns))

    def _look(self, shown: Show) -> tuple[float | None, Headroom | None]:
        """The run's pace and the reading nearest to overflow, as far as the record has them."""
        try:
            with RunRecord(self._runs / shown.run / FILE) as record:
                found = self._headroom.read(record)
                pace = pace_of(newest_digests(record, shown.standing.world_size))
        except StoreError as error:  # the writer has logged it, or has not begun
            log.debug("no pace and no headroom: %s", error)
            return None, None
        return pace, found[0] if found else None


def describe(shown: Show, pace: float | None, nearest: Headroom | None, width: int) -> str:
    """``rankwatch: train-0  4/4 ranks running  batch 12  8.2 batches/s  loss 2.31  nearest to overflow blocks.3.ffn output x12``.

    Abbreviated where that is longer than ``width`` columns.
    """
    running = [standing for standing in shown.standings if standing.state is RankState.RUNNING]
    batch = max((standing.batch for standing in shown.standings), default=-1)
    silent = sum(bool(standing.quiet) for standing in running)
    progress = describe_pace(None if shown.standing.stalled else pace, [standing.still for standing in running])
    long = [f"rankwatch: {shown.run}", f"{len(running)}/{len(shown.standings)} ranks running"]
    long += [f"{silent} silent"] if silent else []
    long += [f"{shown.standing.stalled} stalled"] if shown.standing.stalled else []
    desynced = shown.standing.desynced
    long += [f"{desynced} parameter{'s' * (desynced != 1)} desynced"] if desynced else []
    skipped = shown.standing.skipped
    long += [f"{skipped} step{'s' * (skipped != 1)} left out"] if skipped else []
    differ = shown.standing.collectives
    long += [f"collectives differ in {differ} group{'s' * (differ != 1)}"] if differ else []
    long += [shown.standing.waiting] if shown.standing.waiting else []
    long += [f"batch {batch}"] if batch >= 0 else []
    long += [progress] if progress else []
    short = [part.replace(" ranks running", " ranks").replace(" batches/s", "/s") for part in long]
    loss = shown.standing.loss
    if loss != NO_LOSS:
        long.append(f"loss {loss:.3g}")
        short.append(long[-1])
    if nearest is not None and (nearest.is_narrow or is_urgent(nearest) or loss == NO_LOSS):
        name = f"{describe_reading(nearest)} {nearest.label}"
        long.append(describe_most_urgent(nearest))
        what = "headroom" if nearest.is_narrow else "change"
        short.append(f"{what} {describe_nearness(nearest, nearest.state)} ")
        room = width - len("  ".join(short))
        short[-1] += shorten(name, room, keep_end=True) if room >= LEAST_NAME else ""
    text = "  ".join(long)
    if len(text) <= width:
        return text
    while len("  ".join(short).rstrip()) > width and short[2:]:
        short.pop()
    return "  ".join(short)
