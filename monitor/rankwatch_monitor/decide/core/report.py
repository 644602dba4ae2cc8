"""What reports and live views say of a run, in whatever form they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, overload

from rankwatch.shared.str_enum import StrEnum
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import NO_LOSS, NO_STAGE
from rankwatch.shared.types.gpu import NO_GPU, Gpu
from rankwatch.shared.types.notice import Notice
from rankwatch.shared.words.brief import brief

from ..calls.differs import UnequalCalls
from ..ending.course import Course
from ..ending.judgement import Doubt
from ..replicas.desync import Compared, Desync
from ..trip.began import TripOrigin
from ..trip.skipped import SkippedStep
from ..trip.verdict import Verdict
from .gaps import Gap


class Outcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    """Every rank ended cleanly."""
    ABORTED = "aborted"
    """Stopped by a verdict or a signal, or after the batch that was asked for."""
    FAILED = "failed"
    """A rank, or the job's command, ended by an error of its own."""
    LOST = "lost"
    """A rank went silent."""
    STALLED = "stalled"
    """A rank made no more progress, and the others were stopped because of it."""


class End(StrEnum):
    """Why a run ended, as far as it matters for what to do next. Each has its row in ``next/next_action.py``."""

    FINISHED = "finished"
    VERDICT = "verdict"
    FAILED = "failed"
    """A rank ended by an error of its own."""
    COMMAND = "command"
    """The job's command failed, and no rank says why."""
    LOST = "lost"
    """A rank was lost, or what had started it."""
    STALL = "stall"
    DESYNC = "desync"
    SIGNAL = "signal"
    """A signal ended the job."""
    LIMIT = "limit"
    """It stopped after the batch that was asked for."""
    SIBLING = "sibling"
    """The run of another model of the same processes was stopped."""
    RELAUNCHED = "relaunched"
    """A later start of the same job has begun."""
    UNWATCHED = "unwatched"
    """The collector ended: the ranks may train on."""
    UNKNOWN = "unknown"
    """An older version recorded it."""


class RankState(StrEnum):
    MISSING = "missing"
    """It never connected."""
    RUNNING = "running"
    FINISHED = "finished"
    ENDED = "ended"
    """Its process ended without ``close()`` and without an uncaught exception: normally, or by sys.exit(1)."""
    ABORTED = "aborted"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank in the report.

    ``last_batch`` is -1 before the first; ``farewell`` is the exception that ended the rank, if one did; ``dropped`` batches
    found no room in its spool; ``rival`` is the last other process that tried to connect as this rank. ``loss`` is the abs max
    of its last loss, of batch ``loss_batch``; NO_LOSS: it has none. ``left`` numbers the ends of the ranks, from 1 on; 0: it has
    not ended. ``torch`` is the version. ``farewell_at``: the user's line that the exception came from; empty: not known.
    ``memory``: what a rank that was lost had taken; ``leaked``: it had grown all the time.
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
    loss_batch: int = -1
    loss: float = NO_LOSS
    left: int = 0
    gpu: Gpu = NO_GPU
    torch: str = ""
    farewell_at: str = ""
    memory: str = ""
    leaked: bool = False

    @property
    def last_words(self) -> str:
        """For people."""
        return brief(self.farewell, self.farewell_at)


@dataclass(frozen=True, slots=True)
class RankRows(Sequence[RankRow]):
    """A row for each rank of the world. Those of ranks that never connected are made where they are read: a world is as large as
    its first rank says."""

    connected: Mapping[int, RankRow]
    world_size: int

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[RankRow]:
        return map(self._row, range(self.world_size))

    @overload
    def __getitem__(self, index: int) -> RankRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankRow, ...]: ...
    def __getitem__(self, index: int | slice) -> RankRow | tuple[RankRow, ...]:
        found = range(self.world_size)[index]
        return self._row(found) if isinstance(found, int) else tuple(map(self._row, found))

    def _row(self, rank: int) -> RankRow:
        return self.connected.get(rank) or _missing(rank)


@cache
def _missing(rank: int) -> RankRow:
    return RankRow(rank, -1, "", 0, -1, RankState.MISSING, False, 0, "")


class RankNotice(NamedTuple):
    rank: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that make no progress, and the ranks that wait for them, in a sentence; of very many, the first ones are named.

    ``count`` ranks are stalled, and ``count_waiting`` wait.
    """

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str
    count: int
    count_waiting: int


class RankStack(NamedTuple):
    """Where a rank of a stall is: what its main thread waits in, and each thread with its frames. ``why_not``: it did not say.

    ``collective``: the one that its main thread is in.
    """

    rank: int
    waits: str = ""
    lines: tuple[str, ...] = ()
    why_not: str = ""
    collective: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A run so far, or when it is over. ``acknowledged_in``: seconds from the abort to the last acknowledgement so far.

    ``notices``: the most urgent first; ``notices_unkept`` more found no room.
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
    ranks: Sequence[RankRow]
    notices: tuple[RankNotice, ...] = ()
    notices_unkept: int = 0
    stall: Stall | None = None
    """The stall there is now, or that there was at the end."""
    held_up: tuple[int, str] = -1, ""
    """Since which batch the others wait for a rank in each batch, and for which, in a sentence; empty: for none."""
    stacks: tuple[RankStack, ...] = ()
    """Of some of its ranks, the stalled ones first."""
    origin: TripOrigin | None = None
    """Where the verdict's trip came from; None while that was not looked for."""
    handed: str = ""
    """What the culprit's stage of a pipeline was handed otherwise than the stage before it had sent; empty: nothing is known."""
    course: Course | None = None
    """How a run without a verdict went; None while that was not looked for."""
    closeup: CloseUp | None = None
    """What the verdict's rank, or one that tripped alike, found when it ran again what went bad; None: none has arrived."""
    looked: int = -1
    """The rank of the close-up; -1: that of the verdict."""
    desync: tuple[Desync, ...] = ()
    """The parameters that are not what they must be, the earliest first."""
    desync_unkept: int = 0
    """How many more found no room."""
    compared: Compared | None = None
    """None: no two replicas were compared."""
    stops_ranks: bool = False
    """Whether rankwatch stopped the ranks: by a verdict, for a stall, or because replicas that must be equal are not."""
    model: int = 0
    """The number of the model among those that each of its processes watches."""
    is_own: bool = True
    """Whether it belongs to the command that the collector was started for."""
    skipped: tuple[SkippedStep, ...] = ()
    """The steps that were left out, the last ones in order."""
    skipped_unkept: int = 0
    """How many before these found no room."""
    why_not_skipped: str = ""
    """Why the verdict's step ends the run, where steps may be left out."""
    collectives: tuple[UnequalCalls, ...] = ()
    """Of each process group whose members do not call the same, the first call that differs, or that a rank has yet to make."""
    collectives_unkept: int = 0
    """How many more groups there are."""
    gaps: tuple[Gap, ...] = ()
    """What is not on record, the earliest first."""
    folder: str = ""
    """The run's folder; empty while it is not known."""
    end: End = End.FINISHED
    """As it looks so far."""
    made_with: tuple[str, ...] = ()
    """Command, options, commit and versions, as rank 0 tells them: a line each."""
    measured: str = ""
    """Which batches were measured in full by a budget; empty: there is none."""
    doubts: tuple[Doubt, ...] = ()
    """What speaks against a run that goes on, by the numbers of its batches."""
    follows: str = ""
    """The run of another model of the same processes that ended badly just before: this is the same failure."""

    @property
    def stalled(self) -> str:
        """The stall in a sentence; empty without one."""
        return "" if self.stall is None else self.stall.text

    @property
    def others(self) -> list[RankRow]:
        """The ranks that are to acknowledge the abort."""
        return [row for row in self.ranks if row.state not in (RankState.FAILED, RankState.LOST)]

    @property
    def batches(self) -> int:
        """How many batches the furthest rank has begun."""
        return max((row.last_batch for row in self.ranks), default=-1) + 1
