"""One run, from its first HELLO to its last rank's end: a state machine without input or output, the clock passed in.

Rules: a rank is lost when its connection has ended and it is silent for ``lost_after`` seconds. A trip starts the election;
a rank that fails or is lost ends the run as well; one that makes no progress is told of, and may end it. Whichever is
decided first is the run's cause, and an abort that was decided stands: it is sent to every rank and repeated until the rank
acknowledges it or is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rankwatch.shared import messages
from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.frame import FrameTable, Position
from rankwatch.shared.notice import describe_notice
from rankwatch.shared.text import describe_culprit, name_spans
from rankwatch.shared.tuning import NO_CHANGE, Tuning

from .effects import Effect, Note, Publish, RecordTrace, Send, SendAll, Show
from .election import Election
from .journal import (
    NO_RANK,
    Closed,
    Decided,
    Entry,
    Fact,
    JobEnded,
    JobInterrupted,
    Left,
    Opened,
    Progress,
    Reached,
    Trained,
    Waited,
)
from .notices import Notices
from .options import Options
from .rank import Rank
from .report import Outcome, RankRow, RankState, Report, RunStanding
from .silence import CUT_OFF, Silence
from .stall import Stall, find_stall
from .verdict import LogicalTime, Verdict, logical_time_of

NOBODY = b""
"""The peer of a rank that has yet to connect to this collector."""

JUST_BEFORE = 2.0
"""Seconds: a signal that ends a whole job reaches its ranks and the collector in no order, but at one moment."""

MAX_BEATS = 2048
"""Heartbeats a second of one run."""

MAX_ABORTS = 8192
"""Aborts a second of one run: of very many ranks, one that has yet to acknowledge may only be waiting for its turn."""

MAX_ANSWERS = 4096
"""Ranks of one run, each second, that answer an election or an abort: of very many, the last are longer in coming."""

MAX_TABLES = 256
"""Frame tables kept per run; the oldest goes first, and a rank that needs it again is asked to send it again."""


@dataclass(slots=True)
class Run:
    """See the module. ``over`` once no rank can say anything any more."""

    id: str
    job: str
    restart: int
    world_size: int
    options: Options
    ranks: dict[int, Rank] = field(default_factory=dict)
    over: bool = False
    verdict: Verdict | None = None
    journal: list[Entry] = field(default_factory=list)
    """What is to be put on record, since it was last taken away to be."""
    tuning: Tuning = field(init=False)
    """All that was changed in the ranks' options."""
    _notices: Notices = field(default_factory=Notices)
    _tables: BoundedDict[str, FrameTable] = field(default_factory=lambda: BoundedDict(MAX_TABLES))
    _abort: messages.Abort | None = None
    _abort_at: float = 0.0
    _abort_sent_at: float = 0.0
    _election: Election = field(init=False)
    _silence: Silence = field(init=False)
    _outcome: Outcome | None = None
    _reason: str = ""
    _decided_at: float = float("-inf")
    _limit: str = ""
    """That, and why, a rank stopped after the batch it was told to."""
    _waived: tuple[Outcome, str] | None = None
    """The first failure or loss that did not stop the others."""
    _interrupted: str = ""
    """The signal by which somebody is ending the job."""
    _published: bool = False
    _all_ended_at: float | None = None
    _looked_at: float = float("-inf")
    _shown_at: float = float("-inf")
    _stall: Stall | None = None
    _waiting: str = ""
    """``waiting`` as it was when somebody last looked."""
    _trips: int = 0
    # Kept message by message, so that a message costs the same at 16 ranks and at 16,384.
    _running: set[int] = field(default_factory=set)
    _unacknowledged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tuning = Tuning(every=self.options.every)
        self._election = Election(self.world_size, self.decision_window)
        self._silence = Silence(self.lost_after, self.options.cut_off_after, self.options.return_window)
        self._note_down(0.0, Opened(self.job, self.restart, self.world_size))

    @property
    def heartbeat(self) -> float:
        """Seconds: as in the options, or longer in a world of more ranks than one collector should hear each second."""
        return max(self.options.heartbeat, self.world_size / MAX_BEATS)

    @property
    def lost_after(self) -> float:
        return 3 * self.heartbeat

    @property
    def decision_window(self) -> float:
        return max(self.options.decision_window, self.world_size / MAX_ANSWERS)

    @property
    def _acknowledge_window(self) -> float:
        return max(self.options.acknowledge_window, self.world_size / MAX_ANSWERS)

    @property
    def _abort_repeat(self) -> float:
        return max(self.options.abort_repeat, self.world_size / MAX_ABORTS)

    @property
    def waiting(self) -> str:
        """Which ranks the election waits for; empty when it waits for none."""
        return self._election.waiting if self._outcome is None else ""

    # --- what comes in ------------------------------------------------------------------------------------------------

    def welcome(self, hello: messages.Hello, peer: bytes, now: float) -> Iterator[Effect]:
        """A rank says HELLO, for the first time or again after its connection broke."""
        record = self.ranks.get(hello.rank)
        if record is None:
            self._note_down(now, hello, hello.rank)
            record = self.ranks[hello.rank] = Rank(hello, peer, now, now)
        elif record.state is RankState.LOST:
            self._note_down(now, hello, hello.rank)
            record.state = RankState.RUNNING
            yield Note(f"run {self.id}: {record.name} is back")
            if self.over and self._abort is None and not self._election.has_begun:
                self.over = self._published = False  # it was the network, and the ranks never noticed
                self._outcome, self._reason, self._waived = None, "", None
        record.peer = peer
        record.hear(now)
        if record.is_running:
            self._running.add(hello.rank)
            if record.acknowledged_at is None:
                self._unacknowledged.add(hello.rank)
        if self.tuning != NO_CHANGE:
            yield Send(peer, messages.Tune(self.id, self.tuning))  # before WELCOME: it holds before the rank's first batch
        yield Send(peer, messages.Welcome(self.id, self.heartbeat, self.decision_window, record.stored))
        if self._abort is not None:
            yield Send(peer, self._abort)
        elif self._election.target is not None:
            yield Send(peer, messages.Probe(self._election.target.position))

    def receive(self, rank: int, message: messages.Message, now: float) -> Iterable[Effect]:
        record = self.ranks[rank]
        record.hear(now)
        self._silence.heard_at = now
        if isinstance(message, messages.Batch):
            return self._take_batch(record, message, now)
        if isinstance(message, messages.Ack):
            return self._take_ack(record, message, now)
        return self._take(record, message, now)

    def stored(self, seqs: Mapping[int, int]) -> Iterator[Effect]:
        """What these ranks sent is on record, up to these numbers: they need not keep it any longer."""
        for rank, seq in seqs.items():
            record = self.ranks[rank]
            record.stored = max(record.stored, seq)
            if record.awaits_receipt and record.stored >= record.seq:
                record.awaits_receipt = False
                yield Send(record.peer, messages.Ack(record.stored, abort=False))

    def disconnected(self, rank: int, peer: bytes, now: float) -> None:
        """A connection of the rank has ended. It may have another, or come back, so this alone decides nothing."""
        record = self.ranks[rank]
        if record.peer == peer:
            # A process that dies is silent from then on; where the network is cut, silence comes first.
            record.connected, record.gone_at, record.cut_off = False, now, bool(record.quiet)

    def tune(self, tuning: Tuning, now: float) -> SendAll:
        """Somebody changes options of the ranks: those that are connected are told now, the others when they come (back)."""
        self._note_down(now, messages.Tune(self.id, tuning))
        self.tuning = self.tuning.then(tuning)
        listening = [record.peer for record in self.ranks.values() if record.is_running and record.connected]
        return SendAll(listening, messages.Tune(self.id, self.tuning))

    def job_told(self, event: JobInterrupted | JobEnded, now: float) -> Iterator[Effect]:
        """What becomes of the job's command is known."""
        if isinstance(event, JobInterrupted):
            self._note_down(now, event)
            self._interrupted = event.signal
            by_a_rank = self._outcome in (Outcome.FAILED, Outcome.LOST)
            if by_a_rank and not self.over and now - self._decided_at <= JUST_BEFORE:
                self._end_as(Outcome.ABORTED, f"stopped by {event.signal}; just before, {self._reason}", now)
        else:
            yield from self.job_ended(event, now)

    def job_ended(self, end: JobEnded, now: float) -> Iterator[Effect]:
        """The processes of the job are known to have ended (exit code None: not known how)."""
        self._note_down(now, end)
        if end.interrupted and self._is_open:
            self._end_as(Outcome.ABORTED, f"stopped by {end.interrupted}", now)
            for rank in list(self._running):
                self._leave(self.ranks[rank], RankState.ABORTED)
        if end.exit_code is None and self._running and self._is_open:
            self._end_as(Outcome.LOST, "the collector was ended while the run went on", now)
        elif end.exit_code is not None:
            vanished = [self.ranks[rank] for rank in self._running]
            for record in vanished:
                self._lose(record, now)
            is_unexplained = not vanished and any(r.state is RankState.ENDED for r in self.ranks.values())
            if end.exit_code and is_unexplained and self._is_open:
                self._end_as(Outcome.FAILED, f"the command ended with exit code {end.exit_code}", now)
        yield from self._decide(now, ended=True)

    def tick(self, now: float) -> Iterator[Effect]:
        """Time has passed."""
        if now - self._looked_at >= self.heartbeat / 4:
            self._looked_at = now
            yield from self._look_for_lost(now)
            yield from self._look_for_stall(now)
            yield from self._look_for_waiting(now)
        if now - self._shown_at >= self.heartbeat:
            yield self._show(now)
        if self._abort is not None and now - self._abort_sent_at >= self._abort_repeat:
            yield from self._send_abort(now)
        yield from self._decide(now)

    # --- what comes from the record ------------------------------------------------------------------------------------

    def replay(self, entry: Entry) -> None:
        """Takes in a fact that is on record already; what was decided upon it is on record as well."""
        now, rank, fact = entry
        effects: Iterable[Effect] = ()
        if isinstance(fact, messages.Hello):
            effects = self.welcome(fact, NOBODY, now)
        elif isinstance(fact, messages.Tune):
            self.tune(fact.tuning, now)
        elif isinstance(fact, Left):
            self._leave(self.ranks[rank], fact.state)
        elif isinstance(fact, (JobInterrupted, JobEnded)):
            effects = self.job_told(fact, now)
        elif isinstance(fact, Reached):
            self._take_positions(fact)
        elif isinstance(fact, Waited):
            effects = self._decide(now)
        elif isinstance(fact, Decided):
            self._outcome, self._reason, self._decided_at = fact.outcome, fact.reason, now
            if fact.abort and self._abort is None:
                self._abort, self._abort_at = messages.Abort(fact.reason, -1, 0.0, self.options.abort_grace), now
        elif isinstance(fact, Closed):
            self.over = self._published = True
        elif not isinstance(fact, (Opened, Trained)):
            effects = self.receive(rank, fact, now)
        deque(effects, maxlen=0)
        self.journal.clear()

    def resume(self, progress: Iterable[Progress], now: float) -> None:
        """After a replay: the ranks have yet to find this collector, as after a time in which it was cut off from them all.

        Args:
            progress: the last parts of batches of each rank, in the order in which they came.
        """
        for rank, seq, *part in progress:
            self.ranks[rank].seq = max(self.ranks[rank].seq, seq)
            self.ranks[rank].take(*part)
        self._silence.deaf_at = now
        for rank, record in self.ranks.items():
            record.stored = record.seq
            record.connected, record.quiet, record.cut_off = False, CUT_OFF, True
            record.heard_at = record.moved_at = record.gone_at = now
            if record.is_running and record.acknowledged_at is None:
                self._unacknowledged.add(rank)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self, now: float, *, ended: bool = False) -> Iterator[Effect]:
        if self.over:
            return
        if self._election.has_begun and self._outcome is None:
            yield from self._elect(now, ended=ended)
        if self._outcome is not None and not self._published and (ended or self._is_settled(now)):
            self._published = True
            yield Publish(self.report(), news=True)
        if ended or self._has_ended(now):
            self.over = True
            if self._outcome is None:
                self._end_as(*self._quiet_end(), now)
            self._note_down(now, Closed())
            yield self._show(now)
            yield Publish(self.report(), news=not self._published)

    def _take(self, record: Rank, message: messages.Message, now: float) -> Iterator[Effect]:
        if isinstance(message, messages.Beat):
            record.queued, record.dropped = message.queued, message.dropped
            record.advance(message.position, message.phase)
            if not self._note_answer(record):  # else it was asked a moment ago, and is soon to hear how the election ends
                yield Send(record.peer, messages.Ack(record.stored, abort=False))
        elif isinstance(message, messages.Table):
            self._keep_table(message.table)
        elif isinstance(message, messages.Sequenced):
            if record.is_news(message.seq):
                yield from self._take_sequenced(record, message, now)
        else:
            yield Send(record.peer, messages.Error(f"a rank does not send {type(message).__name__}", "none"))
            return
        self._note_answer(record)
        yield from self._decide(now)

    def _take_ack(self, record: Rank, ack: messages.Ack, now: float) -> Iterable[Effect]:
        """Of thousands that come at a time the last alone may settle something."""
        if ack.abort and record.acknowledged_at is None:
            self._note_down(now, ack, record.hello.rank)
            record.acknowledged_at = now
            self._unacknowledged.discard(record.hello.rank)
        return () if self._unacknowledged else self._decide(now)

    def _take_sequenced(self, record: Rank, message: messages.Sequenced, now: float) -> Iterator[Effect]:
        if isinstance(message, messages.Tripped) and self._is_earliest(logical_time_of(message.trip, record.hello.stage)):
            self._note_down(now, _positions_of(self.ranks.values()))
        self._note_down(now, message, record.hello.rank)
        if isinstance(message, messages.Noticed):
            if self._notices.take(record.hello.rank, message.notice):
                yield Note(f"run {self.id}: {record.name}: {describe_notice(message.notice)}")
            return
        record.awaits_receipt = True
        if isinstance(message, messages.Bye):
            yield from self._take_leave(record, message, now)
        elif isinstance(message, messages.Tripped) and record.trip is None:
            record.trip = message.trip
            self._trips += 1
            record.last_batch = max(record.last_batch, message.trip.position.batch)
            yield Note(f"run {self.id}: {describe_culprit(record.name, message.trip)}")
            place = logical_time_of(message.trip, record.hello.stage)
            if self._is_earliest(place):
                # Those that may trip earlier still are to tell when they are past it.
                asked = self._election.aim(place, self.ranks, now)
                yield SendAll([other.peer for other in asked], messages.Probe(place.position))

    def _take_batch(self, record: Rank, message: messages.Batch, now: float) -> Iterable[Effect]:
        """Of all messages the most frequent by far, which mostly has no effect: so nothing is made to tell one."""
        summary = message.summary
        table = self._tables.get(summary.table_id)
        if table is None:
            # Not taken in: after the new HELLO it comes again, and its table before it.
            text = f"the frame table of batch {summary.batch} is not known here"
            return (Send(record.peer, messages.Error(text, "hello")),)
        effects: list[Effect] = []
        if record.is_news(message.seq):
            if next(reversed(self._tables)) != table.id:  # the one that was used longest ago goes first
                self._tables[table.id] = self._tables.pop(table.id)
            if summary.fits(table):
                self.journal.append(Entry(now, record.hello.rank, Trained(message.seq, summary, table)))
                record.take(summary.batch, summary.first_frame, len(table.specs))
                if summary.traced:
                    frames = tuple(summary.frames(table))
                    effects.append(RecordTrace(self.id, record.hello.rank, summary.batch, frames))
            else:
                effects.append(
                    Send(record.peer, messages.Error(f"batch {summary.batch} does not fit its frame table", "none"))
                )
        if not self._is_open:
            self._note_answer(record)
            effects += self._decide(now)
        return effects

    def _take_leave(self, record: Rank, bye: messages.Bye, now: float) -> Iterator[Effect]:
        record.farewell = bye.text
        if bye.outcome in ("finished", "ended"):
            self._leave(record, RankState(bye.outcome))
        elif bye.outcome == "failed":
            self._leave(record, RankState.FAILED)
            yield from self._stop_for(f"{record.name} failed: {bye.text}", Outcome.FAILED, now)
        else:
            self._leave(record, RankState.ABORTED)
            if bye.outcome == "limit":
                self._limit = bye.text

    def _look_for_lost(self, now: float) -> Iterator[Effect]:
        found = self._silence.look([self.ranks[rank] for rank in self._running], now)
        for text in found.notes:
            yield Note(f"run {self.id}: {text}")
        for record in found.dead:
            self._lose(record, now)
        lost = [record for record in found.dead if record.state is RankState.LOST]
        if lost:
            first, *others = lost
            text = f"{first.name} was lost: nothing heard for {self.lost_after:g} s; {first.last_seen}"
            text += f"; after it {name_spans([record.hello.rank for record in others])}" if others else ""
            yield Note(f"run {self.id}: {text}")
            yield from self._stop_for(text, Outcome.LOST, now)

    def _look_for_stall(self, now: float) -> Iterator[Effect]:
        if not self.options.stall_after or not self._is_open:
            return
        running = [self.ranks[rank] for rank in self._running]
        stall = find_stall(running, now, self.options.stall_after)
        before, self._stall = self._stall, stall
        if stall is None:
            if before is not None and all(self.ranks[rank].is_running for rank in before.ranks):
                yield Note(f"run {self.id}: {name_spans(before.ranks)} went on")
        elif before is None or before.ranks != stall.ranks:
            yield Note(f"run {self.id}: {stall.text}")
            if self.options.abort_on_stall:
                yield from self._abort_for(stall.text, Outcome.STALLED, now)

    def _look_for_waiting(self, now: float) -> Iterator[Effect]:
        before, self._waiting = self._waiting, self.waiting
        if self._waiting != before:
            yield self._show(now)
            if self._waiting:
                yield Note(f"run {self.id}: {self._waiting}")

    def _lose(self, record: Rank, now: float) -> None:
        state = RankState.LOST if record.acknowledged_at is None else RankState.ABORTED
        self._note_down(now, Left(state), record.hello.rank)
        self._leave(record, state)
        # A rank that did not live to acknowledge the abort died before another failed: it is the cause, not the other.
        if record.state is RankState.LOST and self._outcome is Outcome.FAILED:
            self._end_as(Outcome.LOST, f"{record.name} was lost; {record.last_seen}; then {self._reason}", now)

    def _leave(self, record: Rank, state: RankState) -> None:
        record.state = state
        self._running.discard(record.hello.rank)
        self._unacknowledged.discard(record.hello.rank)
        self._note_answer(record)

    def _stop_for(self, reason: str, outcome: Outcome, now: float) -> Iterator[Effect]:
        """A rank failed or was lost: the others must not wait for it in a collective."""
        if not self._is_open or self._interrupted:
            return
        if not self.options.abort_on_lost:
            self._waived = self._waived or (outcome, reason)
            return
        yield from self._abort_for(reason, outcome, now)

    def _abort_for(self, reason: str, outcome: Outcome, now: float) -> Iterator[Effect]:
        self._end_as(outcome, reason, now, abort=True)
        self._abort, self._abort_at = messages.Abort(reason, -1, 0.0, self.options.abort_grace), now
        yield from self._send_abort(now)

    @property
    def _is_open(self) -> bool:
        """Whether it can still be decided how the run ends; a trip is to be decided by the election alone."""
        return self._outcome is None and not self._election.has_begun

    def _is_earliest(self, place: LogicalTime) -> bool:
        return self._outcome is None and self._election.is_lowered_by(place)

    def _take_positions(self, reached: Reached) -> None:
        for rank, position, batch in zip(reached.ranks, reached.positions, reached.reported, strict=True):
            record = self.ranks[rank]
            record.advance(Position(*position), record.phase)
            record.reported_batch = max(record.reported_batch, batch)
            self._note_answer(record)

    def _note_answer(self, record: Rank) -> bool:
        """Whether the election waits for this rank no longer."""
        is_answer = self._election.takes_answer(record)
        if is_answer:
            self._note_down(record.heard_at, _positions_of([record]), record.hello.rank)
        return is_answer

    def _elect(self, now: float, *, ended: bool) -> Iterator[Effect]:
        if not self._election.is_due(now) and not ended:
            return
        self.verdict, reason = self._election.hold(self.ranks, now, final=ended)
        if self.verdict is None:
            return
        if not ended:
            self._note_down(now, Waited())
        culprit = self.ranks[self.verdict.rank]
        text = f"{describe_culprit(culprit.name, self.verdict.trip)} ({self.verdict.cause.value}: {self.verdict.evidence})"
        self._end_as(Outcome.ABORTED, text, now, abort=True)
        yield Note(f"run {self.id}: first overflow: {text}; {reason}")
        self._abort_at = now
        self._abort = messages.Abort(text, self.verdict.rank, self.verdict.trip.time, self.options.abort_grace)
        yield from self._send_abort(now)

    def _send_abort(self, now: float) -> Iterator[Effect]:
        assert self._abort is not None
        self._abort_sent_at = now
        culprit = self._abort.rank
        first = [culprit] if culprit in self._unacknowledged else []  # it stands and waits for it
        ranks = [*first, *(rank for rank in self._unacknowledged if rank != culprit)]
        yield SendAll([self.ranks[rank].peer for rank in ranks], self._abort)

    def _quiet_end(self) -> tuple[Outcome, str]:
        """How a run ends in which nothing was decided."""
        if self._limit:
            return Outcome.ABORTED, self._limit
        lost = [record for record in self.ranks.values() if record.state is RankState.LOST]
        if self._waived is not None and (lost or self._waived[0] is Outcome.FAILED):
            return self._waived
        if lost:
            # The first to die took the others along, or torchrun did.
            first = min(lost, key=lambda record: (record.connected, record.gone_at))
            return Outcome.LOST, f"{first.name} ended without a word; {first.last_seen}"
        return Outcome.FINISHED, ""

    def _end_as(self, outcome: Outcome, reason: str, now: float, *, abort: bool = False) -> None:
        self._note_down(now, Decided(outcome, reason, abort))
        self._outcome, self._reason, self._decided_at = outcome, reason, now

    def _is_settled(self, now: float) -> bool:
        """Whether the report can be printed: everyone acknowledged the abort or is gone, or has had the time to."""
        if self._abort is None:
            return self._has_ended(now)
        return not self._unacknowledged or now - self._abort_at > self._acknowledge_window

    def _has_ended(self, now: float) -> bool:
        if self._running or self.options.job_end_is_told:
            self._all_ended_at = None
            return False
        if self._all_ended_at is None:
            self._all_ended_at = now
        # Ranks that never connected may be on their way still.
        return len(self.ranks) == self.world_size or now - self._all_ended_at > self.lost_after

    def _keep_table(self, table: FrameTable) -> None:
        self._tables[table.id] = table

    def _note_down(self, now: float, fact: Fact, rank: int = NO_RANK) -> None:
        self.journal.append(Entry(now, rank, fact))

    # --- what is told of it -------------------------------------------------------------------------------------------

    def report(self) -> Report:
        acknowledged = [r.acknowledged_at for r in self.ranks.values() if r.acknowledged_at is not None]
        return Report(
            run=self.id,
            job=self.job,
            restart=self.restart,
            world_size=self.world_size,
            outcome=self._outcome or Outcome.FINISHED,
            reason=self._reason,
            verdict=self.verdict,
            frames_in_batch=self._frames_in_batch(),
            acknowledged_in=max(acknowledged) - self._abort_at if acknowledged else None,
            ranks=tuple(self._row(rank) for rank in range(self.world_size)),
            notices=self._notices.all(),
            notices_unkept=self._notices.unkept,
            stalled=self._stall.text if self._stall is not None else "",
        )

    def _show(self, now: float) -> Show:
        self._shown_at = now
        stalled = len(self._stall.ranks) if self._stall is not None else 0
        standing = RunStanding(
            self.job, self.restart, self.world_size, self._trips, stalled, self._outcome, self.over, self.heartbeat, self.waiting
        )  # fmt: skip
        return Show(self.id, tuple([self.ranks[rank].standing(now) for rank in sorted(self.ranks)]), standing)

    def _frames_in_batch(self) -> int | None:
        """The frames of the culprit's batch, as its rank counted them in a batch before, or else another rank."""
        if self.verdict is None:
            return None
        culprit = self.ranks[self.verdict.rank]
        records = (culprit, *(other for other in self.ranks.values() if other.hello.stage == culprit.hello.stage))
        return next((frames for record in records if (frames := record.frames_around(self.verdict.trip))), None)

    def _row(self, rank: int) -> RankRow:
        record = self.ranks.get(rank)
        return record.row() if record else RankRow(rank, -1, "", 0, -1, RankState.MISSING, False, 0, "")


def _positions_of(records: Collection[Rank]) -> Reached:
    ranks = tuple([record.hello.rank for record in records])
    return Reached(
        ranks, tuple([record.progress for record in records]), tuple([record.reported_batch for record in records])
    )
