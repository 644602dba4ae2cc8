"""Standings of ranks and runs, as live views receive them, for tests to vary."""

from __future__ import annotations

from rankwatch_monitor.decide.core.effects import Show
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.decide.core.standing import RankStanding, RunStanding


def standing(rank: int = 0, **changes: object) -> RankStanding:
    """A rank that runs, in the first frame of batch 0."""
    running = RankStanding(rank, RankState.RUNNING, 0, 0, 0, "forward", silent=0.0, still=0.0, quiet="", queued=0, dropped=0)
    return running._replace(**changes)  # type: ignore[arg-type]


def shown(*standings: RankStanding, run: str = "train-0", **changes: object) -> Show:
    """A run whose ranks have all connected, unless ``world_size`` is larger."""
    going = RunStanding(
        "train", 0, len(standings), tripped=0, stalled=0, outcome=None, over=False, heartbeat=1.0, waiting=""
    )
    return Show(run, standings, going._replace(**changes))  # type: ignore[arg-type]
