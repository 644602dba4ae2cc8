"""What a report says of a run, whatever it is printed as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.frame import NO_STAGE
from rankwatch.shared.notice import Notice
from rankwatch.shared.str_enum import StrEnum

from .verdict import Verdict


class Outcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    """Every rank ended cleanly."""
    ABORTED = "aborted"
    """Stopped by a verdict, or after the batch that was asked for."""
    FAILED = "failed"
    """A rank ended by an exception of its own."""
    LOST = "lost"
    """A rank went silent."""
    STALLED = "stalled"
    """A rank made no progress any more, and the others were stopped for it."""


class RankState(StrEnum):
    MISSING = "missing"
    """It never connected."""
    RUNNING = "running"
    FINISHED = "finished"
    ENDED = "ended"
    """Its process ended without ``close()`` and without an exception that reached the top: well, or by sys.exit(1)."""
    ABORTED = "aborted"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank in the report.

    ``last_batch`` is -1 before the first; ``farewell`` is the exception it ended by, if any; ``dropped`` batches found no room
    in its spool; ``rival`` is the last other process that wanted to be this rank while it was there; ``stage`` is its place in
    a pipeline.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    last_batch: int
    state: RankState
    acknowledged: bool
    dropped: int
    farewell: str
    rival: str = ""
    stage: int = NO_STAGE


class RankStanding(NamedTuple):
    """Where a rank is while its run goes on; ``silent`` and ``still`` are seconds since it was heard and since it moved.

    ``quiet`` says how it is silent, where that is longer than it should be; ``queued`` messages wait in it to be sent, and
    ``dropped`` batches found no room there.
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


class RunStanding(NamedTuple):
    """Where a run is while it goes on, and how it ended once it is ``over``; ``tripped`` and ``stalled`` are numbers of ranks.

    ``heartbeat`` is in seconds: ranks report this often, and standings are written this often. ``waiting`` names the ranks
    that an election waits for; empty while there is no election.
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


class RankNotice(NamedTuple):
    rank: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class Report:
    """A run, as far as it is known. ``acknowledged_in`` is seconds from ABORT to the last acknowledgement so far.

    ``notices`` are in the order to show them in; ``notices_unkept`` came when there was no more room.
    """

    run: str
    job: str
    restart: int
    world_size: int
    outcome: Outcome
    reason: str
    verdict: Verdict | None
    frames_in_batch: int | None
    acknowledged_in: float | None
    ranks: tuple[RankRow, ...]
    notices: tuple[RankNotice, ...] = ()
    notices_unkept: int = 0
    stalled: str = ""
    """The ranks that stood still at the end, and who waited for them."""

    @property
    def batches(self) -> int:
        """How many batches the furthest rank has run."""
        return max((row.last_batch for row in self.ranks), default=-1) + 1
