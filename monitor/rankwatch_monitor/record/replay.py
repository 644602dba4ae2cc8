"""A run at one moment, running or over: its record is replayed into a Run, which makes the report."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from rankwatch.shared.printable import printable

from ..decide.core.journal import Opened
from ..decide.core.ledger import Ledger
from ..decide.core.options import Options
from ..decide.core.report import Report
from ..decide.core.run import Run
from ..decide.ending.judgement import Signs
from .course import find_course
from .handed import find_handed
from .origin import find_origin
from .reader import RunRecord
from .schema import StoreError, explained

log = logging.getLogger(__name__)


MOST_SEARCHED = 16
"""Steps that were left out whose origins are looked for: each reads as much of the record as a verdict's."""


class Snapshot(NamedTuple):
    """``report.outcome`` says how the run ended once it ``is_over``."""

    report: Report
    is_over: bool


def restored(record: RunRecord) -> Run:
    """The run, as its facts make it. Raises StoreError when the record makes no sense."""
    entries = record.entries()
    with explained(record.path):
        now = entries[-1].now if entries else 0.0
        awaits_command = any(isinstance(entry.fact, Opened) and entry.fact.awaits_command for entry in entries[:1])
        return Ledger(Options(expects_job_end=awaits_command)).restore(record.run, entries, record.progress(), now)


def take(record: RunRecord, *, course_so_far: bool = False) -> Snapshot:
    """The run in this record. ``course_so_far``: how it went so far, too. Raises StoreError when the record makes no sense."""
    run = restored(record)
    report = replace(run.report(), folder=printable(str(record.path.parent.absolute())))
    has_answer = report.verdict is not None or run.over or course_so_far
    report = searched(report, record) if has_answer else report
    if report.course is not None and not run.over:
        report = replace(report, course=report.course._replace(signs=Signs(reasons=report.doubts)))
    return Snapshot(report, run.over)


def _with_origins(report: Report, record: RunRecord) -> Report:
    """The report with where the last steps that were left out came from."""
    found = list(report.skipped)
    try:
        with explained(record.path):
            for place, one in list(enumerate(found))[-MOST_SEARCHED:]:
                origin = one.origin or find_origin(replace(report, verdict=one.verdict), record)
                found[place] = replace(one, origin=origin)
    except StoreError as error:
        log.error("where a step that was left out went bad is not known: %s", error)
    except Exception:
        log.exception("an error of ours in the search for where a step went bad; the report does without")
    return replace(report, skipped=tuple(found))


def searched(report: Report, record: RunRecord) -> Report:
    """The report with what only its record knows: where its trip came from, and how the run went.

    An error in this search leaves the report as it is.
    """
    report = _with_origins(report, record)
    has_verdict = report.verdict is not None
    what = "where the trip came from" if has_verdict else "how the run went"
    if report.course is not None and (report.origin is not None or not has_verdict):
        return report
    try:
        with explained(record.path):
            if has_verdict and report.origin is None:
                report = replace(report, origin=find_origin(report, record), handed=find_handed(report, record))
            what = "how the run went"
            return report if report.course is not None else replace(report, course=find_course(record, report.world_size))
    except StoreError as error:
        log.error("%s is not known: %s", what, error)
    except Exception:
        log.exception("an error of ours in the search for %s; the report does without", what)
    return report
