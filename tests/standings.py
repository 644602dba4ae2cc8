"""Standings of ranks and runs, as live views receive them, for tests to vary."""

from __future__ import annotations

from rankwatch_monitor.decide.effects import Show
from rankwatch_monitor.decide.report import RankStanding, RankState, RunStanding


def standing(rank: int = 0, **changes: object) -> RankStanding:
    fields: dict[str, object] = {
        "rank": rank,
        "state": RankState.RUNNING,
        "batch": 0,
        "eval": 0,
        "frame": 0,
        "phase": "forward",
        "silent": 0.0,
        "still": 0.0,
        "quiet": "",
        "queued": 0,
        "dropped": 0,
    }
    return RankStanding(**{**fields, **changes})  # type: ignore[arg-type]


def shown(*standings: RankStanding, run: str = "train-0", **changes: object) -> Show:
    """A run whose ranks have all connected, unless ``world_size`` is larger."""
    fields: dict[str, object] = {
        "job": "train",
        "restart": 0,
        "world_size": len(standings),
        "tripped": 0,
        "stalled": 0,
        "outcome": None,
        "over": False,
        "heartbeat": 1.0,
        "waiting": "",
    }
    return Show(run, standings, RunStanding(**{**fields, **changes}))  # type: ignore[arg-type]
