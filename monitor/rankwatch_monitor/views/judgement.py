"""The judgement on a run, for people and for programs."""

from __future__ import annotations

from typing import Any

from ..decide.core.report import Report
from ..decide.ending.judgement import Judgement
from ..decide.next.how_it_went import judgement_of


def headline(judged: Judgement) -> str:
    """What follows upon ``finished``."""
    joint = {True: ", and", False: ", but", None: ":"}[judged.healthy]
    return f"{joint} {judged.text}"


def so_far(report: Report) -> list[tuple[str, str]]:
    """What speaks against a run that is running, while it lasts."""
    judged = judgement_of(report)
    return [] if judged is None or judged.healthy is not False else [("but", "\n".join(one.text for one in judged.reasons))]


def to_dict(report: Report) -> dict[str, Any] | None:
    judged = judgement_of(report)
    return None if judged is None else {**judged._asdict(), "reasons": [one._asdict() for one in judged.reasons]}
