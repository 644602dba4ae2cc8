"""The journal of a run: every fact that its decisions rest on, in the order in which the facts came.

A fact is an input or a finding. Inputs come from outside: messages of ranks, changes of options, the end of the job, the
passing of time. They take the same way live and in a replay. Findings are what the run made of them. They change the run by
``Books.apply`` alone, when they are found and when they are replayed.

Each batch is recorded once. Beats are not recorded: where an election rests on them, ``Reached`` is. ``Run.replay`` makes a
run from its entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import BatchSummary, FrameTable, Position
from rankwatch.shared.words.divergence import Divergence, describe_divergence
from rankwatch.shared.words.text import describe_position, name_ranks

from ..calls.differs import UnequalCalls
from ..ending.judgement import Doubt
from ..replicas.desync import Compared, Desync
from ..replicas.desync_text import describe_compared
from .fact import Finding, OwnFact
from .report import End, Outcome, RankState, Stall

NO_RANK = -1
"""The rank of a fact about the whole run."""

MAX_ENTRIES = 4
"""Desynced parameters that a line names."""


@dataclass(frozen=True, slots=True)
class Opened(OwnFact):
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
    earlier: str = ""

    def describe(self, rank: int) -> str:
        model = f", model {self.model + 1}" if self.model else ""
        return f"job {self.job}, restart {self.restart}{model}, {self.world_size} ranks"


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

    def describe(self, rank: int) -> str:
        return f"what it said before its {'trip' if self.kind == messages.Tripped.__name__ else 'close-up'} is here"


@dataclass(frozen=True, slots=True)
class Left(Finding):
    """The collector counts this rank out: it ended without a BYE. ``memory``: what it had taken; ``leaked``: this grew all the
    time."""

    state: RankState
    memory: str = ""
    leaked: bool = False

    def describe(self, rank: int) -> str:
        return f"counted as {self.state.value}" + (f"; {self.memory}" if self.memory else "")


@dataclass(frozen=True, slots=True)
class Died(Finding):
    """The process of this rank ended without a BYE: ``how`` says in what way, as in ``killed by SIGKILL``."""

    how: str

    def describe(self, rank: int) -> str:
        return self.how


@dataclass(frozen=True, slots=True)
class Aside(Finding):
    """What a rank has done beside its training by now, as its heartbeat says: saved a file, opened a run of W&B."""

    lines: tuple[str, ...]

    def describe(self, rank: int) -> str:
        return "; ".join(self.lines)


@dataclass(frozen=True, slots=True)
class Reached(Finding):
    """The moments of the ranks when one of them tripped, or of one rank when it answered the election.

    ``reported`` is each rank's last batch whose whole forward it had reported. ``settled``, ``first_of_step``: see ``Witness``.
    """

    ranks: tuple[int, ...]
    moments: tuple[tuple[int, int, int, int], ...]
    reported: tuple[int, ...]
    settled: tuple[tuple[int, int, int, int] | None, ...] = ()
    first_of_step: tuple[tuple[int, int], ...] = ()
    of: tuple[int, ...] = ()
    """The key of the step that was left out, if the election is on one; see ``Skipped``."""

    def describe(self, rank: int) -> str:
        if rank != NO_RANK:
            ((_, batch, evaluation, frame),) = self.moments
            return f"answered: it was in {describe_position(Position(batch, evaluation, frame))}, frame {frame}"
        return f"where the {len(self.ranks)} ranks were when one of them tripped"


@dataclass(frozen=True, slots=True)
class Miscounted(Finding):
    """Ranks count batches and optimizer steps differently: ``text`` says which."""

    text: str

    def describe(self, rank: int) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Waited(OwnFact):
    """Time has passed, and the passing of time decided something."""

    def describe(self, rank: int) -> str:
        return "the decision window ended"


@dataclass(frozen=True, slots=True)
class Stood(Finding):
    """The stall there is from now on; None: the ranks went on. Its stacks are the messages ``Inspected``."""

    stall: Stall | None

    def describe(self, rank: int) -> str:
        return "no rank is stalled any more" if self.stall is None else self.stall.text


@dataclass(frozen=True, slots=True)
class WaitedFor(Finding):
    """The others wait for a rank in each batch, from this one on; an empty text: no longer."""

    batch: int
    text: str

    def describe(self, rank: int) -> str:
        return self.text or "no rank holds up the others any more"


@dataclass(frozen=True, slots=True)
class Doubted(Finding):
    """What speaks against the run from now on, by the numbers of its batches; empty: nothing."""

    reasons: tuple[Doubt, ...]

    def describe(self, rank: int) -> str:
        return "; ".join(one.text for one in self.reasons) or "nothing speaks against the run any more"


@dataclass(frozen=True, slots=True)
class Paced(Finding):
    """By their budget, ranks measure each K-th batch in full, from this one on. ``why``: why it is each one."""

    every: int
    first: int
    why: str = ""

    def describe(self, rank: int) -> str:
        return f"from batch {self.first} on, 1 of {self.every} is measured in full{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class LookedClosely(Finding):
    """All of these batches are measured in full, because of something odd. A later one with the same first batch replaces it."""

    first: int
    last: int
    why: str

    def describe(self, rank: int) -> str:
        return f"batches {self.first} to {self.last} are all measured in full: {self.why}"


@dataclass(frozen=True, slots=True)
class NoStack(Finding):
    """A rank of a stall was asked where it is, and did not say."""

    text: str

    def describe(self, rank: int) -> str:
        return f"gave no stack: {self.text}"


@dataclass(frozen=True, slots=True)
class JobInterrupted(OwnFact):
    """This signal is ending the job's command: ranks that fail or are lost from now on do so because of it."""

    signal: str

    def describe(self, rank: int) -> str:
        return f"the command received {self.signal}"


@dataclass(frozen=True, slots=True)
class JobEnded(OwnFact):
    """The command that the collector was started for has ended; exit code None: the collector is being ended.

    ``interrupted`` names the signal that ended the command.
    """

    exit_code: int | None
    interrupted: str = ""

    def describe(self, rank: int) -> str:
        how = "exit code unknown" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"the command ended: {how}" + (f", stopped by {self.interrupted}" if self.interrupted else "")


@dataclass(frozen=True, slots=True)
class Decided(Finding):
    """How the run ends, and whether its ranks are sent an abort. A later decision replaces an earlier one."""

    outcome: Outcome
    reason: str
    abort: bool
    end: End = End.UNKNOWN

    def describe(self, rank: int) -> str:
        return f"decided: {self.outcome.value}{', all ranks are to stop' if self.abort else ''}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Skipped(Finding):
    """A step was left out on all ranks, and the verdict on it is final: on the trips of its optimizer step, of those steps with
    this number the ``nth``.

    ``text`` says what was bad, and ``so_far`` which steps were left out by now. ``stops``: why this helps no more, so that the
    run ends; empty: it goes on. ``found``: the verdict is the end of a divergence.
    """

    step: int
    nth: int
    text: str
    so_far: str
    stops: str = ""
    found: Divergence | None = None

    def describe(self, rank: int) -> str:
        return f"{self.text}; {self.stops}" if self.stops else self.text


@dataclass(frozen=True, slots=True)
class Closed(Finding):
    """The run is over."""

    def describe(self, rank: int) -> str:
        return "the run is over"


@dataclass(frozen=True, slots=True)
class Diverged(Finding):
    """The verdict is the end of a divergence: the batches from which this follows are no facts of the journal."""

    found: Divergence

    def describe(self, rank: int) -> str:
        return f"diverged: {describe_divergence(self.found)}"


@dataclass(frozen=True, slots=True)
class Desynced(Finding):
    """Parameters that are not what they must be: fingerprints are no facts of the journal. A later entry of the same origin
    and parameter replaces an earlier one; ``unkept`` more found no room.
    """

    entries: tuple[Desync, ...]
    unkept: int

    def describe(self, rank: int) -> str:
        more = len(self.entries) - MAX_ENTRIES
        return "; ".join(
            f"desynced ({one.pattern.value}): {one.parameter} of {name_ranks(one.ranks)} since step {one.step}"
            for one in self.entries[:MAX_ENTRIES]
        ) + (f"; and {more} more parameters" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class ReplicasCompared(Finding):
    """What was compared so far."""

    compared: Compared

    def describe(self, rank: int) -> str:
        return f"replicas compared: {describe_compared(self.compared, self.compared.ranks)}"


@dataclass(frozen=True, slots=True)
class CollectivesDiffer(Finding):
    """Members of a process group do not call the same: what they called is no fact of the journal. Of one group, a later finding
    replaces an earlier one.
    """

    found: UnequalCalls

    def describe(self, rank: int) -> str:
        return self.found.text


Fact: TypeAlias = messages.Message | OwnFact | Trained


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
