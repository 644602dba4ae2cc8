"""Where a rank and a run are now, for live views and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rankwatch.shared.types.frame import NO_LOSS
from rankwatch.shared.types.spent import NOT_SPENT, Spent

from .report import Outcome, RankState

if TYPE_CHECKING:
    from .rank import Rank
    from .run import Run


class RankStanding(NamedTuple):
    """Where a rank is now; ``silent`` and ``still`` are seconds since it was last heard and since it last moved.

    ``quiet`` says in what way it is silent, if it is silent for too long; ``queued`` messages wait in its spool, and
    ``dropped`` batches found no room there. ``spent``: where the time of its batches goes.
    ``memory`` and that of its device are in bytes, 0: not known; ``leak`` says how it grew, if it did all the time.
    """

    rank: int
    state: RankState
    batch: int
    eval: int
    frame: int
    phase: str
    silent: float
    still: float
    quiet: str
    queued: int
    dropped: int
    spent: Spent = NOT_SPENT
    memory: int = 0
    device_memory: int = 0
    leak: str = ""


class RunStanding(NamedTuple):
    """Where a run is now, and how it ended once it is ``over``; ``tripped`` and ``stalled`` count ranks.

    Ranks send a beat, and standings are written, every ``heartbeat`` seconds. ``waiting`` says which ranks an election waits
    for; it is empty outside an election. ``desynced`` counts the parameters that are not what they must be, ``skipped`` the
    steps that were left out, ``collectives`` the process groups whose members do not call the same. ``loss`` is the mean of the
    ranks' last losses, or NO_LOSS.
    """

    job: str
    restart: int
    world_size: int
    tripped: int
    stalled: int
    outcome: Outcome | None
    over: bool
    heartbeat: float
    waiting: str
    desynced: int = 0
    skipped: int = 0
    collectives: int = 0
    loss: float = NO_LOSS


def standing_of_rank(rank: Rank, now: float) -> RankStanding:
    return RankStanding(
        rank.number, rank.state, *rank.progress.position, rank.phase,
        round(now - rank.heard_at, 3), round(now - rank.moved_at, 3), rank.quiet, rank.queued, rank.dropped, rank.spent,
        rank.memory.now, rank.device_memory.now, rank.leak,
    )  # fmt: skip


def standing_of(run: Run) -> RunStanding:
    return RunStanding(
        job=run.opened.job,
        restart=run.opened.restart,
        world_size=run.world_size,
        tripped=run.trips.trips,
        stalled=stall.count if (stall := run.stalls.watch.stall) is not None else 0,
        outcome=run.ending.state.outcome,
        over=run.over,
        heartbeat=run.options.heartbeat,
        waiting=run.waiting,
        desynced=len(run.replicas.all()) + run.replicas.watch.findings.unkept,
        skipped=run.skips.count,
        collectives=run.calls.differ,
        loss=_loss_of(run),
    )


def _loss_of(run: Run) -> float:
    losses = [rank.loss for rank in run.ranks.values() if rank.loss != NO_LOSS]
    return sum(losses) / len(losses) if losses else NO_LOSS
