"""Reports of runs that are over, of four ranks on two hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import makers
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Cause
from rankwatch_monitor.decide.core.report import End, Outcome, RankRow, RankState, Report
from rankwatch_monitor.decide.trip.verdict import Certainty, Verdict


def row(rank: int, state: RankState = RankState.FINISHED, **changes: Any) -> RankRow:
    return replace(RankRow(rank, rank, f"node{rank // 2}", 100 + rank, 9, state, False, 0, ""), **changes)


def report(outcome: Outcome = Outcome.FINISHED, *states: RankState, **changes: Any) -> Report:
    """They finished, but for the first ones if their states are given."""
    rows = [row(rank, state) for rank, state in enumerate([*states, *[RankState.FINISHED] * (4 - len(states))])]
    return replace(Report("train-0", "train", 0, 4, outcome, "", None, None, None, rows), **changes)


def judged(cause: Cause, closeup: CloseUp | None = None, alike: tuple[int, ...] = (), **of_trip: Any) -> Report:
    trip = replace(makers.trip(), **of_trip)
    verdict = Verdict(1, trip, cause, "", Certainty.COMPLETE, (), (), 4, "", alike)
    return report(Outcome.ABORTED, verdict=verdict, closeup=closeup, end=End.VERDICT)
