"""The process groups whose members do not call the same collectives, for people and for programs."""

from __future__ import annotations

from typing import Any

from ..decide.calls.differs import UnequalCalls
from ..decide.core.report import Report
from .jsonable import pick

MAX_GROUPS = 4
"""Groups that a report shows: what makes one differ mostly makes all that follow."""


def fields(report: Report) -> list[tuple[str, str]]:
    """A line for each group, but what the reason or the stall says already."""
    told = [one.text for one in report.collectives if not _is_said(one, report)]
    hidden = len(told[MAX_GROUPS:]) + report.collectives_unkept
    more = [f"and {hidden} more groups: report.json has up to {len(report.collectives)}"] if hidden else []
    return [("calls", "\n".join([*told[:MAX_GROUPS], *more]))] if told else []


def summary(report: Report) -> str:
    """Of the first group, and how many more there are; empty: the members of all groups call the same, as far as is known."""
    if not report.collectives:
        return ""
    more = len(report.collectives) - 1 + report.collectives_unkept
    return report.collectives[0].text + (f" (and {more} more groups)" if more else "")


def to_dict(one: UnequalCalls) -> dict[str, Any]:
    sides = [{**pick(side, "ranks count site"), "what": side.what or None} for side in one.sides]
    return {**pick(one, "group name number how is_first text"), "sides": sides}


def _is_said(one: UnequalCalls, report: Report) -> bool:
    return any(text in said for said in (report.reason, report.stalled) for text in (one.text, one.elsewhere))
