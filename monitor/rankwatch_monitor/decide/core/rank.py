"""What a run knows of one of its ranks, and what it says of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rankwatch.shared.link.allowance import Allowance
from rankwatch.shared.types import messages
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import BEGINNING, NO_LOSS, NO_STAGE, Moment, Phase
from rankwatch.shared.types.spent import NOT_SPENT, Spent
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.words.text import describe_position, describe_rank, name_spans

from ..ending.memory import MemoryTaken, describe_memory
from ..keys.budget import WORDS_OVERHEAD, words
from ..trip.skipped import StepKey
from ..trip.verdict import Liveness, Verdict, Witness
from .report import RankRow, RankState

# An election asks all ranks, and the abort waits for it: with thousands of ranks, looking these names up takes milliseconds.
_RUNNING, _FINISHED = RankState.RUNNING, RankState.FINISHED
_LIVE, _OFF, _GONE, _DONE = Liveness.LIVE, Liveness.OFF, Liveness.GONE, Liveness.DONE

CLOSEUP_MARGIN = 2.0
"""Seconds by which a close-up may be later than its rank announced."""


TURN_MARGIN = 5.0
"""Seconds for which a report waits for the batches before a trip that went ahead of them."""


@dataclass(slots=True)
class Rank:
    """A rank that has connected.

    ``full_batch`` is the last batch of which the rank reported more than the root. ``forward_frames`` counts the frames of
    its forward up to the root's, ``frames`` those of its forward and backward so far, ``frames_before`` those of the full
    batch before. ``loss`` is its last loss, of batch ``loss_batch``.
    """

    hello: messages.Hello
    peer: bytes
    heard_at: float
    moved_at: float = 0.0
    state: RankState = RankState.RUNNING
    connected: bool = True
    gone_at: float = 0.0
    """When its last connection ended."""
    cut_off: bool = False
    """Whether it was silent before its connection ended."""
    quiet: str = ""
    """In what way it is silent; empty while it is heard."""
    progress: Moment = BEGINNING
    phase: str = "idle"
    settled: Moment | None = None
    """The moment before which no backward trips either; None: its agent has not told it."""
    first_of_step: tuple[int, int] = (-1, -1)
    """An optimizer step, and the first batch since the one before."""
    seq: int = 0
    """The sequence number of its last message that was taken."""
    missed: int = 0
    """How many messages before that never came, since the last part of a batch that came."""
    recorded: int = 0
    """The sequence number of its last message that is to be in the record: fingerprints are not."""
    stored: int = 0
    """The sequence number up to which its messages are in the record: its spool can drop them."""
    awaits_receipt: bool = False
    """Whether it is acknowledged at once when all its messages are in the record."""
    untold: int = 0
    """What its batches and fingerprints take of its window that were handled since it was acknowledged."""
    ahead: set[type[messages.Sequenced]] = field(default_factory=set)
    """The kinds of message that went ahead of its batches, and have yet to come in their turn."""
    last_batch: int = -1
    reported_batch: int = -1
    """The last batch whose whole forward it has reported: all of it was finite."""
    full_batch: int = -1
    forward_frames: int = 0
    frames: int = 0
    frames_before: int = 0
    loss_batch: int = -1
    loss: float = NO_LOSS
    queued: int = 0
    dropped: int = 0
    departed: bool = False
    """Whether it has destroyed its process group, by its last beat."""
    spent: Spent = NOT_SPENT
    """Where the time of its batches goes, by its last beat."""
    aside: tuple[str, ...] = ()
    """What it has done beside its training by now."""
    memory: MemoryTaken = field(default_factory=MemoryTaken)
    """Of its host that it took,"""
    device_memory: MemoryTaken = field(default_factory=MemoryTaken)
    """and of its device."""
    last_memory: str = ""
    """What it took before it was lost."""
    leaked: bool = False
    """Whether this had grown all the time."""
    trip: Trip | None = None
    """The one that ends the run. Those of steps that were left out are with these."""
    skipped: StepKey | None = None
    """The step that it left out last: a close-up that comes is of it. None: it is of ``trip``."""
    closeup: CloseUp | None = None
    closeup_due: float = float("-inf")
    """Until when the close-up that its trip announced is waited for."""
    turn_due: float = float("-inf")
    """Until when a report waits for the batches before its trip, which went ahead of them."""
    acknowledged_at: float | None = None
    left: int = 0
    """Numbers the ends of the ranks, from 1 on; 0: it has not ended."""
    fault: str = ""
    """The error that switched its watch off, while its process lives."""
    farewell: str = ""
    farewell_at: str = ""
    is_unused: bool = False
    """Whether its model was never trained, while another one of its process was."""
    death: str = ""
    """How its process ended, if it said no farewell and that is known."""
    rival: str = ""
    words: Allowance = field(default_factory=words)
    is_over_budget: bool = False
    """Whether a message of it was over its budget: until its next HELLO, none is taken that would be stored after that one."""

    @property
    def number(self) -> int:
        return self.hello.rank

    @property
    def is_running(self) -> bool:
        return self.state is RankState.RUNNING

    @property
    def name(self) -> str:
        hello = self.hello
        return describe_rank(hello.rank, hello.world_size, hello.host, hello.local_rank, hello.stage)

    @property
    def last_seen(self) -> str:
        position = self.progress.position
        return f"last seen in {describe_position(position)}, frame {position.frame}, phase {self.phase}"

    @property
    def end(self) -> str:
        """Where it was seen last, and what memory it took if that had grown all the time."""
        return "; ".join(filter(None, (self.last_seen, self.leak)))

    @property
    def leak(self) -> str:
        """What memory it takes, if that has grown all the time; else empty."""
        return describe_memory(self.memory, self.device_memory) if self.memory.leaks or self.device_memory.leaks else ""

    @property
    def furthest_batch(self) -> int:
        """The last batch that it has begun, as far as that is known."""
        return max(self.last_batch, self.progress.position.batch, -1 if self.trip is None else self.trip.position.batch)

    def is_gone_since(self, when: float, lost_after: float) -> bool:
        """Whether it had gone then, without having done its work, and has not come back."""
        if self.state in (RankState.FINISHED, RankState.ENDED):
            return False
        had_gone = not self.connected and not self.cut_off and self.gone_at < when
        return had_gone or self.heard_at + lost_after < when

    def hear(self, now: float) -> None:
        self.heard_at, self.connected, self.quiet, self.cut_off = now, True, "", False

    def may_say(self, size: int, words: Allowance, now: float) -> bool:
        """Whether a message of this size may be noted down. ``words``: what is left for its key. It is spent."""
        size += WORDS_OVERHEAD
        return words.has(now, size) and self.words.take(now, size) and words.take(now, size)

    def is_news(self, seq: int, *, is_recorded: bool) -> bool:
        """Whether the message of this number is new. A rank that reconnects sends some messages again."""
        if seq <= self.seq:
            return False
        self.missed += seq - self.seq - 1
        if is_recorded:
            self.recorded = seq
        elif self.stored == self.seq:
            self.stored = seq
        self.seq = seq
        return True

    def receipt(self) -> messages.Ack:
        """What is stored and handled by now. The rank is told it."""
        self.untold = 0
        return messages.Ack(self.stored, abort=False, handled=self.seq)

    def take(self, batch: int, step: int, first_frame: int, frames: int, loss: float = NO_LOSS) -> None:
        """Takes a part of a batch of this optimizer step: the frames of its forward, or those recorded in its backward."""
        end = first_frame + frames
        if batch > self.last_batch:
            self.last_batch = batch
        if batch > self.reported_batch:
            self.reported_batch = batch
        if loss != NO_LOSS and batch >= self.loss_batch:
            self.loss_batch, self.loss = batch, loss
        if first_frame == 0 and frames > 1 + (loss != NO_LOSS):
            self.full_batch, self.frames_before, self.frames = batch, self.frames, 0
            self.forward_frames = end - (loss != NO_LOSS)
        if batch == self.full_batch and end > self.frames:
            self.frames = end
        if self.hello.stage != NO_STAGE:
            step = 0
        elif step > self.first_of_step[0]:
            self.first_of_step = step, batch
        if (step, batch, 0, end) > self.progress:
            self.advance(Moment(step, batch, 0, end), "backward")

    def advance(self, moment: Moment, phase: str) -> None:
        """The rank was at this moment. It never goes back: a beat may be older than a batch that overtook it."""
        if moment >= self.progress:
            if (moment, phase) != (self.progress, self.phase):
                self.moved_at = self.heard_at
            self.progress, self.phase = moment, phase

    def tell(self, moment: Moment, phase: str) -> None:
        """It says where it is. Once its watch is off, its optimizer's steps go on and say nothing of its numbers."""
        if not self.fault:
            self.advance(moment, phase)

    def settle(self, settled: tuple[int, int, int, int] | None, step: int, first: int) -> None:
        """No backward trips before this moment; ``first`` is the first batch of this step."""
        if settled is not None and (self.settled is None or settled > self.settled):
            self.settled = Moment(*settled)
        if step >= self.first_of_step[0]:
            self.first_of_step = step, first

    def take_trip(self, trip: Trip, now: float) -> None:
        self.trip = trip
        if messages.Tripped in self.ahead:
            self.turn_due = now + TURN_MARGIN
        else:
            self.last_batch = max(self.last_batch, trip.position.batch)
        if trip.has_closeup:
            self.closeup_due = now + trip.closeup_within + CLOSEUP_MARGIN

    def take_over(self, trip: Trip, closeup: CloseUp | None, due: float) -> None:
        """Its trip of a step that was left out takes part in how the run ends."""
        if self.trip is None:
            self.trip, self.closeup, self.closeup_due = trip, closeup, due

    def lets_ahead(self, kind: type[messages.Sequenced]) -> bool:
        """Whether a message of this kind may go ahead: what is known already came again, and a close-up needs its trip."""
        if kind is messages.Tripped:
            return self.trip is None
        return kind is messages.LookedCloser and self.trip is not None and self.closeup is None

    def owes_turn(self, now: float) -> bool:
        """Whether the batches before its trip, which went ahead of them, may still come."""
        return self.is_running and messages.Tripped in self.ahead and now < self.turn_due

    def take_turn(self, kind: type[messages.Sequenced]) -> None:
        """All that it said before a message that went ahead is here by now."""
        self.ahead.discard(kind)
        if kind is messages.Tripped:
            self.skipped = None
        self.awaits_receipt = True
        if self.trip is not None:
            self.last_batch = max(self.last_batch, self.trip.position.batch)

    def take_closeup(self, closeup: CloseUp) -> None:
        if self.trip is not None and self.closeup is None:
            self.closeup = closeup

    def owes_closeup(self, now: float) -> bool:
        """Whether the close-up that its trip announced may still come."""
        return self.is_running and self.closeup is None and now < self.closeup_due

    def frames_around(self, trip: Trip) -> int | None:
        """How many frames a batch like the one of ``trip`` has, as this rank counted them; None: unknown.

        In a forward those up to the root's frame, the last one; in a backward those of the whole batch.
        """
        spec, position = trip.frame.spec, trip.position
        if spec.phase is Phase.FORWARD:
            frames = self.forward_frames if spec.module else position.frame + 1
        else:
            reports_root_alone = self.full_batch < position.batch == self.last_batch
            frames = 0 if reports_root_alone else max(self.frames, self.frames_before)
        return frames if frames > position.frame else None

    def witness(self, trip: Trip | None) -> Witness:
        """As an election sees it, of which this is its trip."""
        liveness = _LIVE if self.state is _RUNNING else _DONE if self.state is _FINISHED else _GONE
        liveness = _OFF if self.fault else liveness
        counted = self.settled, self.first_of_step
        return Witness(liveness, self.progress, trip, self.hello.stage, self.reported_batch, self.fault, *counted)

    def row(self) -> RankRow:
        """The rank in a report."""
        after_work = ", when its work was done" if self.death and self.state is RankState.ENDED else ""
        return RankRow(
            rank=self.hello.rank,
            local_rank=self.hello.local_rank,
            host=self.hello.host,
            pid=self.hello.pid,
            last_batch=self.furthest_batch,
            state=self.state,
            acknowledged=self.acknowledged_at is not None,
            dropped=self.dropped,
            farewell=self.farewell or self.fault or ("" if self.is_running else self.death + after_work),
            rival=self.rival,
            stage=self.hello.stage,
            loss_batch=self.loss_batch,
            loss=self.loss,
            left=self.left,
            gpu=self.hello.gpu,
            torch=self.hello.torch,
            farewell_at=self.farewell_at,
            memory=self.last_memory,
            leaked=self.leaked,
        )


def count_frames(verdict: Verdict | None, ranks: Mapping[int, Rank]) -> int | None:
    """The frames of the culprit's batch, as the culprit counted them in a batch before, or else a rank of its stage."""
    if verdict is None:
        return None
    culprit = ranks[verdict.tripped]
    peers = (rank for rank in ranks.values() if rank.hello.stage == culprit.hello.stage)
    counts = (rank.frames_around(verdict.trip) for rank in (culprit, *peers))
    return next((frames for frames in counts if frames), None)


def describe_several(ranks: Sequence[Rank]) -> str:
    """``rank 3 of 8 (node1, local rank 1) is`` or ``ranks 8-15 of 32 (node1) are``: the beginning of a sentence."""
    if len(ranks) == 1:
        return f"{ranks[0].name} is"
    hosts = list(dict.fromkeys(rank.hello.host for rank in ranks))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")
    numbers = name_spans([rank.number for rank in ranks])
    return f"{numbers} of {ranks[0].hello.world_size} ({shown}) are"


def first_to_die(rank: Rank) -> tuple[bool, float]:
    """Sort key of ranks that are dead: in the order in which their connections ended."""
    return rank.connected, rank.gone_at


def describe_first_lost(ranks: Collection[Rank]) -> str:
    """The lost rank whose connection ended first: it took the others along, or torchrun did. Empty when none is lost."""
    lost = [rank for rank in ranks if rank.state is RankState.LOST]
    if not lost:
        return ""
    first = min(lost, key=first_to_die)
    how = f"was lost: {first.death}" if first.death else "ended without a word"
    return f"{first.name} {how}; {first.end}"
