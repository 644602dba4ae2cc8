"""The steps that were left out, each with its verdict, for people and for programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rankwatch.shared.words.text import describe_culprit, describe_rank, format_head

from ..decide.core.report import Report
from ..decide.next.next_action import remedy
from ..decide.trip.began import describe_origin
from ..decide.trip.skipped import SkippedStep
from . import closeup

MAX_STEPS = 8
"""Steps that a report shows with all that is known; it counts the rest."""

_OF_STEP = ("operator", "cause", "recurs", "precision", "began", "put back", "try", "replay")


def report_of(report: Report, one: SkippedStep) -> Report:
    """The report as if the run had ended in this step: what shows a verdict shows this one, with the step's own capsule."""
    capsule = closeup.capsule_of(one.closeup)
    if capsule and report.folder:
        report = replace(report, folder=str(Path(report.folder, capsule)))
    of_step = replace(report, verdict=one.verdict, closeup=one.closeup, looked=-1, origin=one.origin)
    return replace(of_step, frames_in_batch=one.frames_in_batch, skipped=())


def fields(report: Report, *, is_brief: bool = False) -> list[tuple[str, str]]:
    """What was left out, and why the verdict's step was not. ``is_brief``: a line for each step, as the run has ended."""
    found = [("no skip", report.why_not_skipped)] if report.why_not_skipped else []
    if not report.skipped:
        return found
    hidden = len(report.skipped) + report.skipped_unkept - MAX_STEPS
    lines = [f"{hidden} steps before these: report.json has the last {len(report.skipped)}"] if hidden > 0 else []
    for one in report.skipped[-MAX_STEPS:]:
        lines += [_line(report, one), *([] if is_brief else _details(report, one))]
    budget = "" if is_brief else report.skipped[-1].left
    return [*found, ("left out", "\n".join([*lines, budget]).rstrip())]


def _line(report: Report, one: SkippedStep) -> str:
    verdict = one.verdict
    row = report.ranks[verdict.tripped]
    name = describe_rank(row.rank, report.world_size, row.host, row.local_rank, row.stage)
    return f"step {one.step}: {describe_culprit(verdict.who(name), verdict.trip)}"


def _details(report: Report, one: SkippedStep) -> list[str]:
    of = report_of(report, one)
    told = dict([*closeup.fields(of, one.verdict), *closeup.replay(of, one.verdict)])
    told["began"] = describe_origin(one.origin, report.world_size) if one.origin is not None else ""
    told |= {"put back": ", ".join(one.restored), "try": remedy(of, one.verdict)}
    return format_head("", [(name, told[name]) for name in _OF_STEP if told.get(name)]).split("\n")[1:-1]
