"""What ranks, control clients and the collector say to each other. ``wire`` has the bytes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .cause import Trip
from .frame import BatchSummary, FrameTable, Position
from .notice import Notice
from .tuning import NO_CHANGE, Tuning


@dataclass(frozen=True, slots=True)
class Hello:
    """Rank to collector, first on every connection. ``incarnation``, drawn once per process, tells a reconnect from a restart.

    ``stage`` is the rank's stage in a pipeline, from 0 on; NO_STAGE without a pipeline.
    """

    major: int
    minor: int
    job: str
    restart: int
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: str
    torch: str
    incarnation: str
    stage: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Collector to rank: the run it belongs to, what holds in it (seconds), and the last sequence number received."""

    run: str
    heartbeat: float
    decision_window: float
    seq: int


@dataclass(frozen=True, slots=True)
class Table:
    table: FrameTable


@dataclass(frozen=True, slots=True)
class Batch:
    seq: int
    summary: BatchSummary


@dataclass(frozen=True, slots=True)
class Tripped:
    seq: int
    trip: Trip


@dataclass(frozen=True, slots=True)
class Noticed:
    seq: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class Beat:
    """Rank to collector, every heartbeat and in answer to a probe."""

    position: Position
    phase: str
    queued: int
    dropped: int
    time: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Collector to rank: send a BEAT as soon as you are past this position (now, if you are)."""

    position: Position


@dataclass(frozen=True, slots=True)
class Abort:
    """Collector to rank, repeated until acknowledged: stop. ``rank`` is the culprit (-1: none), ``time`` that of its trip."""

    reason: str
    rank: int
    time: float
    grace: float


@dataclass(frozen=True, slots=True)
class Ack:
    """Collector to rank: all up to ``seq`` was received. Rank to collector, with ``abort``: the ABORT was received."""

    seq: int
    abort: bool


@dataclass(frozen=True, slots=True)
class Bye:
    """Rank to collector, last. See OUTCOMES; ``text`` is the exception of ``failed``, the reason of ``limit``."""

    seq: int
    outcome: str
    text: str


@dataclass(frozen=True, slots=True)
class Error:
    """Collector to rank: a message was refused. ``remedy``: ``none``, ``hello`` (say it again), ``stop`` (it is no use)."""

    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Tune:
    """Options changed while the training runs. Control client to collector: for the run of this name, or for all that are
    under way where ``run`` is empty; answered by TUNED or ERROR. Collector to rank: all that was changed in its run so far.
    """

    run: str = ""
    tuning: Tuning = NO_CHANGE


@dataclass(frozen=True, slots=True)
class Tuned:
    """Collector to control client: which runs were tuned, and how many ranks of theirs were told at once."""

    runs: tuple[str, ...]
    ranks: int


@dataclass(frozen=True, slots=True)
class Invite:
    """Control client to collector: asks for keys that speak for this job alone; answered by INVITED or ERROR."""

    job: str


@dataclass(frozen=True, slots=True)
class Invited:
    """Collector to control client: the keys of the job's ranks (CURVE, Z85). Links are encrypted."""

    job: str
    client_public: str
    client_secret: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A kind of a newer minor version: decoded to its name, to be ignored."""

    kind: str


Message: TypeAlias = (
    Hello
    | Welcome
    | Table
    | Batch
    | Tripped
    | Noticed
    | Beat
    | Probe
    | Abort
    | Ack
    | Bye
    | Error
    | Tune
    | Tuned
    | Invite
    | Invited
    | Unknown
)
Sequenced: TypeAlias = Batch | Tripped | Noticed | Bye
"""What is numbered by the rank, and kept by it until it is acknowledged."""

# How a rank ends: closed; its process at its end without close(); by an exception; told to; after the batch it was told to.
OUTCOMES = frozenset({"finished", "ended", "failed", "aborted", "limit"})
REMEDIES = frozenset({"none", "hello", "stop"})
PHASES = frozenset({"idle", "forward", "backward", "optimizer"})
