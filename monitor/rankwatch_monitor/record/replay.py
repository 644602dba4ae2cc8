"""A run at one moment, also while it goes on: its record is replayed, and the run asked for a report."""

from __future__ import annotations

from typing import NamedTuple

from ..decide.ledger import Ledger
from ..decide.options import Options
from ..decide.report import Report
from .reader import RunRecord
from .schema import explained


class Snapshot(NamedTuple):
    """``report.outcome`` says how the run ended once it ``is_over``."""

    report: Report
    is_over: bool


def take(record: RunRecord) -> Snapshot:
    """The run as this record has it. Raises StoreError when the record makes no sense."""
    entries = record.entries()
    with explained(record.path):
        now = entries[-1].now if entries else 0.0
        run = Ledger(Options()).restore(record.run, entries, record.progress(), now)
    return Snapshot(run.report(), run.over)
