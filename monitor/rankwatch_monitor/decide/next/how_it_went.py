"""The judgement on a run without a verdict: what its numbers say, and what its ranks and the collector have told. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from rankwatch.shared.types.notice import NoticeKind, describe_notice
from rankwatch.shared.words.text import name_spans

from ..core.report import Outcome, RankNotice, RankState, Report
from ..ending.course import Course
from ..ending.judgement import LEARNT, Doubt, Judgement, Signs, judge
from ..replicas.desync import BY_PRODUCTS, DesyncPattern
from ..replicas.desync_text import origins
from ..trip.skipped import tell_all

NoticeGroup: TypeAlias = tuple[NoticeKind, str, str, str]

NOTICED = {
    NoticeKind.NO_STEP: "no-step",
    NoticeKind.STOPPED: "weights-unchanged",
    NoticeKind.NOTHING_TO_LEARN: "nothing-to-learn",
    NoticeKind.SKIPPED: "backward-skipped",
    NoticeKind.ALONE: "each-alone",
    NoticeKind.BUFFER: "bad-buffer",
    NoticeKind.NO_GRADIENT: "no-gradient",
}
"""The notices that say that a run did not go well, with the reason's kind. The others may pass, or mean nothing."""


def judgement_of(report: Report) -> Judgement | None:
    """None: it has a verdict or another end, or it was too short to be judged."""
    if report.verdict is not None or report.outcome is not Outcome.FINISHED:
        return None
    is_whole = not (
        report.gaps or any(row.farewell or row.dropped or row.state is RankState.MISSING for row in report.ranks)
    )
    compared = report.compared
    is_equal = compared is not None and compared.equal and not report.desync
    signs = report.course.signs if report.course is not None else Signs(reasons=report.doubts)
    return judge(
        signs, list(_known(report)), list(_noticed(report)), "replicas equal" if is_equal else "", is_whole=is_whole
    )


def left_out(report: Report) -> str:
    """``2 steps were left out: batch 14 (...), batch 20 (...)``; empty: none was."""
    return tell_all(report.skipped, len(report.skipped) + report.skipped_unkept)


def _known(report: Report) -> Iterator[Doubt]:
    if text := left_out(report):
        yield Doubt("steps-left-out", report.skipped[0].batch, text)
    for key, origin in origins(report.desync).items():
        if key >= 0 and origin[0].pattern not in BY_PRODUCTS:
            first = origin[0]
            what = "buffers" if first.pattern is DesyncPattern.BUFFER else "replicas"
            text = f"{what} differ since step {first.step}: {first.parameter} of {name_spans(first.ranks)}"
            yield Doubt("replicas-differ", first.step, text)
    if report.held_up[1]:
        yield Doubt("rank-waited-for", *report.held_up)
    differ = next((one for one in report.collectives if not one.is_awaited), None)
    if differ is not None:
        yield Doubt("collectives-differ", -1, differ.text)


def _noticed(report: Report) -> Iterator[Doubt]:
    if report.course is None or _has_learnt_all(report.course):
        return
    told: dict[NoticeGroup, list[RankNotice]] = {}
    for one in report.notices:
        if one.notice.kind in NOTICED:
            told.setdefault(one.notice.group, []).append(one)
    for same in told.values():
        notice = same[0].notice
        text = f"{name_spans([rank for rank, _ in same])}: {describe_notice(notice)}"
        yield Doubt(NOTICED[notice.kind], notice.since, text)


def _has_learnt_all(course: Course) -> bool:
    """A loss of which next to nothing is left needs no gradient and no step."""
    first, last = course.first_loss, course.last_loss
    return first is not None and last is not None and first.loss > 0.0 and last.loss <= LEARNT * first.loss
