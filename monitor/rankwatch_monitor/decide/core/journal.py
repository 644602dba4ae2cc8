"""The journal of a run: every fact that its decisions rest on, in the order in which the facts came.

A fact is an input or a finding. Inputs come from outside: messages of ranks, changes of options, the end of the job, the
passing of time. Findings are what the run made of them. They change the run by ``Run.apply`` alone, when they are found and
when they are replayed.

Each batch is recorded once. Beats are not recorded: where an election rests on them, ``Reached`` is. ``Run.replay`` makes a
run from its entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import BatchSummary, FrameTable
from rankwatch.shared.words.divergence import Divergence

from ..replicas.desync import Compared, Desync
from .fact import Finding
from .gaps import Gap
from .report import Outcome, RankState, Stall

NO_RANK = -1


@dataclass(frozen=True, slots=True)
class Opened:
    """The run began. Ranks whose HELLO has these values belong to it; see ``messages.Hello``."""

    job: str
    restart: int
    world_size: int
    start: str = ""
    model: int = 0
    bound: str = ""
    """The job that the key speaks for by which the run was begun; empty: any job."""
    awaits_command: bool = False
    """Whether it is over with its command, and not with its ranks: one that looks on sees no end before."""


class Trained(NamedTuple):
    """A part of a batch with its frame table; ``seq`` is the sequence number of the message."""

    seq: int
    summary: BatchSummary
    table: FrameTable


@dataclass(frozen=True, slots=True)
class InTurn(Finding):
    """A message of this kind, which went ahead and has its own entry, has come in its turn."""

    seq: int
    kind: str


@dataclass(frozen=True, slots=True)
class Left(Finding):
    """The collector counts this rank out: it ended without a BYE."""

    state: RankState


@dataclass(frozen=True, slots=True)
class Died(Finding):
    """The process of this rank ended without a BYE: ``how`` says in what way, as in ``killed by SIGKILL``."""

    how: str


@dataclass(frozen=True, slots=True)
class Reached(Finding):
    """The moments of the ranks when one of them tripped, or of one rank when it answered the election.

    ``reported`` is each rank's last batch whose whole forward it had reported.
    """

    ranks: tuple[int, ...]
    moments: tuple[tuple[int, int, int, int], ...]
    reported: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Miscounted(Finding):
    """Ranks count batches and optimizer steps differently: ``text`` says which."""

    text: str


@dataclass(frozen=True, slots=True)
class Waited:
    """Time has passed, and the passing of time decided something."""


@dataclass(frozen=True, slots=True)
class Stood(Finding):
    """The stall there is from now on; None: the ranks went on. Its stacks are the messages ``Inspected``."""

    stall: Stall | None


@dataclass(frozen=True, slots=True)
class NoStack(Finding):
    """A rank of a stall was asked where it is, and did not say."""

    text: str


@dataclass(frozen=True, slots=True)
class JobInterrupted:
    """This signal is ending the job's command: ranks that fail or are lost from now on do so because of it."""

    signal: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The command that the collector was started for has ended; exit code None: the collector is being ended.

    ``interrupted`` names the signal that ended the command.
    """

    exit_code: int | None
    interrupted: str = ""


@dataclass(frozen=True, slots=True)
class Decided(Finding):
    """How the run ends, and whether its ranks are sent an abort. A later decision replaces an earlier one."""

    outcome: Outcome
    reason: str
    abort: bool


@dataclass(frozen=True, slots=True)
class Closed(Finding):
    """The run is over."""


@dataclass(frozen=True, slots=True)
class Diverged(Finding):
    """The verdict is the end of a divergence: the batches from which this follows are no facts of the journal."""

    found: Divergence


@dataclass(frozen=True, slots=True)
class Desynced(Finding):
    """Parameters that are not what they must be: fingerprints are no facts of the journal. A later entry of the same origin
    and parameter replaces an earlier one; ``unkept`` more found no room.
    """

    entries: tuple[Desync, ...]
    unkept: int


@dataclass(frozen=True, slots=True)
class ReplicasCompared(Finding):
    """What was compared so far."""

    compared: Compared


OwnEvent: TypeAlias = (
    Opened
    | Died
    | Left
    | InTurn
    | Reached
    | Miscounted
    | Waited
    | Stood
    | NoStack
    | JobInterrupted
    | JobEnded
    | Diverged
    | Desynced
    | ReplicasCompared
    | Decided
    | Closed
    | Gap
)
Fact: TypeAlias = messages.Message | OwnEvent | Trained


class Entry(NamedTuple):
    """A fact; ``now`` is in seconds of the collector's clock, ``rank`` the rank that it concerns, or NO_RANK."""

    now: float
    rank: int
    fact: Fact


class Progress(NamedTuple):
    """What a restored run needs to know of a part of a batch: its number of frames, its loss, and the message it came in."""

    rank: int
    seq: int
    batch: int
    step: int
    first_frame: int
    frames: int
    loss: float
