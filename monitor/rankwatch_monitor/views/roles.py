"""What each rank has to do with how a run ended: the culprit and the cause first, then what failed because of them. Pure."""

from __future__ import annotations

from typing import NamedTuple

from rankwatch.shared.words.text import name_spans

from ..decide.core.report import Outcome, RankRow, RankState, Report
from ..decide.ending.absent import absent_for

CULPRIT, CAUSE, WENT_BAD, DIFFERS, VICTIM, NOTHING = range(6)
"""What ranks have to do with it, in the order of a list."""

TROUBLE = tuple(RankState(name) for name in ("lost", "failed", "missing", "aborted", "running", "ended", "finished"))
"""The states of a rank, the worst first: a rank that was lost explains why others failed."""

_DEAD = {Outcome.LOST: (RankState.LOST,), Outcome.FAILED: (RankState.FAILED, RankState.LOST)}


_CAUSES = {
    RankState.LOST: "the first that was lost",
    RankState.FAILED: "the first that failed",
    RankState.MISSING: "never connected",
    RankState.ENDED: "had ended already",
    RankState.FINISHED: "had ended already",
}


class RankRole(NamedTuple):
    """A rank in the list. ``text``: its role in a few words; empty: it has none. ``is_cause``: the run ended because of it."""

    row: RankRow
    text: str
    is_cause: bool


def in_order(report: Report) -> list[RankRole]:
    """All ranks, the culprit and the cause first."""
    roles = _roles(report)
    found = [(row, *roles.get(row.rank, (NOTHING, ""))) for row in report.ranks]
    found.sort(key=lambda one: (one[1], *_usual(one[0])))
    return [RankRole(row, text, tier in (CULPRIT, CAUSE)) for row, tier, text in found]


def _usual(row: RankRow) -> tuple[int, int, int, int]:
    """Those in trouble first; of the dead the first to die, of the others the one that is furthest behind."""
    is_dead = row.state in (RankState.LOST, RankState.FAILED)
    return TROUBLE.index(row.state), row.left if is_dead else 0, row.last_batch, row.rank


def _roles(report: Report) -> dict[int, tuple[int, str]]:
    roles: dict[int, tuple[int, str]] = {}
    for rank in sorted({rank for one in report.desync if one.is_split for rank in one.ranks}):
        roles[rank] = DIFFERS, "its replica differs"
    roles.update(_deaths(report))
    if report.verdict is None:
        return roles
    verdict = report.verdict
    for rank, trip in verdict.all_tripped:
        is_at_once = trip.position[:2] == verdict.trip.position[:2]
        roles[rank] = WENT_BAD, "went bad too" if is_at_once else f"went bad too, in batch {trip.position.batch}"
    if verdict.rank is None:  # a training that diverged: every rank did
        return roles
    for rank in verdict.alike or (verdict.rank,):
        roles[rank] = CULPRIT, f"one of {len(verdict.alike)} culprits at once" if verdict.alike else "culprit"
    return roles


def _deaths(report: Report) -> dict[int, tuple[int, str]]:
    """Of a run that failed, or that lost ranks: the rank that was the first, and what happened to the others after that."""
    dead = _DEAD.get(report.outcome, ())
    rows = [row for row in report.ranks if row.state in dead and row.left]
    if not rows:
        return {}
    cause = min(rows, key=lambda row: (dead.index(row.state), row.left))
    absent = absent_for(cause, report.ranks)
    after = f"without {name_spans([row.rank for row in absent])}" if absent else f"after rank {cause.rank}"
    victims = {
        row.rank: (VICTIM, f"{row.state.value} {after}")
        for row in report.ranks
        if row.state in (RankState.LOST, RankState.FAILED)
    }
    return victims | {row.rank: (CAUSE, _CAUSES[row.state]) for row in absent or [cause]}
