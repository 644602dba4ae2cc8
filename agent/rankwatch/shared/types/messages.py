"""The messages between ranks, control clients and the collector. ``wire.py`` encodes them.

KIND is a message's name on the wire. How a field is written is told by its type and annotation: see ``fields.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from .calls import MAX_CALLS, CollectiveCall, GroupCount
from .closeup import CloseUp
from .fields import MAX_RANKS, MAX_TEXT, BatchNumber, Items, integer, lines, number, one_of, string
from .fingerprint import Fingerprint, FingerprintTable
from .frame import BEGINNING, NO_STAGE, BatchSummary, FrameTable, Moment
from .gpu import NO_GPU, Gpu
from .notice import Notice
from .spent import NO_COST, NOT_SPENT, Cost, Spent
from .stream_limit import WINDOW
from .trip import Trip
from .tuning import MAX_PATTERNS, NO_CHANGE, Tuning

MAX_STACK_LINES, MAX_STACK_LINE = 96, 240
"""Of the answer of a rank that was asked where it is: lines, and characters of each."""

ANY_RANK = -1

MAX_START = 64
"""Characters of a start id."""

MAX_MODELS = 1 << 16

# How a rank ended: close(); the process without close(); an exception; an abort; after the batch that was asked for; well, but
# no backward ever reached this model, while another one of the process was trained.
OUTCOMES = frozenset({"finished", "ended", "failed", "aborted", "limit", "unused"})
REMEDIES = frozenset({"none", "hello", "stop"})
PHASES = frozenset({"idle", "forward", "backward", "optimizer"})

MAX_MADE_WITH = 600

Text: TypeAlias = Annotated[str, lines(MAX_TEXT)]
Version: TypeAlias = Annotated[int, integer(0, 1 << 16)]
StartId: TypeAlias = Annotated[str, string(MAX_START)]
StackLine: TypeAlias = Annotated[str, string(MAX_STACK_LINE)]
Key: TypeAlias = Annotated[str, string(40)]
Counts: TypeAlias = tuple[GroupCount, ...]
MadeWith: TypeAlias = Annotated[tuple[Annotated[str, string(MAX_MADE_WITH)], ...], Items(8)]
WithinADay: TypeAlias = Annotated[float, number(0, 86400)]
"""Seconds."""

AHEAD = 0
"""The sequence number of the copy of a TRIP or CLOSEUP that goes ahead of its rank's batches. The message comes in its turn."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Rank to collector, first on every connection. ``incarnation``, random per watch, tells a reconnect from a restart.

    ``start`` is the id of the launch that the rank belongs to, the same on all of its ranks; empty: unknown. ``earlier`` is the
    id that it took over from: of an earlier launch, but ranks of this one may have it. ``launch`` is the id of the
    ``rankwatch run`` that started the process, if one did. ``model`` numbers the models of the process from 0 on. ``age`` is in
    seconds since the process started (0: unknown): it tells the older of two starts. ``stage`` is the rank's stage in a pipeline,
    from 0 on; NO_STAGE without a pipeline. ``gpu`` is the one that the model is on. ``made_with`` is told by rank 0:
    lines such as ``commit: 1a0b0b1d``.
    """

    KIND = "HELLO"
    major: Version
    minor: Version
    job: str
    restart: Annotated[int, integer(0, 1 << 31)]
    rank: Annotated[int, integer(0, MAX_RANKS - 1)]
    world_size: Annotated[int, integer(1, MAX_RANKS)]
    local_rank: Annotated[int, integer(0, MAX_RANKS)]
    host: str
    pid: int
    device: str
    torch: str
    incarnation: Annotated[str, string(64)]
    stage: Annotated[int, integer(NO_STAGE, MAX_RANKS)]
    gpu: Gpu = NO_GPU
    start: StartId = ""
    model: Annotated[int, integer(0, MAX_MODELS)] = 0
    age: float = 0.0
    launch: StartId = ""
    earlier: StartId = ""
    made_with: MadeWith = ()


@dataclass(frozen=True, slots=True)
class Welcome:
    """Collector to rank: its run, the run's intervals in seconds, and the last sequence number that is in the record.

    ``folder`` is the absolute path of the run's folder on the collector's host. A rank on another host may not see it, or may
    see another folder there: the run's has the file ``run.db``. ``host`` is the collector's host.
    ``window``: bytes (``window.py``). Only while the collector has fewer of this rank's batches and fingerprints still to handle,
    the rank sends another one.
    """

    KIND = "WELCOME"
    run: str
    heartbeat: Annotated[float, number(0.01, 3600)]
    decision_window: Annotated[float, number(0, 3600)]
    seq: int
    folder: str = ""
    host: str = ""
    window: Annotated[int, integer(1)] = WINDOW


@dataclass(frozen=True, slots=True)
class Table:
    KIND = "TABLE"
    table: FrameTable


@dataclass(frozen=True, slots=True)
class Batch:
    """``calls``: of the groups whose counts have changed since they were told, as they were when this part of the batch was over.
    They are not in the record."""

    KIND = "BATCH"
    seq: int
    summary: BatchSummary
    calls: Counts = ()


@dataclass(frozen=True, slots=True)
class Tripped:
    KIND = "TRIP"
    seq: int
    trip: Trip


@dataclass(frozen=True, slots=True)
class LookedCloser:
    """Rank to collector, after a TRIP that announced it: what the rank found when it ran the bad forward or backward again."""

    KIND = "CLOSEUP"
    seq: int
    closeup: CloseUp


@dataclass(frozen=True, slots=True)
class Noticed:
    KIND = "NOTICE"
    seq: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Rank to collector, before the first fingerprint of this table."""

    KIND = "FINGERPRINTS"
    table: FingerprintTable


@dataclass(frozen=True, slots=True)
class Fingerprinted:
    KIND = "FINGERPRINT"
    seq: int
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Off:
    """Rank to collector: by this error of its own, the watch judges nothing any more. The process trains on."""

    KIND = "OFF"
    seq: int
    text: Text


@dataclass(frozen=True, slots=True)
class Beat:
    """Rank to collector, every heartbeat, in answer to a probe, and when ``holds`` or ``departed`` changes.

    ``holds``: the rank asks an abort to wait. ``orphaned``: the torchrun that started it has ended. ``settled`` is the moment
    before which no backward trips either, and ``first_of_step`` the first batch of the moment's optimizer step; -1: an agent
    that tells neither. ``departed``: the rank has destroyed its process group. ``spent``: where the time of its batches goes.
    ``memory``: bytes of the host's that the process takes; 0: not known. ``aside``: what rank 0 has done beside its training,
    lines such as ``saved: /data/step-50.pt, after batch 49``. ``cost``: what watching takes of the time that is ``spent``.
    """

    KIND = "BEAT"
    moment: Moment
    phase: Annotated[str, one_of(PHASES)]
    queued: int
    dropped: int
    time: float
    holds: bool = False
    orphaned: bool = False
    first_of_step: BatchNumber = -1
    settled: Moment = BEGINNING
    departed: bool = False
    calls: Counts = ()
    spent: Spent = NOT_SPENT
    memory: Annotated[int, integer(0)] = 0
    aside: MadeWith = ()
    cost: Cost = NO_COST


@dataclass(frozen=True, slots=True)
class Probe:
    """Collector to rank: send a BEAT as soon as you have passed this moment, or now if you have. Another one once no backward
    trips before it either."""

    KIND = "PROBE"
    moment: Moment


@dataclass(frozen=True, slots=True)
class Inspect:
    """Collector to rank, which stalls or waits for one that does: say where your threads are. Repeated until answered.

    Control client to collector: of the run of this name, and of this rank; ANY_RANK: of those that are furthest behind. Answered
    by an INSPECTED of each rank, or by ERROR.
    """

    KIND = "INSPECT"
    number: int
    run: str = ""
    rank: Annotated[int, integer(ANY_RANK, MAX_RANKS - 1)] = ANY_RANK


@dataclass(frozen=True, slots=True)
class Inspected:
    """Rank to collector: the answer to the INSPECT of this number. ``waits``: what the main thread is in, in one line.

    ``lines``: each thread with its frames, the innermost first. ``collective``: the one that the main thread is in.
    Collector to control client: the answer of rank ``who``, of so many that were asked. ``why_not``: why there is none.
    """

    KIND = "INSPECTED"
    number: int
    waits: StackLine
    lines: Annotated[tuple[StackLine, ...], Items(MAX_STACK_LINES)]
    collective: StackLine = ""
    who: str = ""
    why_not: str = ""
    asked: Annotated[int, integer(0, MAX_RANKS)] = 0


@dataclass(frozen=True, slots=True)
class Recount:
    """Collector to rank: tell the calls of this group, from the one with the number ``first`` on."""

    KIND = "RECOUNT"
    number: int
    group: int
    first: Annotated[int, integer(1)]


@dataclass(frozen=True, slots=True)
class Recounted:
    """Rank to collector: the answer to the RECOUNT of this number, at once.

    ``first``: the number of the first of ``calls``: a later one than was asked for where the rank has forgotten earlier ones.
    ``count``: how many the rank has called by now. ``size``: members of the group; 0: the rank does not know the group.
    ``name``: of the group, for people.
    """

    KIND = "RECOUNTED"
    number: int
    group: int
    name: Annotated[str, string(80)]
    size: Annotated[int, integer(0, MAX_RANKS)]
    first: Annotated[int, integer(1)]
    count: int
    calls: Annotated[tuple[CollectiveCall, ...], Items(MAX_CALLS)]


@dataclass(frozen=True, slots=True)
class Abort:
    """Collector to rank, repeated until acknowledged: stop. ``rank`` is the culprit (-1: none).

    ``time``: when it tripped; 0: it did not, but replicas came apart. ``hold_limit``: seconds for which work that the rank
    holds is waited for, and only then the ``grace`` begins. ``batch``, ``module`` and ``cause`` are the verdict's; without
    one, the cause is empty.
    """

    KIND = "ABORT"
    reason: Text
    rank: Annotated[int, integer(-1, MAX_RANKS)]
    time: float
    grace: WithinADay
    hold_limit: WithinADay = 0.0
    batch: BatchNumber = -1
    module: str = ""
    cause: Annotated[str, string(64)] = ""


@dataclass(frozen=True, slots=True)
class Stay:
    """Collector to rank, after ABORT or a BYE: torchrun would end other ranks with this one, and they may save.

    ``seconds``: to a rank that runs, how long its deadline waits for work that a rank holds, at most; 0: its grace begins. To one
    that has closed its watch, how long its process stays, at most; 0: it may end.
    """

    KIND = "STAY"
    seconds: WithinADay


@dataclass(frozen=True, slots=True)
class Ack:
    """Collector to rank: all messages up to ``seq`` are in the record, and those up to ``handled`` are handled.

    Rank to collector (``abort``): the ABORT arrived.
    """

    KIND = "ACK"
    seq: int
    abort: bool
    handled: int = 0


@dataclass(frozen=True, slots=True)
class Bye:
    """Rank to collector, last. See OUTCOMES; ``text`` is the exception of ``failed`` and the reason of ``limit``.

    All that the rank ran before ``moment`` is judged. ``at``: the user's line that the exception came from; empty: not known.
    """

    KIND = "BYE"
    seq: int
    outcome: Annotated[str, one_of(OUTCOMES)]
    text: Text
    moment: Moment = BEGINNING
    at: StackLine = ""

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the rank: that is no failure."""
        return self.outcome == "failed" and self.text.partition(":")[0] == KeyboardInterrupt.__name__


@dataclass(frozen=True, slots=True)
class Error:
    """Collector to rank: a message was refused. ``remedy``: ``none``, ``hello`` (send HELLO again), ``stop`` (give up)."""

    KIND = "ERROR"
    text: Text
    remedy: Annotated[str, one_of(REMEDIES)]


@dataclass(frozen=True, slots=True)
class Tune:
    """Options that change while the training runs.

    Control client to collector: for the run of this name, or for all runs under way where ``run`` is empty; answered by TUNED or
    ERROR. Collector to rank: all changes in its run so far.
    """

    KIND = "TUNE"
    run: str = ""
    tuning: Tuning = NO_CHANGE


@dataclass(frozen=True, slots=True)
class Tuned:
    """Collector to control client: the runs that were tuned, and how many of their ranks were sent the change at once.

    ``mistyped``: what is to be said of patterns that match nothing.
    """

    KIND = "TUNED"
    runs: Annotated[tuple[str, ...], Items(MAX_PATTERNS)]
    ranks: int
    mistyped: Annotated[tuple[Annotated[str, string(MAX_TEXT)], ...], Items(MAX_PATTERNS)] = ()


@dataclass(frozen=True, slots=True)
class Invite:
    """Control client to collector: asks for the keys of this job; answered by INVITED or ERROR."""

    KIND = "INVITE"
    job: str


@dataclass(frozen=True, slots=True)
class Invited:
    """Collector to control client: the keys for the job's ranks (CURVE, Z85). The link is encrypted."""

    KIND = "INVITED"
    job: str
    client_public: Key
    client_secret: Key


@dataclass(frozen=True, slots=True)
class Unknown:
    """A message of a kind that a newer minor version added: only its name is decoded, and it is ignored."""

    kind: str


Message: TypeAlias = (
    Hello
    | Welcome
    | Table
    | Batch
    | Tripped
    | LookedCloser
    | Noticed
    | Fingerprints
    | Fingerprinted
    | Off
    | Beat
    | Probe
    | Inspect
    | Inspected
    | Recount
    | Recounted
    | Abort
    | Stay
    | Ack
    | Bye
    | Error
    | Tune
    | Tuned
    | Invite
    | Invited
    | Unknown
)
Sequenced: TypeAlias = Batch | Tripped | LookedCloser | Noticed | Fingerprinted | Off | Bye
"""Messages with a sequence number: they stay in the rank's spool until they are acknowledged."""
