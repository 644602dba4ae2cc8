"""A run at one moment, running or over: its record is replayed into a Run, which makes the report."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rankwatch.shared.printable import printable

from ..decide.core.journal import Opened
from ..decide.core.ledger import Ledger
from ..decide.core.options import Options
from ..decide.core.report import Report
from .course import with_course
from .origin import with_origin
from .reader import RunRecord
from .schema import explained


class Snapshot(NamedTuple):
    """``report.outcome`` says how the run ended once it ``is_over``."""

    report: Report
    is_over: bool


def take(record: RunRecord) -> Snapshot:
    """The run in this record. Raises StoreError when the record makes no sense."""
    entries = record.entries()
    with explained(record.path):
        now = entries[-1].now if entries else 0.0
        awaits_command = any(isinstance(entry.fact, Opened) and entry.fact.awaits_command for entry in entries[:1])
        run = Ledger(Options(expects_job_end=awaits_command)).restore(record.run, entries, record.progress(), now)
    report = replace(run.report(), folder=printable(str(record.path.parent)))
    report = with_origin(report, record)
    return Snapshot(with_course(report, record) if run.over else report, run.over)
