"""The line that ``rankwatch run`` shows on a terminal: where the ranks are, and what is nearest to overflow."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ..decide.effects import Show
from ..decide.report import RankStanding, RankState
from ..record.follow import HeadroomReader
from ..record.headroom import Headroom
from ..record.reader import RunRecord
from ..record.schema import FILE, StoreError
from ..views.top.table import shorten
from ..views.top.tables import describe_reading, describe_times
from .printer import width_of

log = logging.getLogger(__name__)

PACE_WINDOW = 15.0
"""Seconds of batches that the pace is taken from."""

LEAST_NAME = 10
"""Columns under which a module's name says nothing."""

LAST_READ = 2.0
"""Seconds that a look into the record has, at the end, to return."""


class Status:
    """While it is entered, what was shown last is put into words and drawn, in a thread: the record is read for it.

    Args:
        runs: where runs are recorded.
        draw: called with the line.
    """

    def __init__(self, runs: Path, draw: Callable[[str], None]) -> None:
        self._runs = runs
        self._draw = draw
        self._changed = threading.Condition()
        self._shown: Show | None = None
        self._is_over = False
        self._known: list[str] = []
        self._past: deque[tuple[float, int]] = deque()
        self._headroom, self._record = HeadroomReader(), runs / FILE
        self._thread = threading.Thread(target=self._run, name="rankwatch-status", daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(LAST_READ)

    def show(self, shown: Show) -> None:
        """Takes where the ranks of a run are, without waiting for anything. Of several runs the newest counts."""
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
                run = shown.run
                self._past.clear()
                self._headroom, self._record = HeadroomReader(), self._runs / run / FILE
            self._draw(describe(shown, self._pace(shown.standings), self._nearest(), width_of(sys.stderr)))

    def _pace(self, standings: Sequence[RankStanding]) -> float | None:
        now, batch = time.monotonic(), max((standing.batch for standing in standings), default=-1)
        if batch < 0:
            return None
        self._past.append((now, batch))
        while now - self._past[0][0] > PACE_WINDOW:
            self._past.popleft()
        first, since = self._past[0][1], now - self._past[0][0]
        return (batch - first) / since if since > 0 else None

    def _nearest(self) -> Headroom | None:
        try:
            with RunRecord(self._record) as record:
                found = self._headroom.read(record)
        except StoreError as error:  # the recorder tells of it, or has not begun
            log.debug("no headroom: %s", error)
            return None
        return found[0] if found else None


def describe(shown: Show, pace: float | None, nearest: Headroom | None, width: int) -> str:
    """``rankwatch: train-0  4/4 ranks running  batch 1234  8.2 batches/s  nearest to overflow blocks.3.ffn output x12``.

    In fewer words where ``width`` columns are not enough for that.
    """
    running = [standing for standing in shown.standings if standing.state is RankState.RUNNING]
    batch = max((standing.batch for standing in shown.standings), default=-1)
    silent = sum(bool(standing.quiet) for standing in running)
    long = [f"rankwatch: {shown.run}", f"{len(running)}/{len(shown.standings)} ranks running"]
    long += [f"{silent} silent"] if silent else []
    long += [shown.standing.waiting] if shown.standing.waiting else []
    long += [f"batch {batch}"] if batch >= 0 else []
    long += [f"{pace:.3g} batches/s"] if pace is not None else []
    short = [part.replace(" ranks running", " ranks").replace(" batches/s", "/s") for part in long]
    if nearest is not None:
        name, headroom = f"{describe_reading(nearest)} {nearest.label}", describe_times(nearest.times, nearest.state)
        long.append(f"nearest to overflow {name} {headroom}")
        short.append(f"headroom {headroom} ")
        room = width - len("  ".join(short))
        short[-1] += shorten(name, room, keep_end=True) if room >= LEAST_NAME else ""
    text = "  ".join(long)
    return text if len(text) <= width else "  ".join(short)
