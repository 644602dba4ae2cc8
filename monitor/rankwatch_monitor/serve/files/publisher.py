"""Reports on their way to files and people. Where a trip came from is in the record: a report waits for the writer, not long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rankwatch.shared.bounded import BoundedDict

from ...decide.core.effects import Publish
from ...decide.core.gaps import Gap, joined
from ...decide.core.report import Outcome, Report
from ...decide.ending.rules import EXCUSED
from .run_folder import RunsFolder
from .unwritten import FileWrite

log = logging.getLogger(__name__)

SOON = 5.0
"""Seconds after which a report is shown without what the record knows: a disk that hangs must not hold it back."""

KNOWN_ENDS = 65_536
"""Processes of which it is known that a run of theirs ended badly."""


class Publisher:
    """
    Args:
        runs: where the reports are written.
        write: has an action of a run done in the writer's thread, once all that was received before is in the record.
        unstored: what is not in a run's record; ``late``: nor what still waits for the disk.
        show: called with each report, and whether it is news; in any thread.
    """

    def __init__(
        self,
        runs: RunsFolder,
        write: Callable[[str, FileWrite], None],
        show: Callable[[Report, bool], None],
        unstored: Callable[[str, bool], Sequence[Gap]],
    ) -> None:
        self._runs = runs
        self._write = write
        self._show = show
        self._unstored = unstored
        self._number = 0
        self._ended = BoundedDict[tuple[str, int], tuple[str, int, float]](KNOWN_ENDS)
        """By process: which run of it ended badly, of which model, and when."""
        self._waiting: dict[int, tuple[float, Publish]] = {}

    def publish(self, report: Publish) -> None:
        report = replace(report, report=self._following(self._runs.locate(report.report)))
        self._number += 1
        self._waiting[self._number] = time.monotonic(), report
        complete = partial(self._complete, self._number, report)
        self._write(report.report.run, FileWrite(complete, partial(complete, is_recorded=False)))

    def _following(self, report: Report) -> Report:
        """The report, with the run that it follows from: a process that fails ends the runs of all its models."""
        if report.outcome is Outcome.FINISHED:
            return report
        now = time.monotonic()
        processes = [(row.host, row.pid) for row in report.ranks if row.pid]
        earlier = filter(None, map(self._ended.get, processes))
        found = next((run for run, model, at in earlier if model != report.model and now - at <= EXCUSED), "")
        if not found:
            for process in processes:
                self._ended[process] = report.run, report.model, now
        return replace(report, follows=found)

    def show_late(self, after: float = SOON) -> None:
        """Shows the reports that have waited for so many seconds, as they are."""
        for number, (since, published) in list(self._waiting.items()):
            if time.monotonic() - since >= after and self._waiting.pop(number, None) is not None:
                self._show(self._with_gaps(published.report, late=True), published.news)

    def _complete(self, number: int, published: Publish, *, is_recorded: bool = True) -> None:
        report = self._runs.publish(self._with_gaps(published.report), is_recorded=is_recorded)
        if self._waiting.pop(number, None) is not None:
            self._show(report, published.news)

    def _with_gaps(self, report: Report, *, late: bool = False) -> Report:
        return replace(report, gaps=joined(report.gaps, self._unstored(report.run, late)))
