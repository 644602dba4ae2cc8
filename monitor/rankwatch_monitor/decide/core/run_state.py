"""What is known of one run, what is noted down of it, and what others see: its report, and where it stands. Pure.

``run.py`` decides upon it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rankwatch.shared.types.frame import Moment
from rankwatch.shared.types.tuning import Tuning

from ..ending.abort import AbortDelivery
from ..ending.orphans import Orphans
from ..ending.rules import Ending, Situation
from ..ending.saves import Holding
from ..ending.silence import Silence
from ..replicas.comparison import ReplicaWatch
from ..replicas.desync import Desync
from ..replicas.findings import in_order
from ..replicas.own_notices import ByProducts, desync_of
from ..stalls.stacks import Stacks
from ..stalls.stall import StallWatch
from ..trip.divergence import LossHistories, origin_of
from ..trip.election import Election
from ..trip.verdict import Verdict, doubt
from .budget import Budget
from .effects import Show
from .gaps import CAME_LATE, SPOOL_FULL, Gap, Gaps
from .journal import (
    NO_RANK,
    Entry,
    Fact,
    Miscounted,
    Opened,
    Reached,
    ReplicasCompared,
)
from .notices import Notices
from .options import Options
from .rank import Rank, count_frames
from .report import Outcome, RankRows, RankState, Report, RunStanding
from .tables import FrameTables
from .uneven import StepCounts


@dataclass(slots=True)
class RunState:
    """``over``: all ranks have ended, and nothing more is expected."""

    id: str
    opened: Opened
    options: Options
    budget: Budget = field(default_factory=Budget, repr=False)
    """Of the key by which the run was begun."""
    world_size: int = field(init=False)
    ranks: dict[int, Rank] = field(default_factory=dict)
    over: bool = False
    verdict: Verdict | None = None
    journal: list[Entry] = field(default_factory=list)
    """The entries since the ledger last took them away to have them recorded."""
    tuning: Tuning = field(init=False)
    """All changes of the ranks' options so far."""
    born_at: float = float("inf")
    """When the oldest of its processes started."""
    successor: str = field(default="", repr=False)
    """A run of the same job that began later; empty: none is known."""
    has_told_siblings: bool = field(default=False, repr=False)
    """Whether the runs of other models of its processes know that it has stopped them."""
    tables: FrameTables = field(init=False)
    is_own: bool = False
    """Whether a rank of it was started by the command that this collector was started for, if it was started for one."""
    ticked_at: float = field(default=float("-inf"), repr=False)
    """When time passed for it last."""
    _ending: Ending = field(default_factory=Ending)
    _election: Election = field(init=False)
    _silence: Silence = field(init=False)
    _stalls: StallWatch = field(init=False)
    _stacks: Stacks = field(default_factory=Stacks)
    _notices: Notices = field(default_factory=Notices)
    _byproducts: ByProducts = field(default_factory=ByProducts)
    _losses: LossHistories = field(default_factory=LossHistories)
    _replicas: ReplicaWatch = field(init=False)
    _counts: StepCounts = field(default_factory=StepCounts)
    _gaps: Gaps = field(default_factory=Gaps)
    _gaps_noted: set[Gap] = field(default_factory=set)
    _trips: int = 0
    _departures: int = 0
    """How often a rank has ended."""
    _abort: AbortDelivery = field(init=False)
    _holding: Holding = field(init=False)
    _orphans: Orphans = field(init=False)
    _all_ended_at: float | None = None
    _published: bool = False
    _looked_at: float = float("-inf")
    _shown_at: float = float("-inf")
    _noted_waiting: str = ""
    """``waiting`` as it was last noted."""
    _running: set[int] = field(default_factory=set)
    """Updated message by message, so that a message costs the same at 16 ranks and at 16,384."""

    def __post_init__(self) -> None:
        self.world_size = self.opened.world_size
        self.options = self.options.for_world(self.world_size)
        self.tuning = Tuning(every=self.options.every)
        self._election = Election(self.world_size, self.options.decision_window)
        self._silence = Silence(self.options.lost_after, self.options.cut_off_after, self.options.return_window)
        self._stalls = StallWatch(self.options.stall_after)
        self._replicas = ReplicaWatch(self.world_size, self._locate, self.budget.rounds, self.budget.rows)
        self.tables = FrameTables(self.budget.tables)
        self._abort = AbortDelivery(self.options.abort_repeat, self.options.acknowledge_window)
        self._holding = Holding(self.options.hold_limit)
        self._orphans = Orphans(self.options.lost_after, self.options.abort_grace)
        self.is_own = not self.options.launch
        self._note_down(0.0, self.opened)

    @property
    def job(self) -> str:
        return self.opened.job

    @property
    def restart(self) -> int:
        return self.opened.restart

    @property
    def bound(self) -> str:
        """The job that the key speaks for by which the run was begun, or ANY_JOB."""
        return self.opened.bound

    def _note_down(self, now: float, fact: Fact, rank: int = NO_RANK) -> None:
        self.journal.append(Entry(now, rank, fact))

    def _leave(self, rank: Rank, state: RankState) -> None:
        self._departures += 1
        rank.state, rank.left = state, self._departures
        self._running.discard(rank.number)
        self._replicas.leave(rank.number)
        self._abort.unacknowledged.discard(rank.number)
        self._holding.take(rank, holds=False)
        self._note_answer(rank)

    def _take_moments(self, reached: Reached) -> None:
        for number, moment, batch in zip(reached.ranks, reached.moments, reached.reported, strict=True):
            rank = self.ranks[number]
            rank.advance(Moment(*moment), rank.phase)
            rank.reported_batch = max(rank.reported_batch, batch)
            self._note_answer(rank)

    def _note_answer(self, rank: Rank) -> bool:
        """Whether the election stops waiting for this rank now."""
        is_answer = self._election.takes_answer(rank)
        if is_answer:
            self._note_down(rank.heard_at, moments_of([rank]), rank.number)
        return is_answer

    def _count(self, rank: Rank, batch: int, step: int, now: float) -> None:
        if self._counts.take(rank.number, rank.hello.stage, batch, step):
            self._note_down(now, Miscounted(self._counts.uneven))
            self._miscount(self._counts.uneven)

    def _miscount(self, uneven: str) -> None:
        """A trip may go ahead of batches, and its verdict come before those that tell how its ranks count."""
        self._counts.uneven = uneven
        if self.verdict is not None and not self.over:
            self.verdict = doubt(self.verdict, uneven)

    def _note_compared(self, now: float, *, at_once: bool = False) -> None:
        if compared := self._replicas.note_compared(now, at_once=at_once):
            self._note_down(now, ReplicasCompared(compared))

    def _note_gaps(self) -> None:
        """Not while the disk takes nothing: a gap that grows would be noted again and again."""
        for gap in self._gaps.all():
            if gap not in self._gaps_noted:
                self._gaps_noted.add(gap)
                self._note_down(0.0, gap)

    def _note_missed(self, rank: Rank, batch: int) -> None:
        """A part of this batch came: are there batches before it that never did?"""
        missed, rank.missed = rank.missed, 0
        if missed and batch > rank.last_batch + 1:
            is_known = rank.last_batch >= 0
            first = rank.last_batch + 1 if is_known else max(0, batch - missed)
            self._gaps.add(rank.number, first, batch - 1, SPOOL_FULL if is_known else CAME_LATE)

    def _have_all_ended(self, now: float) -> bool:
        if self._running or self.options.expects_job_end:
            self._all_ended_at = None
            return False
        if self._all_ended_at is None:
            self._all_ended_at = now
        # Ranks that have never connected may still be starting.
        return len(self.ranks) == self.world_size or now - self._all_ended_at > self.options.lost_after

    def _is_settled(self, now: float) -> bool:
        """Whether the report can be printed: the abort is answered, and the ranks asked have told all, or are late."""
        if self._abort.message is None:
            return self._have_all_ended(now)
        culprit = None if self.verdict is None else self.ranks[self.verdict.tripped]
        is_heard = culprit is None or not (culprit.owes_closeup(now) or culprit.owes_turn(now))
        return self._abort.is_answered(now) and is_heard and not self._stacks.are_awaited(now)

    def _locate(self, number: int) -> tuple[str, str]:
        """The host and the GPU of a rank."""
        rank = self.ranks.get(number)
        return ("", "") if rank is None else (rank.hello.host, rank.hello.gpu.id)

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> str:
        """Which ranks the election waits for; empty when it waits for none."""
        return self._election.waiting if self._ending.situation is Situation.ELECTION else ""

    def report(self) -> Report:
        return Report(
            run=self.id,
            job=self.job,
            restart=self.restart,
            world_size=self.world_size,
            model=self.opened.model,
            is_own=self.is_own,
            outcome=self._ending.outcome or Outcome.FINISHED,
            reason=self._ending.reason,
            verdict=self.verdict,
            closeup=None if self.verdict is None else self.ranks[self.verdict.tripped].closeup,
            frames_in_batch=count_frames(self.verdict, self.ranks),
            acknowledged_in=self._abort.answered_in(self.ranks),
            ranks=RankRows({number: rank.row() for number, rank in self.ranks.items()}, self.world_size),
            notices=self._notices.all(),
            notices_unkept=self._notices.unkept,
            stall=self._stalls.stall,
            stacks=self._stacks.all(),
            origin=origin_of(self.verdict),
            desync=self._desync(),
            desync_unkept=self._replicas.findings.unkept,
            compared=self._replicas.compared,
            gaps=self._gaps.all(),
            stops_ranks=self._ending.outcome is Outcome.ABORTED and self._ending.aborts,
        )

    def _desync(self) -> tuple[Desync, ...]:
        return (*in_order(self._replicas.findings.noted), *desync_of(self._notices.all(), self.world_size, self._locate))

    def _show(self, now: float) -> Show:
        self._shown_at = now
        standing = RunStanding(
            job=self.job,
            restart=self.restart,
            world_size=self.world_size,
            tripped=self._trips,
            stalled=stall.count if (stall := self._stalls.stall) is not None else 0,
            outcome=self._ending.outcome,
            over=self.over,
            heartbeat=self.options.heartbeat,
            waiting=self.waiting,
            desynced=len(self._desync()) + self._replicas.findings.unkept,
        )
        return Show(self.id, tuple([self.ranks[number].standing(now) for number in sorted(self.ranks)]), standing)


def moments_of(ranks: Collection[Rank]) -> Reached:
    numbers = tuple([rank.number for rank in ranks])
    return Reached(numbers, tuple([rank.progress for rank in ranks]), tuple([rank.reported_batch for rank in ranks]))
